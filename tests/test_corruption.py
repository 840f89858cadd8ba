"""Damage to published files: found and named before anything is computed from it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle3.errors import StaleInputError
from eagle3.shards import CapturedRow, ShardBuffer, bytes_per_token, open_all, shard_bytes

LENGTHS_TOKENS = [[2, 3], [1, 4], [5]]


def write_shards(directory: Path) -> list[Path]:
    """Three small shards of rows 0 to 4; the first two have the same size."""
    generator = torch.Generator().manual_seed(0)
    paths, begin = [], 0
    for number, lengths in enumerate(LENGTHS_TOKENS):
        buffer = ShardBuffer.allocate(
            range(begin, begin + len(lengths)),
            lengths,
            num_aux=2,
            hidden_size=3,
            dtype=torch.bfloat16,
        )
        num_tokens = sum(lengths)
        states = [torch.randn(num_tokens, 3, generator=generator).bfloat16() for _ in range(3)]
        ids = torch.randint(100, (num_tokens,), generator=generator).int()
        buffer.put(torch.arange(num_tokens), ids, states)
        paths.append(directory / f"shard-{number:05d}.safetensors")
        buffer.publish(paths[-1])
        begin += len(lengths)
    return paths


def read_all(directory: Path) -> list[CapturedRow]:
    """As a stage reads 02's artifact: every row of every shard."""
    artifact = SimpleNamespace(
        manifest={"files": [path.name for path in directory.iterdir()]},
        path=lambda name: directory / name,
    )
    return [shard.row(i) for shard in open_all(artifact) for i in range(shard.num_rows)]


def same(ours: CapturedRow, theirs: CapturedRow) -> bool:
    return all(
        torch.equal(torch.as_tensor(getattr(ours, name)), torch.as_tensor(getattr(theirs, name)))
        for name in ("row_id", "input_ids", "aux_hidden_states", "last_hidden_states")
    )


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> tuple[Path, list[CapturedRow], int]:
    directory = tmp_path_factory.mktemp("shards")
    write_shards(directory)
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


def test_every_byte_of_the_states_is_covered(shards):
    """What the property test samples, for the part a drafter is trained on: the file's tail."""
    path, rows, num_bytes = shards
    whole = path.read_bytes()
    num_state_bytes = 5 * 3 * 3 * 2  # tokens x states x hidden x bfloat16
    try:
        for place in range(num_bytes - num_state_bytes, num_bytes):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(StaleInputError, match="changed on disk"):
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


def test_a_shard_takes_no_more_than_is_planned_for_it(tmp_path):
    for path, lengths in zip(write_shards(tmp_path), LENGTHS_TOKENS, strict=True):
        token_bytes = bytes_per_token(num_aux=2, hidden_size=3, dtype="bfloat16")
        planned = shard_bytes(len(lengths), sum(lengths), token_bytes)
        assert 0 <= planned - path.stat().st_size < 1024
