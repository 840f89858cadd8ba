"""The patched worker on real vLLM in float32, against transformers.

transformers runs in float64: in float32 its own rounding is already 5e-6 on such rows.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from eagle3.capture import (
    VerifierHead,
    capture_rows,
    compute_shard,
    finish_shard,
    relative_error,
)
from eagle3.config_file import load_config
from eagle3.contract import Wiring
from eagle3.eight_bit import MAX_RELATIVE_ERROR
from eagle3.engine import Engine
from eagle3.shard_plan import PlannedShard
from eagle3.shards import Shard
from eagle3.verifier import Verifier

pytestmark = pytest.mark.slow
LENGTHS_TOKENS = [3, 150, 7, 64, 31, 200, 1, 90, 12, 45, 128, 17, 5, 77, 300, 2, 33, 58, 110, 9]


@pytest.fixture(scope="module")
def captured(smollm2_dir, tmp_path_factory):
    """Every layer of SmolLM2 on rows of mixed lengths: chunked prefill, batches > 1."""
    config = load_config(
        Path("configs/smollm2_cpu.yaml"),
        (
            f"verifier.path={smollm2_dir}",
            "verifier.dtype=float32",
            "engine.max_num_batched_tokens=128",
            "engine.max_num_seqs=8",
            f"capture.aux_layer_ids={list(range(1, 30))}",
        ),
    )
    verifier = Verifier.open(config.verifier)
    rows = [rendered(verifier, number)[:n] for number, n in enumerate(LENGTHS_TOKENS)]
    assert [len(row) for row in rows] == LENGTHS_TOKENS
    engine = Engine(config, verifier)
    path = tmp_path_factory.mktemp("capture") / "shard-00000.safetensors"
    wiring, head = Wiring.at_capture(config, verifier), VerifierHead(verifier, "float32")
    shard = capture_rows(engine, wiring, head, rows, path)
    small = PlannedShard(
        "shard-00001.safetensors", 0, list(range(len(rows))), some_kept(rows), "int8", 0
    )
    finish_shard(engine, head, compute_shard(engine, wiring, small, rows, path.parent))
    engine.close()
    return verifier, rows, shard, Shard.open(path.parent / small.name)


def some_kept(rows: list[list[int]]) -> np.ndarray:
    """The second half of each row, as if it were the answer."""
    return np.concatenate([np.arange(len(row)) >= len(row) // 2 for row in rows])


def rendered(verifier: Verifier, number: int) -> list[int]:
    """A conversation of its own through the chat template: rows start as served ones do."""
    text = " ".join(f"Item {i * (number + 3)} lies on shelf {i + number}." for i in range(60))
    messages = [{"role": "user", "content": text}]
    return verifier.tokenizer.apply_chat_template(messages, return_dict=False)


def test_every_layer_equals_transformers(captured):
    """Aux id k is hidden_states[k]; the last state is what transformers' final norm is given."""
    from transformers import AutoModelForCausalLM

    verifier, rows, shard, _ = captured
    model = AutoModelForCausalLM.from_pretrained(verifier.directory, dtype=torch.float64)
    before_norm = {}
    model.model.norm.register_forward_pre_hook(lambda _, args: before_norm.update(state=args[0]))
    worst = 0.0
    for index, row in enumerate(rows):
        ours = shard.row(index)
        assert ours.input_ids.tolist() == row
        with torch.no_grad():
            theirs = model.model(torch.tensor([row]), output_hidden_states=True)
        for slot, layer_id in enumerate(range(1, 30)):
            worst = max(
                worst, relative(ours.aux_hidden_states[:, slot], theirs.hidden_states[layer_id][0])
            )
        worst = max(worst, relative(ours.last_hidden_states, before_norm["state"][0]))
    print(f"largest relative error {worst:.2e}")
    assert worst < 1e-5


def test_states_in_8_bits_are_these_within_their_rounding(captured):
    """Captured by the same worker, which quantises; the proof has passed."""
    _, rows, exact, small = captured
    assert small.path.stat().st_size < 0.3 * exact.path.stat().st_size
    worst = 0.0
    for index, row in enumerate(rows):
        ours, theirs = small.row(index), exact.row(index)
        pairs = [(ours.aux_hidden_states, theirs.aux_hidden_states)]
        begin = len(row) // 2
        pairs.append((ours.last_hidden_states[begin:], theirs.last_hidden_states[begin:]))
        worst = max(worst, *(float(relative_error(a, b).max()) for a, b in pairs))
        assert bool(ours.last_hidden_states[:begin].isnan().all())
    print(f"largest relative error of a state in 8 bits {worst:.3f}")
    assert worst < MAX_RELATIVE_ERROR


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())
