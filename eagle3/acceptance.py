"""Acceptance as vLLM counts it, and the walk that predicts it from teacher-forced drafts.

The engine drafts K tokens, accepts the longest prefix the verifier agrees with, emits one token
of its own, and starts again after it. With the verifier's greedy answer known, a drafter's drafts
at every position tell the whole run: while drafts match, the drafted prefix *is* the answer, so
teacher-forced drafts are the engine's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Acceptance:
    """Counts of a spec-decode run.

    Attributes:
        num_drafts: times the drafter was asked.
        accepted_per_position: ``[K]``, drafts whose token at that position was accepted.
    """

    num_drafts: int
    accepted_per_position: tuple[int, ...]

    def __add__(self, other: Acceptance) -> Acceptance:
        accepted = zip(self.accepted_per_position, other.accepted_per_position, strict=True)
        return Acceptance(self.num_drafts + other.num_drafts, tuple(a + b for a, b in accepted))

    def __sub__(self, earlier: Acceptance) -> Acceptance:
        accepted = zip(self.accepted_per_position, earlier.accepted_per_position, strict=True)
        return Acceptance(self.num_drafts - earlier.num_drafts, tuple(a - b for a, b in accepted))

    @property
    def acceptance_length(self) -> float:
        """Tokens a verifier step yields, the bonus token counted: ``1 + accepted / drafts``."""
        return 1 + sum(self.accepted_per_position) / max(self.num_drafts, 1)

    @property
    def per_position(self) -> list[float]:
        """Share of drafts accepted at each position (unconditional, as vLLM reports)."""
        return [accepted / max(self.num_drafts, 1) for accepted in self.accepted_per_position]


def walk(matches: np.ndarray) -> Acceptance:
    """Walk one answer as the engine does.

    Args:
        matches: bool ``[num_positions, K]``; row i is the draft made once answer token i is
            known: column k says whether it names answer token i+1+k (False past the end). The
            last token of an answer needs no draft, so its row is never visited.

    >>> walk(np.array([[1, 0], [1, 1], [1, 0], [0, 0]], dtype=bool))  # 4 answer tokens, K = 2
    Acceptance(num_drafts=2, accepted_per_position=(2, 0))

    Draft at token 0 accepts token 1 only, the verifier emits token 2; the draft there accepts
    token 3, the last one.
    """
    num_positions, num_draft_tokens = matches.shape
    accepted = [0] * num_draft_tokens
    num_drafts = position = 0
    while position < num_positions - 1:
        num_drafts += 1
        run = matches[position].argmin() if not matches[position].all() else num_draft_tokens
        for k in range(int(run)):
            accepted[k] += 1
        position += int(run) + 1
    return Acceptance(num_drafts, tuple(accepted))
