"""What an operator reads: plain lines under tee, a bar on a terminal, the traceback in the log."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from pathlib import Path

import pytest

from eagle3 import machine
from eagle3.disk import write_speed
from eagle3.files import read_note
from eagle3.script import show_value
from tests.runs import Run, start_script

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d 01_data \S.*")
WORK = (
    "from eagle3.stage import Stage\n"
    "from eagle3.progress import Progress\n"
    "with Stage(invocation.load_config(), '01_data', invocation) as stage:\n"
    "    progress = Progress(80, 'answers', done=10, every_s=0)\n"
    "    for _ in range(7):\n"
    "        progress.advance(5, loss=2.5)\n"
    "        time.sleep(0.15)\n"  # the bar is drawn ten times a second at most
    "    log('in between', path='a b')\n"
    "    raise GateError('WHAT', where='HERE', expected='THIS', found='THAT', fix='do it')\n"
)


def on_terminal(tmp_path: Path, run: Run, *, piped_stdout: bool) -> tuple[str, str]:
    """Run a script whose stderr, and stdout too unless it is piped, is a terminal: both screens."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 120, 0, 0))
    streams = {"stdout": subprocess.PIPE if piped_stdout else terminal, "stderr": terminal}
    process = start_script(tmp_path, WORK, run.path, **streams)
    os.close(terminal)
    shown = b""
    while True:
        try:
            shown += os.read(controller, 65536)
        except OSError:  # the other side is closed
            break
    piped = process.stdout.read() if piped_stdout else ""
    assert process.wait(timeout=60) == 4
    return shown.decode(), piped


def log_file(run: Run) -> str:
    return (run.config.run_dir / "01_data" / "log.txt").read_text()


def test_piped_every_line_has_time_stage_and_values(run, tmp_path):
    process = start_script(tmp_path, WORK, run.path)
    screen, errors = process.communicate(timeout=60)
    lines = screen.splitlines()
    assert not errors and all(LINE.fullmatch(line) for line in lines)
    assert "in between path='a b'" in screen
    assert re.search(r"45/80 answers rate=[\d.]+/s eta=\d+s loss=2.5$", screen, re.MULTILINE)
    # The four parts on the screen, the traceback in the log, and nothing the log lacks.
    assert [line.split(" 01_data ")[1] for line in lines[-5:]] == [
        "error     WHAT",
        "where     HERE",
        "expected  THIS",
        "found     THAT",
        f"next      do it, then: python 01_prepare_data.py {run.path}",
    ]
    assert "Traceback" not in screen
    log = log_file(run)
    assert "Traceback (most recent call last)" in log and "eagle3.errors.GateError: WHAT" in log
    assert all(line in log.splitlines() for line in lines)


def test_on_a_terminal_a_bar_takes_the_place_of_progress_lines(run, tmp_path):
    screen, _ = on_terminal(tmp_path, run, piped_stdout=False)
    assert "| 45.0/80.0 [" in screen and "answers/s, loss=2.5]" in screen
    assert "45/80 answers rate=" not in screen
    # A line in between starts at the line's start, and the last thing said is what to do.
    shown = [part for part in re.split(r"[\r\n]+", screen) if part.strip()]
    assert any(LINE.fullmatch(part) and "in between" in part for part in shown)
    assert "next      do it" in shown[-1]
    log = log_file(run)
    assert "45/80 answers rate=" in log and "\r" not in log and "45.0/80.0" not in log


def test_under_tee_there_is_no_bar_though_stderr_is_a_terminal(run, tmp_path):
    terminal, piped = on_terminal(tmp_path, run, piped_stdout=True)
    assert terminal == "" and "45/80 answers rate=" in piped


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.123456, "0.1235"),
        (7, "7"),
        ("word", "word"),
        ("two words", "'two words'"),
        ("two\nlines", "'two\\nlines'"),
        ("", "''"),
        ([1, 2], "'[1, 2]'"),
    ],
)
def test_a_value_is_one_word_or_quoted(value, shown):
    assert show_value(value) == shown


def test_a_node_with_gpus(monkeypatch, tmp_path):
    """As far as a driver's listing can be made up."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf 'NVIDIA H200, 143771\\n%.0s' 1 2 3\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 00:00:00 UTC 2025\n"
        "GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)\n"
    )
    monkeypatch.setattr(machine, "_DRIVER", tmp_path)
    found = machine.devices()
    assert found["gpus"] == "3 x NVIDIA H200, 140.4 GiB" and found["driver"] == "570.86.15"


def test_a_driver_that_does_not_answer_is_left_out(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(machine, "_LISTING_S", 0.2)
    monkeypatch.setattr(machine, "_DRIVER", tmp_path / "nothing")
    found = machine.devices()
    assert found["cpus"] == os.cpu_count() and not {"gpus", "driver"} & found.keys()


def test_the_disks_speed_is_measured_once_a_run(tmp_path):
    speed = write_speed(tmp_path)
    assert speed > 1 << 20
    assert os.listdir(tmp_path) == [".disk_speed.json"]
    note = tmp_path / ".disk_speed.json"
    assert 0 < read_note(note)["written_bytes"] <= 64 << 20
    note.write_text(note.read_text().replace(str(speed), "12345"))
    assert write_speed(tmp_path) == 12345


def test_a_small_disk_is_not_filled_to_measure_it(small_disk):
    assert write_speed(small_disk) is None and os.listdir(small_disk) == []
