"""Room on disk, asked before anything expensive starts."""

from __future__ import annotations

import shutil
from pathlib import Path

from .errors import NoRoomError
from .files import format_bytes
from .script import log


def free_bytes(path: Path) -> int:
    """Free space where ``path`` is or will be."""
    while not path.exists():
        path = path.absolute().parent
    return shutil.disk_usage(path).free


def require_room(directory: Path, *, needed_bytes: int, kept_bytes: int, budget_bytes: int) -> None:
    """Say what a stage needs, has published, may use and finds free; refuse if it cannot fit.

    Args:
        needed_bytes: of the finished stage, what is already published included.
        kept_bytes: already published.
        budget_bytes: what the config allows.

    Raises:
        NoRoomError: over the budget, or over what is free.
    """
    free = free_bytes(directory)
    log(
        "disk",
        needed=format_bytes(needed_bytes),
        published=format_bytes(kept_bytes),
        free=format_bytes(free),
        budget=format_bytes(budget_bytes),
    )
    for limit_bytes, what, fix in (
        (budget_bytes, "the budget", "raise capture.disk_budget_bytes or take fewer tokens"),
        (free + kept_bytes, "the free space", "free space, or point run.dir elsewhere"),
    ):
        if needed_bytes > limit_bytes:
            raise NoRoomError(
                f"the hidden states do not fit {what}",
                where=directory,
                expected=f"at least {format_bytes(needed_bytes)}",
                found=f"{what}: {format_bytes(limit_bytes)}",
                fix=fix,
            )
