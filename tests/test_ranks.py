"""Two processes over gloo: what one finds out, both do, and only the main one speaks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PARTS = 'where="HERE", expected="THIS", found="THAT"'


def _both(tmp_path: Path, body: str) -> list[tuple[int, str, str]]:
    """Run a script whose ``main`` is ``body`` on two ranks: exit code, output, errors of each."""
    path = tmp_path / "04_train.py"
    lines = "".join(f"        {line}\n" for line in body.splitlines())
    path.write_text(
        "import os, signal\n"
        "from eagle3.errors import *\n"
        "from eagle3.ranks import Ranks\n"
        "from eagle3.script import log, run_script\n"
        f"def main(invocation):\n    with Ranks.join() as ranks:\n{lines}"
        "run_script(main, 'A script.')\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(2):
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, str(path), "config.yaml"],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    found = [process.communicate(timeout=120) for process in processes]
    return [(p.returncode, *texts) for p, texts in zip(processes, found, strict=True)]


@pytest.mark.parametrize("failing", ["main", "other"])
def test_what_fails_on_one_fails_on_both_and_is_told_once(failing, tmp_path):
    if failing == "main":  # a save that meets a full disk
        body = "def work():\n"
        body += f"    raise NoRoomError('WHAT', {PARTS})\n"
        body += "ranks.on_main(work)"
        code = 5
    else:  # an input another node cannot read
        body = "def work():\n"
        body += f"    if not ranks.is_main: raise StaleInputError('WHAT', {PARTS})\n"
        body += "ranks.agree(work)"
        code = 3
    (main, screen, errors), (other, muted, more_errors) = _both(tmp_path, body)
    assert (main, other) == (code, code), errors + more_errors
    assert "error     WHAT" in screen and "found     THAT" in screen
    assert not muted and "Traceback" not in errors + more_errors


def test_a_stop_of_either_stops_both_after_the_same_step(tmp_path):
    body = (
        "assert ranks.gather(ranks.index) == [0, 1]\n"
        "assert ranks.on_main(lambda: ranks.index + 7) == 7\n"
        "for step in range(100):\n"
        "    if step == 3 and not ranks.is_main: os.kill(os.getpid(), signal.SIGTERM)\n"
        "    if ranks.stop_asked(): break\n"
        "print('last step', step, flush=True)\n"
        "raise Interrupted"
    )
    for code, screen, errors in _both(tmp_path, body):
        assert code == 75, errors
        assert "last step 4" in screen
