"""Capture, train, free, round by round: a corpus whose states no disk holds at once.

    python -m eagle3.rounds configs/kimi_k25_int4.yaml
    python -m eagle3.rounds CONFIG --launch "accelerate launch --multi_gpu --num_processes 8"

Where ``capture.round_tokens`` says how many training tokens a round has: runs 02 and 04 in turns,
as an operator would type them (04 behind the words of --launch), until every round is trained and
its states are freed. 01 and 03 come before it, 05 and 06 after. It stops where a script stops, with
that script's message and exit code. Stopped or killed anywhere: run the same command again.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import subprocess
import sys
from pathlib import Path

from .artifact import open_artifact
from .config import Config
from .errors import EXIT_DONE, ConfigError, Interrupted
from .fingerprint import ROUNDS, STAGES
from .locks import StageLock
from .manifest import read_manifest
from .orphans import die_with_parent
from .script import Invocation, command_line, exit_after, log, stop_flag

_SCRIPTS = Path(__file__).resolve().parent.parent
_LOOK_S = 0.2


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--launch", default="", metavar="WORDS", help="put before 04's own words")
    args = parser.parse_args()
    invocation = Invocation(ROUNDS, args.config, tuple(args.set), check=False, redo=False)
    log.stage = "rounds"
    exit_after(functools.partial(run, launch=shlex.split(args.launch)), invocation)


def run(invocation: Invocation, *, launch: list[str]) -> None:
    """Run both scripts in turns until nothing is left to train on.

    Raises:
        ConfigError: the config has no rounds.
        StaleInputError: 01 or 03 is not done, or another process does the same.
        Interrupted: a stop signal arrived; the script at work was stopped and has said so.
        SystemExit: a script did not end well, and has said why.
    """
    config = invocation.load_config()
    if config.capture.round_tokens is None:
        raise ConfigError(
            "this run has no rounds",
            where="capture.round_tokens",
            expected="training tokens of a round; without them 02 and 04 are run once, by hand",
            found=None,
            fix="set capture.round_tokens",
        )
    open_artifact(config, "03_vocab", invocation)  # needed by 04, after hours of 02
    lock = StageLock(config.run_dir, "rounds", worker=None)
    lock.take()
    arguments = [str(invocation.config_path)]
    for override in invocation.overrides:
        arguments += ["--set", override]
    while True:
        run_script("02_hidden", [], arguments)
        if not is_to_train(config, invocation):
            break
        run_script("04_train", launch, arguments)
    log("every round is trained, and its states are freed")


def is_to_train(config: Config, invocation: Invocation) -> bool:
    """Whether 02, which has just looked, found rounds still to be trained."""
    manifest = read_manifest(config.run_dir / "02_hidden", STAGES["02_hidden"], invocation)
    rounds = manifest["results"]["rounds"]
    return rounds["trained"] < rounds["total"]


def run_script(stage: str, launch: list[str], arguments: list[str]) -> None:
    """Run a stage's script to its end; whoever asks this process to stop asks that one.

    Raises:
        Interrupted: somebody did.
        SystemExit: it did not end well.
    """
    stop_flag.raise_if_set()
    script = str(_SCRIPTS / STAGES[stage].script)
    child = subprocess.Popen(
        [*(launch or [sys.executable]), script, *arguments],
        start_new_session=True,  # the terminal's Ctrl-C comes once, through here
        preexec_fn=functools.partial(die_with_parent, os.getpid()),
    )
    is_asked = False
    try:
        while child.poll() is None:
            if stop_flag.signal_name and not is_asked:
                child.terminate()
                is_asked = True
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=_LOOK_S)
    except Interrupted:  # asked twice
        child.terminate()
        child.wait()
        raise
    stop_flag.raise_if_set()
    if child.returncode != EXIT_DONE:
        raise SystemExit(child.returncode)


if __name__ == "__main__":
    main()
