"""Hidden states on disk: shards of whole rows, flat tensors plus row offsets.

A shard is one safetensors file, readable row by row without the rest:

    input_ids           int32 [num_tokens]                   tokens the engine itself ran
    row_ids             int64 [num_rows]                     indices into 01's rows
    row_offsets         int64 [num_rows + 1]
    row_checksums       int64 [num_rows]                     XXH3 of all a row has in this file
    aux_hidden_states   dtype [num_tokens, num_aux, hidden]  entering each aux layer, ascending
    last_hidden_states  dtype [num_tokens, hidden]           last layer's output, before the norm

States are far too many to be read whole before training starts, so each row carries a checksum
and every reading of it is compared: XXH3 runs at memory speed, where SHA-256 of the file would
take as long as the states take to train on. The manifest has the SHA-256 besides.

The worker imports this module inside vLLM's processes: keep its imports few.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from .errors import GateError, StaleInputError
from .files import write_tensors

# safetensors' JSON of the six tensors takes about 500.
_MAX_HEADER_BYTES = 1024
_CAPTURE = "02_gen_hidden_states.py"


@dataclass
class ShardBuffer:
    """Host memory one shard is filled into, by position, as the engine computes it.

    Attributes:
        row_ids, row_offsets: as in the file; request i of the engine is row i.
        filled: bool ``[num_tokens]``, positions written so far.
    """

    row_ids: torch.Tensor
    row_offsets: torch.Tensor
    input_ids: torch.Tensor
    aux_hidden_states: torch.Tensor
    last_hidden_states: torch.Tensor
    filled: torch.Tensor

    @classmethod
    def allocate(
        cls,
        row_ids: Sequence[int],
        lengths_tokens: Sequence[int],
        *,
        num_aux: int,
        hidden_size: int,
        dtype: torch.dtype,
    ) -> ShardBuffer:
        lengths = torch.tensor([0, *lengths_tokens], dtype=torch.int64)
        num_tokens = int(lengths.sum())
        return cls(
            row_ids=torch.tensor(row_ids, dtype=torch.int64),
            row_offsets=lengths.cumsum(0),
            input_ids=torch.zeros(num_tokens, dtype=torch.int32),
            aux_hidden_states=torch.zeros(num_tokens, num_aux, hidden_size, dtype=dtype),
            last_hidden_states=torch.zeros(num_tokens, hidden_size, dtype=dtype),
            filled=torch.zeros(num_tokens, dtype=torch.bool),
        )

    def put(
        self, places: torch.Tensor, input_ids: torch.Tensor, states: list[torch.Tensor]
    ) -> None:
        """Write what one engine step computed.

        Args:
            places: int64 ``[n]``, flat positions in the shard.
            input_ids: int32 ``[n]``.
            states: the aux states in ascending layer order, then the last state, each ``[n, H]``.
        """
        for slot, state in enumerate(states[:-1]):
            self.aux_hidden_states[places, slot] = state.to("cpu")
        self.last_hidden_states[places] = states[-1].to("cpu")
        self.input_ids[places] = input_ids.to("cpu")
        self.filled[places] = True

    def publish(self, path: Path) -> None:
        """Write the shard, read it back, rename it into place.

        Raises:
            ValueError: a position was never computed.
            GateError: a state is not finite.
            NoRoomError: the disk is full.
        """
        missing = int((~self.filled).sum())
        if missing:
            raise ValueError(f"{missing} of {len(self.filled)} positions were never computed")
        for name in ("aux_hidden_states", "last_hidden_states"):
            finite = torch.isfinite(getattr(self, name)).flatten(1).all(1)
            if not finite.all():
                place = int((~finite).nonzero()[0])
                row = int(torch.searchsorted(self.row_offsets, place, right=True)) - 1
                raise GateError(
                    "the verifier computed a state that is not finite",
                    where=f"{path}: {name} of row {int(self.row_ids[row])}",
                    expected="finite states",
                    found=f"{int((~finite).sum())} positions of the shard with NaN or infinity",
                    fix="check the verifier's weights and verifier.dtype (float16 overflows)",
                )
        tensors = {
            "input_ids": self.input_ids,
            "row_ids": self.row_ids,
            "row_offsets": self.row_offsets,
            "row_checksums": torch.tensor([self._checksum(i) for i in range(len(self.row_ids))]),
            "aux_hidden_states": self.aux_hidden_states,
            "last_hidden_states": self.last_hidden_states,
        }

        def validate(partial: Path) -> None:
            shard = Shard.open(partial)
            assert torch.equal(shard.row_ids, self.row_ids)
            for index in range(shard.num_rows):
                shard.row(index)

        write_tensors(path, tensors, validate=validate)

    def _checksum(self, index: int) -> int:
        here = slice(int(self.row_offsets[index]), int(self.row_offsets[index + 1]))
        return row_checksum(
            int(self.row_ids[index]),
            self.input_ids[here],
            self.aux_hidden_states[here],
            self.last_hidden_states[here],
        )


def row_checksum(row_id: int, *tensors: torch.Tensor) -> int:
    """Signed 64-bit XXH3 of a row's stored tensors end to end, its id the seed.

    A bit that flipped shows, and so do offsets that moved, or another row in this one's place.
    """
    digest = xxhash.xxh3_64(seed=row_id)
    for tensor in tensors:
        digest.update(tensor.view(torch.uint8).numpy())
    return int.from_bytes(digest.digest(), "big", signed=True)


@dataclass(frozen=True)
class CapturedRow:
    """One row: tokens int64 ``[n]``, aux states ``[n, num_aux, H]``, last states ``[n, H]``."""

    row_id: int
    input_ids: torch.Tensor
    aux_hidden_states: torch.Tensor
    last_hidden_states: torch.Tensor


@dataclass(frozen=True)
class Shard:
    """An open shard; rows are read from disk when asked for."""

    path: Path
    row_ids: torch.Tensor
    row_offsets: torch.Tensor
    row_checksums: torch.Tensor
    input_ids: torch.Tensor
    script: str
    _file: Any

    @classmethod
    def open(cls, path: Path, script: str = "") -> Shard:
        """Open and check a shard: readable to its end, offsets and shapes in agreement.

        Args:
            script: the one that makes it again, for errors to name; the running one by default.

        Raises:
            StaleInputError: missing, truncated, or no shard.
        """
        try:
            file = safe_open(path, framework="pt")
            row_ids, offsets = file.get_tensor("row_ids"), file.get_tensor("row_offsets")
            num_tokens = int(offsets[-1])
            shapes = {
                name: file.get_slice(name).get_shape()[0]
                for name in ("input_ids", "aux_hidden_states", "last_hidden_states")
            }
            if any(size != num_tokens for size in shapes.values()):
                raise ValueError(f"row_offsets end at {num_tokens}, tensors hold {shapes}")
            checksums = file.get_tensor("row_checksums")
            if not len(row_ids) == len(checksums) == len(offsets) - 1:
                raise ValueError("row_ids, row_checksums and row_offsets are of different lengths")
            if int(offsets[0]) != 0 or bool((offsets.diff() <= 0).any()):
                raise ValueError("row_offsets do not ascend from 0")
            return cls(
                path, row_ids, offsets, checksums, file.get_tensor("input_ids"), script, file
            )
        except (SafetensorError, OSError, ValueError) as error:
            raise StaleInputError(
                "a hidden-state shard cannot be read",
                where=path,
                expected="a complete shard as 02 published it",
                found=f"{type(error).__name__}: {error}",
                fix=f"remove {path}: it alone is made again",
                script=script,
            ) from error

    @property
    def num_rows(self) -> int:
        return len(self.row_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    def row(self, index: int) -> CapturedRow:
        """Read one row.

        Raises:
            StaleInputError: it is not what was captured.
        """
        begin, end = int(self.row_offsets[index]), int(self.row_offsets[index + 1])
        row_id, input_ids = int(self.row_ids[index]), self.input_ids[begin:end]
        aux_states = self._file.get_slice("aux_hidden_states")[begin:end]
        last_states = self._file.get_slice("last_hidden_states")[begin:end]
        found = row_checksum(row_id, input_ids, aux_states, last_states)
        if found != int(self.row_checksums[index]):
            raise StaleInputError(
                "a captured row changed on disk",
                where=f"{self.path}, row {row_id}",
                expected=f"checksum {int(self.row_checksums[index]):x}",
                found=f"checksum {found:x}",
                fix=f"remove {self.path}: it alone is made again",
                script=self.script,
            )
        return CapturedRow(row_id, input_ids.long(), aux_states, last_states)

    def final_states(self) -> torch.Tensor:
        """Last state of every row's last token, ``[num_rows, H]``."""
        last = self._file.get_slice("last_hidden_states")
        return torch.cat([last[int(end) - 1 : int(end)] for end in self.row_offsets[1:]])


def open_all(artifact: Any) -> list[Shard]:
    """Every shard of 02's artifact, in order, each with the rows its place says.

    Raises:
        StaleInputError: one cannot be read, or holds other rows.
    """
    shards, begin = [], 0
    for name in shard_names(artifact.manifest["files"]):
        shard = Shard.open(artifact.path(name), _CAPTURE)
        end = begin + shard.num_rows
        if shard.row_ids.tolist() != list(range(begin, end)):
            raise StaleInputError(
                "a shard holds other rows than its place says",
                where=shard.path,
                expected=f"rows {begin} to {end - 1}",
                found=f"rows {int(shard.row_ids.min())} to {int(shard.row_ids.max())}: "
                "shards were swapped, or their row ids changed",
                fix=f"remove {shard.path}: it alone is made again",
                script=_CAPTURE,
            )
        shards.append(shard)
        begin = end
    return shards


def shard_names(names: Any) -> Iterator[str]:
    """Names of the shard files among an artifact's file names."""
    return (name for name in sorted(names) if name.endswith(".safetensors"))


def shard_bytes(num_rows: int, num_tokens: int, token_bytes: int) -> int:
    """What a shard takes on disk, at most: states, ids, offsets, checksums and the header.

    Args:
        token_bytes: as ``bytes_per_token`` says.
    """
    return num_tokens * token_bytes + 8 * (3 * num_rows + 1) + _MAX_HEADER_BYTES


def bytes_per_token(num_aux: int, hidden_size: int, dtype: str) -> int:
    """Disk a captured token takes: aux states, the last state, its id.

    >>> bytes_per_token(3, 7168, "bfloat16")  # Kimi-K2.5: 57,344 of states
    57348
    """
    return (num_aux + 1) * hidden_size * getattr(torch, dtype).itemsize + 4
