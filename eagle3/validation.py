"""Held-out rows through the drafter: the acceptance length to expect, and the loss."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .acceptance import Acceptance, walk
from .batches import RowReader, prefetched
from .ranks import ALONE, Ranks
from .ttt import TTTStep


@dataclass(frozen=True)
class Validation:
    """Held-out rows through the drafter.

    Attributes:
        acceptance: simulated: each answer walked as the engine walks it (``acceptance.walk``).
        accuracy_per_position: share of the drafts right at TTT step k among those right before it.
        loss: as in training, mean over batches weighted by positions.
    """

    acceptance: Acceptance
    accuracy_per_position: list[float]
    loss: float


@dataclass(frozen=True)
class _Part:
    """What one rank counted; sums of integers, and of floats as they are."""

    acceptance: Acceptance
    asked: torch.Tensor  # int64 [K]
    right: torch.Tensor
    losses: list[float]  # a batch's loss times its positions
    num_positions: int


@torch.no_grad()
def validate(
    step: TTTStep,
    reader: RowReader,
    plan: Sequence[list[int]],
    ttt_steps: int,
    ranks: Ranks = ALONE,
) -> Validation:
    """Run the validation plan; drafts are made at every position, then walked answer by answer.

    Ranks take whole batches, in turn, so every figure is the same whatever their number.
    """
    parts = ranks.gather(ranks.agree(lambda: _count(step, reader, ranks.part(plan), ttt_steps)))
    asked, right = sum(part.asked for part in parts), sum(part.right for part in parts)
    num_positions = sum(part.num_positions for part in parts)
    return Validation(
        acceptance=functools.reduce(operator.add, [part.acceptance for part in parts]),
        accuracy_per_position=(right / asked.clamp_min(1)).tolist(),
        # fsum: the exact sum, rounded once, in whatever order the batches come.
        loss=math.fsum(loss for part in parts for loss in part.losses) / max(num_positions, 1),
    )


def _count(step: TTTStep, reader: RowReader, plan: Sequence[list[int]], ttt_steps: int) -> _Part:
    device = step.drafter.fc.weight.device
    acceptance = Acceptance(0, (0,) * ttt_steps)
    asked = torch.zeros(ttt_steps, dtype=torch.int64)
    right = torch.zeros(ttt_steps, dtype=torch.int64)
    losses, num_positions = [], 0
    for batch in prefetched(reader, plan, ttt_steps, pin=False):
        result = step(batch.to(device), with_matches=True)
        acceptance += walk_answers(result.matches, batch.answer_lengths)
        matches = result.matches.T.cpu()  # [S, K]
        chain = matches.cumprod(1).bool()
        before = torch.cat([torch.ones(len(chain), 1, dtype=torch.bool), chain[:, :-1]], dim=1)
        asked += (before & batch.valid.T.cpu()).sum(0)
        right += chain.sum(0)
        losses.append(float(result.loss) * len(matches))
        num_positions += len(matches)
    return _Part(acceptance, asked, right, losses, num_positions)


def walk_answers(matches: torch.Tensor, answer_lengths: Sequence[int]) -> Acceptance:
    """Walk each answer of a batch as the engine does.

    Args:
        matches: bool ``[K, S]``, as ``TTTStep`` gives them.
        answer_lengths: supervised positions of each answer, in order.
    """
    acceptance = Acceptance(0, (0,) * len(matches))
    for answer in matches.T.cpu().split(list(answer_lengths)):
        # An answer's last token is known but never drafted from: the walk wants its row.
        last = torch.zeros(1, len(matches), dtype=torch.bool)
        acceptance += walk(torch.cat([answer, last]).numpy())
    return acceptance
