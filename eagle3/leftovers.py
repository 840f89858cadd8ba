"""What earlier processes left in a stage's place: finished output, halves, notes of their own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from .files import PARTIAL_SUFFIX
from .manifest import FINGERPRINT, MANIFEST
from .progress import PROGRESS
from .script import ENDED, log


def set_aside(directory: Path, aside: Path) -> None:
    """Start from nothing; the old output stays beside until the new one is published."""
    finished = (directory / MANIFEST).exists()
    if aside.exists() and not finished:  # an interrupted --redo: keep what it set aside
        discard(directory)
    elif finished or (directory / FINGERPRINT).exists():
        discard(aside)
        os.rename(directory, aside)
    directory.mkdir(exist_ok=True)


def discard(directory: Path) -> None:
    """Delete a directory whole: a kill leaves no half of it under a name that is looked at."""
    trash = directory.with_name(f".{directory.stem}.discarded")
    if trash.exists():
        shutil.rmtree(trash)
    if directory.exists():
        os.rename(directory, trash)
        shutil.rmtree(trash)


def sweep(directory: Path) -> None:
    """Remove what killed runs left half written."""
    for path in list(directory.rglob(f"*{PARTIAL_SUFFIX}")):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def forget(directory: Path, *, keep_workers: bool) -> None:
    """Remove what earlier processes noted: how far they were, how they ended."""
    for what in (PROGRESS, ENDED):
        for path in directory.glob(f"{what}*.json"):
            others = keep_workers and ".worker-" in path.name and path != log.beside(ENDED)
            if not others and path != log.beside(PROGRESS):
                path.unlink(missing_ok=True)
