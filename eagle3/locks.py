"""Who may work on a stage: one process alone, or workers that share it.

``flock`` on files beside the stage's directory. The kernel drops a lock with its process, however
that dies. Between nodes they hold where the file system carries ``flock`` to the server: NFS 4
does, Lustre when mounted with ``-o flock``.
"""

from __future__ import annotations

import fcntl
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from .errors import StaleInputError
from .workers import Worker

# Longer than another worker needs to sign the stage's lock and share it.
_SHARING_S = 2.0
# Longer than ``holders`` needs to look at a lock.
_LOOK_S = 0.3


class StageLock:
    """The locks of one process of a stage.

    Without a worker the stage's lock is held exclusively. Workers hold it shared, each has a lock
    of its own besides, and the stage's lock says of how many they are: parts of another count
    would overlap.
    """

    def __init__(self, run_dir: Path, name: str, worker: Worker | None) -> None:
        self.run_dir, self.name, self.worker = run_dir, name, worker
        self.path = run_dir / f".{name}.lock"
        self._held: list[TextIO] = []

    def take(self) -> None:
        """Take the locks or refuse at once.

        Raises:
            StaleInputError: naming the process that has them.
        """
        try:
            if self.worker is None:
                self._take_alone()
            else:
                self._take_share(self.worker)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for file in self._held:
            file.close()  # releases the flock
        self._held.clear()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """One process of the stage at a time, the others wait: for files that all of them write."""
        with open(self.run_dir / f".{self.name}.turn.lock", "a", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _take_alone(self) -> None:
        file = self._open(self.path)
        if not _patiently(file, fcntl.LOCK_EX, _LOOK_S):
            raise self._refused(", ".join(holders(self.run_dir, self.name)) or _read(file))
        _sign(file, this_process())

    def _take_share(self, worker: Worker) -> None:
        own = self._open(_worker_path(self.run_dir, self.name, worker.index))
        if not _patiently(own, fcntl.LOCK_EX, _LOOK_S):
            raise self._refused(_read(own))
        _sign(own, f"worker {worker}: {this_process()}")
        count = f"workers of {worker.count}"
        file = self._open(self.path)
        if _patiently(file, fcntl.LOCK_EX, _LOOK_S):  # the first one here
            _sign(file, count)
        # Else another first one is signing, or a run is alone.
        if not _patiently(file, fcntl.LOCK_SH, _SHARING_S):
            raise self._refused(_read(file))
        if _read(file) != count:
            self._held.remove(own)
            own.close()
            raise self._refused(", ".join(holders(self.run_dir, self.name)))

    def _open(self, path: Path) -> TextIO:
        file = open(path, "a+", encoding="utf-8")  # closed by ``close``
        self._held.append(file)
        return file

    def _refused(self, holder: str) -> StaleInputError:
        mine = f"worker {self.worker}" if self.worker else "one process"
        return StaleInputError(
            f"{self.name} is being made by another process",
            where=self.path,
            expected=f"no other process but workers of the same count, to start {mine}",
            found=holder,
            fix="wait for it, or stop it",
        )


def holders(run_dir: Path, name: str) -> list[str]:
    """Who is at work on a stage now, as each signed its lock: ``pid 12 on box``, ``worker 0/2: pid
    12 on box``. Looks by sharing each lock for a moment, so whoever comes then must ask again."""
    found = []
    alone = run_dir / f".{name}.lock"
    workers = sorted(run_dir.glob(_worker_path(run_dir, name, "*").name))
    for path in [alone, *workers]:
        if path.is_file():
            with open(path, encoding="utf-8") as file:
                if not _try(file, fcntl.LOCK_SH):
                    found.append(_read(file))
    return found


def _worker_path(run_dir: Path, name: str, index: int | str) -> Path:
    return run_dir / f".{name}.worker-{index}.lock"


def _try(file: TextIO, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _patiently(file: TextIO, how: int, seconds: float) -> bool:
    deadline_s = time.monotonic() + seconds
    while not _try(file, how):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


def _read(file: TextIO) -> str:
    file.seek(0)
    return file.read().strip()


def _sign(file: TextIO, text: str) -> None:
    file.truncate(0)
    file.write(text)
    file.flush()


def this_process() -> str:
    return f"pid {os.getpid()} on {platform.node()}"
