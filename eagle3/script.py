"""What all six scripts share: the command line, the log, stop signals, exit codes.

The screen and ``log.txt`` get the same plain lines; a traceback goes to the log only, the screen
gets the four-part message. Under ``--set`` the next command carries the same overrides.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

from .config import Config
from .config_file import load_config
from .errors import EXIT_BUG, EXIT_DONE, EXIT_INTERRUPTED, Interrupted, PipelineError
from .files import disk_full, is_disk_full, write_note
from .workers import Worker

# How a process of a stage ended, until it is begun again or done: ``ended.json`` beside its log.
ENDED = "ended"
# Ctrl-C reaches every process of the terminal, and torchrun then signals its own a second time.
_ECHO_S = 2.0 if "TORCHELASTIC_RUN_ID" in os.environ else 0.0


@dataclass(frozen=True)
class Invocation:
    """One command line: ``python 0N_*.py CONFIG [--set key=value ...] [--check] [--redo]``.

    ``worker`` is this process's part of a stage that several share, None for a process alone;
    ``drafter`` a directory to verify in place of the run's own drafter.
    """

    script: str
    config_path: Path
    overrides: tuple[str, ...]
    check: bool
    redo: bool
    worker: Worker | None = None
    drafter: Path | None = None

    @classmethod
    def parse(
        cls,
        description: str,
        argv: list[str] | None = None,
        *,
        takes_workers: bool = False,
        takes_drafter: bool = False,
    ) -> Invocation:
        parser = command_line(description)
        parser.add_argument("--check", action="store_true", help="preflight only, compute nothing")
        parser.add_argument(
            "--redo", action="store_true", help="set the old output aside and start again"
        )
        parser.add_argument(
            "--worker",
            metavar="I/N",
            help="only part I of N, from 0; without it as RANK/WORLD_SIZE or "
            "SLURM_PROCID/SLURM_NTASKS say; 0/1 for all of it"
            if takes_workers
            else argparse.SUPPRESS,
        )
        parser.add_argument(
            "--drafter",
            type=Path,
            metavar="DIR",
            help="verify the drafter of this directory on the run's prompts, beside its own"
            if takes_drafter
            else argparse.SUPPRESS,
        )
        args = parser.parse_args(argv)
        module = sys.modules["__main__"].__spec__
        script = f"-m {module.name}" if module else Path(sys.argv[0]).name
        if args.drafter and not takes_drafter:
            parser.error(f"{script} takes no --drafter: 06_verify.py does")
        if args.drafter and args.redo:
            parser.error("--drafter needs no --redo: remove the directory it writes to instead")
        if args.worker and not takes_workers:
            parser.error(f"{script} is not split over workers: run it without --worker")
        try:
            worker = Worker.of(args.worker, os.environ) if takes_workers else None
        except ValueError as error:
            parser.error(str(error))
        if worker is not None and args.redo:
            parser.error(
                f"--redo would set aside what the other workers made: with --worker 0/1 (here "
                f"{worker}) start it over, stop it, then start the workers without --redo"
            )
        sets = tuple(args.set)
        return cls(script, args.config, sets, args.check, args.redo, worker, args.drafter)

    def load_config(self) -> Config:
        return load_config(self.config_path, self.overrides)

    def command(self, script: str | None = None, *flags: str) -> str:
        """The command that runs ``script`` (this one by default) on the same config."""
        words = ["python", *(script or self.script).split(), str(self.config_path)]
        for override in self.overrides:
            words += ["--set", override]
        if script is None and self.worker is not None:
            words += ["--worker", str(self.worker)]
        if script is None and self.drafter is not None:
            words += ["--drafter", str(self.drafter)]
        return shlex.join([*words, *flags])


def command_line(description: str) -> argparse.ArgumentParser:
    """What every command of the pipeline takes: a config and overrides."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, help="the run's YAML file, configs/*.yaml")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a config key"
    )
    return parser


class Log:
    """Plain ``time stage message key=value`` lines, to the screen and to the stage's log file.

    A process that follows another (``ranks``) is ``muted``: what it would say, that one says.
    """

    def __init__(self) -> None:
        self.stage = "-"
        self.muted = False
        self.bar: Any = None  # of tqdm, while one is drawn on the terminal
        self.path: Path | None = None
        self._file: TextIO | None = None

    def open(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "a", encoding="utf-8")  # lives as long as the process

    def beside(self, what: str) -> Path | None:
        """A small JSON file of this process, beside its log: ``log.worker-3.txt`` ->
        ``progress.worker-3.json``; None before a stage is entered."""
        return self.path and self.path.with_name(
            self.path.name.replace("log", what, 1)
        ).with_suffix(".json")

    def __call__(self, message: str, **values: Any) -> None:
        if self.muted:
            return
        line = self._line(message, values)
        if self.bar is not None:
            self.bar.clear()
        with contextlib.suppress(OSError):
            print(line, flush=True)
        if self.bar is not None:
            self.bar.refresh()
        self.to_file(line)

    def end_bar(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def quietly(self, message: str, **values: Any) -> None:
        """A line for the log file alone: the screen shows it in another way."""
        self.to_file(self._line(message, values))

    def _line(self, message: str, values: dict[str, Any]) -> str:
        pairs = "".join(f" {key}={show_value(value)}" for key, value in values.items())
        return f"{time.strftime('%Y-%m-%d %H:%M:%S')} {self.stage} {message}{pairs}"

    def to_file(self, text: str) -> None:
        if self._file:
            # A full disk must reach the operator as the error it is, not as one about the log.
            with contextlib.suppress(OSError):
                self._file.write(text.rstrip("\n") + "\n")
                self._file.flush()


def show_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text if text.split() == [text] else repr(text)


log = Log()


class StopFlag:
    """Set by SIGTERM and SIGINT; a stage finishes the unit it is in, then stops."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self.asked_s = 0.0

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: Any) -> None:
        if self.signal_name is not None:
            if time.monotonic() - self.asked_s < _ECHO_S:
                return
            raise Interrupted  # asked twice: stop at once
        self.signal_name, self.asked_s = signal.Signals(number).name, time.monotonic()
        log("stop asked: finishing the unit in progress, again to stop now", by=self.signal_name)

    def raise_if_set(self) -> None:
        """Between two units of work.

        Raises:
            Interrupted: a stop signal arrived.
        """
        if self.signal_name is not None:
            raise Interrupted


stop_flag = StopFlag()


def run_script(
    main: Callable[[Invocation], None],
    description: str,
    *,
    takes_workers: bool = False,
    takes_drafter: bool = False,
) -> NoReturn:
    """Run a script's ``main`` and turn its outcome into an exit code; never returns.

    Args:
        takes_workers: several processes may share the stage (``--worker``).
        takes_drafter: it also runs on a drafter that is not the run's own (``--drafter``).
    """
    takes = {"takes_workers": takes_workers, "takes_drafter": takes_drafter}
    exit_after(main, Invocation.parse(description, **takes))


def exit_after(main: Callable[[Invocation], None], invocation: Invocation) -> NoReturn:
    """Run ``main``; say on the screen and, inside a stage, on disk how it ended; exit."""
    stop_flag.install()
    code, told, command = EXIT_DONE, {}, invocation.command()
    try:
        with _full_disk_named():
            main(invocation)
        stop_flag.raise_if_set()  # the stage is done; what was to run after it is not
    except PipelineError as error:
        log.end_bar()
        log.to_file(traceback.format_exc())
        code = error.exit_code
        log.muted = error.told
        command = error.command or invocation.command(error.script or None)
        told = {
            "error": error.what,
            "where": error.where,
            "expected": error.expected,
            "found": error.found,
            "next": f"{error.fix}, then: {command}" if error.fix else command,
        }
        for part, text in told.items():
            log(f"{part:<9} {text}")
    except BaseException as error:
        log.end_bar()
        if stop_flag.signal_name is None and not isinstance(error, Interrupted):
            if isinstance(error, SystemExit):
                raise
            code = EXIT_BUG
            log.to_file(traceback.format_exc())
            traceback.print_exc()
            log.muted = False
            where = f"in {log.path}" if log.path else "above"
            log(f"this is a bug of ours, not of your input: the traceback is {where}")
            told = {"error": f"{type(error).__name__}: {error}", "where": str(log.path)}
        else:  # an engine or a worker may fail in its own way while being stopped
            log.to_file(traceback.format_exc())
            code = EXIT_INTERRUPTED
            log("stopped; everything published is kept", next=command)
    if path := log.beside(ENDED):
        write_note(path, {"code": code, "unix_s": time.time(), "command": command, **told})
    _flush_screen()
    sys.exit(code)


@contextlib.contextmanager
def _full_disk_named() -> Iterator[None]:
    """A full disk is one whatever library met it."""
    try:
        yield
    except PipelineError:
        raise
    except Exception as error:
        if not is_disk_full(error):
            raise
        where = getattr(error, "filename", None) or (log.path.parent if log.path else ".")
        raise disk_full(Path(where)) from error


def _flush_screen() -> None:
    """Where the screen is a file on a full disk, or a pipe nobody reads, its end is no error."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
