"""Hidden states on disk: shards are filled by the worker, and read row by row.

``shard_layout`` says what a shard holds. The worker imports this module inside vLLM's processes:
keep its imports few.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .errors import GateError, StaleInputError
from .files import write_tensors
from .shard_layout import (
    AUX,
    FINAL,
    LAST,
    SCALES,
    StateDtype,
    decode,
    encode,
    kept_offsets,
    require_sizes,
    row_checksum,
    row_parts,
)

_WHOLE = ("row_ids", "row_offsets", "row_checksums", "input_ids", "has_last_state")  # in memory


@dataclass
class ShardBuffer:
    """Host memory one shard is filled into, by position, as the engine computes it.

    Attributes:
        tensors: the file's, by name; request i of the engine is row i.
        filled: bool ``[num_tokens]``, positions written so far.
    """

    tensors: dict[str, torch.Tensor]
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
        has_last_state: torch.Tensor | None = None,
        state_dtype: StateDtype = "exact",
    ) -> ShardBuffer:
        """A buffer for some rows.

        Args:
            dtype: the verifier's.
            has_last_state: bool ``[num_tokens]``, each row's last token among them; all by default.
        """
        lengths = torch.tensor([0, *lengths_tokens], dtype=torch.int64)
        num_tokens, num_rows = int(lengths.sum()), len(row_ids)
        if has_last_state is None:
            has_last_state = torch.ones(num_tokens, dtype=torch.bool)
        tensors = {
            "row_ids": torch.tensor(row_ids, dtype=torch.int64),
            "row_offsets": lengths.cumsum(0),
            "row_checksums": torch.zeros(num_rows, dtype=torch.int64),
            "input_ids": torch.zeros(num_tokens, dtype=torch.int32),
            "has_last_state": has_last_state,
            FINAL: torch.zeros(num_rows, hidden_size, dtype=dtype),
        }
        for suffix, part in encode(torch.zeros(hidden_size, dtype=dtype), state_dtype).items():
            tensors[AUX + suffix] = part.new_zeros(num_tokens, num_aux, len(part))
            tensors[LAST + suffix] = part.new_zeros(int(has_last_state.sum()), len(part))
        return cls(tensors, torch.zeros(num_tokens, dtype=torch.bool))

    @property
    def row_offsets(self) -> torch.Tensor:
        return self.tensors["row_offsets"]

    def put(
        self, places: torch.Tensor, input_ids: torch.Tensor, states: list[torch.Tensor]
    ) -> None:
        """Write what one engine step computed; states are encoded where they lie.

        Args:
            places: int64 ``[n]``, flat positions in the shard.
            input_ids: int32 ``[n]``.
            states: the aux states in ascending layer order, then the last state, each ``[n, H]``.
        """
        tensors, (*aux_states, last_states) = self.tensors, states
        state_dtype = "int8" if AUX + SCALES in tensors else "exact"
        tensors["input_ids"][places] = input_ids.to("cpu")
        for slot, state in enumerate(aux_states):
            for suffix, part in encode(state, state_dtype).items():
                tensors[AUX + suffix][places, slot] = part.to("cpu")
        has_last_state = tensors["has_last_state"]
        kept = has_last_state[places]
        slots = has_last_state.cumsum(0)[places[kept]] - 1
        for suffix, part in encode(last_states[kept.to(last_states.device)], state_dtype).items():
            tensors[LAST + suffix][slots] = part.to("cpu")
        rows = torch.searchsorted(self.row_offsets, places, right=True) - 1
        is_final = places == self.row_offsets[rows + 1] - 1
        tensors[FINAL][rows[is_final]] = last_states[is_final.to(last_states.device)].to("cpu")
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
        self._require_finite(path)
        tensors, row_ids = self.tensors, self.tensors["row_ids"]
        kept = kept_offsets(tensors["has_last_state"], self.row_offsets)
        for index, row_id in enumerate(row_ids.tolist()):
            parts = row_parts(tensors, index, self.row_offsets, kept)
            tensors["row_checksums"][index] = row_checksum(row_id, parts)

        def validate(partial: Path) -> None:
            shard = Shard.open(partial)
            assert torch.equal(shard.row_ids, row_ids)
            for index in range(shard.num_rows):
                shard.row(index)

        write_tensors(path, tensors, validate=validate)

    def _require_finite(self, path: Path) -> None:
        everywhere = torch.arange(len(self.filled))
        for name, places in (
            (AUX, everywhere),
            (LAST, everywhere[self.tensors["has_last_state"]]),
            (FINAL, self.row_offsets[1:] - 1),
        ):
            # Codes are finite; where a state was not, their scale is not.
            values = self.tensors.get(name + SCALES, self.tensors[name])
            finite = torch.isfinite(values).flatten(1).all(1)
            if not finite.all():
                place = places[~finite][0]
                row = int(torch.searchsorted(self.row_offsets, place, right=True)) - 1
                raise GateError(
                    "the verifier computed a state that is not finite",
                    where=f"{path}: {name} of row {int(self.tensors['row_ids'][row])}",
                    expected="finite states",
                    found=f"{int((~finite).sum())} positions of the shard with NaN or infinity",
                    fix="check the verifier's weights and verifier.dtype (float16 overflows)",
                )


@dataclass(frozen=True)
class CapturedRow:
    """One row.

    Attributes:
        input_ids: int64 ``[n]``.
        aux_hidden_states: ``[n, num_aux, H]``, the verifier's dtype.
        last_hidden_states: ``[n, H]``; NaN where none is kept, so that a use of it shows.
    """

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
    kept_offsets: torch.Tensor
    row_checksums: torch.Tensor
    input_ids: torch.Tensor
    script: str
    _tensors: Mapping[str, Any]

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
            tensors = {name: file.get_slice(name) for name in file.keys()}
            row_ids, offsets, checksums, input_ids, has_last_state = map(file.get_tensor, _WHOLE)
            if int(offsets[0]) != 0 or bool((offsets.diff() <= 0).any()):
                raise ValueError("row_offsets do not ascend from 0")
            shapes = {name: tensor.get_shape() for name, tensor in tensors.items()}
            require_sizes(shapes, int(offsets[-1]), int(has_last_state.sum()))
            kept = kept_offsets(has_last_state, offsets)
            return cls(path, row_ids, offsets, kept, checksums, input_ids, script, tensors)
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
        """Read one row, decoded.

        Raises:
            StaleInputError: it is not what was captured.
        """
        row_id = int(self.row_ids[index])
        parts = row_parts(self._tensors, index, self.row_offsets, self.kept_offsets)
        found = row_checksum(row_id, parts)
        if found != int(self.row_checksums[index]):
            raise StaleInputError(
                "a captured row changed on disk",
                where=f"{self.path}, row {row_id}",
                expected=f"checksum {int(self.row_checksums[index]):x}",
                found=f"checksum {found:x}",
                fix=f"remove {self.path}: it alone is made again",
                script=self.script,
            )
        final, input_ids = parts[FINAL][0], parts["input_ids"].long()
        last_states = final.new_full((len(input_ids), len(final)), float("nan"))
        last_states[parts["has_last_state"]] = decode(parts, LAST, final.dtype)
        return CapturedRow(row_id, input_ids, decode(parts, AUX, final.dtype), last_states)

    def final_states(self) -> torch.Tensor:
        """Last state of every row's last token, as computed, ``[num_rows, H]``."""
        return self._tensors[FINAL][:]

    def kept_final_states(self) -> torch.Tensor:
        """The same where training would read it: among the last states kept, decoded."""
        dtype = self.final_states().dtype
        names = [name for name in (LAST, LAST + SCALES) if name in self._tensors]
        ends = self.kept_offsets[1:].tolist()
        kept = {
            name: torch.cat([self._tensors[name][end - 1 : end] for end in ends]) for name in names
        }
        return decode(kept, LAST, dtype)
