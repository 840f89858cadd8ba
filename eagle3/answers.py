"""Asking the verifier for answers, resumably, and making rows of them.

Finished answers are published in parts, ``part-00000.jsonl`` and so on, each line
``{"key", "token_ids", "finished_by_stop"}``. The key is a digest of the question, so a rerun asks
only for what has no answer yet, whatever order the questions come in.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from .config import Config, RegenerateSection
from .engine import Engine, Sampling
from .errors import StaleInputError
from .files import sha256_json, write_text
from .script import Progress, log, stop_flag
from .selection import Candidate
from .verifier import Verifier

PUBLISH_EVERY_S = 20  # what a kill can cost


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
    """The answers under a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
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
        """Answer every question, publishing as answers finish.

        Whatever ends it, the answers finished by then are published.

        Raises:
            Interrupted: a stop signal arrived.
        """
        lines: list[str] = []
        num_tokens, start_s = 0, time.monotonic()
        published_s = start_s
        try:
            prompts = [question.prompt_ids for question in questions]
            sampling = [question.sampling for question in questions]
            with closing(engine.generate(prompts, sampling)) as completions:
                for completion in completions:
                    record = {
                        "key": questions[completion.index].key,
                        "token_ids": list(completion.token_ids),
                        "finished_by_stop": completion.finished_by_stop,
                    }
                    lines.append(json.dumps(record))
                    num_tokens += len(completion.token_ids)
                    rate = num_tokens / (time.monotonic() - start_s)
                    progress.advance(1, tokens_per_s=round(rate))
                    if time.monotonic() - published_s >= PUBLISH_EVERY_S:
                        self._publish(lines)
                        lines, published_s = [], time.monotonic()
                    stop_flag.raise_if_set()
        finally:
            if lines:
                self._publish(lines)
            progress.close()

    def _publish(self, lines: list[str]) -> None:
        path = self.directory / f"part-{self._next_part:05d}.jsonl"
        write_text(path, "\n".join(lines) + "\n")
        self._read(path)
        self._next_part += 1

    def _read(self, path: Path) -> None:
        try:
            for line in path.read_text(encoding="utf-8").splitlines():
                record = json.loads(line)
                ids = np.array(record["token_ids"], dtype=np.int32)
                self._answers[record["key"]] = Answer(ids, record["finished_by_stop"])
        except (ValueError, KeyError, TypeError) as error:
            raise StaleInputError(
                "a part of the answers is damaged",
                where=path,
                expected="one answer a line",
                found=f"{type(error).__name__}: {error}",
                fix=f"remove {path}: only its answers are asked for again",
            ) from error


def answer_all(
    config: Config, verifier: Verifier, book: AnswerBook, wanted: Sequence[Question]
) -> None:
    """Ask for the answers the book lacks; an engine is started only if there are any.

    Raises:
        Interrupted: a stop signal arrived; the answers finished by then are published.
    """
    missing = book.missing(wanted)
    if not missing:
        return
    num_found = len(wanted) - len(missing)
    log("answers", to_come=len(missing), already_there=num_found)
    # Another seed after a stop, or the same random numbers would be drawn again.
    engine = Engine(config, verifier, seed=config.data.regenerate.seed + len(book))
    try:
        book.ask(engine, missing, Progress(len(wanted), "answers", done=num_found))
    finally:
        engine.close()
