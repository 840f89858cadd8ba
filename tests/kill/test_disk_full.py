"""A disk that is full, or fills up: exit 5 and four parts; with room again, the same result."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from eagle3.artifact import open_artifact
from eagle3.config_file import load_config
from eagle3.disk import free_bytes
from eagle3.errors import EXIT_DONE, EXIT_NO_ROOM
from eagle3.fingerprint import STAGES
from eagle3.script import Invocation
from tests.kill import tally
from tests.kill.victim import LONGEST_S, Moment, assert_equal

pytestmark = pytest.mark.kill


class Disk:
    """A file system of 128 MiB, and a file that fills it."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.filler = directory, directory / "filler"

    def leave(self, num_bytes: int) -> None:
        """Fill all but so much of it; a stage at work may take some of that meanwhile."""
        self.empty()
        with open(self.filler, "wb") as file:
            while (fill_bytes := free_bytes(self.directory) - num_bytes) > 0:
                with contextlib.suppress(OSError):
                    os.posix_fallocate(file.fileno(), self.filler.stat().st_size, fill_bytes)

    def empty(self) -> None:
        self.filler.unlink(missing_ok=True)


@pytest.fixture
def disk(tmp_path):
    directory = tmp_path / "disk"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128m", "tmpfs", str(directory)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.strip()}")
    yield Disk(directory)
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


@pytest.mark.parametrize("stage", STAGES)
def test_a_full_disk_stops_a_stage_and_costs_nothing(stage, disk, undisturbed, start_from):
    run = start_from(stage, directory=disk.directory)
    config = disk.directory / "config.yaml"
    files = undisturbed[stage].rglob("*")
    stage_bytes = sum(path.stat().st_size for path in files if path.is_file())
    moment = Moment.draw(random.Random(stage), undisturbed.life(stage), 0.5)
    codes = []
    for share in (0, 0.4, 0.8, None):  # of what the stage writes; None: filled up on the way
        if share is None:
            disk.empty()
            process = run.reach(moment)
            disk.leave(0)
            screen, code = process.communicate(timeout=LONGEST_S)[0], process.returncode
        else:
            disk.leave(int(share * stage_bytes))
            code, screen = run()
        codes.append(code)
        print(f"{stage}, {share}: exit {code}")
        if code != EXIT_DONE:
            tally.count(stage, tally.FULL)
            assert code == EXIT_NO_ROOM and "Traceback" not in screen, screen[-6000:]
            for part in ("error ", "where ", "expected ", "found ", "next "):
                assert f" {part}" in screen, screen[-6000:]
            assert not (run.stage / "manifest.json").exists()
        for name in STAGES[stage].inputs:
            _open(config, name)
    assert codes[0] == EXIT_NO_ROOM and EXIT_NO_ROOM in codes[1:]
    disk.empty()
    run.finish()
    if stage not in ("01_data", "06_verify"):  # one samples, the other measures
        assert_equal(run.stage, undisturbed[stage])


def _open(config_path: Path, name: str) -> None:
    """What was published before is as it was."""
    invocation = Invocation("test", config_path, (), check=False, redo=False)
    open_artifact(load_config(config_path), name, invocation).verify_checksums()


def test_the_disk_budget_holds_to_the_byte(start_from, undisturbed):
    """One byte less than 02 may need is refused before the engine starts; that much is enough."""
    run = start_from("02_hidden")
    shards = list(undisturbed["02_hidden"].glob("shard-*.safetensors"))
    written_bytes = sum(path.stat().st_size for path in shards)
    key = "capture.disk_budget_bytes"
    code, screen = run("--set", f"{key}={written_bytes - 1}")
    assert code == EXIT_NO_ROOM and "do not fit the budget" in screen
    assert "engine ready" not in screen and not list(run.stage.glob("shard-*"))
    budget_bytes = written_bytes + 1024 * len(shards)  # headers are planned for at their largest
    code, screen = run("--set", f"{key}={budget_bytes}")
    assert code == EXIT_DONE, screen[-4000:]
    assert (
        sum(path.stat().st_size for path in run.stage.glob("shard-*.safetensors")) <= budget_bytes
    )
    shutil.rmtree(run.stage)
