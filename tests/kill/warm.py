"""Scripts started warm: forked from a process that has imported what they import.

Imports are nine tenths of a short run, and killing them teaches nothing. What is forked has
computed nothing yet; it then runs the script's file as ``python`` would.

    python -m tests.kill.warm SOCKET      the process to fork from; it ends with the one it is of
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

from eagle3.engine import _ENVIRONMENT
from eagle3.orphans import die_with_parent

ROOT = Path(__file__).resolve().parents[2]
LONGEST_S = 300  # a script that takes longer hangs
# Beside the scripts' own imports, what they import late: engines, loaders, pictures.
_LATE = (
    "vllm.entrypoints.llm",
    "vllm.model_executor.models.llama",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "speculators.models.eagle3",
    "accelerate",
    "matplotlib.pyplot",
)


class WarmStart:
    """A script that was started warm, in the form of a ``subprocess.Popen``.

    Args:
        server: the socket of the process to fork from.
        words: the script's name and arguments.
    """

    def __init__(self, server: Path, words: list[str], environment: dict[str, str]) -> None:
        self.screen = server.with_name(f"screen-{os.urandom(6).hex()}")
        self.returncode: int | None = None
        self._ended = threading.Event()
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(str(server))
        self._answers = self._connection.makefile("r")
        request = {"words": words, "environment": environment, "screen": str(self.screen)}
        self._connection.sendall(json.dumps(request).encode() + b"\n")
        self.pid = int(self._answers.readline())
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        self.returncode = int(self._answers.readline())
        self._connection.close()
        self._ended.set()

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = LONGEST_S) -> tuple[str, None]:
        """Wait for its end; what it said on both streams."""
        if not self._ended.wait(timeout):
            self.kill()
            raise subprocess.TimeoutExpired(str(self.screen), timeout)
        return self.screen.read_text(errors="replace"), None


def fork_scripts(path: str) -> list[str]:
    """Serve requests; returns in each forked script only, with its words."""
    os.environ.update(_ENVIRONMENT)  # vLLM reads some of it when it is imported
    for module in _LATE:
        importlib.import_module(module)
    for script in sorted(ROOT.glob("0[1-6]_*.py")):
        runpy.run_path(str(script), run_name="imported")
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for what waits for a script
    print("ready", flush=True)
    me = os.getpid()
    while True:
        connection, _ = server.accept()
        if os.fork() == 0:
            die_with_parent(me)
            server.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return _script_of(connection)
        connection.close()


def _script_of(connection: socket.socket) -> list[str]:
    """Fork the script, and tell the other end its process id and how it ended."""
    stream = connection.makefile("rw")
    request = json.loads(stream.readline())
    me = os.getpid()
    if (pid := os.fork()) == 0:
        die_with_parent(me)
        connection.close()
        os.setsid()
        screen = os.open(request["screen"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(screen, 1)
        os.dup2(screen, 2)
        os.environ.clear()
        os.environ.update(request["environment"])
        return request["words"]
    stream.write(f"{pid}\n")
    stream.flush()
    _, status = os.waitpid(pid, 0)
    stream.write(f"{os.waitstatus_to_exitcode(status)}\n")
    stream.flush()
    os._exit(0)


if __name__ == "__main__":
    die_with_parent(os.getppid())
    sys.argv = fork_scripts(sys.argv[1])
    runpy.run_path(sys.argv[0], run_name="__main__")
