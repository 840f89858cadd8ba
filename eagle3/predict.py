"""Replay over many answers: the acceptance a drafter should have when served, and where it errs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from .acceptance import Acceptance, asked, num_leading
from .capture import VerifierHead
from .intervals import Counts
from .progress import Progress
from .replay import Replay, Replayed
from .rows import TokenRows
from .script import stop_flag
from .shards import CapturedRow, Shard

_STATES_AT_ONCE = 256  # bounds the verifier's logits


@dataclass(frozen=True)
class Answer:
    """One answer inside a captured row: where it starts, how many tokens it has, its source."""

    row: CapturedRow
    start: int
    num_tokens: int
    source: str


@dataclass(frozen=True)
class Prediction:
    """What replay says of a set of answers: every draft that could be asked for, a row each.

    Attributes:
        tokens: of each answer, its row's token ids.
        ends: int64 ``[P]``, index of the token after each answer.
        sources: of each answer.
        answer: int64 ``[A]``, ordinal of the answer a draft belongs to, ascending.
        position: int64 ``[A]``, t: drafted from the state of token t and the embedding of t+1.
        drafts: int64 ``[A, K]``.
        truth: int64 ``[A, K]``, the tokens that are there, t+2, t+3, ...; -1 where unknown.
        probabilities: float32 ``[A, K]``, what the verifier gave each draft after the tokens
            before it; None for greedy answers. Says something only while earlier drafts match.
    """

    tokens: tuple[np.ndarray, ...]
    ends: np.ndarray
    sources: tuple[str, ...]
    answer: np.ndarray
    position: np.ndarray
    drafts: np.ndarray
    truth: np.ndarray
    probabilities: np.ndarray | None = None

    @cached_property
    def matches(self) -> np.ndarray:
        """bool ``[A, K]``."""
        return self.drafts == self.truth

    @cached_property
    def is_inside(self) -> np.ndarray:
        """bool ``[A, K]``, whether the token drafted for is the answer's: not beyond its end."""
        named = self.position[:, None] + 2 + np.arange(self.drafts.shape[1])
        return named < self.ends[self.answer][:, None]

    @cached_property
    def num_right(self) -> np.ndarray:
        """int64 ``[A]``, leading drafts that are right."""
        return num_leading(self.matches)

    @cached_property
    def is_asked(self) -> np.ndarray:
        """bool ``[A]``, whether the engine asks for the draft on its way through the answer."""
        starts = np.flatnonzero(np.diff(self.answer)) + 1
        return np.concatenate([asked(matches) for matches in np.split(self.matches, starts)])

    def first(self, num_drafted: int) -> Prediction:
        """The same answers drafted with shorter chains: how the first K of a chain turn out does
        not depend on those after them."""
        probabilities = self.probabilities
        return replace(
            self,
            drafts=self.drafts[:, :num_drafted],
            truth=self.truth[:, :num_drafted],
            probabilities=None if probabilities is None else probabilities[:, :num_drafted],
        )

    @cached_property
    def counts(self) -> Counts:
        """Answer by answer, what vLLM would count on the very tokens emitted."""
        places = np.arange(self.drafts.shape[1])
        return self._counts(self.num_right[:, None] > places)

    @property
    def expected(self) -> Counts:
        """Answer by answer, what its rejection sampler would accept on average.

        A drafted token is accepted with the probability the verifier gives it
        (``acceptance.py``): the same as ``counts`` without the luck of the draw.
        """
        assert self.probabilities is not None
        is_judged = self.num_right[:, None] >= np.arange(self.drafts.shape[1])
        return self._counts(np.where(is_judged, self.probabilities, 0))

    def _counts(self, accepted: np.ndarray) -> Counts:
        answer, num_answers = self.answer[self.is_asked], len(self.ends)
        sums = np.zeros((num_answers, accepted.shape[1]))
        np.add.at(sums, answer, accepted[self.is_asked])
        return Counts(np.bincount(answer, minlength=num_answers).astype(float), sums)

    @property
    def acceptance(self) -> Acceptance:
        """Of all answers together."""
        accepted = self.counts.accepted.sum(0).astype(int)
        return Acceptance(int(self.counts.num_drafts.sum()), tuple(accepted.tolist()))


def predict(
    name: str,
    replay: Replay,
    answers: Iterable[Answer],
    total: int,
    num_draft_tokens: int,
    head: VerifierHead | None = None,
    temperature: float = 0,
) -> Prediction:
    """Replay answers one by one.

    Args:
        name: of the set, for the progress line.
        total: number of answers, at least 1.
        head: the verifier's, for answers drawn at a ``temperature`` above 0.

    Raises:
        Interrupted: a stop signal arrived.
    """
    tokens: list[np.ndarray] = []
    spans: list[tuple[int, int]] = []
    sources: list[str] = []
    replayed: list[Replayed] = []
    probabilities: list[torch.Tensor] = []
    progress = Progress(total, "answers replayed")
    for answer in answers:
        found = replay.answer(
            answer.row.input_ids,
            answer.row.aux_hidden_states,
            answer_start=answer.start,
            num_answer_tokens=answer.num_tokens,
            num_draft_tokens=num_draft_tokens,
        )
        if temperature > 0:
            assert head is not None
            probabilities.append(_probabilities(answer, found.drafts, head, temperature))
        tokens.append(answer.row.input_ids.numpy())
        spans.append((answer.start, answer.start + answer.num_tokens))
        sources.append(answer.source)
        replayed.append(found)
        progress.advance(1, set=name)
        stop_flag.raise_if_set()
    progress.close()
    return Prediction(
        tokens=tuple(tokens),
        ends=np.array([end for _, end in spans]),
        sources=tuple(sources),
        answer=np.repeat(np.arange(len(spans)), [end - start for start, end in spans]),
        position=np.concatenate([np.arange(start - 1, end - 1) for start, end in spans]),
        drafts=torch.cat([each.drafts for each in replayed]).numpy(),
        truth=torch.cat([each.truth for each in replayed]).numpy(),
        probabilities=torch.cat(probabilities).numpy() if probabilities else None,
    )


def _probabilities(
    answer: Answer, drafts: torch.Tensor, head: VerifierHead, temperature: float
) -> torch.Tensor:
    """The verifier's probability of each draft, float32 ``[A, K]``.

    Token t+2+k is decided by the state of token t+1+k: counted from the answer's start, state
    i+k of draft i. Where the row ends before it, 0.
    """
    states = answer.row.last_hidden_states[answer.start :]
    num_states, (num_drafts, num_drafted) = len(states), drafts.shape
    steps = torch.arange(num_drafted)
    by_state = torch.empty(num_states, num_drafted)
    for places in torch.arange(num_states).split(_STATES_AT_ONCE):
        asking = (places[:, None] - steps).clamp(0, num_drafts - 1)
        chances = (head.logits(states[places]) / temperature).softmax(-1)
        by_state[places] = chances.gather(1, drafts[asking, steps])
    decided_by = torch.arange(num_drafts)[:, None] + steps
    found = by_state[decided_by.clamp_max(num_states - 1), steps]
    return found.where(decided_by < num_states, 0)


def served_answers(
    name: str, states: Shard, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> Iterator[Answer]:
    """Row i of the shard is prompt i, answer i, and what the engine emitted beyond its end."""
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        yield Answer(states.row(index), len(prompt), len(answer), name)


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
                source = rows.sources[rows.source_ids[row_id]]
                yield Answer(cut, start, end - start, source)


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
