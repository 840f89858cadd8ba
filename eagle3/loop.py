"""The training loop: plan, optimizer, checkpoints that resume exactly, validation.

Everything that decides the next step is in a checkpoint or follows from the config: weights and
optimizer state in float32, the schedulers, the step; the data order follows from seed and epoch.
Checkpoints are single files, complete or absent.

Where states come in rounds (``retention``) the plan passes over one round ``num_epochs`` times,
then over the next; a run trains as far as it finds states, and the next one goes on.

Several ranks (``accelerate launch``) share each step's rows and average their gradients, which
gives the loss and the gradient of one process up to rounding. Every rank holds the same weights
and optimizer state; the main one alone writes. No checkpoint knows the number of ranks: a resumed
run may have another, and goes on from the same state with the same remaining batches.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from .batches import RowReader, prefetched
from .checkpoints import Checkpoints
from .config import TrainSection
from .drafter import BORROWED
from .errors import Interrupted, StaleInputError
from .fingerprint import ROUNDS
from .optimizers import make_optimizers, step_all
from .pictures import draw_training
from .plan import plan_epoch
from .progress import Progress
from .ranks import ALONE, Ranks
from .schedule import schedule, validation_steps
from .script import log
from .training_log import Metrics, NotFinite, Window, save_bad_batch, scalars, start_trackers
from .ttt import TTTStep
from .validation import validate, walk_answers


class Trainer:
    """One training run over a fixed plan.

    Args:
        step: the TTT step around the drafter being trained.
        reader: the states on disk.
        rounds: training rows, those of each round; all in one where there are no rounds.
        validation_plan: batches of held-out rows, run ``validations_per_epoch`` times an epoch.
        directory: ``04_train``; checkpoints, metrics and curves go here. On several nodes it
            lies on a disk they share: every rank reads the checkpoint it resumes from.
        ranks: the processes that train together.
    """

    def __init__(
        self,
        section: TrainSection,
        step: TTTStep,
        reader: RowReader,
        rounds: Sequence[Sequence[int]],
        validation_plan: Sequence[list[int]],
        directory: Path,
        ranks: Ranks = ALONE,
    ) -> None:
        self.section, self.reader, self.directory = section, reader, directory
        self.checkpoints, self.metrics = Checkpoints(directory), Metrics(directory)
        self.ranks = ranks
        self.rounds, self.validation_plan = rounds, validation_plan
        lengths = reader.rows.lengths
        passes = [row_ids for row_ids in rounds for _ in range(section.num_epochs)]
        self.epochs = [
            plan_epoch(row_ids, lengths, section.batch_tokens, section.seed + index)
            if row_ids
            else []
            for index, row_ids in enumerate(passes)
        ]
        self.plan = [batch for epoch in self.epochs for batch in epoch]
        epoch_ends = list(itertools.accumulate(map(len, self.epochs)))
        self.round_ends = epoch_ends[section.num_epochs - 1 :: section.num_epochs]
        self.validate_after = set(validation_steps(self.epochs, section.validations_per_epoch))
        self.tokens_before = [0]
        for batch in self.plan:
            self.tokens_before.append(self.tokens_before[-1] + int(lengths[batch].sum()))

        self.accelerator = Accelerator(
            mixed_precision=section.mixed_precision,
            cpu=not torch.cuda.is_available(),
            log_with=list(section.trackers) or None,
            project_dir=directory,
        )
        start_trackers(self.accelerator, section.trackers, directory.parent.name)
        optimizers = make_optimizers(section, step.parameters())
        self.schedulers = [
            schedule(optimizer, section.warmup_share, len(self.plan)) for optimizer in optimizers
        ]
        self.step, *self.optimizers = self.accelerator.prepare(step, *optimizers)
        self.done_steps = 0
        self.best = {"acceptance_length": 0.0, "step": 0, "validations_since": 0}
        self.last_shown: dict[str, Any] = {}

    @property
    def has_enough(self) -> bool:
        """Whether to stop early: so many validations in a row were no better."""
        patience = self.section.patience_validations
        return patience is not None and self.best["validations_since"] >= patience

    @property
    def is_done(self) -> bool:
        return self.has_enough or self.done_steps == len(self.plan)

    def run(self) -> None:
        """Train what is left of the plan, as far as its rows' states are on disk.

        Raises:
            StaleInputError: not even the next round's are.
            Interrupted: a stop was asked for, of any rank; the step is finished and saved.
            GateError: a loss is not finite; its batch is saved, the last checkpoint is good.
        """
        self.ranks.on_main(lambda: self.checkpoints.note_rounds(self.round_ends))
        self._resume()
        idle = sum(len(batch) < self.ranks.count for batch in self.plan)
        if idle:
            log(
                "batches have fewer rows than there are processes: some of them wait",
                batches=f"{idle}/{len(self.plan)}",
                processes=self.ranks.count,
                more_rows_a_batch="train.batch_tokens",
            )
        progress = Progress(
            self.tokens_before[-1], "tokens", done=self.tokens_before[self.done_steps]
        )
        self.window = Window()
        for batch in self._batches():
            self._train_step(batch)
            stop = self.ranks.stop_asked()
            saves = self.done_steps % self.section.checkpoint_every_steps == 0 or stop
            validates = self.done_steps in self.validate_after
            if saves or validates or self.done_steps % self.section.log_every_steps == 0:
                self._close_window()
            progress.advance(
                self.tokens_before[self.done_steps] - self.tokens_before[self.done_steps - 1],
                step=f"{self.done_steps}/{len(self.plan)}",
                **self.last_shown,
            )
            if validates:
                self._validate()
            if saves or validates:
                self._save(self.checkpoints.of_step(self.done_steps))
            if self.has_enough:
                log("no better for some validations: stopping early", **self.best)
                break
            if stop and self.done_steps < len(self.plan):
                raise Interrupted
        progress.close()
        # Not end_training(): it ends the processes' groups, and publishing is still to come.
        for tracker in self.accelerator.trackers:
            tracker.finish()

    def _batches(self) -> Iterator[Any]:
        """What is left of the plan, laid out; the time spent waiting for it is counted."""
        left = [] if self.has_enough else self.plan[self.done_steps : self._end_of_states()]
        pin = self.accelerator.device.type == "cuda"
        batches = prefetched(self.reader, left, self.section.ttt_steps, pin=pin, ranks=self.ranks)
        while True:
            begin_s = time.monotonic()
            batch = next(batches, None)
            if batch is None:
                return
            self.window.waited_s += time.monotonic() - begin_s
            yield batch

    def _end_of_states(self) -> int:
        """The step at which the last round ends whose states, like those before it, are there."""
        end = self.done_steps
        for row_ids, round_end in zip(self.rounds, self.round_ends, strict=True):
            if round_end > end:
                if not self.reader.holds(row_ids):
                    break
                end = round_end
        if end == self.done_steps < len(self.plan):
            raise StaleInputError(
                "the states that training goes on with are not on disk",
                where=self.directory.with_name("02_hidden"),
                expected=f"those of the rows trained from step {end} of {len(self.plan)} on",
                found="others: they were freed, or are still to be captured",
                script=ROUNDS,
            )
        return end

    def _train_step(self, batch: Any) -> None:
        """One optimizer step; of one step a line the drafts are looked at too."""
        shown = (self.done_steps + 1) % self.section.log_every_steps == 0
        self.step.train()
        result = self.step(batch.to(self.accelerator.device), with_matches=shown)
        self.accelerator.backward(result.loss)
        self.accelerator.clip_grad_norm_(self.step.parameters(), self.section.max_grad_norm)
        step_all(self.optimizers)
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
        self.done_steps += 1
        self.window.losses.append(result.loss_per_ttt_step)
        self.window.tokens += self.tokens_before[self.done_steps]
        self.window.tokens -= self.tokens_before[self.done_steps - 1]
        if shown:
            self.window.drafts = walk_answers(result.matches, batch.answer_lengths)

    def _close_window(self) -> None:
        """One line of ``metrics.jsonl``, for the steps since the last one."""
        reduce = functools.partial(self.accelerator.reduce, reduction="mean")
        try:
            found = self.window.close(self.section, self.ranks, reduce)
        except NotFinite as error:
            raise self._not_finite(self.done_steps - error.steps_ago + 1) from None
        self.window = Window()
        learning_rate = self.schedulers[0].get_last_lr()[0]
        self._write_metrics(kind="train", **found, learning_rate=learning_rate)
        self.last_shown = {"loss": found["loss"], "waiting": f"{found['waiting_share']:.0%}"}
        if "acceptance_length" in found:
            shares = "/".join(f"{share:.2f}" for share in found["acceptance_per_position"])
            self.last_shown |= {
                "acceptance_length": f"{found['acceptance_length']:.2f}",
                "accepted": shares,
            }

    def _not_finite(self, step: int) -> Exception:
        row_ids = self.plan[step - 1]
        return self.ranks.on_main(
            lambda: save_bad_batch(
                self.directory,
                step,
                {row_id: self.reader[row_id] for row_id in row_ids},
                self.checkpoints.latest(),
            )
        )

    def _validate(self) -> None:
        model = self.accelerator.unwrap_model(self.step)
        with self.accelerator.autocast():
            found = validate(
                model, self.reader, self.validation_plan, self.section.ttt_steps, self.ranks
            )
        length = found.acceptance.acceptance_length
        log(
            "validation",
            step=self.done_steps,
            loss=found.loss,
            acceptance_length=f"{length:.3f}",
            accuracy_per_position=[f"{a:.3f}" for a in found.accuracy_per_position],
        )
        self._write_metrics(
            kind="validation",
            loss=found.loss,
            acceptance_length=length,
            acceptance_per_position=found.acceptance.per_position,
            accuracy_per_position=found.accuracy_per_position,
        )
        self.best["validations_since"] += 1
        if length > self.best["acceptance_length"]:
            self.best = {
                "acceptance_length": length,
                "step": self.done_steps,
                "validations_since": 0,
            }
            self._save(self.checkpoints.best)
        curves = self.directory / "curves.png"
        self.ranks.on_main(lambda: draw_training(curves, self.metrics.path))

    def _write_metrics(self, kind: str, **values: Any) -> None:
        tokens = self.tokens_before[self.done_steps]
        line = {"kind": kind, "step": self.done_steps, "tokens": tokens, **values}
        self.ranks.on_main(lambda: self.metrics.append(line))
        if self.section.trackers:
            named = {f"{kind}/{name}": value for name, value in scalars(values).items()}
            self.accelerator.log({**named, "tokens": tokens}, step=self.done_steps)

    def _save(self, path: Path) -> None:
        """Publish the whole state; every rank waits for it, and fails if it fails."""

        def publish() -> None:
            state = {
                "step": self.done_steps,
                "best": dict(self.best),
                "model": trained_state(self.accelerator.unwrap_model(self.step)),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
                "metrics": self.metrics.lines,
            }
            self.checkpoints.publish(path, state)

        self.ranks.on_main(publish)

    def _resume(self) -> None:
        lines: list[str] = []
        if latest := self.ranks.on_main(self.checkpoints.latest):
            state = self.ranks.agree(lambda: self._load_weights(latest))
            for name in ("optimizers", "schedulers"):
                for part, saved in zip(getattr(self, name), state[name], strict=True):
                    part.load_state_dict(saved)
            self.done_steps, self.best = state["step"], dict(state["best"])
            lines = state["metrics"]
            log("resumed", checkpoint=latest, step=f"{self.done_steps}/{len(self.plan)}")
        self.ranks.on_main(lambda: self.metrics.restore(lines))

    def load_best(self) -> None:
        """Put the best checkpoint's weights into the drafter."""
        self._load_weights(self.checkpoints.best)

    def _load_weights(self, path: Path) -> dict[str, Any]:
        state = self.checkpoints.load(path)
        drafter = self.accelerator.unwrap_model(self.step).drafter
        _, unexpected = drafter.load_state_dict(state["model"], strict=False)
        assert not unexpected, unexpected
        return state


def trained_state(step: TTTStep) -> dict[str, torch.Tensor]:
    """The drafter's own tensors, float32, by speculators' names; borrowed ones left out."""
    state = step.drafter.state_dict()
    return {name: tensor.cpu() for name, tensor in state.items() if name not in BORROWED}
