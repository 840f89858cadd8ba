"""One run of one script: lock, fingerprint, banner, manifest.

On start: done with the same fingerprint -> one line and the next command; partial with the same
one -> continue; done but with files damaged -> partial, without those; anything else -> refuse and
show the difference. ``manifest.json`` is written last.
"""

from __future__ import annotations

import platform
import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .artifact import Artifact, open_artifact, require_files, require_same
from .config import Config
from .contract import Wiring
from .disk import free_bytes, write_speed
from .errors import DamagedError, OutdatedError
from .files import format_bytes, write_json, write_text
from .fingerprint import STAGES, expected_fingerprint, is_verdict, open_verifier
from .leftovers import discard, forget, set_aside, sweep
from .locks import StageLock
from .machine import devices, versions
from .manifest import FINGERPRINT, MANIFEST, read_fingerprint, read_manifest, write_manifest
from .ranks import ALONE, Ranks
from .run_state import look, next_step
from .script import Invocation, log
from .verifier import Verifier


@dataclass
class Stage:
    """An entered stage. Use as a context manager.

    Attributes:
        ranks: the processes of one ``accelerate launch``; the main one locks, compares, publishes.
        directory: ``runs/<name>/<stage>``.
        inputs: upstream artifacts by stage name.
        in_rounds: what is published comes and goes (``retention``): the stage is entered again
            though it is published, and known by what it is made from alone.
        done: the same work is already published; the script only says so and ends.
    """

    config: Config
    name: str
    invocation: Invocation
    ranks: Ranks = ALONE
    in_rounds: bool = False
    inputs: dict[str, Artifact] = field(default_factory=dict)
    done: bool = False

    def __post_init__(self) -> None:
        self.spec = STAGES[self.name]
        self.directory = self.config.run_dir / self.name
        self._lock = StageLock(self.config.run_dir, self.name, self.invocation.worker)
        self._aside = self.config.run_dir / f"{self.name}.old"
        self._opened: dict[str, Artifact] = {}
        self._damaged: tuple[Path, ...] = ()
        self._start_s = time.time()

    def __enter__(self) -> Stage:
        log.stage = f"{self.name} {self.invocation.worker or ''}".strip()
        self.ranks.agree(self._open_inputs)
        self.done = self.ranks.on_main(self._enter)
        return self

    def _open_inputs(self) -> None:
        for upstream in self.spec.inputs:
            self.inputs[upstream] = open_artifact(
                self.config, upstream, self.invocation, self._opened
            )
        digests = {upstream: artifact.digest for upstream, artifact in self.inputs.items()}
        self.fingerprint = expected_fingerprint(self.config, self.name, digests)

    def _enter(self) -> bool:
        """Take the lock and start; whether the stage is done."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock.take()
        try:
            with self._lock.turn():
                self._start()
            if not self.done:
                self._verify_inputs()
        except BaseException:
            self._lock.close()
            raise
        return self.done

    def _verify_inputs(self) -> None:
        for name, upstream in self.inputs.items():
            if not STAGES[name].checked_when_read:
                upstream.verify_checksums()

    def _start(self) -> None:
        if self.invocation.redo:
            set_aside(self.directory, self._aside)
        self._compare_with_disk()
        if not self.done:
            worker = self.invocation.worker
            name = f"log.worker-{worker.index}.txt" if worker else "log.txt"
            log.open(self.directory / name)
            if worker is None:
                sweep(self.directory)
            forget(self.directory, keep_workers=worker is not None)
            write_json(self.directory / FINGERPRINT, self.fingerprint)
            text = yaml.safe_dump(self.config.model_dump(mode="json"), sort_keys=False)
            write_text(self.directory / "config.yaml", text)
            self._banner("start")
            for path in self._damaged:
                log("a published file was damaged and is made again", path=path)

    def __exit__(self, *_exception: object) -> None:
        self._lock.close()

    @property
    def verifier(self) -> Verifier:
        return open_verifier(self.config.verifier)

    def _compare_with_disk(self) -> None:
        try:
            if (self.directory / MANIFEST).is_file():
                self.done = self._open_own()
            elif found := read_fingerprint(self.directory, self.spec, self.invocation):
                require_same(self.config, self.name, found, self.invocation, self._opened)
        except DamagedError as error:
            self._damaged = error.paths
            self._reopen()
        except OutdatedError as error:
            if not is_verdict(error.differences):
                raise
        if self.done:
            discard(self._aside)  # an earlier --redo died between its manifest and this
            log("already done", output=self.directory)
            self.say_next()

    def _open_own(self) -> bool:
        """Whether the finished stage is what it would be now, its verdict included."""
        try:
            open_artifact(self.config, self.name, self.invocation, self._opened)
        except OutdatedError as error:
            if not is_verdict(error.differences):
                raise
            manifest = read_manifest(self.directory, self.spec, self.invocation)
            require_files(self.directory, manifest, self.invocation)
            Artifact(self.directory, manifest).verify_checksums()
            log("other gates: what was measured is kept and judged again", changed=error.found)
            self._reopen()
            return False
        if self.in_rounds:
            self._reopen()
        return not self.in_rounds

    def _reopen(self) -> None:
        """Make a finished stage an unfinished one, without its damaged files."""
        write_json(self.directory / FINGERPRINT, self.fingerprint)
        for path in (self.directory / MANIFEST, *self._damaged):
            path.unlink(missing_ok=True)

    def _banner(self, what: str) -> None:
        log(what, run=self.config.run.name, config=self.invocation.config_path)
        log("versions", python=platform.python_version(), **versions())
        log("devices", **devices())
        for upstream in self.inputs.values():
            log("input", path=upstream.directory, digest=upstream.digest[:12])
        disk = {"free": format_bytes(free_bytes(self.directory))}
        if speed := write_speed(self.config.run_dir):
            disk["write_speed"] = f"{format_bytes(speed)}/s"
        log("output", path=self.directory, **disk)

    def commit(
        self,
        *,
        files: list[str],
        counts: dict[str, Any],
        wiring: Wiring | None = None,
        results: dict[str, Any] | None = None,
        checksums: dict[str, str] | None = None,
    ) -> Artifact:
        """Publish: check the files, write the manifest, open it as the next stage will.

        Of workers that all find the stage complete the first one publishes; nothing is rewritten.

        Args:
            files: names under the stage's directory, all already published.
            counts: whatever was counted; ``in``, ``out`` and ``dropped`` must add up if present.
            wiring: the contract as far as this stage knows it.
            results: what else downstream reads.
            checksums: SHA-256 of files already hashed when they were written.
        """
        if "in" in counts:
            dropped = sum(counts["dropped"].values())
            assert counts["in"] == counts["out"] + dropped, counts
        with self._lock.turn():
            if not (self.directory / MANIFEST).is_file():
                made = {
                    "stage": self.name,
                    "fingerprint": self.fingerprint,
                    "counts": counts,
                    "wiring": wiring.to_json() if wiring else None,
                    "results": results or {},
                }
                seconds = time.time() - self._start_s
                identity = self.fingerprint if self.in_rounds else None
                write_manifest(self.directory, made, files, checksums or {}, seconds, identity)
            self._opened = {}  # read anew, as the next stage will
            artifact = open_artifact(self.config, self.name, self.invocation, self._opened)
            discard(self._aside)
            log.path = None  # nothing more to note
            forget(self.directory, keep_workers=False)
        log(
            "done",
            took=f"{time.time() - self._start_s:.0f}s",
            size=format_bytes(sum(entry["bytes"] for entry in artifact.manifest["files"].values())),
            peak_memory=format_bytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),
            path=self.directory,
        )
        self.say_next()
        return artifact

    def say_next(self) -> None:
        """Print what comes next in this run, and its command."""
        states = look(self.config, self.invocation, self._opened)
        what, values = next_step(self.config, states, self.invocation)
        log(what, **values)


if sys.platform != "linux":
    raise RuntimeError("the pipeline runs on Linux: it relies on flock and atomic renames")
