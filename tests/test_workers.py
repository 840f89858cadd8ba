"""Several workers of one stage: their parts, their locks, and who publishes."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.errors import StaleInputError
from eagle3.files import write_text
from eagle3.script import Invocation
from eagle3.stage import Stage
from eagle3.workers import Worker
from tests.runs import Run

# --- which part ---


@given(st.integers(0, 60), st.integers(1, 9))
def test_every_shard_is_one_workers(num_shards, count):
    """Those whose number leaves the worker's own over the number of workers."""
    plan = [f"shard-{number:05d}.safetensors" for number in range(num_shards)]
    parts = [Worker(index, count).part(plan) for index in range(count)]
    assert sorted(path for part in parts for path in part) == plan
    for index, part in enumerate(parts):
        assert all(plan.index(path) % count == index for path in part)


@pytest.mark.parametrize(
    ("argument", "environment", "expected"),
    [
        (None, {}, None),
        ("1/4", {}, Worker(1, 4)),
        ("0/1", {"RANK": "1", "WORLD_SIZE": "2"}, None),
        ("3/4", {"RANK": "1", "WORLD_SIZE": "2"}, Worker(3, 4)),
        (None, {"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "5"}, Worker(1, 2)),
        (None, {"SLURM_PROCID": "5", "SLURM_NTASKS": "6"}, Worker(5, 6)),
        (None, {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, None),
        (None, {"RANK": "0"}, None),
    ],
)
def test_the_argument_wins_over_the_launcher(argument, environment, expected):
    assert Worker.of(argument, environment) == expected


@pytest.mark.parametrize("text", ["", "1", "2/2", "-1/2", "a/b", "1/0", "1/2/3", "0 /2"])
def test_what_is_no_worker_is_refused(text):
    with pytest.raises(ValueError, match="worker"):
        Worker.parse(text)


@pytest.fixture
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)


def test_the_next_command_carries_the_worker(no_launcher):
    invocation = Invocation.parse("", ["a.yaml", "--worker", "1/2"], takes_workers=True)
    assert invocation.command().endswith("a.yaml --worker 1/2")
    assert "--worker" not in invocation.command("03_build_vocab_map.py")
    assert Invocation.parse("", ["a.yaml"], takes_workers=True).worker is None


def test_a_launchers_variables_mean_nothing_to_the_other_scripts(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert Invocation.parse("", ["a.yaml"]).worker is None
    assert Invocation.parse("", ["a.yaml"], takes_workers=True).worker == Worker(1, 2)


@pytest.mark.parametrize(
    ("flags", "takes_workers", "message"),
    [
        (["--worker", "0/2"], False, "not split over workers"),
        (["--worker", "2/2"], True, "there is no worker 2/2"),
        (["--worker", "2"], True, "a worker is written i/n"),
        (["--worker", "0/2", "--redo"], True, "--worker 0/1"),
    ],
)
def test_a_wrong_command_line_is_exit_2(flags, takes_workers, message, capsys):
    with pytest.raises(SystemExit) as caught:
        Invocation.parse("", ["a.yaml", *flags], takes_workers=takes_workers)
    assert caught.value.code == 2 and message in capsys.readouterr().err


# --- locks ---


def _stage(run: Run, worker: str | None = None) -> Stage:
    named = Worker.parse(worker) if worker else None
    return Stage(run.config, "01_data", replace(run.invocation(), worker=named))


def _refused(run: Run, worker: str | None = None) -> StaleInputError:
    with pytest.raises(StaleInputError, match="another process") as caught, _stage(run, worker):
        pass
    return caught.value


def test_workers_share_a_stage_and_nobody_else_enters(run):
    me = f"pid {os.getpid()} on "
    with _stage(run, "0/3"), _stage(run, "2/3"):
        assert _refused(run, "2/3").found.startswith(f"worker 2/3: {me}")
        both = _refused(run).found
        assert f"worker 0/3: {me}" in both and f"worker 2/3: {me}" in both
        with _stage(run, "1/3"):
            pass
        # Parts of another count overlap with theirs.
        assert "worker 0/3" in _refused(run, "1/4").found
    with _stage(run):
        assert _refused(run, "0/3").found.startswith(me)
    with _stage(run, "1/4"):
        pass


def test_a_refused_worker_leaves_no_lock_behind(run):
    with _stage(run):
        _refused(run, "0/2")
    with _stage(run, "0/3"):
        _refused(run, "1/2")
    with _stage(run, "1/2"), _stage(run, "0/2"):
        pass


def test_each_worker_has_its_log_and_one_publishes(run, capsys):
    with _stage(run, "0/2") as first, _stage(run, "1/2") as second:
        write_text(first.directory / "part-0", "of the first")
        write_text(second.directory / "part-1", "of the second")
        files = ["part-0", "part-1"]
        digest = first.commit(files=files, counts={}).digest
        manifest = first.directory / "manifest.json"
        before = manifest.read_bytes(), manifest.stat().st_ino
        assert second.commit(files=files, counts={}).digest == digest
        assert (manifest.read_bytes(), manifest.stat().st_ino) == before
    names = {path.name for path in first.directory.iterdir()}
    assert {"log.worker-0.txt", "log.worker-1.txt"} <= names and "log.txt" not in names
    assert "01_data 1/2" in (first.directory / "log.worker-1.txt").read_text()
    with _stage(run, "1/2") as again:
        assert again.done
    with _stage(run) as alone:
        assert alone.done


def test_a_run_alone_goes_on_from_what_workers_made(run):
    with _stage(run, "0/2") as worker:
        write_text(worker.directory / "part-0", "of a worker")
    with _stage(run) as alone:
        assert not alone.done and (alone.directory / "part-0").is_file()
