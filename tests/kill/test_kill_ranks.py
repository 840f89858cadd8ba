"""04 by two processes: whichever of them is killed, or their launcher, the end is the same."""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path

import pytest

from tests.conftest import config_writer
from tests.e2e.test_train_ranks import LAUNCH, SETTINGS
from tests.inputs import publish_rows, publish_shards, publish_vocab
from tests.kill import tally
from tests.kill.victim import Moment, Run, assert_equal

pytestmark = pytest.mark.kill


@pytest.fixture(scope="module")
def two_ranks(tiny_verifier_dir, tmp_path_factory):
    """An undisturbed training by two, on made-up inputs, and how it lived."""
    config = config_writer(tmp_path_factory.mktemp("two"), tiny_verifier_dir)(SETTINGS)
    publish_shards(config, publish_rows(config, num_rows=120, num_validation=16))
    publish_vocab(config)
    return config, Run(config, "04_train", launcher=LAUNCH).measure()


@pytest.mark.parametrize("seed", range(2))
def test_two_ranks_end_as_if_nobody_had_been_killed(seed, two_ranks, tiny_verifier_dir, tmp_path):
    undisturbed, life = two_ranks
    config = config_writer(tmp_path, tiny_verifier_dir)(SETTINGS)
    run = Run(config, "04_train", launcher=LAUNCH)
    for name in ("01_data", "02_hidden", "03_vocab"):
        shutil.copytree(undisturbed.parent / "runs" / "tiny" / name, run.stage.parent / name)
    rng = random.Random(seed)
    for victim in rng.sample(["launcher", "rank 0", "rank 1"], 3):
        moment = Moment.draw(rng, life, 0.25)
        process = run.reach(moment)
        pids = {"launcher": process.pid, **_ranks(run)}
        print(f"seed {seed}: {victim} killed {moment}")
        os.kill(pids[victim], signal.SIGKILL)
        screen = process.communicate(timeout=120)[0]
        assert process.returncode != 0, screen[-4000:]
        assert run.survivors() == {}
        tally.count("04_train", tally.KILLS)
    run.finish()
    assert_equal(run.stage, undisturbed.parent / "runs" / "tiny" / "04_train")


def _ranks(run: Run) -> dict[str, int]:
    found = {}
    for pid in run.alive():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # something short-lived of the launcher's
            continue
        for rank in (0, 1):
            if f"RANK={rank}".encode() in environment:
                found[f"rank {rank}"] = pid
    return found
