"""What vLLM's own drafter drafted, on disk: one row a draft, in the order the engine made them.

    request       int64   [A]        the prompt's index in its set
    position      int64   [A]        t: drafted from the state of token t and the embedding of t+1
    drafts        int64   [A, K]     target token ids drafted for tokens t+2, t+3, ...
    num_verified  int64   [A]        drafted tokens that the engine step ending at t+1 verified
    emitted       int64   [A, K+1]   tokens that step emitted, the last one being t+1; -1 beyond
    top_ids       int64   [A, K, 5]  the drafter's best tokens at each position of the chain
    top_logits    float32 [A, K, 5]

The worker imports this module inside vLLM's processes: keep its imports few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from .errors import GateError
from .files import write_tensors
from .intervals import Counts

NUM_TOP = 5


@dataclass(frozen=True)
class RecordedDrafts:
    """The file's tensors."""

    request: torch.Tensor
    position: torch.Tensor
    drafts: torch.Tensor
    num_verified: torch.Tensor
    emitted: torch.Tensor
    top_ids: torch.Tensor
    top_logits: torch.Tensor

    @classmethod
    def load(cls, path: Path) -> RecordedDrafts:
        return cls(**load_file(path))

    def save(self, path: Path) -> None:
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        write_tensors(path, {name: tensor.contiguous() for name, tensor in tensors.items()})

    def of_request(self, request: int) -> torch.Tensor:
        """Its rows, in the order they were made, int64."""
        return (self.request == request).nonzero().flatten()


@dataclass(frozen=True)
class EmittedAnswer:
    """What the engine emitted for one prompt.

    Attributes:
        token_ids: the answer, and what the step that ended it emitted beyond its end.
        num_accepted: of each draft that was verified, the drafted tokens accepted.
    """

    token_ids: tuple[int, ...]
    num_accepted: tuple[int, ...]


def emitted_answers(
    recorded: RecordedDrafts, answers: Sequence[Sequence[int]]
) -> list[EmittedAnswer]:
    """Put the steps of every request together again.

    A step made after the answer had ended (an engine that schedules ahead) is left out, as vLLM's
    counters leave it out.

    Args:
        answers: as the engine returned them, cut at their end.

    Raises:
        GateError: a step was made without a draft, so nothing is recorded of it.
    """
    emitted = []
    for request, answer in enumerate(answers):
        token_ids: list[int] = []
        num_accepted: list[int] = []
        for row in recorded.of_request(request).tolist():
            if len(token_ids) >= len(answer):
                break
            step = [token for token in recorded.emitted[row].tolist() if token >= 0]
            token_ids += step
            if recorded.num_verified[row]:
                num_accepted.append(len(step) - 1)
        if token_ids[: len(answer)] != list(answer):
            same = (ours == theirs for ours, theirs in zip(token_ids, answer, strict=False))
            place = next((i for i, is_same in enumerate(same) if not is_same), len(token_ids))
            raise GateError(
                "vLLM went on without drafting",
                where=f"the answer to prompt {request}, token {place}",
                expected="a draft after every step",
                found="none: it drafts for nobody while a request reaches beyond the drafter's "
                "max_position_embeddings",
                fix="set drafter.max_position_embeddings to the verifier's context, export again",
            )
        emitted.append(EmittedAnswer(tuple(token_ids), tuple(num_accepted)))
    return emitted


def served_counts(emitted: Sequence[EmittedAnswer], num_drafted: int) -> Counts:
    """Acceptance prompt by prompt, of answers as they were served."""
    accepted = [np.array(answer.num_accepted)[:, None] for answer in emitted]
    return Counts(
        np.array([len(each) for each in accepted], dtype=float),
        np.array([(each > np.arange(num_drafted)).sum(0) for each in accepted], dtype=float),
    )
