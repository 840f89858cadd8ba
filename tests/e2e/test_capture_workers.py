"""02 shared by workers: real vLLM, real processes, the same bytes as one run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eagle3.files import sha256_file
from tests.conftest import config_writer
from tests.inputs import publish_rows

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


class Capture:
    """A run of its own on the same token rows."""

    def __init__(self, config: Path, directory: Path) -> None:
        self.directory = directory / "runs" / "tiny" / "02_hidden"
        self.config, self.run_dir = config, directory / "runs"
        shutil.copytree(config.parent / "runs", self.run_dir)

    def start(self, *flags: str, **environment: str) -> subprocess.Popen:
        words = ["02_gen_hidden_states.py", str(self.config), "--set", f"run.dir={self.run_dir}"]
        return subprocess.Popen(
            [sys.executable, *words, *flags],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __call__(self, *flags: str, **environment: str) -> tuple[int, str]:
        process = self.start(*flags, **environment)
        screen = process.communicate(timeout=300)[0]
        return process.returncode, screen

    def wait_for(self, name: str, process: subprocess.Popen) -> None:
        while not (self.directory / name).exists():
            assert process.poll() is None, process.communicate()[0][-4000:]
            time.sleep(0.01)

    @property
    def manifest(self) -> dict:
        return json.loads((self.directory / "manifest.json").read_text())

    def shards(self) -> dict[str, str]:
        paths = sorted(self.directory.glob("shard-*.safetensors"))
        return {path.name: sha256_file(path) for path in paths}


@pytest.fixture(scope="module")
def rows(tmp_path_factory, tiny_verifier_dir):
    """01, made up: a config of 150 rows in about fifty shards."""
    write = config_writer(tmp_path_factory.mktemp("rows"), tiny_verifier_dir)
    config = write({"capture.shard_bytes": 1 << 16})
    publish_rows(config, num_rows=150, num_validation=8)
    return config


@pytest.fixture(scope="module")
def one_run(rows, tmp_path_factory) -> Capture:
    capture = Capture(rows, tmp_path_factory.mktemp("one"))
    code, screen = capture()
    assert code == 0, screen[-4000:]
    assert len(capture.shards()) > 40
    return capture


def assert_same(found: Capture, expected: Capture) -> None:
    assert found.shards() == expected.shards()
    assert found.manifest["digest"] == expected.manifest["digest"]


def test_a_worker_does_its_part_and_a_plain_run_the_rest(rows, one_run, tmp_path):
    capture = Capture(rows, tmp_path)
    code, screen = capture("--worker", "0/2")
    names = list(one_run.shards())
    assert code == 0 and list(capture.shards()) == names[::2], screen[-4000:]
    assert f"missing={len(names) // 2}/{len(names)}" in screen
    assert not (capture.directory / "manifest.json").exists()
    assert (capture.directory / "log.worker-0.txt").is_file()
    code, screen = capture()
    assert code == 0, screen[-4000:]
    assert_same(capture, one_run)


def test_workers_together_one_killed_and_one_started_twice(rows, one_run, tmp_path):
    """Named by a launcher's variables, and by the flag."""
    capture = Capture(rows, tmp_path)
    second_part = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
    workers = [capture.start("--worker", "0/2"), capture.start(**second_part)]
    capture.wait_for("log.worker-0.txt", workers[0])
    again = capture.start("--worker", "0/2")
    capture.wait_for("shard-00001.json", workers[1])
    workers[1].kill()
    workers[1].communicate()
    assert not (capture.directory / "manifest.json").exists(), "it was done before the kill"
    screen = again.communicate(timeout=120)[0]
    assert again.returncode == 3 and f"worker 0/2: pid {workers[0].pid} on " in screen
    code, screen = capture(**second_part)
    assert code == 0 and "02_hidden 1/2 done" in screen, screen[-4000:]
    first = workers[0].communicate(timeout=120)[0]
    assert workers[0].returncode == 0, first[-4000:]
    assert_same(capture, one_run)
