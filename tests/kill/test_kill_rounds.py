"""Rounds killed anywhere: the same drafter as undisturbed, and never more on disk than it may be.

    make test-kill

The command that runs 02 and 04 in turns is killed at random moments, and what it started with it.
Each moment is printed; the seed is the test's parameter.
"""

from __future__ import annotations

import random
import shlex
import threading
from pathlib import Path

import pytest
from safetensors.torch import load

from eagle3.config_file import load_config
from eagle3.contract import Wiring
from eagle3.fingerprint import open_verifier
from eagle3.shard_plan import plan_shards
from tests.conftest import config_writer
from tests.e2e.test_train_ranks import LAUNCH
from tests.inputs import publish_rows, publish_vocab
from tests.kill import tally
from tests.kill.victim import Life, Moment, Run, entries

pytestmark = pytest.mark.kill
NUM_KILLS = 5
SEEDS = range(2)
SETTINGS = {
    "capture.round_tokens": 1500,
    "capture.shard_bytes": 1 << 18,
    "train.num_epochs": 2,
    "train.checkpoint_every_steps": 5,
}


class Rounds(Run):
    """A run of ``eagle3.rounds``; all its stages are watched, and how much 02 has on disk.

    ``budget_bytes`` is room for the validation rows and the largest round; ``kept`` names the
    validation rows' shards.
    """

    def __init__(self, directory: Path, verifier_dir: Path, *, in_budget: bool) -> None:
        write = config_writer(directory, verifier_dir)
        config = write(SETTINGS)
        rows = publish_rows(config, 200, 24)
        publish_vocab(config)
        loaded = load_config(config)
        wiring = Wiring.at_capture(loaded, open_verifier(loaded.verifier))
        plan = plan_shards(rows, loaded, wiring)
        self.kept = sorted(shard.name for shard in plan if shard.round_index is None)
        sizes: dict[int | None, int] = {}
        for shard in plan:
            sizes[shard.round_index] = sizes.get(shard.round_index, 0) + shard.num_bytes
        assert len(sizes) >= 4
        self.budget_bytes = sizes.pop(None) + max(sizes.values())
        if in_budget:
            write({**SETTINGS, "capture.disk_budget_bytes": self.budget_bytes})
        super().__init__(config, "02_hidden")
        self.words = ["-m", "eagle3.rounds", str(config)]
        self.name, self.config = "rounds", config
        self.hidden, self.stage = self.stage, self.stage.parent
        self.most_bytes = 0

    def watch(self, until: threading.Event) -> None:
        """Note the most that shards take, half-written ones too."""
        while not until.wait(0.002):
            sizes = {  # by inode: one renamed meanwhile is seen twice
                inode: size for name, inode, size in entries(self.hidden) if ".safetensors" in name
            }
            self.most_bytes = max(self.most_bytes, sum(sizes.values()))

    def best(self) -> bytes:
        return (self.stage / "04_train" / "best.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(tiny_verifier_dir, tmp_path_factory) -> tuple[bytes, Life]:
    """The drafter of a run that had every round on disk at once; how a run lives that has not."""
    kept = Rounds(tmp_path_factory.mktemp("kept"), tiny_verifier_dir, in_budget=False)
    assert kept.finish().count("captured rate=") == 1
    freed = Rounds(tmp_path_factory.mktemp("freed"), tiny_verifier_dir, in_budget=True)
    life = freed.measure()
    assert freed.best() == kept.best()
    print(life)
    return kept.best(), life


@pytest.mark.parametrize("seed", SEEDS)
def test_killed_anywhere_it_goes_on(seed, undisturbed, tiny_verifier_dir, tmp_path):
    expected, life = undisturbed
    run = Rounds(tmp_path, tiny_verifier_dir, in_budget=True)
    rng = random.Random(f"rounds {seed}")
    ended = threading.Event()
    watcher = threading.Thread(target=run.watch, args=(ended,))
    watcher.start()
    try:
        for number in range(NUM_KILLS):
            # Early each time: a run that goes on must not be done before the last kill.
            moment = Moment.draw(rng, life, 0.2)
            was_killed = run.kill(moment)
            print(f"seed {seed}, kill {number + 1}: {moment}{'' if was_killed else ': too late'}")
        run.finish()
    finally:
        ended.set()
        watcher.join()
    tally.count(run.name, tally.COMPARED)
    tally.count(run.name, tally.DIFFERENCES, run.best() != expected)
    assert run.best() == expected
    assert 0 < run.most_bytes <= run.budget_bytes
    assert not list(run.stage.rglob("*.partial"))
    # What remains of the states, and what the next stages read.
    assert sorted(path.name for path in run.hidden.glob("shard-*.safetensors")) == run.kept
    Run(run.config, "05_export").finish()


def test_two_processes_train_the_rounds_that_one_captures(undisturbed, tiny_verifier_dir, tmp_path):
    """The launch line in front of 04 alone; sums in another order are all that differs."""
    run = Rounds(tmp_path, tiny_verifier_dir, in_budget=True)
    run.words += ["--launch", shlex.join(LAUNCH)]
    assert run.finish().count("processes=2") >= 4  # each round's plan
    found, expected = load(run.best()), load(undisturbed[0])
    assert found.keys() == expected.keys()
    weights = [
        (found[name], tensor) for name, tensor in expected.items() if tensor.is_floating_point()
    ]
    apart = sum(float((mine - theirs).norm() ** 2) for mine, theirs in weights)
    size = sum(float(theirs.norm() ** 2) for _, theirs in weights)
    print(f"two processes, relative difference of the weights: {(apart / size) ** 0.5:.2g}")
    assert apart < 0.01**2 * size
