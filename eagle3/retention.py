"""Which states are on disk now, where a corpus' would not fit: rounds.

With ``capture.round_tokens`` the training rows are split into rounds (``shard_plan.rounds_of``).
02 holds the validation rows' states, and those of as many rounds as ``capture.disk_budget_bytes``
has room for, from the first one that is still to be trained; 04 trains on what is there, passes
over a round as ``train.num_epochs`` says, and leaves a checkpoint where the round ends. 02, run
again, frees what that checkpoint no longer needs. The plan of the training knows nothing of what is
on disk when, so the drafter is the same whatever the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .capture import record_path
from .checkpoints import Checkpoints
from .config import Config
from .files import format_bytes
from .manifest import MANIFEST
from .script import log
from .shard_plan import PlannedShard


@dataclass(frozen=True)
class Rounds:
    """Where a run stands: rounds in all, how many are trained, and those to have on disk now."""

    total: int
    trained: int
    held: range

    @classmethod
    def now(cls, plan: Sequence[PlannedShard], config: Config) -> Rounds:
        total = 1 + max(shard.round_index for shard in plan if shard.round_index is not None)
        sizes_bytes = [0] * total
        for shard in plan:
            if shard.round_index is not None:
                sizes_bytes[shard.round_index] += shard.num_bytes
        validation_bytes = sum(shard.num_bytes for shard in plan) - sum(sizes_bytes)
        left_bytes = config.capture.disk_budget_bytes - validation_bytes
        trained = end = trained_rounds(config, total)
        # One at least: whether it fits is for ``disk.require_room`` to say.
        while end < total and (end == trained or sizes_bytes[end] <= left_bytes):
            left_bytes -= sizes_bytes[end]
            end += 1
        return cls(total, trained, range(trained, end))

    def holds(self, shard: PlannedShard) -> bool:
        """Validation rows' states stay."""
        return shard.round_index is None or shard.round_index in self.held

    def to_json(self) -> dict[str, Any]:
        """Rounds counted from 1, as an operator does."""
        on_disk = [self.held[0] + 1, self.held[-1] + 1] if self.held else []
        return {"total": self.total, "trained": self.trained, "on_disk": on_disk}


def trained_rounds(config: Config, total: int) -> int:
    """Rounds whose states no checkpoint of 04 needs any more, from the first one."""
    directory = config.run_dir / "04_train"
    if (directory / MANIFEST).is_file():
        return total
    return Checkpoints(directory).trained_rounds()


def free(directory: Path, shards: Sequence[PlannedShard]) -> None:
    """Remove what is there of some shards; a record first, as no shard counts without."""
    num_freed = num_bytes = 0
    for shard in shards:
        path = directory / shard.name
        record_path(path).unlink(missing_ok=True)
        if path.is_file():
            num_bytes += path.stat().st_size
            path.unlink(missing_ok=True)
            num_freed += 1
    if num_freed:
        log("freed", shards=num_freed, size=format_bytes(num_bytes))
