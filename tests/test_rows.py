"""Token rows on disk, their counts, the preview, and rows made of answers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from eagle3.answers import Answer, AnswerBook, Question, answered_row, questions
from eagle3.config import RegenerateSection
from eagle3.engine import Completion, Sampling
from eagle3.progress import Progress
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


ASKED = [Question((i,), Sampling(0.7, 8)) for i in range(3)]
ANSWERS = [(4, 2), (1,), (30, 31, 32)]


class Answering:
    """An engine that knows the answers, and may fail after some."""

    def __init__(self, fails_after: int = len(ASKED)) -> None:
        self.fails_after = fails_after

    def generate(self, prompts, sampling):
        for index, (prompt,) in enumerate(prompts):
            if index == self.fails_after:
                raise RuntimeError("the engine died")
            yield Completion(index, ANSWERS[prompt], finished_by_stop=prompt != 1)


def ask(directory: Path, engine: Answering) -> AnswerBook:
    book = AnswerBook(directory)
    missing = book.missing(ASKED)
    book.ask(engine, missing, Progress(len(missing), "answers"))
    return book


def test_what_was_answered_before_the_engine_died_is_not_asked_again(tmp_path):
    with pytest.raises(RuntimeError):
        ask(tmp_path, Answering(fails_after=2))
    assert AnswerBook(tmp_path).missing(ASKED) == ASKED[2:]
    ask(tmp_path, Answering())
    book = AnswerBook(tmp_path)
    assert [tuple(book[q].token_ids) for q in ASKED] == ANSWERS
    assert [book[q].finished_by_stop for q in ASKED] == [True, False, True]
    assert book.num_unreadable == 0


@given(data=st.data())
def test_damage_costs_the_answers_it_hits_and_never_changes_one(tmp_path_factory, data):
    """A part cut anywhere, as by a kill, or with any byte changed."""
    directory = tmp_path_factory.mktemp("answers")
    ask(directory, Answering())
    (path,) = directory.iterdir()
    whole = path.read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    cut = data.draw(st.booleans())
    other = bytes([whole[place] ^ data.draw(st.integers(1, 255))])
    path.write_bytes(whole[:place] if cut else whole[:place] + other + whole[place + 1 :])
    book = AnswerBook(directory)
    begins = [0, *(i + 1 for i, byte in enumerate(whole) if byte == ord("\n"))]
    hit = sum(begin <= place for begin in begins[:-1]) - 1  # the line of that byte
    lost = set(range(hit, 3)) if cut else {hit}
    if not cut and place + 1 in begins:  # two lines became one
        lost |= {hit + 1} & {0, 1, 2}
    assert book.missing(ASKED) == [ASKED[i] for i in sorted(lost)]
    ask(directory, Answering())
    book = AnswerBook(directory)
    assert [tuple(book[q].token_ids) for q in ASKED] == ANSWERS
