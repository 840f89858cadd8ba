"""vLLM's own drafter against the replay, draft by draft, on the same tokens.

In float32 the two are equal but where two of a drafter's tokens are tied. In bfloat16 they are
not: the replay reads states captured while whole answers were prefilled, vLLM's drafter read those
of decoding steps over a few tokens of several requests. The same sums in another order round
otherwise, in each layer of the verifier and again in the drafter, and its two best tokens may
swap. A wrong wiring shows in another way: drafts part at once, at the first position of the
chain, by margins no rounding explains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .capture import NEAR_TIE
from .drafts import NUM_TOP, RecordedDrafts
from .predict import Prediction
from .replay import Replay
from .serve import PromptSet
from .shards import CapturedRow, Shard

_CONTEXT_SHOWN_TOKENS = 16


@dataclass(frozen=True)
class Agreement:
    """Drafts of one prompt set, vLLM's against ours.

    Attributes:
        compared: int64 ``[K]``, drafts at each position of the chain whose earlier ones agree.
        equal: int64 ``[K]``, of those, the same token.
        near_ties: int64 ``[K]``, another token, within rounding of vLLM's best.
        differing_answers: answer -> drafts that differ by more than that, most first.
        first: the first draft that differs by more (of those within rounding, if none does):
            where it is, what was ``drafted`` (vLLM's first), and both top five.
    """

    compared: np.ndarray
    equal: np.ndarray
    near_ties: np.ndarray
    differing_answers: dict[int, int]
    first: dict[str, Any] | None


def agree(
    prompt_set: PromptSet, recorded: RecordedDrafts, prediction: Prediction, replay: Replay
) -> Agreement:
    """Compare every recorded draft inside an answer with the replay's at the same place."""
    request, position = recorded.request.numpy(), recorded.position.numpy()
    is_inside = position < prediction.ends[request] - 1  # token t+1 is the answer's
    request, position = request[is_inside], position[is_inside]
    # The rows of an answer lie one after the other, by position.
    row = np.searchsorted(prediction.answer, request)
    row += position - prediction.position[row]
    assert np.array_equal(prediction.position[row], position)
    theirs = recorded.drafts.numpy()[is_inside]
    ours = prediction.drafts[row, : theirs.shape[1]]
    is_equal = ours == theirs
    # What follows a draft that differs is drafted after another token: not compared.
    is_compared = np.cumprod(np.c_[np.ones(len(row)), is_equal[:, :-1]], axis=1) > 0
    top_ids = recorded.top_ids.numpy()[is_inside]
    top_logits = recorded.top_logits.numpy()[is_inside]
    best = top_logits[..., 0]
    found = np.where(top_ids == ours[..., None], top_logits, -np.inf).max(-1)
    is_near = best - found <= NEAR_TIE[replay.dtype] * np.maximum(np.abs(best), 1)
    differs = is_compared & ~is_equal
    by_more = differs & ~is_near
    answers, times = np.unique(request[by_more.any(1)], return_counts=True)
    wanted = np.argwhere(by_more if by_more.any() else differs)
    first = None
    if len(wanted):
        order = np.lexsort((wanted[:, 1], position[wanted[:, 0]], request[wanted[:, 0]]))
        index, k = wanted[order[0]].tolist()
        captured = Shard.open(prompt_set.states_path).row(int(request[index]))
        first = {
            "set": prompt_set.name,
            "prompt": int(request[index]),
            "is_near_tie": not bool(by_more.any()),
            "drafted": [int(theirs[index, k]), int(ours[index, k])],
            "drafted_before": ours[index, :k].tolist(),
            "vllm": _top(top_ids[index, k], top_logits[index, k]),
            **_in_replay(captured, int(position[index]), k, replay),
        }
    return Agreement(
        compared=is_compared.sum(0),
        equal=(is_compared & is_equal).sum(0),
        near_ties=(differs & is_near).sum(0),
        differing_answers={
            int(answers[i]): int(times[i]) for i in np.argsort(-times, kind="stable")
        },
        first=first,
    )


def _in_replay(captured: CapturedRow, position: int, k: int, replay: Replay) -> dict[str, Any]:
    """A draft's place, the text before it, and the replay's own top five."""
    ids, logits = replay.top(
        captured.input_ids, captured.aux_hidden_states, position, k + 1, NUM_TOP
    )
    return {
        "token_position": position,
        "draft_position": k,
        "context": captured.input_ids[: position + 2][-_CONTEXT_SHOWN_TOKENS:].tolist(),
        "replay": _top(ids[k].numpy(), logits[k].numpy()),
    }


def _top(ids: np.ndarray, logits: np.ndarray) -> list[list[Any]]:
    return [[int(i), round(float(x), 4)] for i, x in zip(ids, logits, strict=True)]
