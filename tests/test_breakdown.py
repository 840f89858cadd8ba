"""Where drafts go wrong, counted by hand on small answers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from predictions import made_up, random_matches

from eagle3.breakdown import (
    KINDS,
    by_context,
    by_source,
    by_token_class,
    disagreements,
    token_classes,
)

T, F = True, False
# Answer 100 101 102 103 104; 1 is what every wrong draft says.
ONE = np.array([[T, F], [F, T], [T, T], [F, F], [F, F]])


def test_sources_and_contexts_hold_every_draft_asked_for_once():
    matches = random_matches(3, 40, 3)
    sources = tuple("ab"[i % 3 == 0] for i in range(40))
    prediction = replace(made_up(matches), sources=sources)
    counts = prediction.counts
    for rows in (by_source(prediction), by_context(prediction)):
        assert sum(row["num_drafts"] for row in rows) == counts.num_drafts.sum()
    for row in by_source(prediction):
        alone = made_up([m for m, source in zip(matches, sources) if source == row["source"]])
        assert row["acceptance_length"] == pytest.approx(alone.counts.acceptance_length)
        assert row["acceptance_per_position"] == pytest.approx(alone.counts.per_position)


def test_contexts_double():
    prediction = made_up([np.zeros((200, 2), dtype=bool)])  # nothing accepted: every token asked
    rows = by_context(prediction)
    assert [row["context_tokens"] for row in rows] == ["1-64", "65-128", "129-256"]
    # A prompt of two tokens and one of the answer are known at the first draft; none at the last.
    assert [row["num_drafts"] for row in rows] == [62, 64, 199 - 62 - 64]


def test_kinds_of_tokens():
    classes = token_classes(200, [100, 101, 102, 104], forced_ids=[102, 104], end_of_turn_ids=[104])
    assert [classes[i] for i in (104, 102, 103, 101)] == list(KINDS)
    rows = {row["token_class"]: row for row in by_token_class(made_up([ONE]), classes)}
    # Drafted for from every position: 101 102 103 104, and one further on where 101, 103 are right.
    assert {name: row["num_tokens"] for name, row in rows.items()} == dict.fromkeys(KINDS, 1)
    assert rows["all other"]["right_per_position"] == [1.0, None]  # 101
    assert rows["think, tool and other forced"]["right_per_position"] == [0.0, 0.0]  # 102
    assert rows["out of draft vocabulary"]["right_per_position"] == [1.0, None]  # 103
    assert rows["end of turn"]["right_per_position"] == [0.0, 1.0]  # 104


def test_disagreements_are_counted_where_the_earlier_drafts_were_right():
    rows = disagreements(made_up([ONE, ONE]), 8, lambda ids: " ".join(map(str, ids)))
    found = [(r["draft_position"], r["drafted"], r["verifier"], r["times"]) for r in rows]
    assert found == [(0, "1", "102", 2), (0, "1", "104", 2), (1, "1", "102", 2)]
    # The text up to the token drafted for; what is beyond the answer is no disagreement.
    assert [row["after"] for row in rows] == ["5 6 100 101", "5 6 100 101 102 103", "5 6 100 101"]
    assert len(disagreements(made_up([ONE]), 1, str)) == 2  # one for each draft position
