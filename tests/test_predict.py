"""Which answers are replayed, and what is made of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from predictions import made_up, random_matches

from eagle3 import predict as predict_module
from eagle3.acceptance import Acceptance, walk
from eagle3.predict import (
    Answer,
    Prediction,
    num_validation_answers,
    spans,
    validation_answers,
)
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
    assert [(a.start, a.num_tokens, a.source) for a in found] == [(1, 2, "test"), (4, 2, "test")]
    assert [a.row.input_ids.tolist() for a in found] == [[5, 6, 7], [5, 6, 7, 8, 9, 10]]
    assert torch.equal(found[0].row.aux_hidden_states[:, 0], states[0][:3])


@given(st.integers(0, 500), st.integers(1, 5), st.integers(0, 4))
def test_counts_are_each_answers_walk_for_any_length_of_chain(seed, num_answers, num_beyond):
    prediction = made_up(random_matches(seed, num_answers, 4), num_beyond)
    starts = np.flatnonzero(np.diff(prediction.answer)) + 1
    for num_drafted in (1, 2, 4):
        shorter = prediction.first(num_drafted)
        walks = [walk(each[:, :num_drafted]) for each in np.split(prediction.matches, starts)]
        assert shorter.counts.num_drafts.tolist() == [w.num_drafts for w in walks]
        assert shorter.counts.accepted.tolist() == [list(w.accepted_per_position) for w in walks]
        assert shorter.acceptance == sum(walks, Acceptance(0, (0,) * num_drafted))


def test_expected_acceptance_is_the_average_over_draws():
    """A verifier of three tokens, drafted for by one guess a state: 20,000 answers are drawn, and
    what their drafts were given is what they accepted, within the noise of the draw."""
    rng = np.random.default_rng(0)
    chances = np.array([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.3, 0.3, 0.4]])  # next token by token
    guess = chances.argmax(1)
    num_answers, num_tokens, num_drafted = 2000, 10, 3
    length = num_tokens + num_drafted  # emitted beyond the end
    drawn = np.zeros((num_answers, length), dtype=int)
    for i in range(1, length):
        drawn[:, i] = (rng.random((num_answers, 1)) > chances[drawn[:, i - 1]].cumsum(1)).sum(1)
    position = np.arange(num_tokens)
    drafts = np.zeros((num_answers, num_tokens, num_drafted), dtype=int)
    given_to = np.zeros(drafts.shape, dtype=np.float32)
    last = drawn[:, :num_tokens]
    for k in range(num_drafted):
        drafts[..., k] = guess[last]
        given_to[..., k] = chances[drawn[:, position + k], drafts[..., k]]
        last = drafts[..., k]
    prediction = Prediction(
        tokens=tuple(drawn),
        ends=np.full(num_answers, num_tokens),
        sources=("test",) * num_answers,
        answer=np.repeat(np.arange(num_answers), num_tokens),
        position=np.tile(position - 1, num_answers),
        drafts=drafts.reshape(-1, num_drafted),
        truth=np.stack([drawn[:, position + 1 + k] for k in range(num_drafted)], -1).reshape(-1, 3),
        probabilities=given_to.reshape(-1, num_drafted),
    )
    counted, expected = prediction.counts, prediction.expected
    assert np.array_equal(counted.num_drafts, expected.num_drafts)
    assert expected.per_position == pytest.approx(counted.per_position, abs=0.015)
    assert counted.acceptance_length > 1.8  # neither hopeless
    # Another answer would have been as likely: the luck of the draw is gone, not the average.
    difference = (counted.accepted - expected.accepted).sum(1)
    assert abs(difference.mean()) < 3 * difference.std() / num_answers**0.5


class Head:
    """A verifier's head that reads logits off its states."""

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return states


def test_probabilities_are_of_the_state_before_each_drafted_token():
    num_tokens, num_beyond, num_drafted, vocab_size = 600, 2, 3, 7  # more states than a block
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(3 + num_tokens + num_beyond, vocab_size, generator=generator)
    row = CapturedRow(0, torch.zeros(len(states)).long(), torch.empty(0), states)
    drafts = torch.randint(0, vocab_size, (num_tokens, num_drafted), generator=generator)
    answer = Answer(row, start=3, num_tokens=num_tokens, source="test")
    found = predict_module._probabilities(answer, drafts, Head(), temperature=0.5)
    for i in (0, 1, 255, 256, 257, num_tokens - 1):
        for k in range(num_drafted):
            state = 3 + i + k  # of answer token i+k, before token i+1+k
            expected = 0.0
            if state < len(states):
                expected = (states[state] / 0.5).softmax(-1)[drafts[i, k]].item()
            assert found[i, k].item() == pytest.approx(expected)
