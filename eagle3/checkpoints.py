"""Checkpoints of a training run: each is one file, complete or absent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import xxhash

from .errors import StaleInputError
from .files import publishing, write_json

KEPT_CHECKPOINTS = 2


class Checkpoints:
    """``checkpoints/step-*.pt``, the last two, and ``checkpoints/best.pt``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "checkpoints"
        self.best = self.directory / "best.pt"
        self._round_ends = directory / "round_ends.json"

    def all(self) -> list[Path]:
        """Those of steps, the earliest first."""
        return sorted(self.directory.glob("step-*.pt"))

    def latest(self) -> Path | None:
        return next(reversed(self.all()), None)

    def of_step(self, num_steps: int) -> Path:
        return self.directory / f"step-{num_steps:08d}.pt"

    def note_rounds(self, round_ends: list[int]) -> None:
        """Write down the step at which each round ends: a function of the config, as the plan."""
        write_json(self._round_ends, round_ends)

    def trained_rounds(self) -> int:
        """Rounds that end where the latest checkpoint was made, or before."""
        latest = self.latest()
        if latest is None or not self._round_ends.is_file():
            return 0
        num_steps = int(latest.stem.removeprefix("step-"))
        ends = json.loads(self._round_ends.read_text(encoding="utf-8"))
        return sum(end <= num_steps for end in ends)

    def publish(self, path: Path, state: dict[str, Any]) -> None:
        """Write one, and let go of those no longer kept.

        Raises:
            NoRoomError: the disk is full.
        """
        # Through a file of ours: torch's own says "unexpected pos" of a full disk.
        with publishing(path) as partial, open(partial, "wb") as file:
            torch.save({**state, "checksum": _checksum(state)}, file)
        for old in self.all()[:-KEPT_CHECKPOINTS]:
            old.unlink()

    def load(self, path: Path) -> dict[str, Any]:
        """Read one and compare its checksum: ``torch.load`` looks at none, and takes most changed
        bits for weights.

        Raises:
            StaleInputError: it is damaged.
        """
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            if state.pop("checksum") != _checksum(state):
                raise ValueError("its checksum is another one")
        except Exception as error:  # torch raises whatever its readers do
            before = "training goes on from the checkpoint before it"
            raise StaleInputError(
                "a checkpoint is damaged",
                where=path,
                expected="a checkpoint as training wrote it",
                found=" ".join(f"{type(error).__name__}: {error}".split())[:200],
                fix="put it back from a copy, or train again (--redo)"
                if path == self.best
                else f"remove {path}: {before}",
            ) from error
        return state


def _checksum(state: Any) -> str:
    """XXH3 of nested dicts and lists of tensors and numbers, in their order."""
    digest = xxhash.xxh3_128()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        elif isinstance(value, dict):
            for key, entry in value.items():
                digest.update(repr(key).encode())
                add(entry)
        elif isinstance(value, list | tuple):
            for entry in value:
                add(entry)
        else:
            digest.update(repr(value).encode())

    add(state)
    return digest.hexdigest()
