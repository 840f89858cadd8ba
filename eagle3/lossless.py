"""Whether drafting changed what the verifier says.

Greedy answers with a drafter and without must be the same tokens. In bfloat16 they need not be:
a verifier step over four tokens rounds otherwise than four steps over one, and two tokens whose
logits are within that rounding may swap. So a difference is explained only if both tokens are
near the top where they first part; after it the answers are free to differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .capture import VerifierHead
from .serve import PromptSet, ServedRun
from .shards import Shard


@dataclass(frozen=True)
class Lossless:
    """Greedy answers with the drafter against those without.

    Attributes:
        compared: prompts.
        equal: answers with the same tokens throughout.
        near_ties: answers that part where both tokens are within rounding of the top logit.
        unexplained: all others.
        differences: each answer that parts: prompt index, answer position, both tokens (the
            drafter's first), how far below the top logit each is.
    """

    compared: int = 0
    equal: int = 0
    near_ties: int = 0
    unexplained: int = 0
    differences: tuple[dict[str, Any], ...] = ()

    def __add__(self, other: Lossless) -> Lossless:
        return Lossless(
            self.compared + other.compared,
            self.equal + other.equal,
            self.near_ties + other.near_ties,
            self.unexplained + other.unexplained,
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
    total = Lossless()
    states = Shard.open(prompt_set.states_path)  # row i is prompt i followed by its drafted answer
    pairs = zip(drafted.answers, plain.answers, strict=True)
    for index, (ours, theirs) in enumerate(pairs):
        if ours == theirs:
            total += Lossless(compared=1, equal=1)
            continue
        place = first_difference(ours, theirs)
        tokens = [answer[place] for answer in (ours, theirs) if place < len(answer)]
        last_states = states.row(index).last_hidden_states
        # The state before an answer's token ``place`` is that of the token it follows.
        logits = head.logits(last_states[len(prompt_set.prompts[index]) + place - 1][None])[0]
        # One answer being the other's beginning is no swap: nothing explains it.
        is_tie = len(tokens) == 2 and all(head.is_near_tie(logits, token) for token in tokens)
        difference = {
            "set": prompt_set.name,
            "prompt": index,
            "answer_position": place,
            "tokens": tokens,
            "below_top_logit": [round((logits.max() - logits[t]).item(), 6) for t in tokens],
            "top_logit": round(logits.max().item(), 4),
            "is_near_tie": is_tie,
        }
        total += Lossless(1, 0, int(is_tie), int(not is_tie), (difference,))
    return total


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """First index at which two different answers differ.

    >>> first_difference([5, 7, 9], [5, 8])
    1
    """
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
