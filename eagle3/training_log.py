"""What a training run says while it runs: one line every few steps, the same in ``metrics.jsonl``.

The only place where the host waits for the device: once a line, never in a step. A loss that is
not finite is found here, its batch saved, before a checkpoint could keep what it did.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .acceptance import Acceptance
from .config import TrainSection
from .errors import ConfigError, GateError
from .files import publishing, write_text
from .ranks import Ranks


class Metrics:
    """``metrics.jsonl``: one line a window of training steps, and one a validation.

    Checkpoints carry the lines, and a resumed run writes the file from them: whatever a kill did
    to the file, it has each line once.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / "metrics.jsonl"
        self.lines: list[str] = []

    def append(self, values: dict[str, Any]) -> None:
        self.lines.append(json.dumps(values) + "\n")
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(self.lines[-1])

    def restore(self, lines: list[str]) -> None:
        """Begin with the lines of a checkpoint; none at the start."""
        self.lines = list(lines)
        write_text(self.path, "".join(lines))


@dataclass
class Window:
    """The steps since the last line.

    Attributes:
        losses: per TTT step, ``[K]`` on the device, one a step.
        tokens: in those steps, of all processes.
        waited_s: time the training waited for a batch.
        drafts: of one of the steps, what a walk over its answers would have accepted.
    """

    losses: list[torch.Tensor] = field(default_factory=list)
    tokens: int = 0
    waited_s: float = 0.0
    drafts: Acceptance | None = None
    begin_s: float = field(default_factory=time.monotonic)

    def close(
        self, section: TrainSection, ranks: Ranks, reduce: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[str, Any]:
        """The window in numbers, the same on every rank.

        Args:
            reduce: the mean over all processes of a tensor on the device.

        Raises:
            NotFinite: naming the first step of the window whose loss is not.
        """
        per_step = reduce(torch.stack(self.losses)).double().cpu()  # [steps, K]
        finite = per_step.isfinite().all(1)
        if not finite.all():
            raise NotFinite(len(self.losses) - int((~finite).nonzero()[0]))
        means = per_step.mean(0).tolist()
        seconds = max(time.monotonic() - self.begin_s, 1e-9)
        found = {
            "loss": sum(mean * section.ttt_step_loss_decay**k for k, mean in enumerate(means)),
            "loss_per_ttt_step": means,
            "tokens_per_s": self.tokens / seconds,
            "waiting_share": self.waited_s / seconds,
        }
        if self.drafts is not None:
            drafts = functools.reduce(operator.add, ranks.gather(self.drafts))
            found["acceptance_length"] = drafts.acceptance_length
            found["acceptance_per_position"] = drafts.per_position
        return found


class NotFinite(Exception):
    """A loss was not finite ``steps_ago`` steps ago (1: the last one)."""

    def __init__(self, steps_ago: int) -> None:
        super().__init__(steps_ago)
        self.steps_ago = steps_ago


def save_bad_batch(
    directory: Path, step: int, rows: dict[int, Any], checkpoint: Path | None
) -> GateError:
    """Save the rows a loss was not finite on; the error to raise.

    Args:
        step: the optimizer step, from 1.
        rows: by row id, what the batch was made of.
        checkpoint: the last good one.
    """
    path = directory / f"not-finite-step-{step}.pt"
    with publishing(path) as partial:
        torch.save({row_id: vars(row) for row_id, row in rows.items()}, partial)
    return GateError(
        f"the loss of step {step} is not finite",
        where=path,
        expected="a finite loss",
        found=f"inf or nan on rows {sorted(rows)}, saved in that file; the last good checkpoint is "
        f"{checkpoint.name if checkpoint else 'none yet'}, and it is kept",
        fix="lower train.learning_rate or train.max_grad_norm and start training over (--redo)",
    )


def start_trackers(accelerator: Any, trackers: Sequence[str], run_name: str) -> None:
    """Trackers of accelerate, which get every line of ``metrics.jsonl``.

    Raises:
        ConfigError: one is asked for and its package is not installed.
    """
    from accelerate.tracking import get_available_trackers

    installed = [str(getattr(name, "value", name)) for name in get_available_trackers()]
    for name in trackers:
        if name not in installed:
            raise ConfigError(
                "a tracker is asked for that is not installed",
                where="train.trackers",
                expected=f"installed ones: {', '.join(installed) or 'none'}",
                found=name,
                fix=f"pip install {name}, or take it out of train.trackers",
            )
    if trackers:
        accelerator.init_trackers(run_name)


def scalars(values: dict[str, Any]) -> dict[str, float]:
    """Numbers of a metrics line, lists by position: what a tracker plots."""
    flat = {}
    for name, value in values.items():
        entries = enumerate(value) if isinstance(value, list | tuple) else [("", value)]
        for index, entry in entries:
            if isinstance(entry, int | float) and math.isfinite(entry):
                flat[f"{name}_{index}" if index != "" else name] = float(entry)
    return flat
