"""Replay over many answers: the acceptance a drafter should have when served, and where it errs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from .acceptance import Acceptance, walk
from .progress import Progress
from .replay import Replay, Replayed
from .rows import TokenRows
from .script import stop_flag
from .shards import CapturedRow, Shard


@dataclass(frozen=True)
class Answer:
    """One answer inside a captured row: where it starts, and how many tokens it has."""

    row: CapturedRow
    start: int
    num_tokens: int


@dataclass
class Prediction:
    """What replay says of a set of answers.

    Attributes:
        acceptance: as vLLM would count it.
        misses: (draft position, drafted id, the verifier's id) -> times, counted at every
            position of an answer whose earlier drafts were all right.
    """

    acceptance: Acceptance
    misses: Counter[tuple[int, int, int]] = field(default_factory=Counter)

    def add(self, answer: Answer, replayed: Replayed) -> None:
        matches = replayed.matches.numpy()
        self.acceptance += walk(matches)
        num_right = np.cumprod(matches, axis=1).sum(1)  # leading drafts that are right
        for position, k in enumerate(num_right):
            token = answer.start + position + 1 + int(k)
            if k < matches.shape[1] and token < answer.start + answer.num_tokens:
                drafted = int(replayed.drafts[position, k])
                self.misses[int(k), drafted, int(answer.row.input_ids[token])] += 1


def predict(
    name: str, replay: Replay, answers: Iterable[Answer], total: int, num_draft_tokens: int
) -> Prediction:
    """Replay answers one by one.

    Args:
        name: of the set, for the progress line.
        total: number of answers.

    Raises:
        Interrupted: a stop signal arrived.
    """
    prediction = Prediction(Acceptance(0, (0,) * num_draft_tokens))
    progress = Progress(total, "answers replayed")
    for answer in answers:
        replayed = replay.answer(
            answer.row.input_ids,
            answer.row.aux_hidden_states,
            answer_start=answer.start,
            num_answer_tokens=answer.num_tokens,
            num_draft_tokens=num_draft_tokens,
        )
        prediction.add(answer, replayed)
        progress.advance(1, set=name)
        stop_flag.raise_if_set()
    progress.close()
    return prediction


def served_answers(
    states: Shard, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> Iterator[Answer]:
    """Row i of the shard is prompt i, answer i, and what the verifier would go on with."""
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        yield Answer(states.row(index), len(prompt), len(answer))


def validation_answers(shards: Iterable[Shard], rows: TokenRows) -> Iterator[Answer]:
    """Every assistant turn of the validation rows.

    A turn's row is cut at its end: what follows is the template's, and no draft is judged by it.
    """
    for shard in shards:
        for index, row_id in enumerate(shard.row_ids.tolist()):
            if not rows.is_validation[row_id]:
                continue
            row = shard.row(index)
            for start, end in spans(rows.row(row_id)[1]):
                cut = CapturedRow(
                    row_id,
                    row.input_ids[:end],
                    row.aux_hidden_states[:end],
                    row.last_hidden_states[:end],
                )
                yield Answer(cut, start, end - start)


def num_validation_answers(rows: TokenRows) -> int:
    """How many ``validation_answers`` there are, without opening a shard."""
    return sum(len(spans(rows.row(int(i))[1])) for i in rows.is_validation.nonzero()[0])


def spans(loss_mask: np.ndarray) -> list[tuple[int, int]]:
    """Runs of supervised tokens as (start, end).

    >>> spans(np.array([0, 1, 1, 0, 1], dtype=bool))
    [(1, 3), (4, 5)]
    """
    edges = np.diff(loss_mask.astype(np.int8), prepend=0, append=0)
    starts, ends = (edges == 1).nonzero()[0], (edges == -1).nonzero()[0]
    return list(zip(starts.tolist(), ends.tolist(), strict=True))
