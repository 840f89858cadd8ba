"""Any EAGLE-3 directory, ours or a published one, reads into one description with findings."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import Drafter, open_verifier
from safetensors.torch import load_file, save_file

from eagle3.errors import ConfigError, GateError
from eagle3.export import CONFIG, WEIGHTS
from eagle3.findings import value_findings
from eagle3.published import Published, require_servable
from eagle3.verifier import Verifier

Q = "layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def drafter(tiny_verifier_dir) -> Drafter:
    return Drafter.random(open_verifier(tiny_verifier_dir))


@pytest.fixture
def exported(drafter, tmp_path) -> Path:
    return drafter.export(tmp_path / "drafter")


def edit(directory: Path, change: Any) -> None:
    config = json.loads((directory / CONFIG).read_text())
    change(config)
    (directory / CONFIG).write_text(json.dumps(config))


def test_our_export_reads_back_without_a_fatal_finding(drafter, exported):
    published = Published.open(exported, drafter.verifier)
    assert published.form == "speculators"
    assert published.drafter == drafter.section
    assert published.aux_layer_ids == drafter.wiring.aux_layer_ids
    assert published.wiring == drafter.wiring
    assert (published.draft_vocab_size, published.vocab_size) == (128, 512)
    assert published.num_speculative_tokens == 3 and not published.has_own_embedding
    require_servable(exported, published.findings)
    tensors = published.load()
    assert value_findings(tensors, published.vocab_size) == []
    for name, tensor in load_file(exported / WEIGHTS).items():
        assert torch.equal(tensors[name], tensor)


def fatal_keys(directory: Path, verifier: Verifier) -> list[str]:
    return [row.key for row in Published.open(directory, verifier).findings if row.fatal]


LAYER = "transformer_layer_config"
IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda c: c[LAYER].pop("head_dim"), f"{LAYER}.head_dim"),
        (lambda c: c[LAYER].update(head_dim=16), Q),
        (lambda c: c[LAYER].update(num_hidden_layers=2), f"{LAYER}.num_hidden_layers"),
        (lambda c: c[LAYER].update(tie_word_embeddings=True), f"{LAYER}.tie_word_embeddings"),
        (lambda c: c[LAYER].pop("rms_norm_eps"), f"{LAYER}.rms_norm_eps"),
        (lambda c: c[LAYER].update(quantization_config={}), f"{LAYER}.quantization_config"),
        (lambda c: c.pop("norm_before_residual"), "norm_before_residual"),
        (lambda c: c.update(fc_norm=True), "fc_norm.0.weight"),
        (lambda c: c.update(model_type="llama"), "model_type"),
        (lambda c: c.update({IDS: [0, 1, 2]}), IDS),
        (lambda c: c.update({IDS: [2, 1, 3]}), IDS),
        (lambda c: c.update({IDS: [1, 2, 9]}), IDS),
        (lambda c: c.update({IDS: [1, 2]}), "num_aux_hidden_states"),
        (lambda c: c.update(draft_vocab_size=64), "lm_head.weight"),
        (lambda c: c["speculators_config"].pop("verifier"), "speculators_config.verifier"),
        (lambda c: c["speculators_config"].pop("proposal_methods"), "proposal_methods"),
    ],
)
def test_what_an_engine_would_serve_otherwise_is_fatal_by_name(drafter, exported, change, key):
    assert fatal_keys(exported, drafter.verifier) == []
    edit(exported, change)
    published = Published.open(exported, drafter.verifier)
    assert any(key in found for found in fatal_keys(exported, drafter.verifier))
    with pytest.raises(GateError):
        require_servable(exported, published.findings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fc.weight", None),
        ("d2t", None),
        ("fc.bias", torch.ones(64)),
        ("verifier_norm.weight", torch.ones(64)),
        (Q, torch.zeros(96, 64)),
    ],
)
def test_tensors_are_held_against_the_geometry(drafter, exported, name, value):
    tensors = load_file(exported / WEIGHTS)
    tensors.pop(name, None)
    if value is not None:
        tensors[name] = value
    save_file(tensors, exported / WEIGHTS)
    assert fatal_keys(exported, drafter.verifier) == [name]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("d2t", lambda t: t["d2t"] + torch.arange(128)),
        ("d2t", lambda t: torch.zeros(128, dtype=torch.int64)),
        ("d2t", lambda t: t["d2t"].roll(1)),
        ("d2t", lambda t: t["d2t"] - 1000),
        (Q, lambda t: t[Q] * float("inf")),
        ("norm.weight", lambda t: torch.zeros(64)),
    ],
)
def test_values_that_cannot_be_meant(drafter, exported, name, value):
    tensors = Published.open(exported, drafter.verifier).load()
    tensors[name] = value(tensors)
    assert [row.key for row in value_findings(tensors, 512) if row.fatal] == [name]


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: (d / CONFIG).write_text("{"),
        lambda d: (d / CONFIG).unlink(),
        lambda d: (d / WEIGHTS).unlink(),
        lambda d: (d / WEIGHTS).write_bytes((d / WEIGHTS).read_bytes()[:5000]),
        lambda d: edit(d, lambda c: c.update(speculators_model_type="dflash")),
        lambda d: edit(d, lambda c: c[LAYER].update(model_type="qwen3")),
        lambda d: edit(d, lambda c: c[LAYER].pop("hidden_size")),
        lambda d: edit(d, lambda c: c[LAYER].update(num_attention_heads=3)),
    ],
)
def test_anything_else_is_refused(drafter, exported, damage):
    damage(exported)
    with pytest.raises(ConfigError) as refused:
        Published.open(exported, drafter.verifier)
    assert str(exported) in refused.value.where and refused.value.fix


# Configs as published for Kimi verifiers (the values of the model cards; other keys left out).
KIMI_VERIFIER = Verifier(
    directory=Path("none"),
    config={
        "model_type": "kimi_k25",
        "text_config": {
            "model_type": "kimi_k2",
            "hidden_size": 7168,
            "num_hidden_layers": 61,
            "vocab_size": 163840,
            "max_position_embeddings": 262144,
        },
    },
    trust_remote_code=False,
)
KIMI_DRAFTER = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 131072,
    "vocab_size": 163840,
    "draft_vocab_size": 32000,
    "tie_word_embeddings": False,
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [2, 30, 58],
        "use_aux_hidden_state": True,
    },
}
YARN = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}
REFERENCES = {
    "AQ-MedAI Kimi-K2-Instruct-eagle3": {**KIMI_DRAFTER, "model_type": "kimi_k2"},
    "AQ-MedAI Kimi-K25-eagle3": KIMI_DRAFTER,
    "lightseekorg kimi-k2.5-eagle3": {
        **KIMI_DRAFTER,
        "intermediate_size": 12288,
        "draft_vocab_size": 163840,
        "rope_theta": 50000.0,
        "rope_scaling": YARN,
    },
}


def sparse_weights(path: Path, shapes: dict[str, tuple[tuple[int, ...], str]]) -> None:
    """A safetensors file of zeros that takes no room on disk, however large."""
    sizes = {"BF16": 2, "F32": 4, "I64": 8, "BOOL": 1}
    header, end = {}, 0
    for name, (shape, dtype) in shapes.items():
        begin, end = end, end + math.prod(shape) * sizes[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def publish(directory: Path, config: dict[str, Any]) -> Path:
    """A drafter of this geometry as SpecForge publishes one: ``midlayer``, own embedding."""
    directory.mkdir()
    (directory / CONFIG).write_text(json.dumps(config))
    hidden, inner, heads = 7168, config["intermediate_size"], 64 * 128
    vocab, draft = 163840, config["draft_vocab_size"] or 163840
    layer = "midlayer."
    shapes = {
        "embed_tokens.weight": (vocab, hidden),
        "fc.weight": (hidden, 3 * hidden),
        **{f"{layer}{n}.weight": (hidden,) for n in ("input_layernorm", "hidden_norm")},
        f"{layer}post_attention_layernorm.weight": (hidden,),
        **{f"{layer}self_attn.{n}_proj.weight": (heads, 2 * hidden) for n in "qkv"},
        f"{layer}self_attn.o_proj.weight": (hidden, heads),
        **{f"{layer}mlp.{n}_proj.weight": (inner, hidden) for n in ("gate", "up")},
        f"{layer}mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "lm_head.weight": (draft, hidden),
    }
    typed = {name: (shape, "BF16") for name, shape in shapes.items()}
    if draft != vocab:
        typed |= {"d2t": ((draft,), "I64"), "t2d": ((vocab,), "BOOL")}
    sparse_weights(directory / WEIGHTS, typed)
    return directory


@pytest.mark.parametrize("name", REFERENCES)
def test_published_kimi_drafters_pass(tmp_path, name):
    config = REFERENCES[name]
    published = Published.open(publish(tmp_path / "drafter", config), KIMI_VERIFIER)
    require_servable(tmp_path, published.findings)
    drafter = published.drafter
    assert published.form == "flat" and published.has_own_embedding
    assert (drafter.num_attention_heads, drafter.head_dim, drafter.num_key_value_heads) == (
        64,
        128,
        64,
    )
    assert published.aux_layer_ids == (2, 30, 58)
    assert published.draft_vocab_size == config["draft_vocab_size"]
    assert drafter.rope_theta == config["rope_theta"]
    assert (drafter.rope_scaling or {}).get("factor") == (64.0 if config["rope_scaling"] else None)
    # Shorter than the verifier's context, each of them; the first has another model's type.
    keys = {finding.key for finding in published.findings}
    assert keys == {"max_position_embeddings"} | (
        {"model_type"} if config["model_type"] != "llama" else set()
    )


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in KIMI_DRAFTER.items() if key not in keys}


@pytest.mark.parametrize(
    ("config", "key", "says", "fatal"),
    [
        (without("head_dim"), "head_dim", "absent: derived as 112", True),
        ({**KIMI_DRAFTER, "head_dim": 64}, "head_dim", "64", True),
        ({**KIMI_DRAFTER, "head_dim": 112}, Q, "[8192, 14336]", True),
        (without("eagle_config"), IDS, "absent: [2, 30, 58] is assumed", False),
        (without("rope_theta"), "rope_parameters", "theta 10000", False),
        (
            {**KIMI_DRAFTER, "eagle_config": {IDS: [1, 29, 57]}},
            f"eagle_config.{IDS}",
            "vLLM captures [1, 29, 57], SGLang [2, 30, 58]",
            False,
        ),
        ({**KIMI_DRAFTER, "draft_vocab_size": None}, "draft_vocab_size", "SGLang stops", False),
        ({**KIMI_DRAFTER, "target_hidden_size": None}, "target_hidden_size", "None", True),
    ],
)
def test_what_a_published_drafter_leaves_out_is_said(tmp_path, config, key, says, fatal):
    published = Published.open(publish(tmp_path / "drafter", config), KIMI_VERIFIER)
    (found,) = [finding for finding in published.findings if finding.key == key]
    assert says in found.found and found.fatal is fatal
    if "head_dim" not in config:
        assert published.drafter.head_dim == 128  # what q_proj was trained with


def test_missing_map_is_said(tmp_path):
    directory = publish(tmp_path / "drafter", KIMI_DRAFTER)
    config = {**KIMI_DRAFTER, "draft_vocab_size": 163840}
    (publish(tmp_path / "full", config) / WEIGHTS).rename(directory / WEIGHTS)
    published = Published.open(directory, KIMI_VERIFIER)
    fatal = {row.key for row in published.findings if row.fatal}
    assert fatal == {"d2t", "lm_head.weight", "draft_vocab_size"}
