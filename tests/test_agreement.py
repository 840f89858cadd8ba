"""vLLM's drafts against the replay's: what is compared, what rounding explains, which is first."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from predictions import made_up

from eagle3.agreement import agree
from eagle3.capture import NEAR_TIE
from eagle3.drafts import NUM_TOP, RecordedDrafts
from eagle3.engine import Sampling
from eagle3.serve import PromptSet
from eagle3.shards import ShardBuffer

TOP = 8.0
ROUNDING = NEAR_TIE[torch.bfloat16] * TOP


class Replay:
    """A witness whose best five are known."""

    dtype = torch.bfloat16

    def top(self, input_ids, aux, position, num_drafted, num_top):
        self.asked = position, num_drafted
        return torch.arange(num_top).repeat(num_drafted, 1), torch.zeros(num_drafted, num_top)


@pytest.fixture
def prompt_set(tmp_path) -> PromptSet:
    """Two prompts of two tokens, answers of five."""
    prompt_set = PromptSet("test", [[5, 6], [5, 6]], Sampling(0, 5), tmp_path)
    buffer = ShardBuffer.allocate([0, 1], [7, 7], num_aux=1, hidden_size=2, dtype=torch.float32)
    ids = torch.tensor([5, 6, 100, 101, 102, 103, 104] * 2, dtype=torch.int32)
    buffer.put(torch.arange(14), ids, [torch.zeros(14, 2)] * 2)
    buffer.publish(prompt_set.states_path)
    return prompt_set


def recorded(rows: list[tuple[int, int, list[int]]], below: float) -> RecordedDrafts:
    """(request, position, drafts): the best is the draft, the second token 1, ``below`` it."""
    drafts = torch.tensor([row[2] for row in rows])
    top_ids = torch.stack([drafts, *(torch.full_like(drafts, i) for i in range(1, NUM_TOP))], -1)
    logits = torch.tensor([TOP, TOP - below, 0, 0, 0]).expand(top_ids.shape)
    nothing = torch.zeros(len(rows), dtype=torch.int64)
    return RecordedDrafts(
        request=torch.tensor([row[0] for row in rows]),
        position=torch.tensor([row[1] for row in rows]),
        drafts=drafts,
        num_verified=nothing,
        emitted=torch.zeros(len(rows), 3, dtype=torch.int64),
        top_ids=top_ids,
        top_logits=logits,
    )


# Ours say 1 wherever they are wrong; two answers, position 1 is the first of each.
OURS = np.array([[1, 1], [1, 0], [0, 1], [0, 0], [0, 0]], dtype=bool)


def test_later_drafts_are_compared_where_the_earlier_agree(prompt_set):
    prediction = made_up([OURS, OURS], num_beyond=2)
    rows = [
        (1, 1, [101, 102]),  # both equal
        (0, 2, [102, 9]),  # the second differs: ours is 1
        (0, 3, [9, 104]),  # the first differs, and the second is no longer asked
        (0, 6, [9, 9]),  # drafted after the answer's last token
        (0, 9, [9, 9]),  # beyond its end
    ]
    found = agree(prompt_set, recorded(rows, 2 * ROUNDING), prediction, Replay())
    assert found.compared.tolist() == [3, 2]
    assert found.equal.tolist() == [2, 1] and found.near_ties.tolist() == [0, 0]
    assert found.differing_answers == {0: 2}


def test_first_is_by_answer_then_position(prompt_set):
    prediction, replay = made_up([OURS, OURS], num_beyond=2), Replay()
    rows = [(1, 1, [9, 9]), (0, 4, [9, 9]), (0, 2, [102, 9])]
    first = agree(prompt_set, recorded(rows, 2 * ROUNDING), prediction, replay).first
    assert (first["prompt"], first["token_position"], first["draft_position"]) == (0, 2, 1)
    assert replay.asked == (2, 2) and not first["is_near_tie"]
    assert first["context"] == [5, 6, 100, 101] and first["drafted_before"] == [102]
    assert first["drafted"] == [9, 1]
    assert first["vllm"][:2] == [[9, TOP], [1, TOP - 2 * ROUNDING]]
    assert first["replay"] == [[i, 0.0] for i in range(NUM_TOP)]


@pytest.mark.parametrize(("below", "is_near"), [(0.9 * ROUNDING, True), (1.1 * ROUNDING, False)])
def test_rounding_explains_a_token_near_vllms_best(prompt_set, below, is_near):
    prediction = made_up([OURS, OURS], num_beyond=2)
    found = agree(prompt_set, recorded([(0, 3, [9, 104])], below), prediction, Replay())
    assert found.near_ties.tolist() == [int(is_near), 0]
    assert found.first["is_near_tie"] is is_near
    assert found.differing_answers == ({} if is_near else {0: 1})


def test_a_token_outside_vllms_top_five_is_not_near(prompt_set):
    prediction = made_up([OURS, OURS], num_beyond=2)
    prediction = replace(prediction, drafts=np.where(prediction.drafts == 1, 77, prediction.drafts))
    found = agree(prompt_set, recorded([(0, 3, [9, 104])], 0), prediction, Replay())
    assert found.near_ties.sum() == 0 and found.first["prompt"] == 0


def test_nothing_differs(prompt_set):
    prediction = made_up([OURS, OURS], num_beyond=2)
    found = agree(prompt_set, recorded([(0, 1, [101, 102])], 0), prediction, Replay())
    assert found.first is None and found.equal.tolist() == [1, 1]
