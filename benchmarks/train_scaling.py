"""How a training step's time and memory grow with tokens, with TTT steps and with the vocabulary.

    python -m benchmarks.train_scaling configs/smollm2_cpu.yaml

Needs the run's 01 to 03. Every point is a fresh drafter on the same rows (forward, backward,
clipping, AdamW), twice over; each batch counts with its quicker time. Draws
``docs/training_tokens.png`` and ``docs/training_ttt_steps.png``, and says of each line fitted
through the points how far the farthest of them lies from it. The last line is JSON.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.train import fresh_drafter, measure
from eagle3.artifact import open_artifact
from eagle3.batches import RowReader, collate
from eagle3.config import Config
from eagle3.plan import plan_epoch, trainable_rows
from eagle3.rows import TokenRows
from eagle3.script import Invocation, log, run_script
from eagle3.shard_plan import open_states
from eagle3.ttt import TTTStep
from eagle3.vocab import VocabMap

BATCH_TOKENS = (512, 1024, 2048, 4096)
TTT_STEPS = (1, 2, 3, 5, 7)
NUM_BATCHES = 16  # of the smallest size: the rows of every point
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
    plan = plan_epoch(trainable_rows(rows)[0], rows.lengths, BATCH_TOKENS[0], 0)[:NUM_BATCHES]

    sizes = [train(config, vocab, reader, plan, tokens, ttt_steps=3) for tokens in BATCH_TOKENS]
    by_tokens = {"3 TTT steps": lines([point.tokens for point in sizes], sizes)}
    by_steps = {}
    for vocabulary in (vocab, large_vocab):
        points = [train(config, vocabulary, reader, plan, 1024, steps) for steps in TTT_STEPS]
        by_steps[f"vocabulary of {len(vocabulary.d2t)}"] = lines(TTT_STEPS, points)
    draw(DOCS / "training_tokens.png", "tokens a batch", by_tokens)
    draw(DOCS / "training_ttt_steps.png", "TTT steps, 1K tokens a batch", by_steps)
    print(
        json.dumps(
            {
                "measured": "ms and MiB of a training step",
                "tokens": by_tokens["3 TTT steps"],
                "ttt_steps": by_steps,
                "supervised_positions_of_1k": round(points[0].supervised),
                "read_and_laid_out_mb_per_s": round(reading_rate(reader, plan) / 1e6),
            }
        )
    )


class Point(NamedTuple):
    """Of a batch: tokens, supervised positions and milliseconds on average, the most memory."""

    tokens: float
    supervised: float
    ms: float
    peak_mib: float


def train(
    config: Config,
    vocab: VocabMap,
    reader: RowReader,
    plan: list[list[int]],
    batch_tokens: int,
    ttt_steps: int,
) -> Point:
    """Train on the plan's batches, joined to the size asked for, after two for warmth."""
    joined = batch_tokens // BATCH_TOKENS[0]
    groups = [plan[i : i + joined] for i in range(0, len(plan), joined)]
    batches = [collate([reader[i] for ids in group for i in ids], ttt_steps) for group in groups]
    model = fresh_drafter(config, vocab)
    step = TTTStep(model, loss="kl_div", ttt_step_loss_decay=1.0)
    seconds, _, peak_bytes = measure(
        model, lambda batch: step(batch).loss, [*batches[:2], *batches, *batches]
    )
    point = Point(
        tokens=float(np.mean([batch.num_tokens for batch in batches])),
        supervised=float(np.mean([len(batch.supervised) for batch in batches])),
        ms=1e3 * float(np.reshape(seconds, (2, -1)).min(0).mean()),
        peak_mib=peak_bytes / 2**20,
    )
    log("measured", vocab=len(vocab.d2t), ttt_steps=ttt_steps, **point._asdict())
    return point


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
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for ax, name, ylabel in zip(
        axes, ("ms", "peak_mib"), ("ms a step", "peak MiB above the weights"), strict=True
    ):
        for label, found in by_label.items():
            line = found[name]
            (dots,) = ax.plot(line["x"], line["y"], "o", label=label)
            ends = np.array([0, max(line["x"])])
            ax.plot(ends, line["slope"] * ends + line["at_zero"], color=dots.get_color())
        ax.set(xlabel=xlabel, ylabel=ylabel, xlim=(0, None), ylim=(0, None))
        ax.grid(alpha=0.3)
        ax.legend()
    figure.savefig(path, dpi=80, metadata={"Software": None})


def reading_rate(reader: RowReader, plan: list[list[int]]) -> float:
    """Bytes of states a second that one core reads, checks and lays out, from the page cache."""
    torch.set_num_threads(1)
    start_s, num_bytes = time.perf_counter(), 0
    for ids in plan:
        rows = [reader[i] for i in ids]
        collate(rows, ttt_steps=3)
        num_bytes += sum(r.aux_hidden_states.nbytes + r.last_hidden_states.nbytes for r in rows)
    return num_bytes / (time.perf_counter() - start_s)


if __name__ == "__main__":
    run_script(main, __doc__)
