"""Stop signals, second copies, and processes that must not outlive the one that started them."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time

import pytest

from eagle3.errors import EXIT_INTERRUPTED, EXIT_STALE
from eagle3.fingerprint import STAGES
from eagle3.locks import StageLock
from tests.kill import tally
from tests.kill.victim import Moment, assert_equal

pytestmark = pytest.mark.kill


@pytest.mark.parametrize("how", ["SIGTERM", "Ctrl-C"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_stop_is_clean_and_the_same_command_goes_on(stage, how, start_from, undisturbed):
    run = start_from(stage)
    rng = random.Random(f"{stage} {how}")
    number = signal.SIGINT if how == "Ctrl-C" else signal.SIGTERM
    while True:
        moment = Moment.draw(rng, undisturbed.life(stage), 0.5)
        print(f"{stage}, {how}: {moment}")
        process = run.reach(moment)
        if how == "Ctrl-C":  # a terminal signals all of its foreground processes
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        screen = process.communicate(timeout=120)[0]
        if process.returncode not in (0, -number):
            break
        # Too late: all was published and only the interpreter was left to end, or not even that.
        assert (run.stage / "manifest.json").is_file(), screen[-6000:]
        shutil.rmtree(run.stage)
    assert process.returncode == EXIT_INTERRUPTED, screen[-6000:]
    tally.count(stage, tally.STOPS)
    assert "Traceback" not in screen and "stopped; everything published is kept" in screen
    assert run.survivors() == {}
    run.finish()
    if stage not in ("01_data", "06_verify"):  # one samples, the other measures
        assert_equal(run.stage, undisturbed[stage])


@pytest.mark.parametrize("stage", STAGES)
def test_a_second_copy_is_refused_and_names_the_first(stage, start_from, undisturbed):
    run = start_from(stage)
    run.stage.mkdir(parents=True)
    first = StageLock(run.stage.parent, stage, None)
    first.take()
    try:
        code, screen = run()
    finally:
        first.close()
    assert code == EXIT_STALE and f"pid {os.getpid()} on " in screen, screen[-2000:]
    assert list(run.stage.iterdir()) == []


@pytest.mark.parametrize("at", ["loading", "capturing"])
def test_engine_workers_end_with_a_killed_script(at, start_from):
    """Two of vLLM's worker processes, by tensor parallelism."""
    run = start_from("02_hidden", {"engine.tensor_parallel_size": 2})
    run.warm = None  # its workers are forked from it: as they are from a script started cold
    process = run.start()
    deadline_s = time.monotonic() + 120
    while len(run.alive()) < 3 or (
        at == "capturing" and not list(run.stage.glob("shard-*.safetensors"))
    ):
        assert process.poll() is None and time.monotonic() < deadline_s, process.communicate()[0]
        time.sleep(0.01)
    if at == "loading":
        time.sleep(random.Random(at).uniform(0, 5))
        assert not list(run.stage.glob("shard-*"))
    started = run.alive()
    assert len(started) >= 3
    process.kill()
    process.communicate()
    assert run.survivors(within_s=1) == {}
    tally.count("02_hidden", tally.KILLS)
