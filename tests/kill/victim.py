"""Runs of real scripts that are killed, and what must hold afterwards.

A moment to kill at is drawn from a seed and printed, so that a failure can be tried again: so many
milliseconds after the stage began, or after the n-th change in its directory (a file that appears,
is renamed, or grows). What exactly the process does then depends on the machine.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle3.fingerprint import STAGES
from tests.kill import tally
from tests.kill.warm import LONGEST_S, WarmStart

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ("tokens_per_s", "waiting_share")  # in lines of metrics.jsonl
_MARK = "EAGLE3_TEST_RUN"  # in the environment of a script and of all that it starts


@dataclass(frozen=True)
class Life:
    """How long a stage works undisturbed, and how often its directory changes meanwhile."""

    seconds: float
    num_changes: int


@dataclass(frozen=True)
class Moment:
    """``after_s`` seconds after a change in the stage's directory, the first one being its start."""

    nth_change: int
    after_s: float

    @classmethod
    def draw(cls, rng: random.Random, life: Life, share: float) -> Moment:
        """Within the first ``share`` of a life: one in four at any time, the others upon a change."""
        if rng.random() < 0.25:
            return cls(1, rng.uniform(0, share * life.seconds))
        last = max(int(share * life.num_changes), 1)
        return cls(rng.randint(1, last), rng.expovariate(1 / 0.01))

    def __str__(self) -> str:
        return f"{self.after_s * 1000:.1f} ms after change {self.nth_change}"


class Run:
    """A run directory of its own; ``stage`` is the directory of the one under test.

    Args:
        config: beside it the run lives.
        stage: its name; ``01_data``, ...
        warm: the socket of a process to fork the script from, instead of starting it cold.
        launcher: words before the script's name, instead of the interpreter.
    """

    def __init__(
        self,
        config: Path,
        stage: str,
        warm: Path | None = None,
        launcher: Sequence[str] = (sys.executable,),
    ) -> None:
        self.warm, self.launcher = warm, launcher
        self.name = stage
        self.words = [STAGES[stage].script, str(config)]
        self.stage = config.parent / "runs" / "tiny" / stage
        self.mark, self.sessions = uuid.uuid4().hex, set[int]()

    def start(self, *flags: str) -> subprocess.Popen | WarmStart:
        """Start the script, the leader of a session and process group, as on a terminal."""
        words = [*self.words, *flags]
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), _MARK: self.mark}
        environment = {**os.environ, **environment}
        if self.warm is not None:
            process = WarmStart(self.warm, words, environment)
        else:
            process = subprocess.Popen(
                [*self.launcher, *words],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        self.sessions.add(process.pid)
        return process

    def __call__(self, *flags: str) -> tuple[int, str]:
        """Run the script to its end: its exit code and what it said."""
        process = self.start(*flags)
        screen = process.communicate(timeout=LONGEST_S)[0]
        return process.returncode, screen

    def finish(self) -> str:
        """Run the script to a good end; what it said."""
        code, screen = self()
        assert code == 0, screen[-6000:]
        return screen

    def measure(self) -> Life:
        """Run the script to its end, watching."""
        process, watch = self.start(), Watch(self.stage)
        while process.poll() is None:
            watch.look()
        screen = process.communicate()[0]
        assert process.returncode == 0, screen[-6000:]
        return Life(time.monotonic() - watch.begun_s, watch.num_changes)

    def reach(self, moment: Moment) -> subprocess.Popen | WarmStart:
        """Start the script and return at a moment, or when it has ended before."""
        watch = Watch(self.stage)
        process = self.start()
        while process.poll() is None and watch.num_changes < moment.nth_change:
            watch.look()
        deadline_s = time.monotonic() + moment.after_s
        while process.poll() is None and time.monotonic() < deadline_s:
            time.sleep(min(0.05, max(deadline_s - time.monotonic(), 0)))
        return process

    def kill(self, moment: Moment) -> bool:
        """Start the script and SIGKILL it at a moment; whether that came before its end."""
        process = self.reach(moment)
        process.kill()
        screen = process.communicate()[0]
        assert process.returncode in (0, -signal.SIGKILL), screen[-6000:]
        assert self.survivors() == {}
        was_killed = process.returncode != 0
        tally.count(self.name, tally.KILLS, was_killed)
        return was_killed

    def survivors(self, within_s: float = 2) -> dict[int, str]:
        """The script and what it started, as far as alive after that time: pid -> command."""
        deadline_s = time.monotonic() + within_s
        while (found := self.alive()) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        return found

    def alive(self) -> dict[int, str]:
        """The script and every process it started that are alive: pid -> command."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                state, _, _, session = (path / "stat").read_text().rpartition(")")[2].split()[:4]
                environment = (path / "environ").read_bytes()
                words = (path / "cmdline").read_bytes().replace(b"\0", b" ")
            except OSError:
                continue
            marked = f"{_MARK}={self.mark}".encode() in environment
            if state != "Z" and (marked or int(session) in self.sessions):
                found[int(path.name)] = words.decode(errors="replace")
        return found


class Watch:
    """Counts what changes in a directory from now on."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.seen = set(entries(directory))
        self.num_changes = 0
        self.begun_s = 0.0  # of the first change

    def look(self) -> None:
        """Count what is new, and wait a moment."""
        new = set(entries(self.directory)) - self.seen
        if new and not self.num_changes:
            self.begun_s = time.monotonic()
        self.seen |= new
        self.num_changes += len(new)
        time.sleep(0.001)


def entries(directory: Path | str, prefix: str = "") -> list[tuple[str, int, int]]:
    """Everything under a directory: name, inode, size."""
    found = []
    try:
        for entry in os.scandir(directory):
            status = entry.stat(follow_symlinks=False)
            if entry.is_dir(follow_symlinks=False):
                found.append((prefix + entry.name, status.st_ino, 0))
                found += entries(entry.path, f"{prefix}{entry.name}/")
            else:
                found.append((prefix + entry.name, status.st_ino, status.st_size))
    except FileNotFoundError:  # not there yet, or renamed meanwhile
        pass
    return found


def contents(stage: Path) -> dict[str, Any]:
    """A finished stage, file by file, leaving out what says when it was made and where."""
    found: dict[str, Any] = {}
    for path in sorted(stage.rglob("*")):
        name = str(path.relative_to(stage))
        if path.is_dir():
            continue
        if name == "metrics.jsonl":
            found[name] = [
                {key: value for key, value in json.loads(line).items() if key not in MEASURED}
                for line in path.read_text().splitlines()
            ]
        elif name == "manifest.json":
            manifest = json.loads(path.read_text())
            manifest["files"].pop("metrics.jsonl", None)
            found[name] = {key: manifest[key] for key in ("files", "counts", "wiring", "results")}
        elif name.startswith("checkpoints/"):
            found[name] = torch.load(path, weights_only=True)
            found[name]["metrics"] = "as in metrics.jsonl"
            found[name].pop("checksum")
        elif name in ("log.txt", "config.yaml"):
            found[name] = "there"
        else:
            found[name] = path.read_bytes()
    return found


def differing(found: Path, expected: Path) -> list[str]:
    """Files in which two finished stages differ, or which one of them has not."""
    ours, theirs = contents(found), contents(expected)
    names = sorted(ours.keys() | theirs.keys())
    return [name for name in names if not _same(ours.get(name), theirs.get(name))]


def assert_equal(found: Path, expected: Path) -> None:
    """Two finished stages: the same files, byte for byte, and nothing half written."""
    names = differing(found, expected)
    tally.count(expected.name, tally.COMPARED)
    tally.count(expected.name, tally.DIFFERENCES, len(names))
    assert names == []


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(_same(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    return ours == theirs
