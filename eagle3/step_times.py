"""What a step of the engine takes with a drafter and without, and when drafting pays.

A step without a drafter yields a token a request, one with it the acceptance length. Drafting
pays while the acceptance length is above the ratio of the two steps' times, the length at which
it breaks even. Steps in which a prompt is prefilled are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any

from .engine import Step

_FEWEST_STEPS = 5  # a median of fewer says nothing


def decode_seconds(steps: Iterable[Step]) -> dict[int, float]:
    """Median seconds of a decoding step, by number of requests in it."""
    seconds: dict[int, list[float]] = {}
    for step in steps:
        if not step.is_prefill:
            seconds.setdefault(step.num_running, []).append(step.seconds)
    return {n: median(s) for n, s in sorted(seconds.items()) if len(s) >= _FEWEST_STEPS}


def break_even(
    with_drafter: Iterable[Step], without: Iterable[Step], acceptance_length: float
) -> list[dict[str, Any]]:
    """A row a concurrency that both were measured at.

    Returns:
        ``concurrency``, the two ``seconds``, ``break_even_length``, and ``times_faster``: what
        the given acceptance length comes to there, prefill left out.
    """
    drafted_s, plain_s = decode_seconds(with_drafter), decode_seconds(without)
    return [
        {
            "concurrency": n,
            "step_s_with": drafted_s[n],
            "step_s_without": plain_s[n],
            "break_even_length": drafted_s[n] / plain_s[n],
            "times_faster": acceptance_length * plain_s[n] / drafted_s[n],
        }
        for n in drafted_s
        if n in plain_s
    ]
