"""Damage to published files: found and named before anything is computed from it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle3.errors import StaleInputError
from eagle3.shard_plan import PlannedShard, open_shards
from eagle3.shards import CapturedRow, ShardBuffer

LENGTHS_TOKENS = [[2, 3], [1, 4], [5]]
HIDDEN = 32
KEPT = np.array([True, True, False, True, True])
PLAN = [
    PlannedShard(f"shard-{number:05d}.safetensors", 0, row_ids, KEPT, "exact", 0)
    for number, row_ids in enumerate([[0, 1], [2, 3], [4]])
]


def write_shards(directory: Path, state_dtype: str = "exact") -> list[Path]:
    """Three small shards of rows 0 to 4; the first two have the same size."""
    generator = torch.Generator().manual_seed(0)
    paths, begin = [], 0
    for number, lengths in enumerate(LENGTHS_TOKENS):
        buffer = ShardBuffer.allocate(
            range(begin, begin + len(lengths)),
            lengths,
            num_aux=2,
            hidden_size=HIDDEN,
            dtype=torch.bfloat16,
            has_last_state=torch.from_numpy(KEPT),
            state_dtype=state_dtype,
        )
        num_tokens = sum(lengths)
        size = (num_tokens, HIDDEN)
        states = [torch.randn(size, generator=generator).bfloat16() for _ in range(3)]
        ids = torch.randint(100, (num_tokens,), generator=generator).int()
        buffer.put(torch.arange(num_tokens), ids, states)
        paths.append(directory / f"shard-{number:05d}.safetensors")
        buffer.publish(paths[-1])
        begin += len(lengths)
    return paths


def read_all(directory: Path) -> list[CapturedRow]:
    """As a stage reads 02's artifact: every row of every shard."""
    artifact = SimpleNamespace(path=lambda name: directory / name)
    shards = open_shards(artifact, PLAN)
    return [shard.row(i) for shard in shards for i in range(shard.num_rows)]


def same(ours: CapturedRow, theirs: CapturedRow) -> bool:
    return ours.row_id == theirs.row_id and all(
        torch.equal(getattr(ours, name).nan_to_num(), getattr(theirs, name).nan_to_num())
        for name in ("input_ids", "aux_hidden_states", "last_hidden_states")
    )


@pytest.fixture(scope="module", params=["exact", "int8"])
def shards(request, tmp_path_factory) -> tuple[Path, list[CapturedRow], int]:
    directory = tmp_path_factory.mktemp("shards")
    write_shards(directory, request.param)
    path = directory / "shard-00001.safetensors"
    return path, read_all(directory), len(path.read_bytes())


@given(st.data())
def test_a_byte_changed_anywhere_in_a_shard_is_named_or_changes_nothing(shards, data):
    """The header included: a space more in it may well be harmless."""
    path, rows, num_bytes = shards
    whole = path.read_bytes()
    place = data.draw(st.integers(0, num_bytes - 1))
    other = whole[place] ^ data.draw(st.integers(1, 255))
    try:
        path.write_bytes(whole[:place] + bytes([other]) + whole[place + 1 :])
        try:
            found = read_all(path.parent)
        except StaleInputError as error:
            assert str(path) in error.where and error.script == "02_gen_hidden_states.py"
            assert str(path) in error.fix
        else:
            assert all(same(a, b) for a, b in zip(found, rows, strict=True))
    finally:
        path.write_bytes(whole)


def test_no_part_of_the_states_is_uncovered(shards):
    """What the property test samples, for the part a drafter is trained on: the file's tail."""
    path, rows, num_bytes = shards
    whole = path.read_bytes()
    header_bytes = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:header_bytes])
    begins = [header[name]["data_offsets"][0] for name in header if "hidden" in name]
    try:
        for place in range(header_bytes + min(begins), num_bytes, 3):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(StaleInputError, match="changed on disk|cannot be read"):
                read_all(path.parent)
    finally:
        path.write_bytes(whole)
    assert all(same(a, b) for a, b in zip(read_all(path.parent), rows, strict=True))


def test_swapped_shards_of_one_size_are_found(tmp_path):
    first, second, _ = write_shards(tmp_path)
    assert first.stat().st_size == second.stat().st_size
    aside = first.rename(tmp_path / "aside")
    second.rename(first), aside.rename(second)
    with pytest.raises(StaleInputError, match="other rows") as caught:
        read_all(tmp_path)
    assert caught.value.where == str(first) and "rows 2 to 3" in caught.value.found
