"""A worker's part of a stage that several independent processes share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

# Who am I, of how many: torchrun, accelerate and most launchers; then srun.
_VARIABLES = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))


@dataclass(frozen=True)
class Worker:
    """Worker ``index`` of ``count``, counted from 0."""

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"there is no worker {self}: workers count from 0")

    @classmethod
    def of(cls, argument: str | None, environment: Mapping[str, str]) -> Worker | None:
        """The worker an argument names, or else the environment; None for a process alone.

        Raises:
            ValueError: what is named is no worker.
        """
        worker = cls.parse(argument) if argument else cls.from_environment(environment)
        return worker if worker and worker.count > 1 else None

    @classmethod
    def parse(cls, text: str) -> Worker:
        """``"0/4"``, the first of four.

        Raises:
            ValueError: not of the form i/n with 0 <= i < n.
        """
        index, slash, count = text.partition("/")
        if not (slash and index.isdecimal() and count.isdecimal()):
            raise ValueError(f"a worker is written i/n, i from 0 (0/4 to 3/4), not {text!r}")
        return cls(int(index), int(count))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Worker | None:
        """What a launcher set: RANK of WORLD_SIZE, or SLURM_PROCID of SLURM_NTASKS.

        >>> print(Worker.from_environment({"SLURM_PROCID": "2", "SLURM_NTASKS": "8"}))
        2/8

        Raises:
            ValueError: the variables are set to something that is no worker.
        """
        for index, count in _VARIABLES:
            if index in environment and count in environment:
                return cls.parse(f"{environment[index]}/{environment[count]}")
        return None

    def part(self, units: Sequence[T]) -> Sequence[T]:
        """The units of work that are this worker's.

        >>> Worker(1, 3).part(["a", "b", "c", "d", "e"])
        ['b', 'e']
        """
        return units[self.index :: self.count]

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"
