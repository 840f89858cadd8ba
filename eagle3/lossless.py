"""Whether drafting changed what the verifier says.

Greedy answers with a drafter and without must be the same tokens. In bfloat16 they need not be:
a verifier step over four tokens rounds otherwise than four steps over one, and two tokens whose
logits are within that rounding may swap. So a difference is explained only if both tokens are
near the top where they first part; after it the answers are free to differ.

How near depends on the machine: AMX rounds another product than AVX-512 does. The answers
themselves tell: where both runs emit the same token and the logits recomputed from the captured
state put another on top, engine and recomputation are as far apart as their rounding is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .capture import VerifierHead
from .serve import PromptSet, ServedRun
from .shards import Shard

# Answers part where rounding is at its largest; where they agree, less of it is seen.
_PARTING = 2


@dataclass(frozen=True)
class Lossless:
    """Greedy answers with the drafter against those without.

    Attributes:
        compared: prompts.
        equal: answers with the same tokens throughout.
        near_ties: answers that part where both tokens are within rounding of the top logit.
        rounding: the largest distance below the top logit of a token both runs emitted; looked at
            only where the dtype's own rounding leaves a difference unexplained, else 0.
        unexplained: all others.
        differences: each answer that parts: prompt index, answer position, both tokens (the
            drafter's first), how far below the top logit each is.
    """

    compared: int = 0
    equal: int = 0
    near_ties: int = 0
    unexplained: int = 0
    rounding: float = 0.0
    differences: tuple[dict[str, Any], ...] = ()

    def __add__(self, other: Lossless) -> Lossless:
        return Lossless(
            self.compared + other.compared,
            self.equal + other.equal,
            self.near_ties + other.near_ties,
            self.unexplained + other.unexplained,
            max(self.rounding, other.rounding),
            (*self.differences, *other.differences),
        )


def compare(
    prompt_set: PromptSet, drafted: ServedRun, plain: ServedRun, head: VerifierHead
) -> Lossless:
    """Compare a set's greedy answers token by token.

    Args:
        drafted, plain: served with and without the drafter.
        head: the verifier's; it knows how near a tie is.
    """
    shard = Shard.open(prompt_set.states_path)  # row i is prompt i followed by its drafted answer
    answers = [
        # Entry i of the states is that of the token before answer token i: it chose it.
        (*pair, shard.row(index).last_hidden_states[len(prompt_set.prompts[index]) - 1 :])
        for index, pair in enumerate(zip(drafted.answers, plain.answers, strict=True))
    ]

    def differences(rounding: float) -> tuple[dict[str, Any], ...]:
        return tuple(
            {"set": prompt_set.name, "prompt": index, **_difference(*answer, head, rounding)}
            for index, answer in enumerate(answers)
            if answer[0] != answer[1]
        )

    rounding, found = 0.0, differences(0.0)
    if not all(difference["is_near_tie"] for difference in found):
        rounding = max(_rounding(*answer, head) for answer in answers)
        found = differences(_PARTING * rounding)
    near_ties = sum(difference["is_near_tie"] for difference in found)
    return Lossless(
        compared=len(answers),
        equal=len(answers) - len(found),
        near_ties=near_ties,
        unexplained=len(found) - near_ties,
        rounding=round(rounding, 6),
        differences=found,
    )


def _difference(
    ours: Sequence[int],
    theirs: Sequence[int],
    states: torch.Tensor,
    head: VerifierHead,
    rounding: float,
) -> dict[str, Any]:
    """Where two answers part, and whether ``rounding`` (in logits) explains it."""
    place = first_difference(ours, theirs)
    tokens = [answer[place] for answer in (ours, theirs) if place < len(answer)]
    logits = head.logits(states[place][None])[0]
    near = [head.is_near_tie(logits, token, rounding) for token in tokens]
    return {
        "answer_position": place,
        "tokens": tokens,
        "below_top_logit": [round((logits.max() - logits[t]).item(), 6) for t in tokens],
        "top_logit": round(logits.max().item(), 4),
        # One answer being the other's beginning is no swap: nothing explains it.
        "is_near_tie": len(tokens) == 2 and all(near),
    }


def _rounding(
    ours: Sequence[int], theirs: Sequence[int], states: torch.Tensor, head: VerifierHead
) -> float:
    """How far below the top logit a token that both runs emit lies at most."""
    agreed = torch.tensor(ours[: first_difference(ours, theirs)], dtype=torch.long)
    logits = head.logits(states[: len(agreed)])
    below = logits.amax(1) - logits.gather(1, agreed[:, None])[:, 0]
    return max([0.0, *below.tolist()])


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """First index at which two answers differ, the shorter one's length if none.

    >>> first_difference([5, 7, 9], [5, 8])
    1
    """
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
