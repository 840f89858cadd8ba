"""What was done to the runs and what came of it: the last lines of ``make test-kill``."""

from __future__ import annotations

from collections import Counter, defaultdict

KILLS, STOPS, FULL, DAMAGED = "SIGKILLs", "stops", "full disks", "files damaged"
KEPT, COMPARED, DIFFERENCES = "kept over kills", "runs compared", "files differing"
_COLUMNS = (KILLS, STOPS, FULL, DAMAGED, KEPT, COMPARED, DIFFERENCES)
_counted: defaultdict[str, Counter[str]] = defaultdict(Counter)  # by stage


def count(stage: str, what: str, number: int = 1) -> None:
    _counted[stage][what] += number


def table() -> list[str]:
    """A line a stage and one for all; [] if nothing was counted."""
    if not _counted:
        return []
    rows = [*sorted(_counted.items()), ("all", sum(_counted.values(), Counter()))]
    lines = [f"{'':<12}" + "".join(f"{what:>16}" for what in _COLUMNS)]
    return lines + [
        f"{stage:<12}" + "".join(f"{counter[what]:>16}" for what in _COLUMNS)
        for stage, counter in rows
    ]
