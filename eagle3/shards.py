"""Hidden states on disk: shards of whole rows, flat tensors plus row offsets.

A shard is one safetensors file, readable row by row without the rest:

    input_ids           int32 [num_tokens]                   tokens the engine itself ran
    row_ids             int64 [num_rows]                     indices into 01's rows
    row_offsets         int64 [num_rows + 1]
    aux_hidden_states   dtype [num_tokens, num_aux, hidden]  entering each aux layer, ascending
    last_hidden_states  dtype [num_tokens, hidden]           last layer's output, before the norm

The worker imports this module inside vLLM's processes: keep its imports few.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .errors import StaleInputError
from .files import write_tensors


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
            ValueError: a position was never computed, or a state is not finite.
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
                raise ValueError(f"{name} of row {int(self.row_ids[row])} is not finite")
        tensors = {
            "input_ids": self.input_ids,
            "row_ids": self.row_ids,
            "row_offsets": self.row_offsets,
            "aux_hidden_states": self.aux_hidden_states,
            "last_hidden_states": self.last_hidden_states,
        }

        def validate(partial: Path) -> None:
            shard = Shard.open(partial)
            assert torch.equal(shard.row_ids, self.row_ids)
            last = shard.row(shard.num_rows - 1)
            begin = int(self.row_offsets[-2])
            assert torch.equal(last.aux_hidden_states, self.aux_hidden_states[begin:])
            assert torch.equal(last.last_hidden_states, self.last_hidden_states[begin:])

        write_tensors(path, tensors, validate=validate)


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
    input_ids: torch.Tensor
    _file: Any

    @classmethod
    def open(cls, path: Path) -> Shard:
        """Open and check a shard: readable to its end, offsets and shapes in agreement.

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
            if len(row_ids) != len(offsets) - 1 or bool((offsets.diff() <= 0).any()):
                raise ValueError("row_offsets do not fit row_ids")
            return cls(path, row_ids, offsets, file.get_tensor("input_ids"), file)
        except (SafetensorError, OSError, ValueError) as error:
            raise StaleInputError(
                "a hidden-state shard cannot be read",
                where=path,
                expected="a complete shard as 02 published it",
                found=f"{type(error).__name__}: {error}",
                fix="redo the stage that wrote it (02_gen_hidden_states.py --redo)",
            ) from error

    @property
    def num_rows(self) -> int:
        return len(self.row_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    def row(self, index: int) -> CapturedRow:
        """Read one row."""
        begin, end = int(self.row_offsets[index]), int(self.row_offsets[index + 1])
        return CapturedRow(
            row_id=int(self.row_ids[index]),
            input_ids=self.input_ids[begin:end].long(),
            aux_hidden_states=self._file.get_slice("aux_hidden_states")[begin:end],
            last_hidden_states=self._file.get_slice("last_hidden_states")[begin:end],
        )

    def final_states(self) -> torch.Tensor:
        """Last state of every row's last token, ``[num_rows, H]``."""
        last = self._file.get_slice("last_hidden_states")
        return torch.cat([last[int(end) - 1 : int(end)] for end in self.row_offsets[1:]])


def open_all(artifact: Any) -> list[Shard]:
    """Every shard of 02's artifact, in order.

    Raises:
        StaleInputError: one cannot be read.
    """
    return [Shard.open(artifact.path(name)) for name in shard_names(artifact.manifest["files"])]


def shard_names(names: Any) -> Iterator[str]:
    """Names of the shard files among an artifact's file names."""
    return (name for name in sorted(names) if name.endswith(".safetensors"))


def bytes_per_token(num_aux: int, hidden_size: int, dtype: str) -> int:
    """Disk a captured token takes: aux states, the last state, its id.

    >>> bytes_per_token(3, 7168, "bfloat16")  # Kimi-K2.5: 57,344 of states
    57348
    """
    return (num_aux + 1) * hidden_size * getattr(torch, dtype).itemsize + 4
