"""A run that nobody disturbed, to copy from and to compare with."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle3.fingerprint import STAGES
from tests.conftest import ROOT, config_writer
from tests.kill import tally
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


def pytest_terminal_summary(terminalreporter) -> None:
    if lines := tally.table():
        terminalreporter.section("what was done to the runs, and what came of it")
        for line in lines:
            terminalreporter.write_line(line)


class Undisturbed:
    """A run whose stages are made when they are asked for, and how each of them lived."""

    def __init__(self, config: Path, warm: Path) -> None:
        self.config, self.warm = config, warm
        self.directory = config.parent / "runs" / "tiny"
        self._lives: dict[str, Life] = {}

    def life(self, stage: str) -> Life:
        """Of a stage; those it needs are made before it."""
        for name in _up_to(stage):
            if name not in self._lives:
                self._lives[name] = Run(self.config, name, self.warm).measure()
                print(f"{name}: {self._lives[name]}")
        return self._lives[stage]

    def __getitem__(self, stage: str) -> Path:
        """A stage's directory, finished."""
        self.life(stage)
        return self.directory / stage


def _up_to(stage: str) -> list[str]:
    names = list(STAGES)
    return names[: names.index(stage) + 1]


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
    directory = tmp_path_factory.mktemp("undisturbed")
    return Undisturbed(config_writer(directory, tiny_verifier_dir)(SETTINGS), warm)


@pytest.fixture
def start_from(undisturbed, tiny_verifier_dir, tmp_path, warm) -> Callable[..., Run]:
    """``start_from(stage)``: a run of one's own whose stages before that one are done."""

    def start_from(
        stage: str, overrides: dict[str, Any] | None = None, directory: Path = tmp_path
    ) -> Run:
        config = config_writer(directory, tiny_verifier_dir)({**SETTINGS, **(overrides or {})})
        run = Run(config, stage, warm)
        for name in _up_to(stage)[:-1]:
            shutil.copytree(undisturbed[name], run.stage.parent / name)
        return run

    return start_from
