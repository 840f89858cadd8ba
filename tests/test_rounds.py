"""Rounds: the same drafter whatever the disk holds, and never more on it than it may."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from eagle3.config_file import load_config
from eagle3.contract import Wiring
from eagle3.errors import ConfigError, StaleInputError
from eagle3.fingerprint import open_verifier
from eagle3.retention import Rounds, free
from eagle3.rounds import run as run_rounds
from eagle3.run_state import look, next_step
from eagle3.script import Invocation
from eagle3.shard_plan import plan_shards, rounds_of
from eagle3.stage import Stage
from tests.inputs import publish_rows, publish_shard, publish_vocab

ROOT = Path(__file__).resolve().parent.parent
NUM_ROWS, NUM_VALIDATION = 40, 8
SETTINGS = {
    "capture.round_tokens": 250,
    "capture.shard_bytes": 1 << 17,
    "train.num_epochs": 2,
    "train.batch_tokens": 64,
    "train.checkpoint_every_steps": 3,
}


def invocation(path: Path, *overrides: str, **flags: bool) -> Invocation:
    flags = {"check": False, "redo": False, **flags}
    return Invocation("04_train.py", path, overrides, **flags)


class Run:
    """A run whose 02 makes states up, in rounds as the real one does."""

    def __init__(self, path: Path, *overrides: str) -> None:
        self.path, self.overrides = path, overrides
        self.rows = publish_rows(path, NUM_ROWS, NUM_VALIDATION)
        publish_vocab(path)
        self.config = load_config(path, overrides)
        verifier = open_verifier(self.config.verifier)
        self.wiring = Wiring.at_capture(self.config, verifier)
        self.plan = plan_shards(self.rows, self.config, self.wiring)
        self.directory = self.config.run_dir / "02_hidden"

    def capture(self) -> Rounds:
        rounds = Rounds.now(self.plan, self.config)
        called = invocation(self.path, *self.overrides)
        with Stage(self.config, "02_hidden", called, in_rounds=True) as stage:
            assert not stage.done
            free(self.directory, [shard for shard in self.plan if not rounds.holds(shard)])
            held = [shard for shard in self.plan if rounds.holds(shard)]
            for shard in held:
                if not (self.directory / shard.name).is_file():
                    publish_shard(self.directory, shard, self.rows, self.wiring, stage.verifier)
                assert self.used_bytes() <= self.config.capture.disk_budget_bytes
            stage.commit(
                files=[shard.name for shard in held],
                counts={},
                wiring=self.wiring,
                results={"rounds": rounds.to_json()},
            )
        return rounds

    def train(self, **flags: bool) -> None:
        main = runpy.run_path(str(ROOT / "04_train.py"))["main"]
        main(invocation(self.path, *self.overrides, **flags))

    def used_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.directory.glob("shard-*"))

    def best(self) -> bytes:
        return (self.config.run_dir / "04_train" / "best.safetensors").read_bytes()

    def status(self) -> tuple[dict[str, str], str]:
        found = look(self.config, invocation(self.path, *self.overrides))
        _, values = next_step(self.config, found, invocation(self.path, *self.overrides))
        return {name: state.state for name, state in found.items()}, next(iter(values.values()))


@pytest.fixture
def budget_bytes(write_config) -> int:
    """Room for the validation rows and the largest round."""
    path = write_config(SETTINGS, "sizes.yaml")
    config = load_config(path)
    rows = publish_rows(path, NUM_ROWS, NUM_VALIDATION)
    plan = plan_shards(rows, config, Wiring.at_capture(config, open_verifier(config.verifier)))
    sizes: dict[int | None, int] = {}
    for shard in plan:
        sizes[shard.round_index] = sizes.get(shard.round_index, 0) + shard.num_bytes
    assert len(sizes) > 3
    return sizes.pop(None) + max(sizes.values())


def test_freed_or_kept_the_drafter_is_the_same_bit_for_bit(write_config, budget_bytes):
    kept = Run(write_config({**SETTINGS, "run.name": "kept"}, "kept.yaml"))
    rounds = kept.capture()
    assert len(rounds.held) == rounds.total > 2
    kept.train()
    assert kept.status()[0]["04_train"] == "done"

    small = {**SETTINGS, "run.name": "freed", "capture.disk_budget_bytes": budget_bytes}
    freed = Run(write_config(small, "freed.yaml"))
    command = f"python -m eagle3.rounds {freed.path}"
    for number in range(rounds.total):
        now = freed.capture()
        assert (now.trained, now.held) == (number, range(number, number + 1))
        states, following = freed.status()
        assert states["02_hidden"] == "partial" and following == command
        freed.train()
        states, following = freed.status()
        is_last = number == rounds.total - 1
        assert states["04_train"] == ("done" if is_last else "partial") and following == command
    assert freed.capture().held == range(rounds.total, rounds.total)
    states, following = freed.status()
    assert states["02_hidden"] == states["04_train"] == "done"
    assert following == f"python 05_export.py {freed.path}"
    names = {path.name for path in freed.directory.glob("shard-*.safetensors")}
    assert names == {shard.name for shard in freed.plan if shard.round_index is None}
    assert freed.best() == kept.best()

    # Trained again: its states are captured again, not missed in silence.
    with pytest.raises(StaleInputError, match="not on disk") as caught:
        freed.train(redo=True)
    assert caught.value.script == "-m eagle3.rounds"
    assert freed.capture().held == range(1)


def test_a_round_larger_than_the_budget_is_asked_for_all_the_same(write_config, budget_bytes):
    """Whether it fits is for the disk check to say; nothing is skipped in silence."""
    run = Run(write_config(SETTINGS), f"capture.disk_budget_bytes={budget_bytes // 2}")
    assert Rounds.now(run.plan, run.config).held == range(1)


def test_every_training_row_is_in_one_round_of_so_many_tokens(write_config):
    path = write_config(SETTINGS)
    rows = publish_rows(path, NUM_ROWS, NUM_VALIDATION)
    rounds = rounds_of(rows, load_config(path))
    assert sorted(np.concatenate(rounds).tolist()) == list(range(NUM_ROWS - NUM_VALIDATION))
    assert all(rows.lengths[row_ids].sum() <= 250 for row_ids in rounds)
    again = rounds_of(rows, load_config(path, ("data.seed=1",)))
    assert [r.tolist() for r in again] != [r.tolist() for r in rounds]
    assert len(rounds_of(rows, load_config(path, ("capture.round_tokens=null",)))) == 1


def test_a_run_without_rounds_is_refused(write_config):
    with pytest.raises(ConfigError, match="no rounds"):
        run_rounds(invocation(write_config()), launch=[])


def test_what_comes_after_01_is_03(write_config):
    path = write_config(SETTINGS)
    publish_rows(path, NUM_ROWS, NUM_VALIDATION)
    called = invocation(path)
    _, values = next_step(called.load_config(), look(called.load_config(), called), called)
    assert values["command"] == f"python 03_build_vocab_map.py {path}"


def test_what_stops_a_script_stops_the_rounds(write_config):
    """The script's own message and exit code; what it started ends with it."""
    path = write_config({**SETTINGS, "capture.disk_budget_bytes": 1000})
    publish_rows(path, NUM_ROWS, NUM_VALIDATION)
    command = [sys.executable, "-m", "eagle3.rounds", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 3 and "03_vocab is not there" in done.stdout
    publish_vocab(path)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 5 and "do not fit the budget" in done.stdout
