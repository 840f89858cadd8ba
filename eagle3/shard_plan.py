"""Which rows lie in which shard, and what a shard takes on disk.

A function of 01's rows and the config: 02 works it off, and whoever reads the states computes it
again and compares. Validation rows come first, in shards of their own, and are always kept as they
were computed: what is measured on them is what a served drafter sees. Training rows follow, round
by round (``rounds``): a shard belongs to one round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .artifact import Artifact
from .config import Config
from .contract import Wiring
from .eight_bit import bytes_per_state
from .errors import StaleInputError
from .rows import TokenRows
from .shard_layout import StateDtype
from .shards import Shard

_CAPTURE = "02_gen_hidden_states.py"
# safetensors' JSON of the ten tensors takes about 850.
_MAX_HEADER_BYTES = 1024


@dataclass(frozen=True, eq=False)
class PlannedShard:
    """One shard: its file's name, the rows it holds in order, and what it takes on disk at most.

    Attributes:
        round_index: of the training round it belongs to; None for validation rows.
        has_last_state: bool ``[num_tokens]``, tokens whose last state is kept.
    """

    name: str
    round_index: int | None
    row_ids: list[int]
    has_last_state: np.ndarray
    state_dtype: StateDtype
    num_bytes: int

    @property
    def num_tokens(self) -> int:
        return len(self.has_last_state)


def plan_shards(rows: TokenRows, config: Config, wiring: Wiring) -> list[PlannedShard]:
    """Whole rows into shards of up to ``capture.shard_bytes``, or of one larger row."""
    kept = last_states_kept(rows)
    num_kept = np.add.reduceat(kept, rows.row_offsets[:-1], dtype=np.int64)
    rounds = rounds_of(rows, config)
    plan: list[PlannedShard] = []
    for round_index, row_ids in [(None, np.flatnonzero(rows.is_validation)), *enumerate(rounds)]:
        state_dtype = "exact" if round_index is None else config.capture.state_dtype
        sizes_bytes = bytes_of_rows(rows.lengths[row_ids], num_kept[row_ids], wiring, state_dtype)
        for part in pack(sizes_bytes, config.capture.shard_bytes - _MAX_HEADER_BYTES):
            plan.append(
                PlannedShard(
                    name=f"shard-{len(plan):05d}.safetensors",
                    round_index=round_index,
                    row_ids=row_ids[part].tolist(),
                    has_last_state=np.concatenate([kept[rows.place(i)] for i in row_ids[part]]),
                    state_dtype=state_dtype,
                    num_bytes=int(sizes_bytes[part].sum()) + _MAX_HEADER_BYTES,
                )
            )
    return plan


def rounds_of(rows: TokenRows, config: Config) -> list[np.ndarray]:
    """Training rows of each round, ascending; all of them in one unless ``capture.round_tokens``
    says how many tokens a round has at most. Which row is in which is drawn by ``data.seed``."""
    row_ids = np.flatnonzero(~rows.is_validation)
    if config.capture.round_tokens is None:
        return [row_ids]
    order = np.random.default_rng(config.data.seed).permutation(row_ids)
    parts = pack(rows.lengths[order], config.capture.round_tokens)
    return [np.sort(order[part]) for part in parts]


def bytes_of_rows(
    lengths_tokens: Any, num_kept: Any, wiring: Wiring, state_dtype: StateDtype
) -> Any:
    """Disk that rows take, from their lengths and the last states they keep: of one row, or of an
    array of them."""
    exact_bytes = wiring.hidden_size * getattr(torch, wiring.dtype).itemsize
    state_bytes = exact_bytes if state_dtype == "exact" else bytes_per_state(wiring.hidden_size)
    token_bytes = torch.int32.itemsize + torch.bool.itemsize
    token_bytes += len(wiring.aux_layer_ids) * state_bytes
    row_bytes = exact_bytes + 3 * torch.int64.itemsize
    return lengths_tokens * token_bytes + num_kept * state_bytes + row_bytes


def plain_bytes(config: Config) -> int:
    """A token's states as computed, the last one always among them: 57,344 for Kimi-K2.5."""
    num_states = len(config.capture.aux_layer_ids) + 1
    itemsize = getattr(torch, config.verifier.dtype).itemsize
    return num_states * config.drafter.hidden_size * itemsize


def pack(sizes: Sequence[int], limit: int) -> list[slice]:
    """Consecutive items in parts of up to ``limit``, or of one larger item.

    >>> pack([3, 4, 9, 2], 8)
    [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None)]
    """
    parts, begin, filled = [], 0, 0
    for index, size in enumerate(sizes):
        if index > begin and filled + size > limit:
            parts.append(slice(begin, index))
            begin, filled = index, 0
        filled += size
    return [*parts, slice(begin, len(sizes))] if len(sizes) else []


def last_states_kept(rows: TokenRows) -> np.ndarray:
    """Bool ``[num_tokens]``: tokens whose last state is kept: targets, and each row's last token.

    A supervised position t is judged by the state of token t+1, and tokens t+1 and t+2 are in the
    mask (``contract``).
    """
    kept = rows.loss_mask.copy()
    kept[:-1] &= rows.loss_mask[1:]
    kept[rows.row_offsets[1:] - 1] = True
    return kept


def open_states(
    hidden: Artifact, rows: TokenRows, config: Config, *, only_validation: bool = False
) -> list[Shard]:
    """Every shard that 02 has on disk now, or those of the validation rows.

    Raises:
        StaleInputError: one cannot be read, or holds other rows than it should.
    """
    plan = plan_shards(rows, config, hidden.wiring)
    if only_validation:
        plan = [shard for shard in plan if shard.round_index is None]
    return open_shards(hidden, [s for s in plan if s.name in hidden.manifest["files"]])


def open_shards(hidden: Artifact, plan: Sequence[PlannedShard]) -> list[Shard]:
    """Some shards of 02's, each with the rows it should hold.

    Raises:
        StaleInputError: one cannot be read, or holds other rows.
    """
    shards = []
    for planned in plan:
        shard = Shard.open(hidden.path(planned.name), _CAPTURE)
        if shard.row_ids.tolist() != planned.row_ids:
            raise StaleInputError(
                "a shard holds other rows than its place says",
                where=shard.path,
                expected=f"rows {_span(planned.row_ids)}",
                found=f"rows {_span(shard.row_ids.tolist())}: "
                "shards were swapped, or their row ids changed",
                fix=f"remove {shard.path}: it alone is made again",
                script=_CAPTURE,
            )
        shards.append(shard)
    return shards


def _span(row_ids: Sequence[int]) -> str:
    return f"{row_ids[0]} to {row_ids[-1]}, {len(row_ids)} of them"
