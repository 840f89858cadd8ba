"""Which rows lie in which shard, and the room a shard is planned with."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.config_file import load_config
from eagle3.contract import Wiring
from eagle3.fingerprint import open_verifier
from eagle3.shard_plan import pack, plan_shards
from tests.inputs import publish_rows, publish_shard


@pytest.mark.parametrize("state_dtype", ["exact", "int8"])
def test_a_shard_takes_no_more_than_is_planned_for_it(write_config, tmp_path, state_dtype):
    path = write_config({"capture.state_dtype": state_dtype, "capture.shard_bytes": 1 << 16})
    rows, config = publish_rows(path, num_rows=40, num_validation=12), load_config(path)
    verifier = open_verifier(config.verifier)
    wiring = Wiring.at_capture(config, verifier)
    plan = plan_shards(rows, config, wiring)
    assert sorted(i for shard in plan for i in shard.row_ids) == list(range(40))
    for shard in plan:
        is_validation = shard.round_index is None
        assert {bool(rows.is_validation[i]) for i in shard.row_ids} == {is_validation}
        assert shard.state_dtype == ("exact" if is_validation else state_dtype)
        publish_shard(tmp_path, shard, rows, wiring, verifier)
        num_bytes = (tmp_path / shard.name).stat().st_size
        assert shard.num_bytes - 1024 < num_bytes <= shard.num_bytes <= 1 << 16
    assert len(plan) > 2


@given(st.lists(st.integers(1, 50), max_size=60))
def test_parts_hold_everything_in_order_and_no_two_would_fit_together(sizes):
    parts = pack(sizes, 64)
    assert [size for part in parts for size in sizes[part]] == sizes
    totals = [sum(sizes[part]) for part in parts]
    assert all(total <= 64 for total in totals)
    assert all(a + sizes[part.start] > 64 for a, part in zip(totals, parts[1:], strict=False))
