"""Every stage is killed at random moments and run again: nothing is lost, nothing is different.

    make test-kill

Twenty kills a stage, each run killed five times before it may end; a few of them are among the
tests of `make test`. The seed is the test's parameter, and each moment is printed.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kill import tally
from tests.kill.conftest import SETTINGS
from tests.kill.victim import Moment, Run, assert_equal

SEEDS = [pytest.param(seed, 5, id=f"seed{seed}", marks=pytest.mark.kill) for seed in range(4)]
SAMPLE = pytest.param(0, 2, id="sample", marks=pytest.mark.slow)


@pytest.fixture
def kills(start_from, undisturbed) -> Callable[..., Iterator[Run]]:
    """``kills(stage, seed, num_kills, share)``: a run killed again and again, handed over after
    each kill.

    ``share`` is the part of a stage's life the moments are drawn from: a stage that goes on where
    it was killed must not be done before the last kill. If it is, it starts over: its directory is
    gone when it is handed over.
    """

    def kills(stage: str, seed: int, num_kills: int, share: float) -> Iterator[Run]:
        rng = random.Random(f"{stage} {seed}")
        run = start_from(stage)
        num_done = 0
        while num_done < num_kills:
            moment = Moment.draw(rng, undisturbed.life(stage), share)
            if run.kill(moment):
                num_done += 1
                print(f"{stage}, seed {seed}, kill {num_done}: {moment}")
            else:
                print(f"{stage}, seed {seed}: {moment} came too late")
                shutil.rmtree(run.stage)
            yield run

    return kills


@pytest.mark.parametrize(("seed", "num_kills"), SEEDS)
def test_01_keeps_every_answer(seed, num_kills, kills, undisturbed):
    """Sampled answers are drawn anew by another run, so the rows differ; those on disk stay."""
    kept: dict[str, str] = {}
    for run in kills("01_data", seed, num_kills, 0.3):
        now = _answers(run.stage)
        assert now.items() >= kept.items() or not run.stage.exists()
        kept = now
    screen = run.finish()
    final = _answers(run.stage)
    assert {key: final[key] for key in kept} == kept
    tally.count("01_data", tally.KEPT, len(kept))
    if asked := re.search(r"answers to_come=(\d+) already_there=(\d+)", screen):
        assert int(asked[2]) == len(kept)
    found, expected = (
        json.loads((stage / "manifest.json").read_text())["counts"]
        for stage in (run.stage, undisturbed["01_data"])
    )
    assert found["in"] == expected["in"]
    assert found["answers"]["asked"] == expected["answers"]["asked"]
    names = {path.name for path in run.stage.iterdir()}
    assert names == {path.name for path in undisturbed["01_data"].iterdir()}


def _answers(stage: Path) -> dict[str, str]:
    """Whole lines of the answers on disk, by question."""
    return {
        json.loads(line)["key"]: line
        for path in sorted((stage / "answers").glob("part-*.jsonl"))
        for line in path.read_text().split("\n")[:-1]
    }


@pytest.mark.parametrize(("seed", "num_kills"), [*SEEDS, SAMPLE])
def test_02_computes_no_proven_shard_again(seed, num_kills, kills, undisturbed):
    proven: dict[str, int] = {}
    for run in kills("02_hidden", seed, num_kills, 0.3):
        records = {path.stem for path in run.stage.glob("shard-*.json")}
        shards = {path.stem: path.stat().st_ino for path in run.stage.glob("shard-*.safetensors")}
        now = {name: shards[name] for name in records}
        assert now.items() >= proven.items() or not run.stage.exists()
        proven = now
        # One is being proven while the next one is written.
        partial = {path.name.split(".")[0] for path in run.stage.glob("shard-*.partial")}
        assert len((shards.keys() | partial) - records) <= 2
    run.finish()
    for name, inode in proven.items():
        assert (run.stage / f"{name}.safetensors").stat().st_ino == inode
        tally.count("02_hidden", tally.KEPT)
    assert_equal(run.stage, undisturbed["02_hidden"])


@pytest.mark.parametrize("stage", ["03_vocab", "05_export"])
@pytest.mark.parametrize(("seed", "num_kills"), SEEDS)
def test_03_and_05_start_over(stage, seed, num_kills, kills, undisturbed):
    for run in kills(stage, seed, num_kills, 0.9):
        pass
    run.finish()
    assert_equal(run.stage, undisturbed[stage])


@pytest.mark.parametrize(("seed", "num_kills"), [*SEEDS, SAMPLE])
def test_04_goes_on_from_its_last_checkpoint(seed, num_kills, kills, undisturbed):
    last_step = 0
    for run in kills("04_train", seed, num_kills, 0.3):
        steps = [int(p.stem[5:]) for p in (run.stage / "checkpoints").glob("step-*.pt")]
        assert max(steps, default=0) >= last_step or not run.stage.exists()
        last_step = max(steps, default=0)
        lines = (run.stage / "metrics.jsonl").read_text().split("\n")[:-1] if steps else []
        trained = max((json.loads(line)["step"] for line in lines), default=0)
        assert trained - last_step <= SETTINGS["train.checkpoint_every_steps"]
    was_done = (run.stage / "manifest.json").is_file()  # the last kill came after it
    screen = run.finish()
    if last_step:
        assert re.search("already done" if was_done else rf"resumed .* step={last_step}/", screen)
        tally.count("04_train", tally.KEPT, last_step)
    assert_equal(run.stage, undisturbed["04_train"])
