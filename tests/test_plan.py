"""The plan, and the shares of its batches: the same training whatever the number of processes."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle3.batches import Row, RowReader, collate, count_valid, prefetched
from eagle3.plan import share_of
from eagle3.ranks import Ranks
from eagle3.rows import TokenRows

TTT_STEPS = 4
MASKS = st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=9)


@given(st.lists(st.integers(0, 99), min_size=1, max_size=20, unique=True), st.integers(1, 12))
def test_shares_are_the_batch(batch, count):
    shares = [share_of(batch, index, count) for index in range(count)]
    assert sorted(row for rows, counts in shares if counts for row in rows) == sorted(batch)
    assert all(rows and set(rows) <= set(batch) for rows, _ in shares)
    sizes = [len(rows) if counts else 0 for rows, counts in shares]
    assert max(sizes) - min(sizes) <= 1


class MadeReader(RowReader):
    """Rows whose states are zeros: only their masks matter here."""

    def __init__(self, rows: TokenRows) -> None:
        self.rows = rows

    def __getitem__(self, row_id: int) -> Row:
        ids, mask = self.rows.row(row_id)
        states = torch.zeros(len(ids), 1, 2)
        return Row(torch.from_numpy(ids), torch.from_numpy(mask), states, states[:, 0])


def _reader(masks: list[list[bool]]) -> MadeReader:
    # Every row begins a supervised answer, as ``trainable_rows`` demands.
    rows = [(range(len(m) + 3), [False, True, True, *m]) for m in masks]
    blank = [0] * len(rows)
    return MadeReader(
        TokenRows.from_lists(rows, source_ids=blank, is_validation=blank, sources=["made up"])
    )


@given(MASKS, st.integers(1, 6))
def test_the_ranks_average_is_the_batch_mean(masks, count):
    """Every position of the batch weighs the same, and the weights of a TTT step sum to one."""
    reader = _reader(masks)
    batch = range(len(masks))
    whole = collate([reader[i] for i in batch], TTT_STEPS)
    assert (
        whole.divisors.tolist()
        == count_valid([reader.rows.row(i)[1] for i in batch], TTT_STEPS).tolist()
    )
    summed = torch.zeros(TTT_STEPS)
    for index in range(count):
        (share,) = prefetched(reader, [batch], TTT_STEPS, pin=False, ranks=Ranks(index, count))
        weights = share.valid / share.divisors[:, None] / count
        expected = 1 / whole.divisors if index < len(masks) else torch.zeros(TTT_STEPS)
        assert torch.allclose(weights, share.valid * expected[:, None])
        summed += weights.sum(1)
    assert np.allclose(summed, whole.valid.any(1).float())


@given(MASKS)
def test_one_process_reads_the_batch_whole(masks):
    reader = _reader(masks)
    (batch,) = prefetched(reader, [range(len(masks))], TTT_STEPS, pin=False)
    whole = collate([reader[i] for i in range(len(masks))], TTT_STEPS)
    assert torch.equal(batch.divisors, whole.divisors) and torch.equal(batch.valid, whole.valid)
