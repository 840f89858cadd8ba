"""Where a run stands, read off its directory: what each stage is, and the command that comes next.

Works while stages run and after any kind of end: a stage at work is known by its lock, which the
kernel drops with the process, and a finished one by its manifest.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from .artifact import Artifact, open_artifact, require_same
from .config import Config
from .errors import EXIT_DONE, EXIT_INTERRUPTED, OutdatedError, PipelineError, StaleInputError
from .files import read_note
from .fingerprint import ROUNDS, STAGES, is_verdict
from .locks import holders
from .manifest import FINGERPRINT, MANIFEST, read_fingerprint
from .progress import PROGRESS
from .script import ENDED, Invocation

NOT_STARTED, RUNNING, PARTIAL, DONE = "not started", "running", "partial", "done"
STALE, DAMAGED, FAILED, UNKNOWN = "stale", "damaged", "failed", "unknown"
STATUS = "-m eagle3.status"
_SILENT_S = 30  # a running stage whose last word is older is shown with its age


@dataclass(frozen=True)
class StageState:
    """One stage.

    Attributes:
        why: what an operator should know besides, a line each.
        command: what to type to get it done; empty where that is for another stage to say.
    """

    name: str
    state: str
    why: tuple[str, ...] = ()
    command: str = ""


def look(
    config: Config, invocation: Invocation, opened: dict[str, Artifact] | None = None
) -> dict[str, StageState]:
    """Every stage, by name, in order.

    Args:
        opened: artifacts verified already, by stage; the others are added.
    """
    opened = {} if opened is None else opened
    states: dict[str, StageState] = {}
    for name in STAGES:
        states[name] = _look_at(config, name, invocation, opened, states)
    return states


def next_step(
    config: Config, states: dict[str, StageState], invocation: Invocation
) -> tuple[str, dict[str, Any]]:
    """The last line of every script and of the status: what comes next, and the command to type."""
    for name, found in states.items():
        inputs = STAGES["04_train" if _in_rounds(config, name) else name].inputs
        unmade = [up for up in inputs if states[up].state != DONE and up != name]
        if found.command and not unmade:
            return "next", {"command": found.command}
    for name, found in states.items():
        if found.state == RUNNING:
            return f"next, when {name} is done", {"command": invocation.command(STATUS)}
    return "the run is complete", {"report": config.run_dir / "06_verify" / "report.html"}


def _look_at(
    config: Config,
    name: str,
    invocation: Invocation,
    opened: dict[str, Artifact],
    states: dict[str, StageState],
) -> StageState:
    spec, directory = STAGES[name], config.run_dir / name
    in_rounds = _in_rounds(config, name)
    command = invocation.command(ROUNDS if in_rounds else spec.script)
    finished = (directory / MANIFEST).is_file()
    at_work = [] if finished else holders(config.run_dir, name)
    if not finished and not at_work and not (directory / FINGERPRINT).is_file():
        return StageState(name, NOT_STARTED, command=command)
    wrong = _what_is_wrong(config, name, invocation, opened, states)
    if at_work:
        return StageState(name, RUNNING, (*_progress(directory, at_work), *wrong.why))
    if finished and in_rounds and wrong.state == DONE:
        return _rounds(config, opened[name], command)
    if wrong.state != DONE or finished:
        return wrong
    failed = [
        note
        for _, note in _notes(directory, ENDED)
        if note["code"] not in (EXIT_DONE, EXIT_INTERRUPTED)
    ]
    if not failed:
        why = (*_progress(directory, []), _how_it_ended(directory, in_rounds))
        return StageState(name, PARTIAL, why, command)
    note = failed[0]
    why = [f"exit {note['code']}: {note['error']}", f"where: {note['where']}"]
    why += [f"{part}: {note[part]}" for part in ("expected", "found", "next") if part in note]
    # What it says to type holds until one of its inputs is made again.
    manifests = [config.run_dir / upstream / MANIFEST for upstream in spec.inputs]
    if all(path.stat().st_mtime < note["unix_s"] for path in manifests):
        command = note["command"]
    return StageState(name, FAILED, tuple(why), command)


def _what_is_wrong(
    config: Config,
    name: str,
    invocation: Invocation,
    opened: dict[str, Artifact],
    states: dict[str, StageState],
) -> StageState:
    """Whether what is on disk, finished or not, is what the config asks for: "done" if so."""
    spec, directory = STAGES[name], config.run_dir / name
    unmade = [upstream for upstream in spec.inputs if states[upstream].state != DONE]
    if unmade == ["02_hidden"] and _in_rounds(config, name) and states[unmade[0]].state != STALE:
        if "02_hidden" not in opened:  # it frees and captures: compared once it has
            return StageState(name, DONE)
    elif unmade:
        why = tuple(f"its input {upstream} is {states[upstream].state}" for upstream in unmade)
        return StageState(name, STALE, why)
    try:
        if (directory / MANIFEST).is_file():
            open_artifact(config, name, invocation, opened)
        elif found := read_fingerprint(directory, spec, invocation):
            require_same(config, name, found, invocation, opened)
    except OutdatedError as error:
        judge = is_verdict(error.differences)
        command = invocation.command(spec.script) if judge else error.command
        return StageState(name, STALE, (error.found,), command)
    except PipelineError as error:
        state = DAMAGED if isinstance(error, StaleInputError) else UNKNOWN
        command = error.command or invocation.command(error.script or spec.script)
        return StageState(name, state, (str(error),), command)
    return StageState(name, DONE)


def _progress(directory: Path, at_work: list[str]) -> list[str]:
    """How far each process of a stage is, or was: a line each."""
    lines, silent = [], list(at_work)
    for path, note in _notes(directory, PROGRESS):
        line = f"{note['done']}/{note['total']} {note['unit']}"
        worker = path.stem.partition(".worker-")[2]
        begin, end = f"worker {worker}/" if worker else "pid ", note["by"]
        holder = next((h for h in silent if h.startswith(begin) and h.endswith(end)), None)
        if holder is not None:
            silent.remove(holder)
            line = f"{holder}: {line}"
            if note["rate"] > 0:
                left_s = (note["total"] - note["done"]) / note["rate"]
                line += f", {note['rate']:.4g}/s, {timedelta(seconds=round(left_s))} left"
            age_s = time.time() - note["unix_s"]
            line += f", {age_s:.0f} s ago" if age_s > _SILENT_S else ""
        lines.append(line)
    return [*lines, *silent]


def _in_rounds(config: Config, name: str) -> bool:
    """Whether a stage's work goes round by round (``retention``)."""
    return config.capture.round_tokens is not None and name in ("02_hidden", "04_train")


def _rounds(config: Config, found: Artifact, command: str) -> StageState:
    """A stage that is published and may have more to do: 02, until every round is trained."""
    name, rounds = found.manifest["stage"], found.manifest["results"].get("rounds")
    if rounds is None or rounds["trained"] == rounds["total"]:
        return StageState(name, DONE)
    why = f"{rounds['trained']} of {rounds['total']} rounds were trained when it looked, " + (
        "on disk: {} to {}".format(*rounds["on_disk"])
    )
    return StageState(name, PARTIAL, (why,), "" if holders(config.run_dir, "04_train") else command)


def _how_it_ended(directory: Path, in_rounds: bool) -> str:
    codes = {note["code"] for _, note in _notes(directory, ENDED)}
    if EXIT_INTERRUPTED in codes:
        return "stopped"
    if not codes:
        return "ended without a word: killed?"
    return f"the parts of {'other rounds' if in_rounds else 'other workers'} are missing"


def _notes(directory: Path, what: str) -> list[tuple[Path, dict[str, Any]]]:
    """What each process of a stage noted, the readable ones."""
    paths = sorted(directory.glob(f"{what}*.json"))
    return [(path, note) for path in paths if (note := read_note(path))]
