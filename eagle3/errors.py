"""The four-part error and the exit codes of every script.

A user's error says what happened, where, what was expected against what was found, and what to
do next. Anything else that escapes is our own bug: exit 1 and a traceback in the stage's log.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

EXIT_DONE = 0
EXIT_BUG = 1
EXIT_CONFIG = 2
EXIT_STALE = 3
EXIT_GATE = 4
EXIT_NO_ROOM = 5
EXIT_INTERRUPTED = 75


class PipelineError(Exception):
    """An error an operator can act on.

    Args:
        what: what happened, one sentence.
        where: the file, line or config key it happened at.
        expected: what would have been right.
        found: what was there instead.
        fix: what to do, as an imperative ("set drafter.head_dim"); "then run the same command
            again" is added when it is printed.
        script: the one to run next on this config, when it is another one than that which failed.
        command: the exact next command, when that is not enough.
    """

    exit_code: ClassVar[int] = EXIT_BUG
    told = False  # another process of the same run prints it

    def __init__(
        self,
        what: str,
        *,
        where: Any,
        expected: Any,
        found: Any,
        fix: str = "",
        script: str = "",
        command: str = "",
    ) -> None:
        super().__init__(what)
        self.what, self.where = what, str(where)
        self.expected, self.found = str(expected), str(found)
        self.fix, self.script, self.command = fix, script, command

    def __reduce__(self):
        parts = ("where", "expected", "found", "fix", "script", "command")
        kwargs = {part: getattr(self, part) for part in parts}
        return _rebuild, (type(self), self.what, kwargs)

    def __str__(self) -> str:
        return f"{self.what} [{self.where}] expected: {self.expected}; found: {self.found}"


def _rebuild(kind: type[PipelineError], what: str, kwargs: dict[str, str]) -> PipelineError:
    return kind(what, **kwargs)


class ConfigError(PipelineError):
    """The YAML, the verifier or the source data is not what a run needs."""

    exit_code = EXIT_CONFIG


class StaleInputError(PipelineError):
    """An artifact is missing, incomplete, damaged, or made from something else."""

    exit_code = EXIT_STALE


class OutdatedError(StaleInputError):
    """An artifact made from something else than the config now asks for.

    Attributes:
        differences: (key, on disk, now).
    """

    differences: tuple[tuple[str, Any, Any], ...] = ()


class DamagedError(StaleInputError):
    """Files of a finished stage are missing, or not of the size they were published with.

    Attributes:
        paths: of all of them.
    """

    paths: tuple[Path, ...] = ()


class GateError(PipelineError):
    """A stage did its work and the result is not good enough to pass on."""

    exit_code = EXIT_GATE


class NoRoomError(PipelineError):
    """Not enough disk, memory or GPUs."""

    exit_code = EXIT_NO_ROOM


class Interrupted(Exception):
    """A stop signal arrived; everything finished so far is published. Exit 75: run again."""
