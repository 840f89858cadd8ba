"""Which rows are trained on, in which order, and which process computes which of them.

The plan is a function of rows, batch size and seed, never of the number of processes: a batch is
one optimizer step for all of them together. So a run may be stopped under one number of processes
and resumed under another, and goes on with the same batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .contract import supervised_positions
from .errors import ConfigError
from .rows import TokenRows


def trainable_rows(rows: TokenRows) -> tuple[list[int], dict[str, int]]:
    """Training rows with at least one supervised position, and the others counted by reason."""
    kept, dropped = [], {"validation": 0, "nothing_supervised": 0}
    for index in range(rows.num_rows):
        if rows.is_validation[index]:
            dropped["validation"] += 1
        elif not supervised_positions(rows.row(index)[1], ttt_step=0):
            dropped["nothing_supervised"] += 1
        else:
            kept.append(index)
    return kept, dropped


def require_both(row_ids: Sequence[int], validation_ids: Sequence[int]) -> None:
    """Training and validation need at least one row each.

    Raises:
        ConfigError: one of them has none.
    """
    if not row_ids or not validation_ids:
        raise ConfigError(
            "there is nothing to train on, or nothing to validate on",
            where="data.sources",
            expected="at least one training and one validation row with a supervised position",
            found=f"{len(row_ids)} training rows, {len(validation_ids)} validation rows",
            fix="give 01 more conversations (data.sources, data.min_supervised_tokens)",
        )


def plan_epoch(
    row_ids: Sequence[int], lengths_tokens: np.ndarray, batch_tokens: int, seed: int
) -> list[list[int]]:
    """Every row once, shuffled, in batches of up to ``batch_tokens`` tokens of similar lengths.

    Similar lengths keep padding small; windows of some batches keep the order random. The same
    seed gives the same plan.
    """
    rng = np.random.default_rng(seed)
    order = rng.permutation(np.array(row_ids))
    window = max(16 * batch_tokens // max(int(lengths_tokens[order].mean()), 1), 1)
    batches: list[list[int]] = []
    for begin in range(0, len(order), window):
        part = order[begin : begin + window]
        batch, filled_tokens = [], 0
        for row in part[np.argsort(lengths_tokens[part], kind="stable")]:
            if batch and filled_tokens + lengths_tokens[row] > batch_tokens:
                batches.append(batch)
                batch, filled_tokens = [], 0
            batch.append(int(row))
            filled_tokens += lengths_tokens[row]
        batches.append(batch)
    return [batches[i] for i in rng.permutation(len(batches))]


def share_of(batch: Sequence[int], index: int, count: int) -> tuple[list[int], bool]:
    """The rows of a batch that process ``index`` of ``count`` computes, and whether they count.

    A batch has its rows in order of length, so dealing them out gives shares of similar sizes.
    Where there are fewer rows than processes, a process left without computes the first row at
    weight zero: it takes part in the averaging of gradients and adds nothing to them.

    >>> share_of([7, 3, 5], 0, 2), share_of([7, 3, 5], 1, 2), share_of([7], 1, 2)
    (([7, 5], True), ([3], True), ([7], False))
    """
    own = list(batch[index::count])
    return (own, True) if own else ([batch[0]], False)
