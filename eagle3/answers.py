"""Asking the verifier for answers, resumably, and making rows of them.

Each answer is on disk the moment it is finished: a line ``{"key", "token_ids",
"finished_by_stop", "check"}`` of ``part-00000.jsonl``, the next run's in ``part-00001.jsonl``. The
key is a digest of the question, so a rerun asks only for what has no answer yet, whatever order
the questions come in. A line a kill cut in two, or whose check does not fit, is no answer.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from .config import Config, RegenerateSection
from .engine import Engine, Sampling
from .files import appending, sha256_json
from .progress import Progress
from .script import log, stop_flag
from .selection import Candidate
from .verifier import Verifier

_SYNC_EVERY_S = 20  # what a power cut can cost; a kill costs nothing that was finished


@dataclass(frozen=True)
class Question:
    """One answer to ask for.

    Attributes:
        prompt_ids: token ids with the generation prompt.
        sampling: how the answer is drawn.
        repeat: which of several answers to the same prompt.
    """

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    repeat: int = 0

    @cached_property
    def key(self) -> str:
        return sha256_json([self.prompt_ids, self.sampling.temperature, self.repeat])


@dataclass(frozen=True)
class Answer:
    """Emitted token ids, int32 ``[num_tokens]``, the end-of-turn token included if it came."""

    token_ids: np.ndarray
    finished_by_stop: bool


def questions(
    candidate: Candidate, regenerate: RegenerateSection, is_validation: bool
) -> list[Question]:
    """What to ask of one prompt: training answers are drawn, in every mode the config names.

    A validation prompt is answered once and greedily, because that is how acceptance is served.
    """
    prompt = tuple(candidate.prompt_ids.tolist())
    if is_validation:
        return [Question(prompt, Sampling(0.0, regenerate.max_new_tokens))]
    prompts = [candidate.prompt_ids, *candidate.other_prompt_ids]
    return [
        Question(
            tuple(ids.tolist()),
            Sampling(mode.temperature, regenerate.max_new_tokens, mode.top_p),
            repeat,
        )
        for ids, mode in zip(prompts, (regenerate, *regenerate.other_modes), strict=True)
        for repeat in range(regenerate.answers_per_prompt)
    ]


def answered_row(
    question: Question, answer: Answer, max_length_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Prompt ids and emitted ids as they are, cut to the longest row; the emitted ones supervised.

    Returns:
        int32 ``[num_tokens]`` and bool ``[num_tokens]``.
    """
    ids = np.concatenate([np.array(question.prompt_ids, np.int32), answer.token_ids])
    mask = np.arange(len(ids)) >= len(question.prompt_ids)
    return ids[:max_length_tokens], mask[:max_length_tokens]


class AnswerBook:
    """The answers under a directory.

    Attributes:
        num_unreadable: lines that are no answer.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.num_unreadable = 0
        self._answers: dict[str, Answer] = {}
        self._next_part = 0
        for path in sorted(directory.glob("part-*.jsonl")):
            self._read(path)
            self._next_part = int(path.stem.removeprefix("part-")) + 1

    def __len__(self) -> int:
        return len(self._answers)

    def __getitem__(self, question: Question) -> Answer:
        return self._answers[question.key]

    def missing(self, questions: Iterable[Question]) -> list[Question]:
        return [question for question in questions if question.key not in self._answers]

    def ask(self, engine: Engine, questions: Sequence[Question], progress: Progress) -> None:
        """Answer every question, each kept as it is finished.

        Raises:
            Interrupted: a stop signal arrived.
            NoRoomError: the disk is full.
        """
        prompts = [question.prompt_ids for question in questions]
        sampling = [question.sampling for question in questions]
        start_s = synced_s = time.monotonic()
        num_tokens = 0
        path = self.directory / f"part-{self._next_part:05d}.jsonl"
        self._next_part += 1
        try:
            with appending(path) as part, closing(engine.generate(prompts, sampling)) as finished:
                for completion in finished:
                    key = questions[completion.index].key
                    ids = np.array(completion.token_ids, dtype=np.int32)
                    self._answers[key] = answer = Answer(ids, completion.finished_by_stop)
                    part.write(_line(key, answer))
                    part.flush()
                    if time.monotonic() - synced_s >= _SYNC_EVERY_S:
                        os.fsync(part.fileno())
                        synced_s = time.monotonic()
                    num_tokens += len(ids)
                    rate = num_tokens / (time.monotonic() - start_s)
                    progress.advance(1, tokens_per_s=round(rate))
                    stop_flag.raise_if_set()
        finally:
            progress.close()

    def _read(self, path: Path) -> None:
        with open(path, encoding="utf-8", errors="replace", newline="\n") as lines:
            for line in lines:
                try:
                    record = json.loads(line)
                    ids = np.array(record["token_ids"], dtype=np.int32)
                    key, answer = record["key"], Answer(ids, record["finished_by_stop"])
                    if _line(key, answer) != line:
                        raise ValueError
                except (ValueError, KeyError, TypeError, OverflowError):
                    self.num_unreadable += 1
                else:
                    self._answers[key] = answer


def _line(key: str, answer: Answer) -> str:
    record = {
        "key": key,
        "token_ids": answer.token_ids.tolist(),
        "finished_by_stop": answer.finished_by_stop,
    }
    return json.dumps({**record, "check": sha256_json(record)[:16]}) + "\n"


def answer_all(
    config: Config, verifier: Verifier, book: AnswerBook, wanted: Sequence[Question]
) -> None:
    """Ask for the answers the book lacks; an engine is started only if there are any.

    Raises:
        Interrupted: a stop signal arrived; the answers finished by then are kept.
    """
    missing = book.missing(wanted)
    if not missing:
        return
    num_found = len(wanted) - len(missing)
    unreadable = {"unreadable": book.num_unreadable} if book.num_unreadable else {}
    log("answers", to_come=len(missing), already_there=num_found, **unreadable)
    # Another seed after a stop, or the same random numbers would be drawn again.
    engine = Engine(config, verifier, seed=config.data.regenerate.seed + len(book))
    try:
        book.ask(engine, missing, Progress(len(wanted), "answers", done=num_found))
    finally:
        engine.close()
