"""Acceptance as vLLM counts it, and the walk that predicts it from teacher-forced drafts.

The engine drafts K tokens, accepts the longest prefix the verifier agrees with, emits one token
of its own, and starts again after it. With the tokens the verifier emitted known, a drafter's
drafts at every position tell the whole run: while drafts match, the drafted prefix *is* the
answer, so teacher-forced drafts are the engine's.

That holds for sampled answers as for greedy ones. vLLM drafts greedily and passes no draft
probabilities, so its rejection sampler accepts a drafted token with the probability the verifier
gives it, and emits any *other* token if it rejects (``v1/sample/rejection_sampler.py``,
``NO_DRAFT_PROBS``): a draft was accepted exactly where it is the token that was emitted.
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


def num_leading(matches: np.ndarray) -> np.ndarray:
    """How many drafts of each row are right before the first that is wrong, int64 ``[n]``.

    Args:
        matches: bool ``[n, K]``.
    """
    return np.cumprod(matches, axis=1).sum(1)


def asked(matches: np.ndarray) -> np.ndarray:
    """Which drafts of one answer the engine makes, bool ``[num_positions]``.

    Args:
        matches: bool ``[num_positions, K]``; row i is the draft made once answer token i is
            known: column k says whether it names answer token i+1+k (False past the end). The
            last token of an answer needs no draft.
    """
    mask = np.zeros(len(matches), dtype=bool)
    runs = num_leading(matches)
    position = 0
    while position < len(matches) - 1:
        mask[position] = True
        position += int(runs[position]) + 1
    return mask


def walk(matches: np.ndarray) -> Acceptance:
    """Walk one answer as the engine does.

    Args:
        matches: as ``asked`` takes them.

    >>> walk(np.array([[1, 0], [1, 1], [1, 0], [0, 0]], dtype=bool))  # 4 answer tokens, K = 2
    Acceptance(num_drafts=2, accepted_per_position=(2, 0))

    Draft at token 0 accepts token 1 only, the verifier emits token 2; the draft there accepts
    token 3, the last one.
    """
    runs = num_leading(matches[asked(matches)])
    accepted = runs[:, None] > np.arange(matches.shape[1])
    return Acceptance(len(runs), tuple(accepted.sum(0).tolist()))
