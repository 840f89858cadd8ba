"""Rows in, published and proven shards out: the driver of the patched worker.

A shard is one unit of work. Proof that its states are the verifier's own, for every row: the
tokens the engine ran are the row's tokens; the token the engine emits next is
argmax(lm_head(norm(last state))) computed here from the stored exact state and the checkpoint; and
among the states that training reads, that token's is the same, to the precision it is kept in.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .contract import Wiring
from .eight_bit import MAX_RELATIVE_ERROR
from .engine import Engine, Sampling
from .errors import GateError, StaleInputError
from .files import sha256_json, write_json
from .shard_plan import PlannedShard
from .shards import Shard
from .verifier import Verifier

_ONE_TOKEN = Sampling(temperature=0, max_new_tokens=1)
# Share of the top logit within which two tokens may swap: the engine's logits and ours are rounded
# on different paths. bfloat16: two units in the last place. float32: several times the largest
# difference seen (4e-6), what many layers' sums in another order come to.
NEAR_TIE = {torch.bfloat16: 2**-6, torch.float32: 2**-16}
# How many times that may be believed where more was seen: a recomputation gone wrong sees anything.
MOST_ROUNDING = 4


class VerifierHead:
    """The verifier's own logits from captured last states, in plain torch."""

    def __init__(self, verifier: Verifier, dtype: str) -> None:
        self.dtype = getattr(torch, dtype)
        self.norm = verifier.final_norm().to(self.dtype)
        self.eps = verifier.rms_norm_eps
        self.lm_head = verifier.lm_head().to(self.dtype)

    def logits(self, last_states: torch.Tensor) -> torch.Tensor:
        """``[n, hidden]`` states before the final norm -> float32 ``[n, vocab_size]`` logits."""
        states = last_states.float()
        normed = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + self.eps)
        return ((normed.to(self.dtype) * self.norm) @ self.lm_head.T).float()

    def is_near_tie(self, logits: torch.Tensor, token_id: int, rounding: float = 0.0) -> bool:
        """Whether a token's logit is within rounding of the largest one.

        Args:
            rounding: as seen between engine and recomputation, in logits; believed up to
                ``MOST_ROUNDING`` times what the dtype alone explains.
        """
        top = logits.max()
        least = float(NEAR_TIE[self.dtype] * top.abs().clamp_min(1))
        allowed = min(max(rounding, least), MOST_ROUNDING * least)
        return bool(top - logits[token_id] <= allowed)


@dataclass(frozen=True)
class PendingShard:
    """A shard being written by the worker, and what the engine emitted after each of its rows."""

    path: Path
    rows: Sequence[Sequence[int]]
    next_token_ids: list[int]


def compute_shard(
    engine: Engine,
    wiring: Wiring,
    shard: PlannedShard,
    rows: Sequence[Sequence[int]],
    directory: Path,
) -> PendingShard:
    """Prefill a shard's rows through the engine and hand their states to the worker's writer."""
    engine.rpc(
        "capture_begin",
        [*wiring.aux_layer_ids, wiring.num_verifier_layers],
        shard.row_ids,
        [len(row) for row in rows],
        shard.has_last_state.tobytes(),
        shard.state_dtype,
    )
    next_token_ids = [-1] * len(rows)
    for completion in engine.generate(rows, _ONE_TOKEN):
        next_token_ids[completion.index] = completion.token_ids[0]
    path = directory / shard.name
    engine.rpc("capture_publish", str(path))
    return PendingShard(path, rows, next_token_ids)


def finish_shard(engine: Engine, head: VerifierHead, pending: PendingShard) -> dict[str, Any]:
    """Wait for the shard's file and prove it; its record (bytes, sha256, near ties) is published
    beside it as ``<shard>.json``, last: no record, no shard.

    Raises:
        GateError: a stored token or the verifier's next token is not what the states say.
        NoRoomError: the disk is full.
    """
    record = engine.rpc("capture_wait")
    shard = Shard.open(pending.path)
    final_states = shard.final_states()
    strays = relative_error(shard.kept_final_states(), final_states) > MAX_RELATIVE_ERROR
    for index, row in enumerate(pending.rows):
        begin, end = shard.row_offsets[index], shard.row_offsets[index + 1]
        if shard.input_ids[begin:end].tolist() != list(row):
            raise _unproven(shard, index, "the row's own tokens", "other tokens")
        if strays[index]:
            raise _unproven(shard, index, "the last token's state", "another state in its place")
    logits = head.logits(final_states)
    argmax = logits.argmax(-1).tolist()
    near_ties = 0
    for index, (emitted, ours) in enumerate(zip(pending.next_token_ids, argmax, strict=True)):
        if emitted != ours:
            if not head.is_near_tie(logits[index], emitted):
                found = f"the engine emitted {emitted}, the states say {ours}"
                raise _unproven(shard, index, "argmax(lm_head(norm(last state)))", found)
            near_ties += 1
    record = {**record, "rows": shard.num_rows, "tokens": shard.num_tokens, "near_ties": near_ties}
    write_json(record_path(pending.path), {**record, "self_digest": sha256_json(record)})
    return record


def capture_rows(
    engine: Engine,
    wiring: Wiring,
    head: VerifierHead,
    rows: Sequence[Sequence[int]],
    path: Path,
) -> Shard:
    """Capture a few rows into one proven shard, row ids 0, 1, ..., every state as computed (06
    replays what it served)."""
    everywhere = np.ones(sum(map(len, rows)), dtype=bool)
    shard = PlannedShard(path.name, None, list(range(len(rows))), everywhere, "exact", 0)
    finish_shard(engine, head, compute_shard(engine, wiring, shard, rows, path.parent))
    return Shard.open(path)


def relative_error(states: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """``[n]``: norm of the difference over the norm, state by state."""
    exact = exact.float()
    return (states.float() - exact).norm(dim=-1) / exact.norm(dim=-1).clamp_min(1e-30)


def read_record(path: Path, row_ids: Sequence[int]) -> dict[str, Any] | None:
    """A shard's record if both are there, the record whole, the shard of its size and rows.

    This is what a run that goes on takes for done; ``Shard.row`` compares what is inside.
    """
    try:
        record = json.loads(record_path(path).read_text(encoding="utf-8"))
        whole = record.pop("self_digest") == sha256_json(record)
        if not whole or record["bytes"] != path.stat().st_size:
            return None
        return record if Shard.open(path).row_ids.tolist() == list(row_ids) else None
    except (OSError, ValueError, KeyError, AttributeError, StaleInputError):
        return None


def read_records(directory: Path, plan: Iterable[PlannedShard]) -> dict[str, dict[str, Any] | None]:
    """The record of every planned shard by name, None for one that is not there or not proven."""
    os.listdir(directory)  # an NFS client then asks for other nodes' new files
    return {each.name: read_record(directory / each.name, each.row_ids) for each in plan}


def record_path(shard_path: Path) -> Path:
    """``shard-00000.safetensors`` -> ``shard-00000.json``."""
    return shard_path.with_suffix(".json")


def _unproven(shard: Shard, index: int, expected: str, found: str) -> GateError:
    shard.path.unlink()
    return GateError(
        "captured states are not the verifier's own; the shard was thrown away",
        where=f"{shard.path.name}, row {int(shard.row_ids[index])}",
        expected=expected,
        found=found,
        fix="check that the engine serves the checkpoint in verifier.path, unmodified",
    )
