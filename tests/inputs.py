"""Upstream artifacts made up in a moment, published as the scripts do: for tests of 02 and 04."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from eagle3.config import Config
from eagle3.config_file import load_config
from eagle3.contract import Wiring
from eagle3.rows import TokenRows
from eagle3.script import Invocation
from eagle3.shard_plan import PlannedShard, plan_shards
from eagle3.shards import ShardBuffer
from eagle3.stage import Stage
from eagle3.verifier import Verifier
from eagle3.vocab import VocabMap

_FAVOURITE = 7  # the token that most rows are made of, and that the verifier predicts


def publish_rows(config_path: Path, num_rows: int, num_validation: int) -> TokenRows:
    """01: rows of 6 to 40 tokens, the last two thirds of each supervised."""
    config, invocation = _open(config_path)
    rng = np.random.default_rng(0)
    with Stage(config, "01_data", invocation) as stage:
        lengths = rng.integers(6, 41, num_rows)
        made = []
        for n in lengths:
            ids = rng.integers(0, stage.verifier.vocab_size, n)
            made.append((np.where(rng.random(n) < 0.7, _FAVOURITE, ids), np.arange(n) >= n // 3))
        rows = TokenRows.from_lists(
            made,
            source_ids=[0] * num_rows,
            is_validation=[i >= num_rows - num_validation for i in range(num_rows)],
            sources=["made up"],
        )
        rows.save(stage.directory / "rows.safetensors")
        stage.commit(files=["rows.safetensors"], counts={})
    return rows


def publish_shards(config_path: Path, rows: TokenRows, lean: float = 2) -> None:
    """02: random states of the rows, the last one leaning to one token: that can be learned."""
    config, invocation = _open(config_path)
    with Stage(config, "02_hidden", invocation) as stage:
        wiring = Wiring.at_capture(config, stage.verifier)
        plan = plan_shards(rows, config, wiring)
        for shard in plan:
            publish_shard(stage.directory, shard, rows, wiring, stage.verifier, lean)
        stage.commit(files=[shard.name for shard in plan], counts={}, wiring=wiring)


def publish_shard(
    directory: Path,
    shard: PlannedShard,
    rows: TokenRows,
    wiring: Wiring,
    verifier: Verifier,
    lean: float = 2,
) -> None:
    """One shard of such states, the same whenever it is made."""
    favourite = verifier.lm_head()[_FAVOURITE] / verifier.final_norm()
    buffer = ShardBuffer.allocate(
        shard.row_ids,
        [int(rows.lengths[i]) for i in shard.row_ids],
        num_aux=len(wiring.aux_layer_ids),
        hidden_size=wiring.hidden_size,
        dtype=getattr(torch, wiring.dtype),
        has_last_state=torch.from_numpy(shard.has_last_state),
        state_dtype=shard.state_dtype,
    )
    generator = torch.Generator().manual_seed(shard.row_ids[0])
    size = (len(wiring.aux_layer_ids) + 1, shard.num_tokens, wiring.hidden_size)
    states = torch.randn(size, generator=generator)
    states[-1] += lean * favourite / favourite.square().mean().sqrt()
    ids = torch.from_numpy(np.concatenate([rows.row(i)[0] for i in shard.row_ids]))
    states = states.to(getattr(torch, wiring.dtype))
    buffer.put(torch.arange(len(ids)), ids, list(states))
    buffer.publish(directory / shard.name)


def publish_vocab(config_path: Path) -> None:
    """03: the first tokens of the vocabulary."""
    config, invocation = _open(config_path)
    with Stage(config, "03_vocab", invocation) as stage:
        ids = range(config.vocab.draft_vocab_size)
        vocab_map = VocabMap.from_target_ids(list(ids), stage.verifier.vocab_size)
        vocab_map.save(stage.directory / "vocab_map.safetensors")
        stage.commit(files=["vocab_map.safetensors"], counts={})


def _open(config_path: Path) -> tuple[Config, Invocation]:
    return load_config(config_path), Invocation("test", config_path, (), check=False, redo=False)
