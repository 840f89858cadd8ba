"""Room on disk, asked before anything expensive starts."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

from .errors import NoRoomError
from .files import format_bytes, read_note, write_note
from .script import log

_SPEED = ".disk_speed.json"
_SPEED_PIECE_BYTES = 4 << 20
_SPEED_BYTES = 32 << 20
_SPEED_S = 0.5


def free_bytes(path: Path) -> int:
    """Free space where ``path`` is or will be."""
    while not path.exists():
        path = path.absolute().parent
    return shutil.disk_usage(path).free


def used_bytes(directory: Path) -> int:
    """Bytes of every file under a directory; files that vanish meanwhile count nothing."""
    total_bytes = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total_bytes += os.lstat(f"{folder}/{name}").st_size
    return total_bytes


def write_speed(run_dir: Path) -> int | None:
    """Bytes a second that fsynced writes take on the run's disk, measured once a run: at most
    32 MiB or half a second. None where that much would not be left free tenfold."""
    note = run_dir / _SPEED
    if speed := read_note(note).get("bytes_per_s"):
        return speed
    if free_bytes(run_dir) < 10 * _SPEED_BYTES:
        return None
    probe, piece = run_dir / ".disk_speed.partial", os.urandom(_SPEED_PIECE_BYTES)
    written_bytes, start_s = 0, time.monotonic()
    try:
        with open(probe, "wb", buffering=0) as file:
            while written_bytes < _SPEED_BYTES and time.monotonic() - start_s < _SPEED_S:
                written_bytes += file.write(piece)
                os.fsync(file.fileno())
    except OSError:  # a quota: the stage will say so where it matters
        return None
    finally:
        probe.unlink(missing_ok=True)
    speed = int(written_bytes / (time.monotonic() - start_s))
    write_note(note, {"bytes_per_s": speed, "written_bytes": written_bytes})
    return speed


def require_free(directory: Path, num_bytes: int) -> None:
    """Before a file is computed: that its disk still has room for it.

    Raises:
        NoRoomError: it has not.
    """
    free = free_bytes(directory)
    if num_bytes > free:
        raise NoRoomError(
            "the disk filled up meanwhile; everything published so far is intact",
            where=directory,
            expected=f"at least {format_bytes(num_bytes)} for the next file",
            found=f"{format_bytes(free)} free",
            fix="free space on that file system",
        )


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
