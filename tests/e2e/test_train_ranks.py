"""04 under ``accelerate launch``: two processes train what one trains, and stop and go on as one.

Real scripts on the tiny verifier and made-up states, in float32: what differs is rounding only.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle3.errors import EXIT_INTERRUPTED
from tests.conftest import config_writer
from tests.inputs import publish_rows, publish_shards, publish_vocab

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {
    "train.mixed_precision": "no",
    "train.num_epochs": 4,
    "train.batch_tokens": 128,  # about five rows; two processes have shares of two and three
    "train.log_every_steps": 1,
    "train.checkpoint_every_steps": 5,
}
LAUNCH = [
    *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"),
    *("--num_processes", "2", "--num_machines", "1", "--main_process_port", "0"),
    *("--mixed_precision", "no", "--dynamo_backend", "no"),
]


class Training:
    """A run of its own on the same inputs."""

    def __init__(self, config: Path, directory: Path) -> None:
        self.directory = directory / "runs" / "tiny" / "04_train"
        self.words = ["04_train.py", str(config), "--set", f"run.dir={directory / 'runs'}"]
        shutil.copytree(config.parent / "runs", directory / "runs")

    def start(self, num_processes: int) -> subprocess.Popen:
        return subprocess.Popen(
            [*(LAUNCH if num_processes > 1 else [sys.executable]), *self.words],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, num_processes: int) -> str:
        process = self.start(num_processes)
        screen = process.communicate(timeout=300)[0]
        assert process.returncode == 0, screen[-4000:]
        return screen

    def stop(self, num_processes: int, rank: int) -> str:
        """Start, SIGTERM one rank after the first checkpoint, and wait for the end of all."""
        process = self.start(num_processes)
        before = set(self.checkpoints())
        while not set(self.checkpoints()) - before:
            assert process.poll() is None, process.communicate()[0][-4000:]
            time.sleep(0.01)
        os.kill(_pid_of_rank(process.pid, rank) if num_processes > 1 else process.pid, 15)
        screen = process.communicate(timeout=120)[0]
        assert process.returncode != 0
        assert not (self.directory / "manifest.json").exists(), "it was done before the stop"
        return screen

    def checkpoints(self) -> list[Path]:
        return sorted((self.directory / "checkpoints").glob("step-*.pt"))

    @property
    def metrics(self) -> list[dict]:
        lines = (self.directory / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def of_kind(self, kind: str) -> list[dict]:
        return [line for line in self.metrics if line["kind"] == kind]


def _pid_of_rank(launcher: int, rank: int) -> int:
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
            environment = (path / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if parent == launcher and f"RANK={rank}".encode() in environment:
            return int(path.name)
    raise AssertionError(f"no rank {rank} under {launcher}")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, tiny_verifier_dir):
    """01, 02 and 03, made up, and a config of their own."""
    directory = tmp_path_factory.mktemp("inputs")
    write = config_writer(directory, tiny_verifier_dir)
    config = write(SETTINGS)
    rows = publish_rows(config, num_rows=120, num_validation=16)
    publish_shards(config, rows)
    publish_vocab(config)
    return config


@pytest.fixture(scope="module")
def alone(inputs, tmp_path_factory) -> Training:
    training = Training(inputs, tmp_path_factory.mktemp("alone"))
    training.run(1)
    return training


def assert_same_training(found: Training, expected: Training) -> None:
    """Every step's loss, every validation, and the published weights, up to float32 rounding."""
    steps = expected.of_kind("train")
    assert [m["step"] for m in found.of_kind("train")] == [m["step"] for m in steps]
    for ours, theirs in zip(found.of_kind("train"), steps, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5), theirs["step"]
        assert ours["loss_per_ttt_step"] == pytest.approx(theirs["loss_per_ttt_step"], rel=1e-5)
    # It learned, or nothing was compared.
    assert steps[-1]["loss"] < 0.8 * steps[0]["loss"]
    assert expected.of_kind("validation")[-1]["acceptance_length"] > 1.2
    for ours, theirs in zip(
        found.of_kind("validation"), expected.of_kind("validation"), strict=True
    ):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["acceptance_length"] == pytest.approx(theirs["acceptance_length"], abs=0.02)
    weights, others = (load_file(t.directory / "best.safetensors") for t in (found, expected))
    worst = max(
        float((weights[name] - other).float().norm() / other.float().norm().clamp_min(1e-6))
        for name, other in others.items()
        if other.dtype != torch.bool
    )
    losses = zip(found.of_kind("train"), steps, strict=True)
    apart = max(abs(a["loss"] / b["loss"] - 1) for a, b in losses)
    print(f"largest relative difference: weights {worst:.1e}, loss {apart:.1e}")
    assert worst < 1e-3


def test_two_processes_train_what_one_trains(inputs, alone, tmp_path):
    two = Training(inputs, tmp_path)
    screen = two.run(2)
    assert_same_training(two, alone)
    # One of them speaks, and what it publishes is a stage like any other.
    assert len(re.findall(r"04_train plan .*processes=2", screen)) == 1
    assert len(re.findall(r"04_train done ", screen)) == 1
    assert "already done" in two.run(2)


def test_stopped_two_go_on_as_two_and_then_as_one(inputs, alone, tmp_path):
    """SIGTERM to the follower first, to the main one then."""
    training = Training(inputs, tmp_path)
    screen = training.stop(2, rank=1)
    assert f"exitcode  : {EXIT_INTERRUPTED}" in screen and "stopped; everything" in screen
    first = training.checkpoints()[-1]
    screen = training.stop(2, rank=0)
    assert f"resumed checkpoint={first}" in screen
    assert training.checkpoints()[-1] > first
    assert f"resumed checkpoint={training.checkpoints()[-1]}" in training.run(1)
    assert_same_training(training, alone)


def test_one_killed_goes_on_as_two_and_a_killed_launcher_frees_the_stage(inputs, alone, tmp_path):
    training = Training(inputs, tmp_path)
    training.stop(1, rank=0)
    process = training.start(2)
    before = training.checkpoints()[-1]
    while training.checkpoints()[-1] == before:
        assert process.poll() is None, process.communicate()[0][-4000:]
        time.sleep(0.01)
    os.kill(_pid_of_rank(process.pid, 1), signal.SIGKILL)
    screen = process.communicate(timeout=120)[0]
    assert process.returncode != 0, screen[-2000:]
    assert "resumed" in training.run(2)
    assert_same_training(training, alone)


def test_a_refusal_is_told_once_and_ends_all(inputs, tmp_path):
    """A damaged upstream file: both processes find it, one says it, none waits for the other."""
    training = Training(inputs, tmp_path)
    shard = training.directory.parent / "02_hidden" / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    process = training.start(2)
    screen = process.communicate(timeout=120)[0]
    assert process.returncode != 0 and "exitcode  : 3" in screen
    assert screen.count("error     a file was truncated") == 1
