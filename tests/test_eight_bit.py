"""States in 8 bits: what comes back, and what a shard of them keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as np_st

from eagle3.contract import supervised_positions
from eagle3.eight_bit import GROUP, MAX_RELATIVE_ERROR, dequantise, quantise
from eagle3.errors import GateError
from eagle3.rows import TokenRows
from eagle3.shard_plan import last_states_kept
from eagle3.shards import Shard, ShardBuffer

HIDDEN, NUM_AUX = 64, 2
STATES = np_st.arrays(
    np.float32, (3, 2 * GROUP), elements=st.floats(-1e5, 1e5, width=32, allow_subnormal=False)
)


@given(STATES)
def test_no_value_is_off_by_more_than_half_a_step_of_its_group(values):
    states = torch.from_numpy(values)
    codes, scales = quantise(states)
    assert codes.dtype == torch.int8 and scales.shape == (3, 2)
    groups = states.unflatten(-1, (-1, GROUP))
    error = (dequantise(codes, scales, torch.float32).unflatten(-1, (-1, GROUP)) - groups).abs()
    # The scale is rounded to bfloat16: the largest value may be cut to 127 of its steps.
    most = groups.abs().amax(-1, keepdim=True) / 254 * (1 + 2**-7) + 1e-35
    assert bool((error <= most).all())


@given(STATES)
def test_a_state_is_never_further_than_the_proof_allows(values):
    states = torch.from_numpy(values).bfloat16()
    error = dequantise(*quantise(states), torch.bfloat16).float() - states.float()
    norm = states.float().norm(dim=-1)
    assert bool((error.norm(dim=-1) <= MAX_RELATIVE_ERROR * norm + 1e-30).all())


def test_a_large_channel_costs_its_own_group_alone():
    states = torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(0))
    outlier = states.clone()
    outlier[:, 3] = 1e4
    plain, disturbed = (dequantise(*quantise(s), torch.float32) for s in (states, outlier))
    assert torch.equal(plain[:, GROUP:], disturbed[:, GROUP:])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_states_that_are_not_finite_are_not_published(tmp_path, bad):
    buffer = ShardBuffer.allocate(
        [5], [3], num_aux=NUM_AUX, hidden_size=HIDDEN, dtype=torch.float32, state_dtype="int8"
    )
    states = [torch.ones(3, HIDDEN) for _ in range(NUM_AUX + 1)]
    states[1][2, 40] = bad
    buffer.put(torch.arange(3), torch.zeros(3).int(), states)
    with pytest.raises(GateError, match="aux_hidden_states of row 5"):
        buffer.publish(tmp_path / "shard-00000.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("state_dtype", ["exact", "int8"])
def test_a_shard_filled_in_any_order_gives_its_rows_back(tmp_path, state_dtype):
    """Rows of several lengths, put step by step as chunked prefills come; some last states kept."""
    generator = torch.Generator().manual_seed(0)
    lengths = [4, 1, 7, 3]
    num_tokens = sum(lengths)
    kept = torch.rand(num_tokens, generator=generator) < 0.4
    ends = torch.tensor(lengths).cumsum(0)
    kept[ends - 1] = True
    states = torch.randn(NUM_AUX + 1, num_tokens, HIDDEN, generator=generator).bfloat16()
    ids = torch.randint(1000, (num_tokens,), generator=generator).int()
    buffer = ShardBuffer.allocate(
        [9, 2, 4, 7],
        lengths,
        num_aux=NUM_AUX,
        hidden_size=HIDDEN,
        dtype=torch.bfloat16,
        has_last_state=kept,
        state_dtype=state_dtype,
    )
    for places in torch.randperm(num_tokens, generator=generator).split(4):
        buffer.put(places, ids[places], list(states[:, places]))
    path = tmp_path / "shard-00000.safetensors"
    buffer.publish(path)
    shard = Shard.open(path)
    assert torch.equal(shard.final_states(), states[-1, ends - 1])
    expected = states if state_dtype == "exact" else dequantise(*quantise(states), torch.bfloat16)
    for index, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        row = shard.row(index)
        assert row.row_id == [9, 2, 4, 7][index]
        assert torch.equal(row.input_ids, ids[begin:end].long())
        assert torch.equal(row.aux_hidden_states, expected[:-1, begin:end].transpose(0, 1))
        here = kept[begin:end]
        assert torch.equal(row.last_hidden_states[here], expected[-1, begin:end][here])
        assert bool(row.last_hidden_states[~here].isnan().all())
    assert torch.equal(shard.kept_final_states(), expected[-1, ends - 1])


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=5))
def test_last_states_are_kept_for_every_target_and_little_else(masks):
    rows = TokenRows.from_lists(
        [([0] * len(mask), mask) for mask in masks],
        source_ids=[0] * len(masks),
        is_validation=[False] * len(masks),
        sources=["made"],
    )
    kept = last_states_kept(rows)
    for index, mask in enumerate(masks):
        targets = {t + 1 for t in supervised_positions(mask, ttt_step=0)}
        found = set(np.flatnonzero(kept[rows.place(index)]).tolist())
        assert targets | {len(mask) - 1} <= found
        assert found <= targets | {0, len(mask) - 1}
