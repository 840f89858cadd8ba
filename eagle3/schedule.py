"""When things happen in a run of a known number of steps: learning rate, validations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def validation_steps(epochs: Sequence[Sequence[Any]], per_epoch: int) -> list[int]:
    """Optimizer steps after which to validate, evenly spread over each epoch, its end included.

    >>> validation_steps([[0] * 10, [0] * 3], 2)
    [5, 10, 12, 13]
    """
    found, begin = set(), 0
    for epoch in epochs:
        found |= {begin + math.ceil(len(epoch) * (i + 1) / per_epoch) for i in range(per_epoch)}
        begin += len(epoch)
    return sorted(found)


def linear_with_warmup(done_steps: int, warmup_steps: int, num_steps: int) -> float:
    """Factor on the peak learning rate: linear from 1/warmup, then linear to zero.

    >>> [linear_with_warmup(s, 2, 6) for s in range(7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if done_steps < warmup_steps:
        return (done_steps + 1) / warmup_steps
    return max(num_steps - done_steps, 0) / max(num_steps - warmup_steps, 1)


def schedule(optimizer: Optimizer, warmup_share: float, num_steps: int) -> LambdaLR:
    """An optimizer's learning rate over a run of ``num_steps``, by ``linear_with_warmup``."""
    warmup_steps = math.ceil(warmup_share * num_steps)
    return LambdaLR(optimizer, lambda done: linear_with_warmup(done, warmup_steps, num_steps))
