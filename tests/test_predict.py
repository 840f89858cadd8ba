"""Which answers are replayed, and what is made of them."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle3.acceptance import Acceptance
from eagle3.predict import (
    Answer,
    Prediction,
    num_validation_answers,
    spans,
    validation_answers,
)
from eagle3.replay import Replayed
from eagle3.rows import TokenRows
from eagle3.shards import CapturedRow, Shard, ShardBuffer


@given(st.lists(st.booleans(), max_size=20))
def test_spans_cover_the_mask_and_nothing_else(mask):
    found = spans(np.array(mask, dtype=bool))
    covered = [any(start <= i < end for start, end in found) for i in range(len(mask))]
    assert covered == mask
    assert all(0 <= start < end <= len(mask) for start, end in found)
    assert all(a[1] < b[0] for a, b in zip(found, found[1:]))  # maximal runs, in order


def test_validation_turns_are_cut_at_their_end(tmp_path):
    rows = TokenRows.from_lists(
        [
            ([1, 2, 3, 4], [0, 0, 1, 1]),  # training
            ([5, 6, 7, 8, 9, 10], [0, 1, 1, 0, 1, 1]),  # two turns
        ],
        source_ids=[0, 0],
        is_validation=[False, True],
        sources=["test"],
    )
    buffer = ShardBuffer.allocate(
        [1, 0], [6, 4], num_aux=1, hidden_size=2, dtype=torch.float32
    )  # rows may lie in any order
    ids = torch.tensor([5, 6, 7, 8, 9, 10, 1, 2, 3, 4], dtype=torch.int32)
    states = [torch.arange(20.0).reshape(10, 2) + k for k in (0, 100)]
    buffer.put(torch.arange(10), ids, states)
    buffer.publish(tmp_path / "shard-00000.safetensors")
    found = list(validation_answers([Shard.open(tmp_path / "shard-00000.safetensors")], rows))
    assert num_validation_answers(rows) == len(found) == 2
    assert [(a.start, a.num_tokens) for a in found] == [(1, 2), (4, 2)]
    assert [a.row.input_ids.tolist() for a in found] == [[5, 6, 7], [5, 6, 7, 8, 9, 10]]
    assert torch.equal(found[0].row.aux_hidden_states[:, 0], states[0][:3])


def test_misses_are_counted_where_the_earlier_drafts_were_right():
    row = CapturedRow(0, torch.tensor([1, 2, 10, 11, 12, 13]), torch.empty(0), torch.empty(0))
    answer = Answer(row, start=2, num_tokens=4)  # answer 10 11 12 13
    drafts = torch.tensor([[11, 99], [50, 13], [13, 60], [70, 71]])
    matches = torch.tensor([[True, False], [False, True], [True, False], [False, False]])
    prediction = Prediction(Acceptance(0, (0, 0)))
    prediction.add(answer, Replayed(drafts, matches))
    # At 10: 11 right, 99 for 12. At 11: 50 for 12. At 12: 13 right, then past the end: no miss.
    assert prediction.misses == {(1, 99, 12): 1, (0, 50, 12): 1}
    assert prediction.acceptance == Acceptance(2, (2, 0))
