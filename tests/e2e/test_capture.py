"""The patched worker on real vLLM in float32, against transformers.

transformers runs in float64: in float32 its own rounding is already 5e-6 on such rows.
"""

import numpy as np
import pytest
import torch

from eagle3.capture import VerifierHead, capture_rows
from eagle3.config import load_config
from eagle3.contract import Wiring
from eagle3.engine import Engine
from eagle3.verifier import Verifier

pytestmark = pytest.mark.slow
LENGTHS_TOKENS = [3, 150, 7, 64, 31, 200, 1, 90, 12, 45, 128, 17, 5, 77, 300, 2, 33, 58, 110, 9]


@pytest.fixture(scope="module")
def captured(smollm2_dir, tmp_path_factory):
    """Every layer of SmolLM2 on random rows: mixed lengths, chunked prefill, batches > 1."""
    from pathlib import Path

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
    rng = np.random.default_rng(0)
    rows = [rng.integers(3, verifier.vocab_size, n).tolist() for n in LENGTHS_TOKENS]
    engine = Engine(config, verifier)
    path = tmp_path_factory.mktemp("capture") / "shard-00000.safetensors"
    shard = capture_rows(
        engine,
        Wiring.at_capture(config, verifier),
        VerifierHead(verifier, "float32"),
        rows,
        path,
    )
    engine.close()
    return verifier, rows, shard


def test_every_layer_equals_transformers(captured):
    """Aux id k is hidden_states[k]; the last state, normed, is transformers' last_hidden_state."""
    from transformers import AutoModelForCausalLM

    verifier, rows, shard = captured
    model = AutoModelForCausalLM.from_pretrained(verifier.directory, dtype=torch.float64)
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
        with torch.no_grad():
            normed = model.model.norm(ours.last_hidden_states.double())
        worst = max(worst, relative(normed, theirs.last_hidden_state[0]))
    print(f"largest relative error {worst:.2e}")
    assert worst < 1e-5


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())
