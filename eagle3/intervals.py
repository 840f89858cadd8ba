"""How sure an acceptance length is: a bootstrap over prompts.

The prompts are the sample; drafts of one prompt are not independent of each other. Two sides
measured on the same prompts are resampled together (the same seed draws the same prompts), so
the interval of their difference leaves out what the prompts themselves vary by.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

SHARE = 0.95
_NUM_RESAMPLES = 4000
_SEED = 0


@dataclass(frozen=True)
class Counts:
    """Acceptance prompt by prompt.

    Attributes:
        num_drafts: float64 ``[P]``, times the drafter was asked.
        accepted: float64 ``[P, K]``, drafts accepted at each position, counted or expected.
    """

    num_drafts: np.ndarray
    accepted: np.ndarray

    @property
    def acceptance_length(self) -> float:
        return 1 + float(self.accepted.sum() / max(self.num_drafts.sum(), 1))

    @property
    def per_position(self) -> list[float]:
        return (self.accepted.sum(0) / max(self.num_drafts.sum(), 1)).tolist()

    def resampled_lengths(self, seed: int = _SEED) -> np.ndarray:
        """The acceptance length of each resample of the prompts, float64 ``[R]``.

        Args:
            seed: another one for prompts that have nothing to do with these.
        """
        drawn = _draws(len(self.num_drafts), seed)
        num_drafts = drawn @ self.num_drafts
        return 1 + (drawn @ self.accepted.sum(1)) / np.maximum(num_drafts, 1)


class Interval(NamedTuple):
    """The middle 95% of the resamples."""

    low: float
    high: float

    @classmethod
    def of(cls, resamples: np.ndarray) -> Interval:
        low, high = np.quantile(resamples, [(1 - SHARE) / 2, (1 + SHARE) / 2])
        return cls(float(low), float(high))

    def distance(self, other: Interval) -> float:
        """0 where the two overlap, else the gap between them."""
        return max(0.0, self.low - other.high, other.low - self.high)


def length_interval(counts: Counts) -> Interval:
    """Of an acceptance length."""
    return Interval.of(counts.resampled_lengths())


def difference_interval(a: Counts, b: Counts) -> Interval:
    """Of ``a``'s acceptance length minus ``b``'s, both measured on the same prompts."""
    assert len(a.num_drafts) == len(b.num_drafts)
    return Interval.of(a.resampled_lengths() - b.resampled_lengths())


def resampled_rates(blocks: np.ndarray, seed: int = _SEED) -> np.ndarray:
    """Tokens a second of each resample of a run's blocks of steps, float64 ``[R]``.

    Args:
        blocks: float64 ``[B, 2]``, tokens and seconds of stretches of the run: a machine is slow
            for a while at a time, so that steps are not independent and stretches nearly are.
        seed: another one for another run, whose stretches have nothing to do with these.
    """
    tokens, seconds = (_draws(len(blocks), seed) @ blocks).T
    return tokens / seconds


@functools.lru_cache(maxsize=4)
def _draws(num_drawn: int, seed: int = _SEED) -> np.ndarray:
    """How often each resample draws each of the sample, int64 ``[R, N]``."""
    shares = np.full(num_drawn, 1 / num_drawn)
    return np.random.default_rng(seed).multinomial(num_drawn, shares, size=_NUM_RESAMPLES)
