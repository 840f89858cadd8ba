"""Rows in, published and proven shards out: the driver of the patched worker.

A shard is one unit of work. Proof that its states are the verifier's own, for every row: the
tokens the engine ran are the row's tokens, and the token the engine emits next is
argmax(lm_head(norm(last state))) computed here from the stored bytes and the checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .contract import Wiring
from .engine import Engine, Sampling
from .errors import GateError, StaleInputError
from .files import sha256_json, write_json
from .shards import Shard
from .verifier import Verifier

_ONE_TOKEN = Sampling(temperature=0, max_new_tokens=1)
# Share of the top logit within which two tokens may swap: the engine's logits and ours are rounded
# on different paths. bfloat16: two units in the last place. float32: several times the largest
# difference seen (4e-6), what many layers' sums in another order come to.
NEAR_TIE = {torch.bfloat16: 2**-6, torch.float32: 2**-16}


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

    def is_near_tie(self, logits: torch.Tensor, token_id: int) -> bool:
        """Whether a token's logit is within rounding of the largest one."""
        top = logits.max()
        return bool(top - logits[token_id] <= NEAR_TIE[self.dtype] * top.abs().clamp_min(1))


@dataclass(frozen=True)
class PendingShard:
    """A shard being written by the worker, and what the engine emitted after each of its rows."""

    path: Path
    rows: Sequence[Sequence[int]]
    next_token_ids: list[int]


def compute_shard(
    engine: Engine,
    wiring: Wiring,
    row_ids: Sequence[int],
    rows: Sequence[Sequence[int]],
    path: Path,
) -> PendingShard:
    """Prefill rows through the engine and hand their states to the worker's writer."""
    layer_ids = [*wiring.aux_layer_ids, wiring.num_verifier_layers]
    lengths_tokens = [len(row) for row in rows]
    engine.rpc("capture_begin", layer_ids, [int(i) for i in row_ids], lengths_tokens)
    next_token_ids = [-1] * len(rows)
    for completion in engine.generate(rows, _ONE_TOKEN):
        next_token_ids[completion.index] = completion.token_ids[0]
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
    for index, row in enumerate(pending.rows):
        begin, end = shard.row_offsets[index], shard.row_offsets[index + 1]
        if shard.input_ids[begin:end].tolist() != list(row):
            raise _unproven(shard, index, "the row's own tokens", "other tokens")
    logits = head.logits(shard.final_states())
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
    """Capture a few rows into one proven shard, row ids 0, 1, ... (06 replays what it served)."""
    finish_shard(engine, head, compute_shard(engine, wiring, range(len(rows)), rows, path))
    return Shard.open(path)


def plan_shards(
    lengths_tokens: Sequence[int], shard_tokens: int, directory: Path
) -> dict[Path, list[int]]:
    """Whole rows, in order, into shards of up to ``shard_tokens`` tokens, or one longer row.

    >>> list(plan_shards([3, 4, 9, 2], 8, Path("02_hidden")).values())
    [[0, 1], [2], [3]]
    """
    plan: dict[Path, list[int]] = {}
    filled_tokens = shard_tokens
    for row_id, length_tokens in enumerate(lengths_tokens):
        if not plan or filled_tokens + length_tokens > shard_tokens:
            path = directory / f"shard-{len(plan):05d}.safetensors"
            plan[path], filled_tokens = [], 0
        plan[path].append(row_id)
        filled_tokens += int(length_tokens)
    return plan


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


def read_records(plan: Mapping[Path, Sequence[int]]) -> dict[Path, dict[str, Any] | None]:
    """The record of every planned shard, None for one that is not there or not proven."""
    for directory in {path.parent for path in plan}:
        os.listdir(directory)  # an NFS client then asks for other nodes' new files
    return {path: read_record(path, row_ids) for path, row_ids in plan.items()}


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
