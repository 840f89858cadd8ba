"""Published files are complete or absent, and a full disk is an error an operator can act on."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from eagle3.errors import EXIT_NO_ROOM, NoRoomError
from eagle3.files import (
    PARTIAL_SUFFIX,
    format_bytes,
    is_disk_full,
    publishing,
    sha256_file,
    sha256_json,
    write_json,
    write_tensors,
    write_text,
)
from eagle3.leftovers import sweep

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=4,
)


def test_publishing_makes_directories_and_leaves_only_the_file(tmp_path):
    path = tmp_path / "a" / "b" / "file.txt"
    write_text(path, "grüße\n")
    assert path.read_text(encoding="utf-8") == "grüße\n"
    assert os.listdir(path.parent) == ["file.txt"]


def test_a_kill_while_tensors_are_written_leaves_only_what_is_swept(tmp_path, monkeypatch):
    """safetensors writes under a random name first; here the process ends right then."""

    def write_half(tensors, path, metadata):
        path.with_name(".tmpX1Y2Z3").write_bytes(b"half")
        os._exit(9)

    monkeypatch.setattr("safetensors.torch.save_file", write_half)
    if (pid := os.fork()) == 0:
        try:
            write_tensors(tmp_path / "shard.safetensors", {"a": torch.zeros(2)})
        finally:
            os._exit(1)  # whatever happens: no second test run
    os.waitpid(pid, 0)
    assert os.listdir(tmp_path) == [".shard.safetensors.partial"]
    sweep(tmp_path)
    assert os.listdir(tmp_path) == []


def test_tensors_are_as_readable_as_any_file(tmp_path):
    write_tensors(tmp_path / "a.safetensors", {"a": torch.zeros(2)})
    write_text(tmp_path / "b", "")
    assert (tmp_path / "a.safetensors").stat().st_mode == (tmp_path / "b").stat().st_mode
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "b"]


def test_nothing_stands_under_the_final_name_before_the_body_ends(tmp_path):
    path = tmp_path / "file"
    write_text(path, "old")
    with publishing(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
        assert partial.parent == path.parent  # a rename across file systems is no rename
    assert path.read_text() == "new"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError])
@pytest.mark.parametrize("there_before", [False, True])
def test_an_exception_leaves_what_was_there(error, there_before, tmp_path):
    path = tmp_path / "file"
    if there_before:
        write_text(path, "old")
    with pytest.raises(error), publishing(path) as partial:
        partial.write_text("half of the n")
        raise error("stop")
    assert os.listdir(tmp_path) == (["file"] if there_before else [])
    assert not there_before or path.read_text() == "old"


def test_what_a_killed_process_left_is_overwritten(tmp_path):
    (tmp_path / f"file{PARTIAL_SUFFIX}").write_text("left by a killed process, and longer")
    write_text(tmp_path / "file", "new")
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "new"


def test_a_file_that_reads_back_wrong_is_not_published(tmp_path):
    path = tmp_path / "x.safetensors"

    def refuse(partial: Path) -> None:
        assert torch.equal(load_file(partial)["x"], torch.arange(3))
        raise RuntimeError("not what was meant")

    with pytest.raises(RuntimeError):
        write_tensors(path, {"x": torch.arange(3)}, validate=refuse)
    assert os.listdir(tmp_path) == []
    write_tensors(path, {"x": torch.arange(3)}, metadata={"made by": "a test"})
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_a_full_device_is_no_room(tmp_path):
    """/dev/full refuses every write with the real ENOSPC, for any user."""
    path = tmp_path / "file"
    write_text(path, "old")
    (tmp_path / f"file{PARTIAL_SUFFIX}").symlink_to("/dev/full")
    with pytest.raises(NoRoomError) as caught:
        write_text(path, "new")
    assert caught.value.exit_code == EXIT_NO_ROOM and caught.value.where == str(path)
    assert os.listdir(tmp_path) == ["file"] and path.read_text() == "old"


@pytest.mark.parametrize("kind", ["text", "tensors"])
def test_a_full_file_system_is_no_room(kind, small_disk):
    """What is published stays, the partial file does not eat the room that is left."""
    path = small_disk / "file"
    write_text(small_disk / "before", "published")
    free_bytes = shutil.disk_usage(small_disk).free
    with pytest.raises(NoRoomError) as caught:
        if kind == "text":
            write_text(path, "x" * (free_bytes + 1))
        else:
            write_tensors(path, {"x": torch.zeros(free_bytes + 1, dtype=torch.uint8)})
    assert "free" in caught.value.found
    assert os.listdir(small_disk) == ["before"]
    assert (small_disk / "before").read_text() == "published"
    assert shutil.disk_usage(small_disk).free == free_bytes


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_is_recognised_under_other_errors(number):
    try:
        try:
            raise OSError(number, os.strerror(number))
        except OSError as error:
            raise RuntimeError("could not save") from error
    except RuntimeError as error:
        assert is_disk_full(error) is (number != errno.EIO)


@given(JSON)
def test_json_reads_back_as_written(tmp_path_factory, value):
    path = tmp_path_factory.getbasetemp() / "value.json"
    write_json(path, value)
    assert json.loads(path.read_text(encoding="utf-8")) == value


@given(st.dictionaries(st.text(), JSON, min_size=2))
def test_a_json_digest_knows_content_not_key_order(value):
    assert sha256_json(value) == sha256_json(dict(reversed(value.items())))
    key = next(iter(value))
    assert sha256_json(value) != sha256_json({**value, key: [value[key]]})
    assert sha256_json(value) != sha256_json({k: v for k, v in value.items() if k != key})


@pytest.mark.parametrize("num_bytes", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1])
def test_a_file_digest_is_sha256_of_all_of_it(num_bytes, tmp_path):
    content = os.urandom(num_bytes)
    (tmp_path / "file").write_bytes(content)
    assert sha256_file(tmp_path / "file") == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (4 << 30, "4.0 GiB"), (35 << 40, "35.0 TiB")],
)
def test_format_bytes(num_bytes, text):
    assert format_bytes(num_bytes) == text
