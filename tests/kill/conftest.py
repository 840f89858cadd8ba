"""One run of all six scripts that nobody disturbed, to copy from and to compare with."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from eagle3.fingerprint import STAGES
from tests.conftest import ROOT, config_writer
from tests.kill.victim import Life, Run

SETTINGS = {
    "data.sources": [{"kind": "package", "name": "chitchat", "max_conversations": 250}],
    "data.num_validation_prompts": 16,
    "capture.shard_bytes": 1 << 17,
    "train.num_epochs": 3,
    "train.log_every_steps": 1,
    "train.checkpoint_every_steps": 5,
    # The verifier is random and so is what it says: nothing to accept.
    "verify.gates.min_acceptance_length": {"heldout": 1.0, "mt_bench": 1.0},
}


@dataclass(frozen=True)
class Undisturbed:
    """Where it lies, and how each of its stages lived."""

    directory: Path
    lives: dict[str, Life]


@pytest.fixture(scope="session")
def warm() -> Iterator[Path]:
    """The socket of a process that has imported everything."""
    with tempfile.TemporaryDirectory() as directory:  # a socket's path must be short
        path = Path(directory) / "socket"
        words = [sys.executable, "-m", "tests.kill.warm", str(path)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield path
        process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def undisturbed(tiny_verifier_dir, tmp_path_factory, warm) -> Undisturbed:
    """Started cold; the lives are those of a second run, started warm as those that are killed."""
    directories, lives = [], {}
    for name in ("undisturbed", "measured"):
        config = config_writer(tmp_path_factory.mktemp(name), tiny_verifier_dir)(SETTINGS)
        directories.append(config.parent / "runs" / "tiny")
        for stage in STAGES:
            if name == "undisturbed":
                Run(config, stage).finish()
            else:
                lives[stage] = Run(config, stage, warm=warm).measure()
    print(*(f"{name}: {life}" for name, life in lives.items()), sep="\n")
    return Undisturbed(directories[0], lives)


@pytest.fixture
def start_from(undisturbed, tiny_verifier_dir, tmp_path, warm) -> Callable[..., Run]:
    """``start_from(stage, overrides)``: a run whose stages before that one are done."""

    def start_from(stage: str, overrides: dict | None = None, directory: Path = tmp_path) -> Run:
        config = config_writer(directory, tiny_verifier_dir)({**SETTINGS, **(overrides or {})})
        return Run(config, stage, undisturbed.directory, warm)

    return start_from
