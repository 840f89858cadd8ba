"""What the status command says of a run: at work, stopped, killed, failed, stale, damaged, done."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eagle3.errors import EXIT_STALE
from eagle3.progress import Progress
from eagle3.run_state import look, next_step
from eagle3.workers import Worker
from tests.runs import ROOT, Run, start_script


def status(run: Run, *flags: str) -> tuple[int, list[str]]:
    """Exit code and screen of the command, as an operator types it."""
    sets = [word for override in run.overrides for word in ("--set", override)]
    done = subprocess.run(
        [sys.executable, "-m", "eagle3.status", str(run.path), *sets, *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert not done.stderr
    return done.returncode, done.stdout.splitlines()


def row(lines: list[str], stage: str) -> str:
    """A stage's row, its further lines joined."""
    begin = next(i for i, line in enumerate(lines) if line.startswith(stage))
    end = begin + 1
    while lines[end].startswith(" "):
        end += 1
    return " ".join(" ".join(lines[begin:end]).split())


def state(run: Run, stage: str) -> str:
    """A stage's state and all it says, as ``state: why; why``."""
    found = look(run.config, run.invocation())[stage]
    return f"{found.state}: {'; '.join(found.why)}"


def command(run: Run) -> str:
    config, invocation = run.config, run.invocation()
    return next_step(config, look(config, invocation), invocation)[1].get("command", "none")


def test_nothing_is_there_yet_and_nothing_is_made(run):
    code, lines = status(run)
    assert code == 0 and len(lines) == 8
    assert all("not started -" in row(lines, stage) for stage in ("01_data", "06_verify"))
    assert lines[-1] == f"next: python 01_prepare_data.py {run.path}"
    assert not run.config.run_dir.exists()


def test_a_run_that_is_done(run):
    run.make_all()
    code, lines = status(run)
    assert code == 0 and row(lines, "03_vocab").startswith("03_vocab done ")
    assert lines[-1] == f"the run is complete: {run.config.run_dir}/06_verify/report.html"
    assert command(run) == "none"


def test_the_last_line_is_the_scripts_own(run, capsys):
    for name in ("01_data", "02_hidden", "03_vocab"):
        run.make(name)
        said = capsys.readouterr().out.splitlines()[-1]
        assert f"next command='{command(run)}'" in said


WORK = (
    "from eagle3.stage import Stage\n"
    "from eagle3.progress import Progress\n"
    "with Stage(invocation.load_config(), '01_data', invocation) as stage:\n"
    "    progress = Progress(80, 'answers', done=12)\n"
    "    time.sleep(1.1)\n"
    "    progress.advance(4)\n"
    "    print('at work', flush=True)\n"
)


def wait_for(process: subprocess.Popen, line: str) -> None:
    while process.stdout.readline() != line + "\n":
        assert process.poll() is None, process.stderr.read()


def test_at_work_then_killed_then_gone_on(run, tmp_path):
    process = start_script(tmp_path, WORK + "    time.sleep(600)", run.path)
    try:
        wait_for(process, "at work")
        code, lines = status(run)
        found = row(lines, "01_data")
        assert code == 0 and found.startswith("01_data running ")
        me = f"pid {process.pid} on {os.uname().nodename}"
        assert re.search(rf"{me}: 16/80 answers, [\d.]+/s, 0:\d\d:\d\d left", found)
        assert lines[-1].startswith("next, when 01_data is done: python -m eagle3.status")
    finally:
        process.kill()
        process.communicate()
    assert state(run, "01_data") == "partial: 16/80 answers; ended without a word: killed?"
    assert command(run) == f"python 01_prepare_data.py {run.path}"
    with run.stage():  # at work again, and of no use yet: the count is the former process's
        assert state(run, "01_data") == f"running: 16/80 answers; pid {os.getpid()} on " + (
            os.uname().nodename
        )


def test_at_work_on_a_great_deal_of_which_nothing_is_done(run):
    with run.stage():
        Progress(6_000_000_000, "tokens")
        me = f"pid {os.getpid()} on {os.uname().nodename}"
        assert state(run, "01_data") == f"running: {me}: 0/6000000000 tokens"


def test_workers_each_have_their_line(run, tmp_path):
    with run.stage(worker=Worker(0, 3)):
        Progress(50, "tokens", done=10)
    with run.stage(worker=Worker(1, 3)):
        me = f"pid {os.getpid()} on {os.uname().nodename}"
        assert state(run, "01_data") == f"running: 10/50 tokens; worker 1/3: {me}"
        Progress(40, "tokens")
        assert state(run, "01_data").endswith(f"; worker 1/3: {me}: 0/40 tokens")


def test_stopped_by_a_signal(run, tmp_path):
    body = WORK + "    while True:\n        stop_flag.raise_if_set()\n        time.sleep(0.02)"
    process = start_script(tmp_path, body, run.path)
    wait_for(process, "at work")
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 75
    assert state(run, "01_data") == "partial: 16/80 answers; stopped"


FAIL = (
    "from eagle3.stage import Stage\n"
    "with Stage(invocation.load_config(), '01_data', invocation) as stage:\n"
    "    raise "
)


def test_a_failure_is_kept_until_the_stage_is_begun_again(run, tmp_path):
    raised = "GateError('WHAT', where='HERE', expected='THIS', found='THAT', fix='do it')"
    process = start_script(tmp_path, FAIL + raised, run.path)
    process.communicate(timeout=60)
    assert process.returncode == 4
    said = f"next: do it, then: python 01_prepare_data.py {run.path}"
    parts = f"exit 4: WHAT; where: HERE; expected: THIS; found: THAT; {said}"
    assert state(run, "01_data") == f"failed: {parts}"
    assert row(status(run)[1], "01_data").endswith(said)

    process = start_script(tmp_path, FAIL + "RuntimeError('ours')", run.path)
    process.communicate(timeout=60)
    log = run.config.run_dir / "01_data" / "log.txt"
    assert state(run, "01_data") == f"failed: exit 1: RuntimeError: ours; where: {log}"
    run.make()
    assert state(run, "01_data") == "done: "
    assert not list(log.parent.glob("ended*")) and not list(log.parent.glob("progress*"))


def test_what_a_failure_says_to_type_holds_until_it_was_done(run, tmp_path):
    """03 found its input damaged in a way that sizes do not show."""
    run.make()
    upstream = f"python 01_prepare_data.py {run.path} --redo"
    body = FAIL.replace("01_data", "03_vocab") + (
        f"StaleInputError('x', where='x', expected='x', found='x', command='{upstream}')"
    )
    start_script(tmp_path, body, run.path).communicate(timeout=60)
    assert state(run, "03_vocab").startswith("failed: exit 3")
    run.make("02_hidden")
    assert command(run) == upstream
    run.make(redo=True)
    assert command(run) == f"python 03_build_vocab_map.py {run.path}"


def test_a_changed_key_shows_at_its_stage_and_after(write_config):
    run = Run(write_config)
    run.make_all()
    changed = Run(write_config, ("train.seed=7",))
    assert state(changed, "03_vocab") == "done: "
    assert state(changed, "04_train") == "stale: train.seed: 0 -> 7"
    assert state(changed, "05_export") == "stale: its input 04_train is stale"
    assert command(changed) == f"python 04_train.py {run.path} --set train.seed=7 --redo"
    with changed.stage("04_train", redo=True):
        found = row(status(changed)[1], "04_train")
        assert "running" in found and "from before --redo, kept until the new is published" in found


def test_an_edited_config_shows_while_the_stage_runs(write_config):
    with Run(write_config).stage():
        found = state(Run(write_config, ("data.seed=7",)), "01_data")
        assert found.startswith("running: pid ") and found.endswith("; data.seed: 0 -> 7")


def test_damage_shows_with_what_to_do(run):
    artifact = run.make()
    artifact.path("rows.txt").unlink()
    found = state(run, "01_data")
    assert found.startswith("damaged: a published file is missing") and "rows.txt" in found
    assert command(run) == f"python 01_prepare_data.py {run.path}"
    (artifact.directory / "manifest.json").unlink()
    (artifact.directory / "fingerprint.json").write_text("{")
    assert state(run, "01_data").startswith("damaged: an unfinished stage does not say")


def test_a_verifier_that_is_gone_leaves_the_rest_readable(run, tiny_verifier_dir, tmp_path):
    copied = shutil.copytree(tiny_verifier_dir, tmp_path / "copied")
    run.overrides = (f"verifier.path={copied}",)
    run.make()
    shutil.rmtree(copied)
    code, lines = status(run)
    assert code == 0 and "unknown" in row(lines, "01_data") and str(copied) in row(lines, "01_data")


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_every_file_is_read_on_demand(damage, write_config):
    """Of stages that are stale too; whatever differs is named."""
    run = Run(write_config)
    run.make_all()
    code, lines = status(run, "--verify-checksums")
    assert code == 0 and "checksums: 6 of 6 files are as published" in lines
    for name in ("02_hidden", "05_export"):
        path = run.config.run_dir / name / "rows.txt"
        path.write_text("swor") if damage == "changed" else path.unlink()
    code, lines = status(Run(write_config, ("data.seed=7",)), "--verify-checksums")
    assert code == EXIT_STALE and "checksums: 4 of 6 files are as published" in lines
    named = [line for line in lines if line.startswith("not as published: ")]
    assert [Path(line.split(": ")[1]).parent.name for line in named] == ["02_hidden", "05_export"]
    command = f"python 02_gen_hidden_states.py {run.path} --set data.seed=7"
    assert "next      remove them" in lines[-1] and lines[-1].endswith(f", then: {command}")


def test_a_config_that_does_not_load_is_exit_2(run):
    run.overrides = ("train.sede=1",)
    code, lines = status(run)
    assert code == 2 and any("did you mean seed?" in line for line in lines)


def test_ten_thousand_shards_and_a_verifier_of_kimis_size_take_less_than_a_second(
    write_config, tiny_verifier_dir, tmp_path
):
    """Imports included. The weights are 64 files of 9.3 GB that hold nothing."""
    verifier = shutil.copytree(tiny_verifier_dir, tmp_path / "verifier")
    for index in range(64):
        with open(verifier / f"part-{index:05d}.safetensors", "wb") as file:
            file.truncate(9_300_000_000)
    run = Run(write_config, (f"verifier.path={verifier}",))
    run.make()
    shards = [f"shard-{index:05d}.safetensors" for index in range(10_000)]
    with run.stage("02_hidden") as stage:
        for name in shards:
            (stage.directory / name).write_bytes(b"x" * 64)
            (stage.directory / name.replace("safetensors", "json")).write_text("{}")
        stage.commit(files=shards, counts={}, checksums=dict.fromkeys(shards, "0" * 64))
    for name in ("03_vocab", "04_train", "05_export", "06_verify"):
        run.make(name)
    seconds = []
    for _ in range(3):
        start_s = time.monotonic()
        code, lines = status(run)
        seconds.append(time.monotonic() - start_s)
        assert code == 0 and sum(" done " in line for line in lines) == 6
    print(f"status took {min(seconds):.2f} s")
    assert min(seconds) < 1
