"""How a training step's time and memory grow with tokens, with TTT steps and with the vocabulary.

    python -m benchmarks.train_scaling configs/smollm2_cpu.yaml

Needs the run's 01 to 03. Each point trains on the same few batches (forward, backward, clipping,
AdamW) in several rounds over all points; a batch counts with its quickest round. Time is that of
one core, which a busy machine disturbs least; memory is the peak above what was there before the
step. Draws ``docs/training_tokens.png`` and ``docs/training_ttt_steps.png``, and says of the line
fitted through the points how far the farthest of them lies from it. The last line is JSON.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.train import fresh_drafter, peak_bytes, reset_peak
from eagle3.artifact import open_artifact
from eagle3.batches import Batch, RowReader, collate
from eagle3.plan import plan_epoch, trainable_rows
from eagle3.rows import TokenRows
from eagle3.script import Invocation, log, run_script
from eagle3.shard_plan import open_states
from eagle3.ttt import TTTStep
from eagle3.vocab import VocabMap

BATCH_TOKENS = (512, 1024, 2048, 4096)
TTT_STEPS = (1, 2, 3, 5, 7)
NUM_ROUNDS = 4
DOCS = Path(__file__).resolve().parent.parent / "docs"


def main(invocation: Invocation) -> None:
    config = invocation.load_config()
    data, hidden, vocab_artifact = (
        open_artifact(config, name, invocation) for name in ("01_data", "02_hidden", "03_vocab")
    )
    rows = TokenRows.load(data.path("rows.safetensors"))
    reader = RowReader(rows, open_states(hidden, rows, config))
    vocab = VocabMap.load(vocab_artifact.path("vocab_map.safetensors"))
    large_vocab = VocabMap.from_target_ids(range(4 * len(vocab.d2t)), len(vocab.t2d))
    torch.set_num_threads(1)
    plan = plan_epoch(trainable_rows(rows)[0], rows.lengths, BATCH_TOKENS[0], 0)
    learner, large_learner = (Learner(fresh_drafter(config, v)) for v in (vocab, large_vocab))
    sizes = [Point(learner, reader, plan[:8], tokens, 3) for tokens in BATCH_TOKENS]
    steps, large_steps = (
        [Point(who, reader, plan[:4], 1024, ttt_steps) for ttt_steps in TTT_STEPS]
        for who in (learner, large_learner)
    )
    for number in range(NUM_ROUNDS):
        for point in (*sizes, *steps, *large_steps):
            point.measure()
        log("round done", number=number, ms=[round(point.ms) for point in (*sizes, *steps)])
    by_tokens = {"3 TTT steps": lines([point.num_tokens for point in sizes], sizes)}
    by_steps = {
        f"vocabulary of {len(v.d2t)}": lines(TTT_STEPS, points)
        for v, points in ((vocab, steps), (large_vocab, large_steps))
    }
    draw(DOCS / "training_tokens.png", "tokens a batch", by_tokens)
    draw(DOCS / "training_ttt_steps.png", "TTT steps, 1K tokens a batch", by_steps)
    print(
        json.dumps(
            {
                "measured": "ms and MiB of a training step",
                "tokens": by_tokens,
                "ttt_steps": by_steps,
                "supervised_positions_of_1k": round(steps[0].num_supervised),
                "read_and_laid_out_mb_per_s": round(reading_rate(reader, plan) / 1e6),
            }
        )
    )


class Learner:
    """A drafter, its step and its optimizer."""

    def __init__(self, model: Any) -> None:
        self.step = TTTStep(model, loss="kl_div", ttt_step_loss_decay=1.0)
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-5, fused=True)

    def learn(self, batch: Batch) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.step(batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Point:
    """The plan's batches joined to a size: milliseconds a batch, and the most MiB of any."""

    def __init__(
        self,
        learner: Learner,
        reader: RowReader,
        plan: list[list[int]],
        batch_tokens: int,
        ttt_steps: int,
    ) -> None:
        joined = batch_tokens // BATCH_TOKENS[0]
        groups = [plan[i : i + joined] for i in range(0, len(plan), joined)]
        self.learner = learner
        self.batches = [collate([reader[i] for ids in g for i in ids], ttt_steps) for g in groups]
        self.num_tokens = float(np.mean([batch.num_tokens for batch in self.batches]))
        self.num_supervised = float(np.mean([len(batch.supervised) for batch in self.batches]))
        self.rounds_s: list[list[float]] = []
        self.peak_mib = float("inf")

    def measure(self) -> None:
        start_bytes, seconds = reset_peak(), []
        for batch in self.batches:
            start_s = time.process_time()
            self.learner.learn(batch)
            seconds.append(time.process_time() - start_s)
        self.rounds_s.append(seconds)
        self.peak_mib = min(self.peak_mib, (peak_bytes() - start_bytes) / 2**20)

    @property
    def ms(self) -> float:
        return 1e3 * float(np.min(self.rounds_s, axis=0).mean())


def lines(x: Sequence[float], points: list[Point]) -> dict[str, dict[str, Any]]:
    """A straight line by least squares through the times, and one through the memory."""
    found: dict[str, dict[str, Any]] = {}
    for name in ("ms", "peak_mib"):
        y = np.array([getattr(point, name) for point in points])
        slope, at_zero = np.polyfit(x, y, 1)
        off_line = np.abs(y / (slope * np.array(x) + at_zero) - 1)
        found[name] = {
            "x": [round(value) for value in x],
            "y": [round(value, 1) for value in y],
            "slope": round(slope, 4),
            "at_zero": round(at_zero, 1),
            "farthest_from_line": f"{off_line.max():.1%}",
        }
    return found


def draw(path: Path, xlabel: str, by_label: dict[str, dict[str, dict[str, Any]]]) -> None:
    with two_panels(path) as axes:
        for ax, name, ylabel in zip(
            axes,
            ("ms", "peak_mib"),
            ("ms a step, one core", "peak MiB above weights and AdamW"),
            strict=True,
        ):
            for label, found in by_label.items():
                line = found[name]
                (dots,) = ax.plot(line["x"], line["y"], "o", label=label)
                ends = np.array([0, max(line["x"])])
                ax.plot(ends, line["slope"] * ends + line["at_zero"], color=dots.get_color())
            ax.set(xlabel=xlabel, ylabel=ylabel, xlim=(0, None), ylim=(0, None))


@contextmanager
def two_panels(path: Path) -> Iterator[Any]:
    """A picture for the docs: axes to draw on, side by side; written when they are drawn."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    yield axes
    for ax in axes:
        ax.grid(alpha=0.3)
        ax.legend()
    figure.savefig(path, dpi=80, metadata={"Software": None})


def reading_rate(reader: RowReader, plan: list[list[int]]) -> float:
    """Bytes of states a second that one core reads, checks and lays out, from the page cache."""
    start_s, num_bytes = time.perf_counter(), 0
    for ids in plan:
        rows = [reader[i] for i in ids]
        collate(rows, ttt_steps=3)
        num_bytes += sum(r.aux_hidden_states.nbytes + r.last_hidden_states.nbytes for r in rows)
    return num_bytes / (time.perf_counter() - start_s)


if __name__ == "__main__":
    run_script(main, __doc__)
