"""What a training run leaves on disk while it runs: checkpoints and metrics.

A checkpoint is one file, complete or absent. Metrics are lines of JSON, appended; what a killed
run wrote beyond its last checkpoint is cut off, and written again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from .files import publishing, write_text

KEPT_CHECKPOINTS = 2


class Checkpoints:
    """``checkpoints/step-*.pt``, the last two, and ``checkpoints/best.pt``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "checkpoints"
        self.best = self.directory / "best.pt"

    def all(self) -> list[Path]:
        """Those of steps, the earliest first."""
        return sorted(self.directory.glob("step-*.pt"))

    def latest(self) -> Path | None:
        return next(reversed(self.all()), None)

    def of_step(self, num_steps: int) -> Path:
        return self.directory / f"step-{num_steps:08d}.pt"

    def publish(self, path: Path, state: dict[str, Any]) -> None:
        """Write one, and let go of those no longer kept.

        Raises:
            NoRoomError: the disk is full.
        """
        with publishing(path) as partial:
            torch.save(state, partial)
        for old in self.all()[:-KEPT_CHECKPOINTS]:
            old.unlink()


class Metrics:
    """``metrics.jsonl``: one line a window of training steps, and one a validation."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "metrics.jsonl"

    def append(self, values: dict[str, Any]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")

    def trim(self, num_steps: int) -> None:
        """Keep the whole lines of the first ``num_steps`` steps."""
        if self.path.is_file():
            lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n")]
            kept = [line for line in kept if json.loads(line)["step"] <= num_steps]
            write_text(self.path, "".join(kept))
