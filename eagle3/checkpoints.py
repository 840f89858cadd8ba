"""Checkpoints of a training run: each is one file, complete or absent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .files import publishing

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
