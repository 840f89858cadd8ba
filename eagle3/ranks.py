"""The processes of one ``accelerate launch`` acting as one: one leads, all go on or all stop.

Everything said here travels over gloo between the CPUs: no GPU waits for it, and a wait for the
main process (a checkpoint, a checksum) is no unfinished NCCL call for a watchdog to end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from .errors import Interrupted, PipelineError
from .orphans import die_with_parent
from .script import log, stop_flag

T = TypeVar("T")

# The longest the others wait for the main process alone: checksums of a large upstream artifact.
_LONGEST_WAIT = timedelta(hours=4)


class Ranks:
    """Process ``index`` of ``count``; 0 is the main one. Use as a context manager.

    Args:
        group: a gloo group of all processes; None for a process alone.
    """

    def __init__(self, index: int = 0, count: int = 1, group: Any = None) -> None:
        self.index, self.count, self._group = index, count, group
        self._vote: tuple[Any, Any] | None = None

    @classmethod
    def join(cls) -> Ranks:
        """Meet the other processes of the launcher, or be alone; the others than main are mute."""
        import torch
        from accelerate import PartialState

        state = PartialState(cpu=not torch.cuda.is_available())
        if state.num_processes == 1:
            return cls()
        if "TORCHELASTIC_RUN_ID" in os.environ:  # a launcher that is killed ends nobody
            die_with_parent(os.getppid())
        group = torch.distributed.new_group(backend="gloo", timeout=_LONGEST_WAIT)
        ranks = cls(state.process_index, state.num_processes, group)
        log.muted = not ranks.is_main
        return ranks

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        """Leave together, after success or a stop. After an error of one rank's own the others may
        be in the middle of a call that never ends; the launcher ends them."""
        if kind is None or issubclass(kind, Interrupted):
            self._leave()

    def _leave(self) -> None:
        """All ranks are here: end the groups. One that only exits may abort in gloo's threads, and
        its exit code is then lost."""
        if self._group is None:
            return
        import torch

        if self._vote is not None:
            self._vote[0].wait()
        torch.distributed.barrier(self._group)
        torch.distributed.destroy_process_group()
        self._group = None

    @property
    def is_main(self) -> bool:
        return self.index == 0

    def part(self, units: Sequence[T]) -> Sequence[T]:
        """This process's units: every ``count``-th one from ``index``."""
        return units[self.index :: self.count]

    def gather(self, value: T) -> list[T]:
        """Everybody's (picklable) value, by rank, on every rank."""
        if self._group is None:
            return [value]
        import torch

        values: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(values, value, group=self._group)
        return values

    def agree(self, work: Callable[[], T]) -> T:
        """Run ``work`` on every rank; if it fails on one of them, it fails on all, for good.

        Raises:
            Exception: this rank's own error, or else the first other rank's.
        """
        value: Any = None
        mine: BaseException | None = None
        try:
            value = work()
        except BaseException as error:
            mine = error
        errors = self.gather(None if mine is None else _portable(mine))
        first = next((rank for rank, error in enumerate(errors) if error is not None), None)
        if first is None:
            return value
        error = mine or errors[first]
        if isinstance(error, PipelineError):
            error.told = not self.is_main
        self._leave()  # it ends every rank here
        raise error

    def on_main(self, work: Callable[[], T]) -> T:
        """Run ``work`` on the main process only; every rank waits, and returns its (picklable)
        value or fails with its error."""
        value = self.agree(work if self.is_main else lambda: None)
        return self.gather(value)[0]

    def stop_asked(self) -> bool:
        """Whether any rank was asked to stop, the same answer on all; every rank calls it once a
        step. With several ranks it is the answer to the step before: a vote is under way while the
        step is computed, and nobody waits for it."""
        asked = stop_flag.signal_name is not None
        if self._group is None:
            return asked
        import torch

        before = self._vote
        flag = torch.tensor([int(asked)])
        maximum = torch.distributed.ReduceOp.MAX
        vote = torch.distributed.all_reduce(flag, maximum, group=self._group, async_op=True)
        self._vote = (vote, flag)
        if before is None:
            return False
        before[0].wait()
        return bool(before[1])


def _portable(error: BaseException) -> BaseException:
    """An error another process can raise; what may not survive pickling goes as text."""
    if isinstance(error, PipelineError | Interrupted):
        return error
    return RuntimeError(f"on another rank: {type(error).__name__}: {error}")


ALONE = Ranks()
