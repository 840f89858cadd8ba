"""Recorded steps put together to the answers the engine returned, and counted as it counts."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle3.drafts import RecordedDrafts, emitted_answers, served_counts
from eagle3.errors import GateError

NUM_DRAFTED = 3


def recorded(rows: list[tuple[int, int, int, list[int]]]) -> RecordedDrafts:
    """From (request, position, drafts verified, tokens emitted)."""
    emitted = torch.full((len(rows), NUM_DRAFTED + 1), -1)
    for row, (*_, tokens) in enumerate(rows):
        emitted[row, : len(tokens)] = torch.tensor(tokens)
    none = torch.zeros(len(rows), NUM_DRAFTED, dtype=torch.int64)
    return RecordedDrafts(
        request=torch.tensor([row[0] for row in rows]),
        position=torch.tensor([row[1] for row in rows]),
        drafts=none,
        num_verified=torch.tensor([row[2] for row in rows]),
        emitted=emitted,
        top_ids=none[..., None].repeat(1, 1, 5),
        top_logits=none[..., None].repeat(1, 1, 5).float(),
    )


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
    ahead=st.booleans(),
)
def test_steps_of_requests_served_together_make_their_answers(lengths, seed, ahead):
    """A simulated engine: requests advance in turn, each by one to four tokens a step."""
    rng = random.Random(seed)
    rows, num_drafts, accepted, answers = [], [], [], []
    for request, length in enumerate(lengths):
        tokens, position = [rng.randrange(100)], 10
        rows.append((rng.random(), request, position, 0, list(tokens)))
        num_drafts.append(0)
        accepted.append([0] * NUM_DRAFTED)
        while len(tokens) < length or ahead and rows[-1][3] == 0:
            is_counted = len(tokens) < length
            num_accepted = rng.randrange(NUM_DRAFTED + 1)
            step = [rng.randrange(100) for _ in range(num_accepted + 1)]
            position += len(step)
            rows.append((rows[-1][0] + rng.random(), request, position, NUM_DRAFTED, step))
            tokens += step
            num_drafts[-1] += is_counted
            for k in range(num_accepted if is_counted else 0):
                accepted[-1][k] += 1
        answers.append(tokens[:length])
    rows.sort()  # by time: requests lie across each other
    emitted = emitted_answers(recorded([row[1:] for row in rows]), answers)
    for answer, found in zip(answers, emitted, strict=True):
        assert list(found.token_ids[: len(answer)]) == answer
        assert len(found.token_ids) <= len(answer) + NUM_DRAFTED
    counts = served_counts(emitted, NUM_DRAFTED)
    assert counts.num_drafts.tolist() == num_drafts
    assert counts.accepted.tolist() == accepted


def test_a_recording_of_another_answer_is_no_recording():
    rows = [(0, 10, 0, [5]), (0, 12, 3, [6, 7])]
    assert emitted_answers(recorded(rows), [(5, 6)])[0].token_ids == (5, 6, 7)
    with pytest.raises(GateError, match="prompt 0"):
        emitted_answers(recorded(rows), [(5, 9)])
    with pytest.raises(GateError, match="prompt 0"):
        emitted_answers(recorded(rows), [(5, 6, 7, 8)])


def test_round_trip(tmp_path):
    rows = recorded([(0, 10, 0, [5]), (1, 12, 3, [6, 7])])
    rows.save(tmp_path / "drafts.safetensors")
    loaded = RecordedDrafts.load(tmp_path / "drafts.safetensors")
    assert torch.equal(loaded.emitted, rows.emitted)
    assert loaded.of_request(1).tolist() == [1]
