"""Training batches from the shards: rows joined with their masks, laid out for one TTT step.

A batch holds whole rows end to end. A row of n tokens has n-1 drafter positions; position t reads
the aux states of token t and the embedding of token t+1 (see ``contract``). Logits, queries and
the MLP are only needed where something is supervised; every position gives keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch

from .attention import RowSpans
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
        input_ids: int64 ``[M]``; position t embeds token t+1.
        position_ids: int64 ``[M]``, t+1 within the row (speculators counts from 1; RoPE is
            relative, so a uniform shift changes nothing).
        rows: which keys each row's queries may see.
        supervised: int64 ``[S]``, supervised positions among M (those of TTT step 0).
        valid: bool ``[K, S]``, supervised at TTT step k.
        divisors: float32 ``[K]``, what the sum over valid positions is divided by: their number.
            In a share of one in n processes it is that of all shares over n: the average of the
            processes' losses and gradients is then the whole batch's mean. Infinite in a share
            that only keeps its process company (``plan.share_of``).
        last_hidden_states: ``[S, hidden]``, the verifier's last state of token t+1: it predicts
            t+2, and step k's target for position t is entry ``target_index[k]``.
        target_index: int64 ``[K, S]``, entry holding position t+k (itself where not valid): its
            target, and the token it embeds, are what step k needs at position t.
        next_token_ids: int64 ``[K, S]``, token t+2+k of the row (-1 beyond its end).
        answer_lengths: supervised positions of each answer, in order (for ``walk``).
    """

    aux_hidden_states: torch.Tensor
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    rows: RowSpans
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
        return len(self.position_ids) + len(self.rows.num_keys)

    def to(self, device: torch.device) -> Batch:
        """The batch on a device; copies are asynchronous from pinned memory."""
        return _on_tensors(self, lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """The batch in pinned memory."""
        return _on_tensors(self, torch.Tensor.pin_memory)


@dataclass(frozen=True)
class Row:
    """A captured row joined with its loss mask (bool ``[n]``)."""

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    aux_hidden_states: torch.Tensor
    last_hidden_states: torch.Tensor


def _on_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A dataclass with the function applied to its tensors, those of dataclasses in it too."""
    changed = {}
    for field in fields(value):
        part = getattr(value, field.name)
        if isinstance(part, torch.Tensor):
            changed[field.name] = function(part)
        elif is_dataclass(part):
            changed[field.name] = _on_tensors(part, function)
    return replace(value, **changed)


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
    >>> embedded = batch.input_ids[batch.supervised]  # by positions 1 and 2 at TTT step 0
    >>> embedded.tolist(), embedded[batch.target_index[1]][batch.valid[1]].tolist()  # and at 1
    ([12, 13], [13])
    >>> batch.next_token_ids.tolist()  # what positions 1 and 2 predict
    [[13, 14], [14, -1]]
    """
    supervised = [_supervised(row.loss_mask) for row in rows]
    num_keys = [len(row.input_ids) - 1 for row in rows]
    num_queries = [len(positions) for positions in supervised]
    key_begin = np.concatenate([[0], np.cumsum(num_keys)])
    num_supervised = sum(num_queries)
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
        input_ids=torch.cat([row.input_ids[1:] for row in rows]),
        position_ids=torch.cat([torch.arange(1, n + 1) for n in num_keys]),
        rows=RowSpans(tuple(num_queries), tuple(num_keys), torch.cat(supervised)),
        supervised=torch.cat(
            [p + int(begin) for p, begin in zip(supervised, key_begin, strict=False)]
        ),
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
            ours = np.concatenate([rows.row(i)[0] for i in shard.row_ids.tolist()])
            if not np.array_equal(shard.input_ids.numpy(), ours):
                raise _other_tokens(shard)

    def holds(self, row_ids: Iterable[int]) -> bool:
        """Whether the states of all these rows are here."""
        return all(row_id in self._place for row_id in row_ids)

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
        return batch.pin_memory() if pin else batch

    # One core reads; a second team of OpenMP threads would spin against the one that trains.
    with ThreadPoolExecutor(1, "batch-reader", torch.set_num_threads, (1,)) as pool:
        ahead = [pool.submit(load, row_ids) for row_ids in plan[:2]]
        for upcoming in [*plan[2:], None, None]:
            if not ahead:
                break
            yield ahead.pop(0).result()
            if upcoming is not None:
                ahead.append(pool.submit(load, upcoming))
