"""The tensor table is speculators' own, for every geometry."""

from __future__ import annotations

import pytest
import torch
from drafters import Drafter, open_verifier, section

from eagle3.contract import Wiring
from eagle3.drafter import BORROWED, layer_config, rope_parameters, speculators_config, tensor_table


class NamedVerifier:
    """The two facts ``speculators_config`` asks of a verifier."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.directory, self.config = vocab_size, "none", {}


def model_on_meta(geometry, *, num_aux: int, draft_vocab_size: int, vocab_size: int):
    from speculators.models.eagle3 import Eagle3DraftModel

    ids = tuple(range(1, num_aux + 1))
    wiring = Wiring(ids, num_aux + 2, "", "", geometry.hidden_size, "bfloat16", "")
    config = speculators_config(
        wiring,
        geometry,
        draft_vocab_size=draft_vocab_size,
        verifier=NamedVerifier(vocab_size),
        num_speculative_tokens=3,
    )
    with torch.device("meta"):
        return Eagle3DraftModel(config)


KIMI = {
    "hidden_size": 7168,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 128,
    "intermediate_size": 18432,
    "rope_theta": 50000.0,
    "max_position_embeddings": 262144,
}


@pytest.mark.parametrize(
    ("changes", "num_aux", "draft_vocab_size", "vocab_size"),
    [
        ({}, 3, 128, 512),
        ({"num_key_value_heads": 4}, 3, 128, 512),
        ({"num_key_value_heads": 1, "head_dim": 16}, 3, 128, 512),
        ({"head_dim": 128}, 3, 128, 512),
        ({"norm_before_fc": True}, 3, 128, 512),
        ({"fc_norm": True, "norm_output": True}, 3, 128, 512),
        ({"fc_norm": True}, 4, 128, 512),
        ({"norm_before_residual": True}, 1, 128, 512),
        ({}, 3, 512, 512),  # no pruning, no map
        (KIMI, 3, 32000, 163840),
    ],
)
def test_table_is_speculators_state_dict(changes, num_aux, draft_vocab_size, vocab_size):
    sizes = {"draft_vocab_size": draft_vocab_size, "vocab_size": vocab_size}
    table = tensor_table(section(**changes), num_aux=num_aux, **sizes)
    state = model_on_meta(section(**changes), num_aux=num_aux, **sizes).state_dict()
    assert set(table) == set(state) - set(BORROWED)
    for name, (shape, dtype) in table.items():
        assert tuple(state[name].shape) == shape, name
        assert dtype == (torch.bfloat16 if state[name].is_floating_point() else state[name].dtype)


def test_kimi_by_hand():
    """The shapes published Kimi drafters have (hidden 7168, 64 heads of 128, 3 aux states)."""
    table = tensor_table(section(**KIMI), num_aux=3, draft_vocab_size=32000, vocab_size=163840)
    shapes = {name: shape for name, (shape, _) in table.items()}
    assert shapes["fc.weight"] == (7168, 21504)
    for which in "qkv":
        assert shapes[f"layers.0.self_attn.{which}_proj.weight"] == (8192, 14336)
    assert shapes["layers.0.self_attn.o_proj.weight"] == (7168, 8192)
    assert shapes["lm_head.weight"] == (32000, 7168)
    assert (shapes["d2t"], shapes["t2d"]) == ((32000,), (163840,))


def test_rope_theta_is_inside_and_scaling_kept():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert rope_parameters(section(rope_scaling=scaling, rope_theta=5e4)) == {
        **scaling,
        "rope_theta": 5e4,
    }
    plain = layer_config(section(rope_theta=7.0), 512)["rope_parameters"]
    assert plain == {"rope_type": "default", "rope_theta": 7.0}


def test_build_borrows_the_verifiers_own_tensors(tiny_verifier_dir):
    verifier = open_verifier(tiny_verifier_dir)
    drafter = Drafter.random(verifier)
    state, rows = drafter.model.state_dict(), verifier.lm_head()[drafter.vocab_map.target_ids]
    assert torch.equal(state["embed_tokens.weight"], verifier.embed_tokens())
    assert torch.equal(state["verifier_norm.weight"], verifier.final_norm())
    assert torch.equal(state["verifier_lm_head.weight"], rows)
    assert torch.equal(state["lm_head.weight"], rows)
    assert torch.equal(state["t2d"].nonzero().flatten(), drafter.vocab_map.target_ids)
    trainable = {n for n, p in drafter.model.named_parameters() if p.requires_grad}
    assert trainable == set(drafter.table) - {"d2t", "t2d"}
