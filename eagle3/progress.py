"""Done of total: on the screen, in the log, and on disk for whoever asks how far a stage is."""

from __future__ import annotations

import sys
import time
from typing import Any

from .files import write_note
from .locks import this_process
from .script import log, show_value

PROGRESS = "progress"
_NOTE_EVERY_S = 1.0


class Progress:
    """Done of total, rate and ETA: a bar on a terminal, a line every ``every_s`` seconds else.

    ``progress.json`` in the stage's directory says the same at most once a second, with the
    process it is of.

    Args:
        total: units of work in all.
        unit: what ``advance`` counts, plural ("tokens").
        done: units finished by an earlier run of the same stage; shown, not counted in the rate.
    """

    def __init__(self, total: int, unit: str, *, done: int = 0, every_s: float = 15) -> None:
        self.total, self.unit, self.done, self.every_s = total, unit, done, every_s
        self.start_done, self.start_s = done, time.monotonic()
        self.said_s = self.noted_s = self.start_s
        # Under ``| tee`` stderr is still the terminal: a bar there would replace the lines.
        if sys.stdout.isatty() and sys.stderr.isatty() and not log.muted:
            from tqdm import tqdm

            log.bar = tqdm(total=total, initial=done, unit=f" {unit}", unit_scale=True)
        self._note()

    @property
    def rate(self) -> float:
        """Units a second since this run of the stage began."""
        return (self.done - self.start_done) / max(time.monotonic() - self.start_s, 1e-9)

    def advance(self, num_units: int, **values: Any) -> None:
        self.done += num_units
        now_s = time.monotonic()
        if log.bar is not None:
            shown = {key: show_value(value) for key, value in values.items()}
            log.bar.set_postfix(shown, refresh=False)
            log.bar.update(num_units)
        if now_s - self.noted_s >= _NOTE_EVERY_S:
            self.noted_s = now_s
            self._note()
        if now_s - self.said_s >= self.every_s:
            self.said_s = now_s
            eta_s = (self.total - self.done) / max(self.rate, 1e-9)
            say = log if log.bar is None else log.quietly
            say(
                f"{self.done}/{self.total} {self.unit}",
                rate=f"{self.rate:.1f}/s",
                eta=f"{eta_s:.0f}s",
                **values,
            )

    def close(self) -> None:
        self._note()
        log.end_bar()

    def _note(self) -> None:
        path = log.beside(PROGRESS)
        if path is not None:
            values = {"done": self.done, "total": self.total, "unit": self.unit, "rate": self.rate}
            write_note(path, {"by": this_process(), "unix_s": time.time(), **values})
