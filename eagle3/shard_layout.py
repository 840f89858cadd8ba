"""What a shard of hidden states holds: whole rows, flat tensors plus row offsets.

A shard is one safetensors file, readable row by row without the rest:

    row_ids              int64 [num_rows]                     indices into 01's rows
    row_offsets          int64 [num_rows + 1]
    row_checksums        int64 [num_rows]                     XXH3 of all a row has in this file
    input_ids            int32 [num_tokens]                   tokens the engine itself ran
    aux_hidden_states    dtype [num_tokens, num_aux, hidden]  entering each aux layer, ascending
    has_last_state       bool  [num_tokens]                   tokens whose last state is kept
    last_hidden_states   dtype [num_kept, hidden]             last layer's output, before the norm
    final_hidden_states  dtype [num_rows, hidden]             that of each row's last token

The dtype is the verifier's; in 8 bits aux and last states are int8 codes with
``aux_hidden_states.scales`` and ``last_hidden_states.scales`` besides (``eight_bit``).

A last state is a training target: it is kept where training asks for it and at each row's last
token, by which 02 proves the row. ``final_hidden_states`` has that one as it was computed.

States are far too many to be read whole before training starts, so each row carries a checksum
and every reading of it is compared: XXH3 runs at memory speed, where SHA-256 of the file would
take as long as the states take to train on. The manifest has the SHA-256 besides.

The worker imports this module inside vLLM's processes: keep its imports few.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import xxhash
from torch.nn.functional import pad

from .eight_bit import dequantise, quantise

StateDtype = Literal["exact", "int8"]
AUX, LAST, FINAL = "aux_hidden_states", "last_hidden_states", "final_hidden_states"
SCALES = ".scales"
_EXACT = {"row_ids", "row_offsets", "row_checksums", "input_ids", "has_last_state"}
_EXACT |= {AUX, LAST, FINAL}
_INT8 = _EXACT | {AUX + SCALES, LAST + SCALES}


def encode(states: torch.Tensor, state_dtype: StateDtype) -> dict[str, torch.Tensor]:
    """``[..., H]`` states as they are stored, by what the tensors' names end in."""
    if state_dtype == "exact":
        return {"": states}
    codes, scales = quantise(states)
    return {"": codes, SCALES: scales}


def decode(parts: Mapping[str, torch.Tensor], name: str, dtype: torch.dtype) -> torch.Tensor:
    """The states that ``encode`` was given; ``parts`` has more than this name's tensors."""
    scales = parts.get(name + SCALES)
    return parts[name] if scales is None else dequantise(parts[name], scales, dtype)


def kept_offsets(has_last_state: torch.Tensor, row_offsets: torch.Tensor) -> torch.Tensor:
    """int64 ``[num_rows + 1]``: how many last states the rows before a row keep."""
    return pad(has_last_state.cumsum(0), (1, 0))[row_offsets]


def row_parts(
    tensors: Mapping[str, Any], index: int, row_offsets: torch.Tensor, kept: torch.Tensor
) -> dict[str, torch.Tensor]:
    """What a row has of each tensor, by name.

    Args:
        tensors: in memory, or slices of a file: no more of it is read.
        kept: ``kept_offsets``.
    """
    tokens, states = (
        slice(*offsets[index : index + 2].tolist()) for offsets in (row_offsets, kept)
    )
    places = {"input_ids": tokens, "has_last_state": tokens, FINAL: slice(index, index + 1)}
    for suffix in ("", SCALES):
        places |= {AUX + suffix: tokens, LAST + suffix: states}
    return {name: tensors[name][place] for name, place in places.items() if name in tensors}


def row_checksum(row_id: int, parts: Mapping[str, torch.Tensor]) -> int:
    """Signed 64-bit XXH3 of a row's parts end to end, its id the seed.

    A bit that flipped shows, and so do offsets that moved, another dtype, or another row in this
    one's place.
    """
    digest = xxhash.xxh3_64(seed=row_id)
    for part in parts.values():
        digest.update(str(part.dtype).encode())
        digest.update(part.view(torch.uint8).numpy())
    return int.from_bytes(digest.digest(), "big", signed=True)


def require_sizes(shapes: Mapping[str, list[int]], num_tokens: int, num_kept: int) -> None:
    """Compare the tensors of a file with what its offsets say.

    Raises:
        ValueError: a tensor is missing, of another size, or none of a shard.
    """
    if set(shapes) not in (_EXACT, _INT8):
        raise ValueError(f"its tensors are {', '.join(sorted(shapes))}")
    num_rows = shapes["row_ids"][0]
    sizes = {"row_offsets": num_rows + 1, LAST: num_kept, LAST + SCALES: num_kept}
    sizes |= dict.fromkeys(("row_ids", "row_checksums", FINAL), num_rows)
    for name, shape in shapes.items():
        if shape[0] != sizes.get(name, num_tokens):
            raise ValueError(f"{name} holds {shape[0]}, not {sizes.get(name, num_tokens)}")
