"""Token rows on disk, their counts, the preview, and rows made of answers."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from eagle3.answers import Answer, AnswerBook, Question, answered_row, questions
from eagle3.config import RegenerateSection
from eagle3.engine import Sampling
from eagle3.errors import StaleInputError
from eagle3.rows import TokenRows
from eagle3.selection import Candidate
from eagle3.summary import marked, preview, tally

ROW = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), min_size=1, max_size=8)
ROWS = st.lists(st.tuples(ROW, st.integers(0, 1), st.booleans()), min_size=1, max_size=6)
REGENERATE = RegenerateSection(
    other_modes=[{"chat_template_kwargs": {"thinking": False}, "temperature": 0.6, "top_p": 1.0}],
    temperature=0.7,
    top_p=0.9,
    max_new_tokens=16,
    answers_per_prompt=3,
    seed=0,
)


def build(rows) -> TokenRows:
    return TokenRows.from_lists(
        [([i for i, _ in row], [m for _, m in row]) for row, _, _ in rows],
        source_ids=[source for _, source, _ in rows],
        is_validation=[side for _, _, side in rows],
        sources=["a", "b"],
    )


@given(rows=ROWS)
def test_rows_come_back_from_disk_as_they_went(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("rows") / "rows.safetensors"
    build(rows).save(path)
    found = TokenRows.load(path)
    assert found.num_rows == len(rows) and found.sources == ("a", "b")
    for index, (row, source, side) in enumerate(rows):
        ids, mask = found.row(index)
        assert list(zip(ids.tolist(), mask.tolist(), strict=True)) == row
        assert (found.source_ids[index], found.is_validation[index]) == (source, side)
        assert found.lengths[index] == len(row)


@given(rows=ROWS)
def test_a_tally_adds_up(rows):
    built = build(rows)
    sides = [tally(built, side) for side in (built.is_validation, ~built.is_validation)]
    for key, total in (
        ("rows", built.num_rows),
        ("tokens", len(built.input_ids)),
        ("supervised_tokens", int(built.loss_mask.sum())),
    ):
        assert sum(source[key] for side in sides for source in side.values()) == total


def test_a_preview_marks_what_is_trained(tiny_verifier_dir):
    tokenizer = AutoTokenizer.from_pretrained(tiny_verifier_dir)
    prompt, answer = tokenizer.encode("<|im_start|>user\n"), tokenizer.encode("yes<|im_end|>")
    ids, mask = np.array(prompt + answer), np.array([0] * len(prompt) + [1] * len(answer), bool)
    context, trained = marked(ids, mask, tokenizer).splitlines()
    assert context.startswith("context  <|im_start|>·") and context.endswith("·⏎")
    assert trained.startswith("TRAINED  ") and trained.endswith("·<|im_end|>")
    rows = TokenRows.from_lists(
        [(ids, mask)] * 8, source_ids=[0] * 8, is_validation=[False] * 7 + [True], sources=["a"]
    )
    assert preview(rows, tokenizer).count("\nTRAINED") == 4  # three training rows, one validation


def test_training_prompts_are_answered_in_every_mode_and_validation_prompts_once_greedily():
    thinking, instant = np.array([1, 2], np.int32), np.array([1, 2, 3], np.int32)
    candidate = Candidate(0, "hi", thinking, (instant,), None, Counter())
    training = questions(candidate, REGENERATE, is_validation=False)
    assert [q.sampling for q in training] == [Sampling(0.7, 16, 0.9)] * 3 + [Sampling(0.6, 16)] * 3
    assert [q.prompt_ids for q in training] == [(1, 2)] * 3 + [(1, 2, 3)] * 3
    assert len({q.key for q in training}) == 6
    (validation,) = questions(candidate, REGENERATE, is_validation=True)
    assert validation.sampling == Sampling(0.0, 16) and validation.prompt_ids == (1, 2)


@given(
    prompt=st.lists(st.integers(0, 99), min_size=1, max_size=8),
    emitted=st.lists(st.integers(0, 99), min_size=1, max_size=8),
    longest=st.integers(9, 20),
)
def test_an_answered_row_is_the_prompt_and_what_was_emitted(prompt, emitted, longest):
    answer = Answer(np.array(emitted, np.int32), finished_by_stop=True)
    ids, mask = answered_row(Question(tuple(prompt), Sampling(0.0, 8)), answer, longest)
    assert ids.dtype == np.int32 and len(ids) == min(len(prompt) + len(emitted), longest)
    assert ids.tolist() == (prompt + emitted)[:longest]
    assert ids[mask].tolist() == emitted[: longest - len(prompt)]


def test_only_questions_without_an_answer_are_missing(tmp_path):
    asked = [Question((i,), Sampling(0.7, 8)) for i in range(3)]
    line = {"key": asked[1].key, "token_ids": [4, 2], "finished_by_stop": True}
    (tmp_path / "part-00004.jsonl").write_text(json.dumps(line) + "\n")
    book = AnswerBook(tmp_path)
    assert book.missing(asked) == [asked[0], asked[2]]
    assert book[asked[1]].token_ids.tolist() == [4, 2] and book[asked[1]].finished_by_stop


def test_a_damaged_part_is_named(tmp_path):
    path = tmp_path / "part-00000.jsonl"
    path.write_text('{"key": "half a li')
    with pytest.raises(StaleInputError) as error:
        AnswerBook(tmp_path)
    assert error.value.where == str(path)
