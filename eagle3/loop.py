"""The training loop: plan, optimizer, checkpoints that resume exactly, validation.

Everything that decides the next step is in a checkpoint or follows from the config: weights and
AdamW state in float32, the scheduler, the step; the data order is a function of seed and epoch.
Checkpoints are single files, complete or absent.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from .acceptance import Acceptance, walk
from .batches import RowReader, plan_epoch, prefetched
from .config import TrainSection
from .drafter import BORROWED
from .files import publishing, write_text
from .script import Progress, log, stop_flag
from .ttt import TTTStep

KEPT_CHECKPOINTS = 2


@dataclass(frozen=True)
class Validation:
    """Held-out rows through the drafter.

    Attributes:
        acceptance: simulated: each answer walked as the engine walks it (``acceptance.walk``).
        accuracy_per_position: share of the drafts right at TTT step k among those right before it.
        loss: as in training, mean over batches weighted by positions.
    """

    acceptance: Acceptance
    accuracy_per_position: list[float]
    loss: float


@torch.no_grad()
def validate(
    step: TTTStep, reader: RowReader, plan: Sequence[list[int]], ttt_steps: int
) -> Validation:
    """Run the validation plan; drafts are made at every position, then walked answer by answer."""
    step.eval()
    device = step.drafter.fc.weight.device
    acceptance = Acceptance(0, (0,) * ttt_steps)
    asked, right = torch.zeros(ttt_steps), torch.zeros(ttt_steps)
    loss_sum = num_positions = 0.0
    for batch in prefetched(reader, plan, ttt_steps, pin=False):
        result = step(batch.to(device))
        matches = result.matches.T.cpu()  # [S, K]
        begin = 0
        for length in batch.answer_lengths:
            acceptance += walk(_with_last_token(matches[begin : begin + length]))
            begin += length
        chain = matches.cumprod(1).bool()
        before = torch.cat([torch.ones(len(chain), 1, dtype=torch.bool), chain[:, :-1]], dim=1)
        asked += (before & batch.valid.T.cpu()).sum(0)
        right += chain.sum(0)
        loss_sum += float(result.loss) * len(matches)
        num_positions += len(matches)
    accuracy = (right / asked.clamp_min(1)).tolist()
    return Validation(acceptance, accuracy, loss_sum / max(num_positions, 1))


def _with_last_token(matches: torch.Tensor) -> Any:
    """An answer's last token is known but never drafted from: the walk wants its row."""
    return torch.cat([matches, torch.zeros(1, matches.shape[1], dtype=torch.bool)]).numpy()


class Trainer:
    """One training run over a fixed plan.

    Args:
        step: the TTT step around the drafter being trained.
        reader, row_ids: the training rows.
        validation_plan: batches of held-out rows, run after every epoch.
        directory: ``04_train``; checkpoints and ``metrics.jsonl`` go here.
    """

    def __init__(
        self,
        section: TrainSection,
        step: TTTStep,
        reader: RowReader,
        row_ids: Sequence[int],
        validation_plan: Sequence[list[int]],
        directory: Path,
    ) -> None:
        self.section, self.reader, self.directory = section, reader, directory
        self.validation_plan = validation_plan
        lengths = reader.rows.lengths
        self.epochs = [
            plan_epoch(row_ids, lengths, section.batch_tokens, section.seed + epoch)
            for epoch in range(section.num_epochs)
        ]
        self.plan = [batch for epoch in self.epochs for batch in epoch]
        self.epoch_ends = {
            sum(len(epoch) for epoch in self.epochs[: index + 1]): index + 1
            for index in range(len(self.epochs))
        }
        self.tokens_before = [0]
        for batch in self.plan:
            self.tokens_before.append(self.tokens_before[-1] + int(lengths[batch].sum()))

        self.accelerator = Accelerator(
            mixed_precision=section.mixed_precision, cpu=not torch.cuda.is_available()
        )
        trainable = [p for p in step.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            trainable,
            lr=section.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=section.weight_decay,
            fused=True,
        )
        warmup_steps = math.ceil(section.warmup_share * len(self.plan))
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda done: cosine_with_warmup(done, warmup_steps, len(self.plan))
        )
        self.step, self.optimizer = self.accelerator.prepare(step, optimizer)
        self.scheduler = scheduler
        self.done_steps = 0
        self.best = {"acceptance_length": 0.0, "step": 0}
        self.last_shown: dict[str, float] = {}

    def run(self) -> None:
        """Train what is left of the plan.

        Raises:
            Interrupted: a stop was asked for; the step is finished and saved.
            RuntimeError: the loss is not finite (a bug or a learning rate far too high).
        """
        self._resume()
        progress = Progress(
            self.tokens_before[-1], "tokens", done=self.tokens_before[self.done_steps]
        )
        left = self.plan[self.done_steps :]
        pin = self.accelerator.device.type == "cuda"
        window: list[torch.Tensor] = []
        window_s = time.monotonic()
        for batch in prefetched(self.reader, left, self.section.ttt_steps, pin=pin):
            result = self._train_step(batch)
            window.append(result.loss_per_ttt_step)
            if self.done_steps % self.section.log_every_steps == 0:
                seconds, window_s = time.monotonic() - window_s, time.monotonic()
                self._log_window(window, seconds)
                window.clear()
            progress.advance(
                self.tokens_before[self.done_steps] - self.tokens_before[self.done_steps - 1],
                step=f"{self.done_steps}/{len(self.plan)}",
                **self.last_shown,
            )
            if self.done_steps in self.epoch_ends:
                self._validate(self.epoch_ends[self.done_steps])
                self._save()
            elif (
                self.done_steps % self.section.checkpoint_every_steps == 0 or stop_flag.signal_name
            ):
                self._save()
            if self.done_steps < len(self.plan):
                stop_flag.raise_if_set()
        progress.close()

    def _train_step(self, batch: Any) -> Any:
        self.step.train()
        result = self.step(batch.to(self.accelerator.device))
        self.accelerator.backward(result.loss)
        self.accelerator.clip_grad_norm_(self.step.parameters(), self.section.max_grad_norm)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done_steps += 1
        return result

    def _log_window(self, window: list[torch.Tensor], seconds: float) -> None:
        """One line of ``metrics.jsonl`` for the steps since the last one; the only host sync."""
        per_step = torch.stack(window).mean(0).tolist()
        loss = sum(mean * self.section.ttt_step_loss_decay**k for k, mean in enumerate(per_step))
        if not math.isfinite(loss):
            raise RuntimeError(f"the loss is {loss} at step {self.done_steps}")
        num_tokens = self.tokens_before[self.done_steps]
        since = self.tokens_before[self.done_steps - len(window)]
        self._write_metrics(
            kind="train",
            step=self.done_steps,
            tokens=num_tokens,
            loss=loss,
            loss_per_ttt_step=per_step,
            learning_rate=self.scheduler.get_last_lr()[0],
            tokens_per_s=(num_tokens - since) / max(seconds, 1e-9),
        )
        self.last_shown = {"loss": loss}

    def _validate(self, epoch: int) -> None:
        model = self.accelerator.unwrap_model(self.step)
        with self.accelerator.autocast():
            found = validate(model, self.reader, self.validation_plan, self.section.ttt_steps)
        length = found.acceptance.acceptance_length
        log(
            "validation",
            epoch=epoch,
            loss=found.loss,
            acceptance_length=f"{length:.3f}",
            accuracy_per_position=[f"{a:.3f}" for a in found.accuracy_per_position],
        )
        self._write_metrics(
            kind="validation",
            step=self.done_steps,
            tokens=self.tokens_before[self.done_steps],
            epoch=epoch,
            loss=found.loss,
            acceptance_length=length,
            acceptance_per_position=found.acceptance.per_position,
            accuracy_per_position=found.accuracy_per_position,
        )
        if length > self.best["acceptance_length"]:
            self.best = {"acceptance_length": length, "step": self.done_steps}
            self._save(name="best.pt")

    def _write_metrics(self, **values: Any) -> None:
        with open(self.directory / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")

    # Checkpoints

    def _checkpoints(self) -> list[Path]:
        return sorted((self.directory / "checkpoints").glob("step-*.pt"))

    def _save(self, name: str | None = None) -> None:
        """Publish the whole state as one file; keep the last two (and ``best.pt``)."""
        path = self.directory / "checkpoints" / (name or f"step-{self.done_steps:08d}.pt")
        model = self.accelerator.unwrap_model(self.step)
        state = {
            "step": self.done_steps,
            "best": self.best,
            "model": trained_state(model),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }
        with publishing(path) as partial:
            torch.save(state, partial)
        for old in self._checkpoints()[:-KEPT_CHECKPOINTS]:
            old.unlink()

    def _resume(self) -> None:
        metrics = self.directory / "metrics.jsonl"
        if checkpoints := self._checkpoints():
            state = self._load_weights(checkpoints[-1])
            self.optimizer.load_state_dict(state["optimizer"])
            self.scheduler.load_state_dict(state["scheduler"])
            self.done_steps, self.best = state["step"], state["best"]
            log("resumed", checkpoint=checkpoints[-1], step=f"{self.done_steps}/{len(self.plan)}")
        if metrics.is_file():  # lines beyond the checkpoint will be written again
            lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n")]
            kept = [line for line in kept if json.loads(line)["step"] <= self.done_steps]
            write_text(metrics, "".join(kept))

    def load_best(self) -> None:
        """Put the best checkpoint's weights into the drafter."""
        self._load_weights(self.directory / "checkpoints" / "best.pt")

    def _load_weights(self, path: Path) -> dict[str, Any]:
        state = torch.load(path, map_location="cpu", weights_only=True)
        drafter = self.accelerator.unwrap_model(self.step).drafter
        _, unexpected = drafter.load_state_dict(state["model"], strict=False)
        assert not unexpected, unexpected
        return state


def trained_state(step: TTTStep) -> dict[str, torch.Tensor]:
    """The drafter's own tensors, float32, by speculators' names; borrowed ones left out."""
    state = step.drafter.state_dict()
    return {name: tensor.cpu() for name, tensor in state.items() if name not in BORROWED}


def cosine_with_warmup(done_steps: int, warmup_steps: int, num_steps: int) -> float:
    """Factor on the peak learning rate: linear from 1/warmup, then half a cosine to zero.

    >>> [round(cosine_with_warmup(s, 2, 6), 2) for s in range(7)]
    [0.5, 1.0, 1.0, 0.85, 0.5, 0.15, 0.0]
    """
    if done_steps < warmup_steps:
        return (done_steps + 1) / warmup_steps
    done = (done_steps - warmup_steps) / max(num_steps - warmup_steps, 1)
    return 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
