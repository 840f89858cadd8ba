"""Files that are complete or absent.

Every artifact is written beside its destination under a partial name, fsynced, validated,
renamed, and its directory fsynced. A reader never sees half a file under its final name.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from .errors import NoRoomError

PARTIAL_SUFFIX = ".partial"
_CHUNK_BYTES = 1 << 20
_SAMPLE_BYTES = 1 << 16


@contextmanager
def publishing(path: Path) -> Iterator[Path]:
    """Yield a partial path beside ``path``; on a clean exit fsync it and rename it into place.

    The body writes the partial file and may validate it by reading it back; if the body raises,
    the partial file is removed and ``path`` is left as it was.

    Raises:
        NoRoomError: the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        yield partial
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
        fsync_directory(path.parent)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if is_disk_full(error):
            raise disk_full(path) from error
        raise


@contextmanager
def appending(path: Path) -> Iterator[TextIO]:
    """Open a file of lines to add to, fsynced at the end; whoever reads it allows for a last line
    cut in two.

    Raises:
        NoRoomError: the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(path, "a", encoding="utf-8") as file:
            try:
                yield file
            finally:
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        if is_disk_full(error):
            raise disk_full(path) from error
        raise


def is_disk_full(error: BaseException) -> bool:
    """Whether an error, or anything that caused it, is ENOSPC or EDQUOT.

    safetensors' Rust writer reports the errno in its message only.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if "No space left on device" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def disk_full(path: Path) -> NoRoomError:
    """The error for a write that met a full disk; what was published before stays readable."""
    free_bytes = shutil.disk_usage(path.parent).free
    return NoRoomError(
        "the disk is full; everything published so far is intact",
        where=path,
        expected="room for the next file",
        found=f"{format_bytes(free_bytes)} free",
        fix="free space on that file system",
    )


def fsync_directory(directory: Path) -> None:
    """Make renames in ``directory`` survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Publish a small text file."""
    with publishing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Publish a JSON file, keys in the order given."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_note(path: Path, value: Any) -> None:
    """Replace a small JSON file that no result depends on: whole or absent, but not fsynced, and
    left out where it cannot be written (a full disk must stop the work, not the word about it)."""
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    with contextlib.suppress(OSError):
        try:
            partial.write_text(json.dumps(value) + "\n", encoding="utf-8")
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def read_note(path: Path) -> dict[str, Any]:
    """What ``write_note`` wrote; {} if it is not there or not whole (after a power cut)."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def write_tensors(
    path: Path,
    tensors: dict[str, Any],
    *,
    metadata: dict[str, str] | None = None,
    validate: Callable[[Path], None] = lambda partial: None,
) -> None:
    """Publish a safetensors file; ``validate`` reads the partial file back and raises if wrong.

    Raises:
        NoRoomError: the disk is full.
    """
    from safetensors.torch import save_file

    with publishing(path) as partial:
        # save_file writes a file of a random name beside the one it is given, readable by its owner
        # alone, and renames it. In a directory of its own a kill leaves nothing that has no name.
        scratch = partial.with_name(f".{partial.name}")
        try:
            shutil.rmtree(scratch, ignore_errors=True)  # a killed process of several: no sweep
            scratch.mkdir()
            save_file(tensors, scratch / path.name, metadata=metadata)
            partial.touch()
            shutil.copymode(partial, scratch / path.name)
            os.replace(scratch / path.name, partial)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        validate(partial)


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's content, read in 1 MiB pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(_CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def sampled_sha256(path: Path) -> str:
    """Hex SHA-256 of a file's size and of 64 KiB from each of eight places, both ends included.

    For files too large to read whole at every start: an edited source, or a retrained checkpoint
    of the same shapes, cannot share it in practice.
    """
    size_bytes = path.stat().st_size
    digest = hashlib.sha256(str(size_bytes).encode())
    with open(path, "rb") as file:
        for place in range(8):
            file.seek(place * max(size_bytes - _SAMPLE_BYTES, 0) // 7)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def sha256_json(value: Any) -> str:
    """Hex SHA-256 of a JSON value in canonical form (sorted keys, no spaces)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def format_bytes(num_bytes: float) -> str:
    """``1536`` -> ``'1.5 KiB'``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
