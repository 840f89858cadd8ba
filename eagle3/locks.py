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
        if not _try(file, fcntl.LOCK_EX):
            raise self._refused(", ".join(self._workers_at_work()) or _read(file))
        _sign(file, _this_process())

    def _take_share(self, worker: Worker) -> None:
        own = self._open(self._worker_path(worker.index))
        if not _try(own, fcntl.LOCK_EX):
            raise self._refused(_read(own))
        _sign(own, f"worker {worker}: {_this_process()}")
        count = f"workers of {worker.count}"
        file = self._open(self.path)
        if _try(file, fcntl.LOCK_EX):  # the first one here
            _sign(file, count)
        deadline_s = time.monotonic() + _SHARING_S
        while not _try(file, fcntl.LOCK_SH):  # another first one is signing, or a run is alone
            if time.monotonic() > deadline_s:
                raise self._refused(_read(file))
            time.sleep(0.05)
        if _read(file) != count:
            raise self._refused(", ".join(self._workers_at_work()))

    def _workers_at_work(self) -> list[str]:
        """What the other workers that hold their lock now have signed it with."""
        found = []
        ours = self._worker_path(self.worker.index) if self.worker else None
        for path in sorted(self.run_dir.glob(self._worker_path("*").name)):
            with open(path, encoding="utf-8") as file:
                if path != ours and not _try(file, fcntl.LOCK_SH):
                    found.append(_read(file))
        return found

    def _worker_path(self, index: int | str) -> Path:
        return self.run_dir / f".{self.name}.worker-{index}.lock"

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


def _try(file: TextIO, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(file: TextIO) -> str:
    file.seek(0)
    return file.read().strip()


def _sign(file: TextIO, text: str) -> None:
    file.truncate(0)
    file.write(text)
    file.flush()


def _this_process() -> str:
    return f"pid {os.getpid()} on {platform.node()}"
