"""Where a drafter is right and where it errs: by source, context length, and kind of token.

By source and context length the drafts are those the engine asks for, counted as it counts them.
By kind of token they are all that could be asked for: rare tokens need every one, and whether a
draft is right does not depend on where the engine happened to stop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .predict import Prediction

# Contexts up to here are one group; the next goes up to twice as long, and so on.
_SHORTEST_CONTEXT_TOKENS = 64
_CONTEXT_SHOWN_TOKENS = 12
KINDS = END_OF_TURN, FORCED, OUT_OF_VOCABULARY, OTHER = (
    "end of turn",
    "think, tool and other forced",
    "out of draft vocabulary",
    "all other",
)


def by_source(prediction: Prediction) -> list[dict[str, Any]]:
    """A row a source: drafts asked for, acceptance length and shares."""
    sources = np.array(prediction.sources)[prediction.answer]
    names = dict.fromkeys(prediction.sources)
    return [{"source": name, **_asked(prediction, sources == name)} for name in names]


def by_context(prediction: Prediction) -> list[dict[str, Any]]:
    """A row a range of context lengths: the tokens known when the draft is made."""
    context = prediction.position + 2
    groups = np.ceil(np.log2(np.maximum(context / _SHORTEST_CONTEXT_TOKENS, 1))).astype(int)
    rows = []
    for group in np.unique(groups[prediction.is_asked]):
        most = _SHORTEST_CONTEXT_TOKENS << int(group)
        low = most // 2 + 1 if group else 1
        label = {"context_tokens": f"{low}-{most}", "most_tokens": most}
        rows.append({**label, **_asked(prediction, groups == group)})
    return rows


def _asked(prediction: Prediction, is_chosen: np.ndarray) -> dict[str, Any]:
    right = prediction.num_right[prediction.is_asked & is_chosen]
    shares = (right[:, None] > np.arange(prediction.drafts.shape[1])).mean(0)
    return {
        "num_drafts": len(right),
        "acceptance_length": float(1 + shares.sum()),
        "acceptance_per_position": shares.tolist(),
    }


def token_classes(
    vocab_size: int,
    drafted_ids: Sequence[int],
    forced_ids: Sequence[int],
    end_of_turn_ids: Sequence[int],
) -> np.ndarray:
    """The kind of every token, one of ``KINDS``, ``[vocab_size]``.

    Args:
        drafted_ids: the draft vocabulary, as target ids.
        forced_ids: think, tool and other tokens that the config forces into it.
    """
    classes = np.full(vocab_size, OUT_OF_VOCABULARY, dtype=object)
    for ids, kind in ((drafted_ids, OTHER), (forced_ids, FORCED), (end_of_turn_ids, END_OF_TURN)):
        classes[list(ids)] = kind
    return classes


def by_token_class(prediction: Prediction, classes: np.ndarray) -> list[dict[str, Any]]:
    """A row a kind of token: how often the verifier emits it, and how often it is drafted right.

    Args:
        classes: from ``token_classes``.

    Returns:
        ``num_tokens`` and ``right_per_position``: at each position of the chain, the share right
        of the drafts whose earlier ones are (None where there are none).
    """
    places = np.arange(prediction.drafts.shape[1])
    is_reached = (prediction.num_right[:, None] >= places) & prediction.is_inside
    rows = []
    for name in KINDS:
        is_chosen = is_reached & (classes == name)[prediction.truth]
        reached = is_chosen.sum(0)
        right = (is_chosen & prediction.matches).sum(0)
        shares = [int(r) / int(n) if n else None for r, n in zip(right, reached, strict=True)]
        row = {"token_class": name, "num_tokens": int(reached[0]), "right_per_position": shares}
        rows.append(row)
    return rows


def disagreements(
    prediction: Prediction, most: int, decode: Callable[[list[int]], str]
) -> list[dict[str, Any]]:
    """The wrong drafts met most often, at every position of an answer whose earlier drafts were
    all right: draft position, both tokens, times, and the text before one of them.

    Args:
        most: rows for each position of the chain.
        decode: token ids -> text.
    """
    counted: Counter[tuple[int, int, int]] = Counter()
    seen: dict[tuple[int, int, int], int] = {}
    for row, k in _misses(prediction):
        key = (k, int(prediction.drafts[row, k]), int(prediction.truth[row, k]))
        counted[key] += 1
        seen.setdefault(key, row)
    found: list[dict[str, Any]] = []
    for k in range(prediction.drafts.shape[1]):
        here = [(key, times) for key, times in counted.most_common() if key[0] == k][:most]
        for key, times in here:
            row = seen[key]
            end = int(prediction.position[row]) + 2 + k
            tokens = prediction.tokens[prediction.answer[row]][:end].tolist()
            found.append(
                {
                    "draft_position": k,
                    "drafted": decode([key[1]]),
                    "verifier": decode([key[2]]),
                    "times": times,
                    "after": decode(tokens[-_CONTEXT_SHOWN_TOKENS:]),
                }
            )
    return found


def _misses(prediction: Prediction) -> Iterator[tuple[int, int]]:
    """(row, draft position) of every first wrong draft inside its answer."""
    num_drafted = prediction.drafts.shape[1]
    for row, k in enumerate(prediction.num_right.tolist()):
        if k < num_drafted and prediction.is_inside[row, k]:
            yield row, k
