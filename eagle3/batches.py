"""Training batches from the shards: rows joined with their masks, laid out for one TTT step.

A batch holds whole rows end to end. A row of n tokens has n-1 drafter positions; position t reads
the aux states of token t and the embedding of token t+1 (see ``contract``). Logits, queries and
the MLP are only needed where something is supervised; every position gives keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from .errors import StaleInputError
from .plan import share_of
from .ranks import ALONE, Ranks
from .rows import TokenRows
from .shards import Shard


@dataclass(frozen=True)
class Batch:
    """One optimizer step's rows, or one process's share of them.

    M positions, S supervised ones, B rows, K TTT steps, A aux layers.

    Attributes:
        aux_hidden_states: ``[M, A * hidden]``, the verifier's dtype.
        input_ids: int64 ``[K, M]``; ``[k, t]`` is token t+1+k (0 beyond the row's end).
        position_ids: int64 ``[M]``, t+1 within the row (speculators counts from 1; RoPE is
            relative, so a uniform shift changes nothing).
        key_index: int64 ``[B, L]``, the row's positions among M, padded with 0.
        query_index: int64 ``[B, Q]``, the row's supervised positions among S, padded with 0.
        query_slot: int64 ``[S]``, where each supervised position lies in the flattened [B, Q].
        attention_mask: bool ``[B, 1, Q, L]``, True where a query may look.
        supervised: int64 ``[S]``, supervised positions among M (those of TTT step 0).
        valid: bool ``[K, S]``, supervised at TTT step k.
        divisors: float32 ``[K]``, what the sum over valid positions is divided by: their number.
            In a share of one in n processes it is that of all shares over n: the average of the
            processes' losses and gradients is then the whole batch's mean. Infinite in a share
            that only keeps its process company (``plan.share_of``).
        last_hidden_states: ``[S, hidden]``, the verifier's last state of token t+1: it predicts
            t+2, and step k's target for position t is entry ``target_index[k]``.
        target_index: int64 ``[K, S]``, entry holding position t+k (itself where not valid).
        next_token_ids: int64 ``[K, S]``, token t+2+k of the row (-1 beyond its end).
        answer_lengths: supervised positions of each answer, in order (for ``walk``).
    """

    aux_hidden_states: torch.Tensor
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    key_index: torch.Tensor
    query_index: torch.Tensor
    query_slot: torch.Tensor
    attention_mask: torch.Tensor
    supervised: torch.Tensor
    valid: torch.Tensor
    divisors: torch.Tensor
    last_hidden_states: torch.Tensor
    target_index: torch.Tensor
    next_token_ids: torch.Tensor
    answer_lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the rows, prompts included."""
        return len(self.position_ids) + len(self.key_index)

    def to(self, device: torch.device) -> Batch:
        """The batch on a device; copies are asynchronous from pinned memory."""
        moved = {
            field.name: value.to(device, non_blocking=True)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
            else value
            for field in fields(self)
        }
        return Batch(**moved)


@dataclass(frozen=True)
class Row:
    """A captured row joined with its loss mask (bool ``[n]``)."""

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    aux_hidden_states: torch.Tensor
    last_hidden_states: torch.Tensor


def collate(rows: Sequence[Row], ttt_steps: int, divisors: torch.Tensor | None = None) -> Batch:
    """Lay rows out as a batch.

    Args:
        divisors: float32 ``[ttt_steps]``, of a share of a larger batch; these rows' own by default.

    >>> states = torch.zeros(5, 1, 2)
    >>> mask = torch.tensor([False, False, True, True, True])
    >>> row = Row(torch.tensor([10, 11, 12, 13, 14]), mask, states, states[:, 0])
    >>> batch = collate([row], ttt_steps=2)
    >>> batch.supervised.tolist(), batch.valid.tolist()
    ([1, 2], [[True, True], [True, False]])
    >>> batch.input_ids.tolist()  # what each of the 4 positions embeds at TTT steps 0 and 1
    [[11, 12, 13, 14], [12, 13, 14, 0]]
    >>> batch.next_token_ids.tolist()  # what positions 1 and 2 predict
    [[13, 14], [14, -1]]
    """
    supervised = [_supervised(row.loss_mask) for row in rows]
    num_keys = [len(row.input_ids) - 1 for row in rows]
    num_queries = [len(positions) for positions in supervised]
    key_begin = np.concatenate([[0], np.cumsum(num_keys)])
    query_begin = np.concatenate([[0], np.cumsum(num_queries)])
    max_keys, max_queries = max(num_keys), max(num_queries)
    num_rows, num_supervised = len(rows), int(query_begin[-1])

    key_index = torch.zeros(num_rows, max_keys, dtype=torch.int64)
    query_index = torch.zeros(num_rows, max_queries, dtype=torch.int64)
    attention_mask = torch.zeros(num_rows, 1, max_queries, max_keys, dtype=torch.bool)
    attention_mask[..., 0] = True  # a padded query looks somewhere: no empty softmax
    query_slot, flat_supervised = [], []
    for b, positions in enumerate(supervised):
        keys, queries = torch.arange(num_keys[b]), torch.arange(num_queries[b])
        key_index[b, : num_keys[b]] = keys + int(key_begin[b])
        query_index[b, : num_queries[b]] = queries + int(query_begin[b])
        attention_mask[b, 0, : num_queries[b], : num_keys[b]] = keys <= positions[:, None]
        query_slot.append(queries + b * max_queries)
        flat_supervised.append(positions + int(key_begin[b]))

    input_ids = torch.stack(
        [
            torch.cat([_shifted(row.input_ids, 1 + k, 1, 0) for row in rows])
            for k in range(ttt_steps)
        ]
    )
    next_ids, valid, target_index = [], [], []
    for k in range(ttt_steps):
        tokens = [_shifted(row.input_ids, 2 + k, 1, -1) for row in rows]
        chain = [_chain_mask(row.loss_mask, k) for row in rows]
        next_ids.append(torch.cat([t[p] for t, p in zip(tokens, supervised, strict=True)]))
        valid.append(torch.cat([c[p] for c, p in zip(chain, supervised, strict=True)]))
        # A valid chain at t makes t+1, ..., t+k supervised too: they follow t in S directly.
        entries = torch.arange(num_supervised)
        target_index.append(
            torch.where(valid[-1], (entries + k).clamp_max(num_supervised - 1), entries)
        )
    return Batch(
        aux_hidden_states=torch.cat([row.aux_hidden_states[:-1].flatten(1) for row in rows]),
        input_ids=input_ids,
        position_ids=torch.cat([torch.arange(1, n + 1) for n in num_keys]),
        key_index=key_index,
        query_index=query_index,
        query_slot=torch.cat(query_slot),
        attention_mask=attention_mask,
        supervised=torch.cat(flat_supervised),
        valid=torch.stack(valid),
        divisors=torch.stack(valid).sum(1).clamp_min(1).float() if divisors is None else divisors,
        last_hidden_states=torch.cat(
            [row.last_hidden_states[p + 1] for row, p in zip(rows, supervised, strict=True)]
        ),
        target_index=torch.stack(target_index),
        next_token_ids=torch.stack(next_ids),
        answer_lengths=tuple(
            int(length) for positions in supervised for length in _run_lengths(positions)
        ),
    )


def _chain_mask(loss_mask: torch.Tensor, ttt_step: int) -> torch.Tensor:
    """Bool ``[n-1]``: position t is supervised at this TTT step (``contract``'s rule)."""
    mask = loss_mask[1:].clone()
    for ahead in range(2, 3 + ttt_step):
        mask &= _shifted(loss_mask, ahead, 1, False)
    return mask


def count_valid(loss_masks: Sequence[np.ndarray], ttt_steps: int) -> torch.Tensor:
    """Float32 ``[K]``: supervised positions of all rows at each TTT step, at least 1."""
    masks = [torch.from_numpy(mask) for mask in loss_masks]
    counts = [sum(int(_chain_mask(mask, k).sum()) for mask in masks) for k in range(ttt_steps)]
    return torch.tensor(counts, dtype=torch.float32).clamp_min(1)


def _supervised(loss_mask: torch.Tensor) -> torch.Tensor:
    return _chain_mask(loss_mask, 0).nonzero()[:, 0]


def _shifted(values: torch.Tensor, ahead: int, drop: int, fill: Any) -> torch.Tensor:
    """``[n - drop]``: entry t is ``values[t + ahead]``, or ``fill`` beyond the end."""
    shifted = values.new_full((len(values) - drop,), fill)
    kept = values[ahead : ahead + len(shifted)]
    shifted[: len(kept)] = kept
    return shifted


def _run_lengths(positions: torch.Tensor) -> np.ndarray:
    """Lengths of the runs of consecutive positions: one a supervised answer."""
    breaks = (positions.diff() != 1).nonzero()[:, 0].numpy() + 1
    return np.diff(np.concatenate([[0], breaks, [len(positions)]]))


class RowReader:
    """Rows of the shards by 01's row index, joined with their loss masks.

    Raises:
        StaleInputError: a shard cannot be read, or its tokens are not 01's (found on opening).
    """

    def __init__(self, rows: TokenRows, shards: Sequence[Shard]) -> None:
        self.rows = rows
        self._place = {
            int(row_id): (shard, index)
            for shard in shards
            for index, row_id in enumerate(shard.row_ids)
        }
        for shard in shards:
            first, last = int(shard.row_ids[0]), int(shard.row_ids[-1])
            ours = rows.input_ids[rows.row_offsets[first] : rows.row_offsets[last + 1]]
            if not np.array_equal(shard.input_ids.numpy(), ours):
                raise _other_tokens(shard)

    def __getitem__(self, row_id: int) -> Row:
        shard, index = self._place[row_id]
        captured = shard.row(index)
        mask = torch.from_numpy(self.rows.row(row_id)[1])
        return Row(
            captured.input_ids, mask, captured.aux_hidden_states, captured.last_hidden_states
        )


def _other_tokens(shard: Shard) -> StaleInputError:
    return StaleInputError(
        "a shard holds other tokens than 01's rows",
        where=shard.path,
        expected="the token ids of 01_data/rows.safetensors",
        found="other ids: shards were swapped, or the rows made again",
        fix="redo 02 (02_gen_hidden_states.py --redo)",
    )


def prefetched(
    reader: RowReader,
    plan: Sequence[Sequence[int]],
    ttt_steps: int,
    *,
    pin: bool,
    ranks: Ranks = ALONE,
) -> Iterator[Batch]:
    """The plan's batches in order, of each this rank's share, the next one read and laid out while
    this one trains. A rank reads its own rows only; the others' loss masks are in memory."""

    def load(batch_rows: Sequence[int]) -> Batch:
        row_ids, counts = share_of(batch_rows, ranks.index, ranks.count)
        divisors = None
        if ranks.count > 1:
            masks = [reader.rows.row(row_id)[1] for row_id in batch_rows]
            divisors = count_valid(masks, ttt_steps) / (ranks.count if counts else 0)
        batch = collate([reader[row_id] for row_id in row_ids], ttt_steps, divisors)
        if pin:
            for field in fields(batch):
                value = getattr(batch, field.name)
                if isinstance(value, torch.Tensor):
                    object.__setattr__(batch, field.name, value.pin_memory())
        return batch

    # One core reads; a second team of OpenMP threads would spin against the one that trains.
    with ThreadPoolExecutor(1, "batch-reader", torch.set_num_threads, (1,)) as pool:
        ahead = [pool.submit(load, row_ids) for row_ids in plan[:2]]
        for upcoming in [*plan[2:], None, None]:
            if not ahead:
                break
            yield ahead.pop(0).result()
            if upcoming is not None:
                ahead.append(pool.submit(load, upcoming))
