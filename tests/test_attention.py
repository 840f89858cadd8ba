"""A TTT step's attention against dense softmax in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3 import attention
from eagle3.attention import RowSpans, attend

NUM_HEADS, HEAD_DIM = 2, 8
PARTS = ("queries", "keys", "values", "chain keys", "chain values")


@st.composite
def spans(draw):
    """Up to four rows of 1 to 12 keys, any of whose positions ask, or none of a row's."""
    num_keys = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    asking = [
        sorted(draw(st.sets(st.integers(0, n - 1), min_size=int(row == 0), max_size=n)))
        for row, n in enumerate(num_keys)
    ]
    return spans_of(num_keys, asking)


def spans_of(num_keys: list[int], asking: list[list[int]]) -> RowSpans:
    """Rows whose queries are those of the given positions."""
    last_key = torch.tensor([position for positions in asking for position in positions])
    return RowSpans(tuple(map(len, asking)), tuple(num_keys), last_key)


def random_inputs(rows: RowSpans, num_chain_steps: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries, keys, values, all chain keys and all chain values ``[k, S, N, D]``."""
    generator = torch.Generator().manual_seed(0)
    num_queries, num_keys = sum(rows.num_queries), sum(rows.num_keys)
    leading = [(num_queries,), (num_keys,), (num_keys,), *[(num_chain_steps, num_queries)] * 2]
    return [
        torch.randn(*shape, NUM_HEADS, HEAD_DIM, generator=generator).to(dtype) for shape in leading
    ]


def dense(queries, keys, values, chain_keys, chain_values, rows: RowSpans) -> torch.Tensor:
    """Softmax over all keys of the batch and the chain's, those out of sight masked."""
    query_row = torch.repeat_interleave(torch.tensor(rows.num_queries))
    key_row = torch.repeat_interleave(torch.tensor(rows.num_keys))
    key_place = torch.cat([torch.arange(n) for n in rows.num_keys])
    is_seen = (query_row[:, None] == key_row) & (key_place <= rows.last_key[:, None])
    scores = torch.einsum("snd,mnd->nsm", queries, keys).masked_fill(~is_seen, float("-inf"))
    own_scores = torch.einsum("snd,ksnd->nsk", queries, chain_keys)
    shares = (torch.cat([scores, own_scores], dim=-1) * HEAD_DIM**-0.5).softmax(-1)
    row_shares, own_shares = shares.split([len(keys), len(chain_keys)], dim=-1)
    return torch.einsum("nsm,mnd->snd", row_shares, values) + torch.einsum(
        "nsk,ksnd->snd", own_shares, chain_values
    )


def with_gradients(function, inputs: list[torch.Tensor], rows: RowSpans) -> list[torch.Tensor]:
    """The output, and every input's gradient for one fixed gradient of the output."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    output = function(*leaves, rows)
    generator = torch.Generator().manual_seed(1)
    output.backward(torch.randn(output.shape, generator=generator).to(output.dtype))
    none = torch.zeros(0, dtype=output.dtype)
    return [output.detach(), *(none if x.grad is None else x.grad for x in leaves)]


def ours(queries, keys, values, chain_keys, chain_values, rows: RowSpans) -> torch.Tensor:
    return attend(queries, keys, values, [*chain_keys], [*chain_values], rows)


def compare(
    rows: RowSpans,
    num_chain_steps: int,
    block_scores: int,
    *,
    dtype: torch.dtype = torch.float32,
    tolerance: float = 2e-6,
) -> None:
    inputs = random_inputs(rows, num_chain_steps, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(attention._BLOCK_SCORES, "cpu", block_scores)
        found = with_gradients(ours, inputs, rows)
    expected = with_gradients(dense, [x.double() for x in inputs], rows)
    for name, mine, theirs in zip(("output", *PARTS), found, expected, strict=True):
        assert mine.dtype == dtype or not mine.numel(), name
        # A gradient may vanish (a softmax over one key): then its rounding is what is left.
        difference = (mine.double() - theirs).norm() if theirs.numel() else 0.0
        assert difference <= tolerance * (theirs.norm() + theirs.numel() ** 0.5), name


@given(rows=spans(), num_chain_steps=st.integers(0, 6), block_queries=st.sampled_from([1, 3, 99]))
@settings(max_examples=60)
def test_equals_dense_softmax(rows, num_chain_steps, block_queries):
    longest = max(rows.num_keys)
    compare(rows, num_chain_steps, block_queries * longest * NUM_HEADS)


@pytest.mark.parametrize("num_chain_steps", range(7))
def test_equals_dense_softmax_on_long_rows(num_chain_steps):
    """Longer than a kernel's own blocks, with a prompt, two turns, and a row nobody asks."""
    asking = [
        [*range(300, 430), *range(600, 700)],
        [],
        [0],
        [*range(3, 90)],
    ]
    rows = spans_of([700, 33, 1, 90], asking)
    compare(rows, num_chain_steps, 50 * 700 * NUM_HEADS)


@pytest.mark.parametrize("num_chain_steps", [0, 2])
def test_bfloat16_is_as_close_as_its_rounding(num_chain_steps):
    rows = spans_of([120, 40], [[*range(30, 120)], [*range(10, 40)]])
    compare(rows, num_chain_steps, 1 << 20, dtype=torch.bfloat16, tolerance=2**-7)


def test_nothing_of_queries_times_keys_is_kept():
    """Rows twice as long keep twice the bytes for the backward pass, not four times."""

    def kept_bytes(num_keys: int) -> int:
        rows = spans_of([num_keys], [[*range(num_keys)]])
        inputs = [x.requires_grad_() for x in random_inputs(rows, 2, torch.float32)]
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.nbytes), id):
            ours(*inputs, rows)
        return sum(kept)

    assert kept_bytes(256) == 2 * kept_bytes(128) > 0
