"""Token rows: what 01 publishes and every later stage reads.

A row is one conversation (or one assistant turn of it) exactly as the verifier sees and emits it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from .files import write_tensors


@dataclass(frozen=True)
class TokenRows:
    """Flat rows.

    Attributes:
        input_ids: int32 ``[num_tokens]``, all rows one after another.
        loss_mask: bool ``[num_tokens]``, True on the assistant's tokens, end of turn included.
        row_offsets: int64 ``[num_rows + 1]``; row r is tokens ``row_offsets[r]`` to
            ``row_offsets[r + 1]``, the end excluded.
        source_ids: int32 ``[num_rows]``, index into ``sources``.
        is_validation: bool ``[num_rows]``; no prompt stands on both sides.
        sources: names of the data sources.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    row_offsets: np.ndarray
    source_ids: np.ndarray
    is_validation: np.ndarray
    sources: tuple[str, ...]

    @classmethod
    def from_lists(
        cls,
        rows: Sequence[tuple[Sequence[int], Sequence[int]]],
        *,
        source_ids: Sequence[int],
        is_validation: Sequence[bool],
        sources: Sequence[str],
    ) -> TokenRows:
        """From ``(token ids, loss mask)`` pairs."""
        lengths = [len(ids) for ids, _ in rows]
        # Joined as arrays: as Python numbers a large corpus would take ten times the memory.
        input_ids = [np.asarray(ids, dtype=np.int32) for ids, _ in rows]
        loss_mask = [np.asarray(mask, dtype=bool) for _, mask in rows]
        return cls(
            input_ids=np.concatenate(input_ids or [np.empty(0, np.int32)]),
            loss_mask=np.concatenate(loss_mask or [np.empty(0, bool)]),
            row_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            source_ids=np.array(source_ids, dtype=np.int32),
            is_validation=np.array(is_validation, dtype=bool),
            sources=tuple(sources),
        )

    @property
    def num_rows(self) -> int:
        return len(self.row_offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, int64 ``[num_rows]``."""
        return np.diff(self.row_offsets)

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and loss mask of one row."""
        here = self.place(index)
        return self.input_ids[here], self.loss_mask[here]

    def place(self, index: int) -> slice:
        """Where one row lies among all tokens."""
        return slice(self.row_offsets[index], self.row_offsets[index + 1])

    def save(self, path: Path) -> None:
        """Publish as one safetensors file, read back and compared."""
        tensors = {
            "input_ids": torch.from_numpy(self.input_ids),
            "loss_mask": torch.from_numpy(self.loss_mask),
            "row_offsets": torch.from_numpy(self.row_offsets),
            "source_ids": torch.from_numpy(self.source_ids),
            "is_validation": torch.from_numpy(self.is_validation),
        }

        def validate(partial: Path) -> None:
            found = load_file(partial)
            assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())

        write_tensors(
            path, tensors, metadata={"sources": json.dumps(self.sources)}, validate=validate
        )

    @classmethod
    def load(cls, path: Path) -> TokenRows:
        with safe_open(path, framework="np") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            return cls(**tensors, sources=tuple(json.loads(file.metadata()["sources"])))
