"""Scripts as processes: exit codes, what the screen says, stop signals, one process a stage."""

from __future__ import annotations

import os
import pickle
import signal

import pytest

from eagle3.errors import ConfigError, GateError, NoRoomError, StaleInputError
from tests.runs import start_script

PARTS = 'where="HERE", expected="THIS", found="THAT", fix="do it"'


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("pass", 0),
        ("raise RuntimeError('ours')", 1),
        (f"raise ConfigError('WHAT', {PARTS})", 2),
        (f"raise StaleInputError('WHAT', {PARTS})", 3),
        (f"raise GateError('WHAT', {PARTS})", 4),
        (f"raise NoRoomError('WHAT', {PARTS})", 5),
        ("raise Interrupted", 75),
        ("invocation.load_config()", 2),
    ],
)
def test_exit_codes(body, code, tmp_path):
    process = start_script(tmp_path, body, tmp_path / "no config.yaml", "--set", "train.seed=1")
    screen, errors = process.communicate(timeout=60)
    assert process.returncode == code
    command = f"python 01_prepare_data.py '{tmp_path}/no config.yaml' --set train.seed=1"
    if code in (2, 3, 4, 5):
        assert "Traceback" not in screen + errors
        assert screen.splitlines()[-1].endswith(f", then: {command}")
    if "WHAT" in body:
        for line in ("error     WHAT", "where     HERE", "expected  THIS", "found     THAT"):
            assert line in screen
    if code == 1:
        assert "RuntimeError: ours" in errors and "bug" in screen
    if code == 75:
        assert repr(command) in screen or f'"{command}"' in screen


def test_an_error_may_name_the_script_that_mends_it(tmp_path):
    body = f"raise StaleInputError('WHAT', script='02_gen_hidden_states.py', {PARTS})"
    process = start_script(tmp_path, body, tmp_path / "config.yaml", "--set", "train.seed=1")
    screen, _ = process.communicate(timeout=60)
    command = f"python 02_gen_hidden_states.py {tmp_path}/config.yaml --set train.seed=1"
    assert screen.splitlines()[-1].endswith(f"do it, then: {command}")


@pytest.mark.parametrize("kind", [ConfigError, StaleInputError, GateError, NoRoomError])
def test_errors_cross_process_borders_whole(kind):
    error = kind("what", where="a", expected="b", found="c", fix="d", script="e", command="f")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind and vars(copy) == vars(error)


def test_a_stop_signal_finishes_the_unit_and_exits_75(tmp_path):
    body = (
        "print('started', flush=True)\n"
        "while stop_flag.signal_name is None: time.sleep(0.02)\n"
        "print('unit done', flush=True)\n"
        "stop_flag.raise_if_set()\n"
        "print('next unit')"
    )
    process = start_script(tmp_path, body, tmp_path / "config.yaml")
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGTERM)
    screen, errors = process.communicate(timeout=60)
    assert process.returncode == 75 and not errors
    assert screen.splitlines()[-2] == "unit done"
    assert f"python 01_prepare_data.py {tmp_path / 'config.yaml'}" in screen.splitlines()[-1]


def test_a_second_stop_signal_stops_at_once(tmp_path):
    body = "print('started', flush=True)\nwhile True: time.sleep(0.05)"
    process = start_script(tmp_path, body, tmp_path / "config.yaml")
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGINT)
    assert "again to stop now" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 75


ENTER = (
    "from eagle3.stage import Stage\n"
    "from eagle3.files import write_text\n"
    "with Stage(invocation.load_config(), '01_data', invocation) as stage:\n"
)


def test_a_second_process_is_refused_and_a_killed_one_frees_the_stage(run, tmp_path):
    body = ENTER + "    print('entered', flush=True)\n    time.sleep(600)"
    process = start_script(tmp_path, body, run.path)
    try:
        while process.stdout.readline() != "entered\n":
            assert process.poll() is None, process.stderr.read()
        error = run.refused()
        assert error.found.startswith(f"pid {process.pid} on ")
    finally:
        process.kill()
        process.communicate()
    with run.stage() as stage:
        assert not stage.done


def test_a_disk_full_to_the_last_byte_is_exit_5(write_config, small_disk, tmp_path):
    """The log is on the full disk too: that must not turn the error into a bug."""
    body = ENTER + (
        "    with open(stage.directory.parent / 'filler', 'wb', buffering=0) as file:\n"
        "        try:\n"
        "            while file.write(bytes(512)): pass\n"
        "        except OSError: pass\n"
        "    log('x' * 10000)\n"
        "    write_text(stage.directory / 'rows.txt', 'rows')"
    )
    path = write_config({"run.dir": str(small_disk / "runs")})
    process = start_script(tmp_path, body, path)
    screen, errors = process.communicate(timeout=60)
    assert process.returncode == 5, errors
    assert "the disk is full" in screen and "Traceback" not in screen + errors


@pytest.mark.parametrize(
    "body",
    [
        "open('/dev/full', 'w').write('x' * 100000)",
        "raise RuntimeError('io: No space left on device (os error 28)')",
        "from eagle3.files import write_text; from pathlib import Path\n"
        "os.symlink('/dev/full', 'file.partial'); write_text(Path('file'), 'x')",
    ],
    ids=["a library", "in words only", "an artifact"],
)
def test_a_full_disk_is_exit_5_whoever_meets_it(body, tmp_path):
    process = start_script(tmp_path, body, tmp_path / "config.yaml", cwd=tmp_path)
    screen, errors = process.communicate(timeout=60)
    assert process.returncode == 5 and "error     the disk is full" in screen, errors
    assert "Traceback" not in screen + errors


@pytest.mark.parametrize(("body", "code"), [("log('done')", 0), ("raise Interrupted", 75)])
def test_a_screen_that_cannot_be_written_changes_nothing(body, code, tmp_path):
    """Sent to a file on the full disk, or to a pipe whose reader is gone."""
    full = os.open("/dev/full", os.O_WRONLY)
    process = start_script(tmp_path, body, tmp_path / "config.yaml", stdout=full)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code and not errors


def test_a_stop_while_the_last_unit_is_done_stops_what_follows(tmp_path):
    """``01 && 02``: a signal that 01 outlived must not be forgotten."""
    body = "print('started', flush=True)\nwhile stop_flag.signal_name is None: time.sleep(0.02)"
    process = start_script(tmp_path, body, tmp_path / "config.yaml")
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 75
