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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from .config import Config
from .config_file import load_config
from .errors import EXIT_BUG, EXIT_DONE, EXIT_INTERRUPTED, Interrupted, PipelineError
from .workers import Worker

# Ctrl-C reaches every process of the terminal, and torchrun then signals its own a second time.
_ECHO_S = 2.0 if "TORCHELASTIC_RUN_ID" in os.environ else 0.0


@dataclass(frozen=True)
class Invocation:
    """One command line: ``python 0N_*.py CONFIG [--set key=value ...] [--check] [--redo]``.

    ``worker`` is this process's part of a stage that several share, None for a process alone.
    """

    script: str
    config_path: Path
    overrides: tuple[str, ...]
    check: bool
    redo: bool
    worker: Worker | None = None

    @classmethod
    def parse(
        cls, description: str, argv: list[str] | None = None, *, takes_workers: bool = False
    ) -> Invocation:
        parser = argparse.ArgumentParser(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("config", type=Path, help="the run's YAML file, configs/*.yaml")
        parser.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE", help="override a config key"
        )
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
        args = parser.parse_args(argv)
        script = Path(sys.argv[0]).name
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
        return cls(script, args.config, tuple(args.set), args.check, args.redo, worker)

    def load_config(self) -> Config:
        return load_config(self.config_path, self.overrides)

    def command(self, script: str | None = None, *flags: str) -> str:
        """The command that runs ``script`` (this one by default) on the same config."""
        words = ["python", script or self.script, str(self.config_path)]
        for override in self.overrides:
            words += ["--set", override]
        if script is None and self.worker is not None:
            words += ["--worker", str(self.worker)]
        return shlex.join([*words, *flags])


class Log:
    """Plain ``time stage message key=value`` lines, to the screen and to the stage's log file.

    A process that follows another (``ranks``) is ``muted``: what it would say, that one says.
    """

    def __init__(self) -> None:
        self.stage = "-"
        self.muted = False
        self._file: TextIO | None = None

    def open(self, path: Path) -> None:
        self._file = open(path, "a", encoding="utf-8")  # lives as long as the process

    def __call__(self, message: str, **values: Any) -> None:
        pairs = "".join(f" {key}={_show(value)}" for key, value in values.items())
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {self.stage} {message}{pairs}"
        if self.muted:
            return
        print(line, flush=True)
        self.to_file(line)

    def to_file(self, text: str) -> None:
        if self._file:
            # A full disk must reach the operator as the error it is, not as one about the log.
            with contextlib.suppress(OSError):
                self._file.write(text.rstrip("\n") + "\n")
                self._file.flush()


def _show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return repr(text) if " " in text else text


log = Log()


class Progress:
    """Done of total, rate and ETA: a bar on a terminal, a line every ``every_s`` seconds else.

    Args:
        total: units of work in all.
        unit: what ``advance`` counts, plural ("tokens").
        done: units finished by an earlier run of the same stage; shown, not counted in the rate.
    """

    def __init__(self, total: int, unit: str, *, done: int = 0, every_s: float = 15) -> None:
        self.total, self.unit, self.done, self.every_s = total, unit, done, every_s
        self.start_done, self.start_s, self.last_s = done, time.monotonic(), time.monotonic()
        self.bar = None
        if sys.stderr.isatty() and not log.muted:
            from tqdm import tqdm

            self.bar = tqdm(total=total, initial=done, unit=f" {unit}", unit_scale=True)

    @property
    def rate(self) -> float:
        """Units a second since this run of the stage began."""
        return (self.done - self.start_done) / max(time.monotonic() - self.start_s, 1e-9)

    def advance(self, num_units: int, **values: Any) -> None:
        self.done += num_units
        if self.bar is not None:
            self.bar.set_postfix({key: _show(value) for key, value in values.items()})
            self.bar.update(num_units)
        elif time.monotonic() - self.last_s >= self.every_s:
            self.last_s = time.monotonic()
            eta_s = (self.total - self.done) / max(self.rate, 1e-9)
            log(
                f"{self.done}/{self.total} {self.unit}",
                rate=f"{self.rate:.1f}/s",
                eta=f"{eta_s:.0f}s",
                **values,
            )

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


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
    main: Callable[[Invocation], None], description: str, *, takes_workers: bool = False
) -> None:
    """Run a script's ``main`` and turn its outcome into an exit code; never returns.

    Args:
        takes_workers: several processes may share the stage (``--worker``).
    """
    invocation = Invocation.parse(description, takes_workers=takes_workers)
    stop_flag.install()
    code = EXIT_DONE
    try:
        main(invocation)
    except PipelineError as error:
        log.to_file(traceback.format_exc())
        code = error.exit_code
        log.muted = error.told
        _explain(error, invocation)
    except BaseException as error:
        if stop_flag.signal_name is None and not isinstance(error, Interrupted):
            if isinstance(error, SystemExit):
                raise
            code = EXIT_BUG
            log.to_file(traceback.format_exc())
            traceback.print_exc()
            log.muted = False
            log("this is a bug of ours, not of your input: the traceback is in the stage's log")
        else:  # an engine or a worker may fail in its own way while being stopped
            log.to_file(traceback.format_exc())
            code = EXIT_INTERRUPTED
            log("stopped; everything published is kept", next=invocation.command())
    sys.stdout.flush()
    sys.exit(code)


def _explain(error: PipelineError, invocation: Invocation) -> None:
    """Print the four parts."""
    next_command = error.command or invocation.command(error.script or None)
    step = f"{error.fix}, then: {next_command}" if error.fix else next_command
    for line in (
        f"error     {error.what}",
        f"where     {error.where}",
        f"expected  {error.expected}",
        f"found     {error.found}",
        f"next      {step}",
    ):
        log(line)
