"""The flat form: SGLang's loader takes every tensor of it, and it loses nothing.

SGLang cannot be installed beside vLLM here, so what its 0.5.23 loader does is written down as a
table, from ``srt/models/llama_eagle3.py`` and ``set_eagle3_layers_to_capture`` of the verifiers,
and the exported directory is held against it.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import GEOMETRY, Drafter, open_verifier, section
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from eagle3.contract import Wiring
from eagle3.errors import ConfigError, GateError
from eagle3.export import CONFIG, WEIGHTS, speculators_form, write_directory
from eagle3.exported import check_directory
from eagle3.findings import value_findings
from eagle3.flat import flat_form, servable_forms, written_layer_ids
from eagle3.published import Published, require_servable

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


def sglang_parameters(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Parameters of ``LlamaForCausalLMEagle3``, names and shapes as its constructors make them."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    eagle_config = config.get("eagle_config") or {}
    ids = eagle_config.get("eagle_aux_hidden_state_layer_ids")
    num_aux = config.get("num_aux_hidden_states") or (len(ids) if ids else 3)
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    num_heads = config["num_attention_heads"] + 2 * config["num_key_value_heads"]
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.fc.weight": (hidden, num_aux * config.get("target_hidden_size", hidden)),
        f"{layer}self_attn.qkv_proj.weight": (num_heads * head_dim, 2 * hidden),
        f"{layer}self_attn.o_proj.weight": (hidden, config["num_attention_heads"] * head_dim),
        f"{layer}mlp.gate_up_proj.weight": (2 * inner, hidden),
        f"{layer}mlp.down_proj.weight": (hidden, inner),
        f"{layer}input_layernorm.weight": (hidden,),
        f"{layer}hidden_norm.weight": (hidden,),
        f"{layer}post_attention_layernorm.weight": (hidden,),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config["draft_vocab_size"], hidden),
    }
    if eagle_config.get("norm_before_fc", config.get("norm_before_fc", False)):
        shapes["model.input_norm.weight"] = (num_aux * hidden,)
    if config.get("fc_norm") or config.get("use_aux_norm", False):
        shapes |= {f"model.fc_norm.{i}.weight": (hidden,) for i in range(num_aux)}
    return shapes


STACKED = {  # name in the file -> name of the parameter, place in it
    ".q_proj": (".qkv_proj", 0),
    ".k_proj": (".qkv_proj", 1),
    ".v_proj": (".qkv_proj", 2),
    ".gate_proj": (".gate_up_proj", 0),
    ".up_proj": (".gate_up_proj", 1),
}


def sglang_load(
    config: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> tuple[dict[str, dict[int, torch.Tensor]], torch.Tensor | None]:
    """``load_weights``: what fills each parameter, by place in it, and the hot token ids.

    A name that matches nothing is skipped, as there.
    """
    parameters = sglang_parameters(config)
    filled: dict[str, dict[int, torch.Tensor]] = {name: {} for name in parameters}
    hot_token_ids = None
    for name, tensor in tensors.items():
        name = name.replace("midlayer", "layers.0")
        if "d2t" in name:
            hot_token_ids = tensor + torch.arange(len(tensor))
            continue
        if "t2d" in name:
            continue
        place = 0
        for shard, (parameter, shard_place) in STACKED.items():
            if shard in name:
                name, place = name.replace(shard, parameter), shard_place
                break
        name = name if name in parameters else f"model.{name}"
        if name in parameters:
            filled[name][place] = tensor
    return filled, hot_token_ids


GEOMETRIES = {
    "as the demo": {},
    "multi-head, narrow": {"num_key_value_heads": 4, "head_dim": 8},
    "norm_before_fc": {"norm_before_fc": True, "norm_output": True},
    "fc_norm, two states": {"fc_norm": True, "aux_layer_ids": (1, 3)},
    "no map": {"draft_vocab_size": 512},
    "yarn": {"rope_theta": 5e4, "rope_scaling": YARN},
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_sglang_takes_every_tensor(tiny_verifier_dir, tmp_path, name):
    drafter = Drafter.random(open_verifier(tiny_verifier_dir), **GEOMETRIES[name])
    directory = drafter.export(tmp_path / "sglang", drafter.flat)
    config = json.loads((directory / CONFIG).read_text())
    tensors = load_file(directory / WEIGHTS)
    filled, hot_token_ids = sglang_load(config, tensors)

    # All but the embedding, which SGLang sets to the verifier's, is filled, and exactly.
    assert filled.pop("model.embed_tokens.weight") == {}
    for parameter, parts in filled.items():
        whole = torch.cat([parts[place] for place in sorted(parts)])
        assert whole.shape == sglang_parameters(config)[parameter], parameter
    assert sum(map(len, filled.values())) == len(tensors) - ("d2t" in tensors) - ("t2d" in tensors)
    qkv = filled["model.layers.0.self_attn.qkv_proj.weight"]
    for place, kind in enumerate("qkv"):
        trained = drafter.state_dict()[f"layers.0.self_attn.{kind}_proj.weight"]
        assert torch.equal(qkv[place], trained.bfloat16())
    if "d2t" in tensors:
        assert torch.equal(hot_token_ids, drafter.vocab_map.target_ids)

    # What else its constructors read.
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["model_type"] == "llama" and config["tie_word_embeddings"] is False
    assert config["rope_parameters"]["rope_theta"] == drafter.section.rope_theta
    assert config["eagle_config"]["use_aux_hidden_state"] is True
    assert not {"auto_map", "target_hidden_size", "quantization_config"} & config.keys()
    written_ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert [i + 1 for i in written_ids] == list(drafter.wiring.aux_layer_ids)


def llama_captures(written_ids: list[int]) -> list[int]:
    """``srt/models/llama.py``, ``set_eagle3_layers_to_capture``."""
    return [i + 1 for i in written_ids]


def deepseek_captures(written_ids: list[int]) -> list[int]:
    """``srt/models/deepseek_v2.py``; Kimi-K2.5's class hands the ids through."""
    if written_ids and written_ids[0] == 1:
        return [i + 1 for i in written_ids]
    return list(written_ids)


NUM_LAYERS = 7
TRIPLES = [list(ids) for ids in itertools.combinations(range(1, NUM_LAYERS), 3)]


@pytest.mark.parametrize("ids", TRIPLES, ids=str)
@pytest.mark.parametrize(
    ("model_type", "captures"), [("llama", llama_captures), ("kimi_k2", deepseek_captures)]
)
def test_sglang_captures_the_layers_trained_on_or_is_refused(model_type, captures, ids):
    wiring = Wiring(tuple(ids), NUM_LAYERS, "", "", 64, "bfloat16", "")
    # Any ascending list at all that SGLang would read as these layers.
    possible = [
        list(written)
        for written in itertools.combinations(range(NUM_LAYERS), 3)
        if captures(list(written)) == ids
    ]
    if possible:
        assert written_layer_ids(section(), wiring, {"model_type": model_type}) in possible
        return
    assert model_type == "kimi_k2" and ids[0] == 1
    with pytest.raises(ConfigError) as refused:
        written_layer_ids(section(), wiring, {"model_type": model_type})
    assert refused.value.where == "capture.aux_layer_ids" and str(ids) in refused.value.found
    assert refused.value.fix


def test_published_kimi_ids_are_written_as_they_are():
    """Where both engines read the same list, both get the same list."""
    wiring = Wiring((2, 30, 58), 61, "", "", 7168, "bfloat16", "")
    assert written_layer_ids(section(), wiring, {"model_type": "kimi_k2"}) == [2, 30, 58]
    assert written_layer_ids(section(), wiring, {"model_type": "llama"}) == [1, 29, 57]


@pytest.mark.parametrize(
    ("changes", "text_config", "where"),
    [
        ({"norm_before_residual": True}, {"model_type": "llama"}, "drafter.norm_before_residual"),
        ({}, {"model_type": "a family nobody read"}, "capture.aux_layer_ids"),
    ],
)
def test_what_sglang_does_not_have_is_refused_by_name(changes, text_config, where):
    wiring = Wiring((1, 2, 3), 4, "", "", 64, "bfloat16", "")
    with pytest.raises(ConfigError, match="SGLang cannot serve") as refused:
        written_layer_ids(section(**changes), wiring, text_config)
    assert refused.value.where == where


def test_what_sglang_cannot_serve_leaves_vllms_directory(tiny_verifier_dir):
    drafter = Drafter.random(open_verifier(tiny_verifier_dir), norm_before_residual=True)
    forms = servable_forms(drafter.section, drafter.wiring, drafter.verifier, **drafter.sizes)
    assert [form.directory for form in forms] == ["drafter"]


@st.composite
def geometries(draw: st.DrawFn) -> dict[str, Any]:
    num_heads = draw(st.sampled_from([1, 2, 4, 8]))
    flag = draw(st.sampled_from([None, "norm_before_fc", "fc_norm"]))
    return {
        "num_attention_heads": num_heads,
        "num_key_value_heads": draw(st.sampled_from([n for n in (1, 2, 4) if num_heads % n == 0])),
        "head_dim": draw(st.sampled_from([8, 24, 64])),
        "intermediate_size": draw(st.sampled_from([32, 96])),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5])),
        "rope_theta": draw(st.sampled_from([1e4, 5e4])),
        "rope_scaling": draw(st.sampled_from([None, YARN])),
        "norm_output": draw(st.booleans()),
        **({flag: True} if flag else {}),
        "aux_layer_ids": draw(st.sampled_from([(1,), (1, 3), (1, 2, 3)])),
        "draft_vocab_size": draw(st.sampled_from([16, 128, 512])),
        "seed": draw(st.integers(0, 99)),
    }


@given(changes=geometries())
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_round_trip_is_identical(tiny_verifier_dir, tmp_path_factory, changes):
    """speculators' form -> flat -> speculators' form: the same bytes, each time from disk alone."""
    drafter = Drafter.random(open_verifier(tiny_verifier_dir), **changes)
    room = tmp_path_factory.mktemp("round_trip")
    first = drafter.export(room / "first")

    def write_again(source: Path, target: Path, form_of: Any, *args: Any) -> None:
        published = Published.open(source, drafter.verifier)
        require_servable(source, published.findings)
        tensors = published.load()
        assert value_findings(tensors, published.vocab_size) == []
        form = form_of(
            published.drafter,
            published.wiring,
            *args,
            draft_vocab_size=published.draft_vocab_size,
            vocab_size=published.vocab_size,
            num_speculative_tokens=published.num_speculative_tokens,
        )
        target.mkdir()
        write_directory(target, tensors, form, published.wiring, drafter.verifier)

    write_again(first, room / "flat", flat_form, drafter.verifier.text_config)
    write_again(room / "flat", room / "again", speculators_form)
    for name in (CONFIG, WEIGHTS):
        assert (room / "again" / name).read_bytes() == (first / name).read_bytes()
    flat = load_file(room / "flat" / WEIGHTS)
    assert all("layers.0" not in name for name in flat) and "midlayer.mlp.up_proj.weight" in flat
    check_directory(room / "flat", drafter.flat, drafter.table, drafter.wiring)


def test_vllm_reads_the_flat_config_as_the_other(tiny_verifier_dir, tmp_path):
    """Every attribute ``llama_eagle3.py`` and the runner read, by vLLM's own config code."""
    from vllm.transformers_utils.config import get_config
    from vllm.transformers_utils.configs.eagle import EAGLEConfig

    drafter = Drafter.random(
        open_verifier(tiny_verifier_dir), rope_scaling=YARN, fc_norm=True, aux_layer_ids=(1, 3)
    )
    ours = get_config(str(drafter.export(tmp_path / "drafter")), trust_remote_code=False)
    flat = get_config(str(drafter.export(tmp_path / "sglang", drafter.flat)), False)
    flat = EAGLEConfig(flat, method="eagle3", model_type="eagle")  # as SpeculativeConfig does
    assert flat.architectures == ["LlamaForCausalLMEagle3"]
    assert ours.architectures == ["Eagle3LlamaForCausalLM"]  # the same class, by either name
    keys = {*GEOMETRY, "draft_vocab_size", "vocab_size", "num_hidden_layers", "rope_parameters"}
    keys |= {"eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states", "attention_bias"}
    for key in keys - {"rope_theta", "rope_scaling", "reference"}:
        assert getattr(flat, key) == getattr(ours, key), key


def test_a_name_sglang_would_skip_is_refused(tiny_verifier_dir, tmp_path):
    """``midlayer`` misspelt: SGLang leaves the parameter as it was; our check names it."""
    from safetensors.torch import save_file

    drafter = Drafter.random(open_verifier(tiny_verifier_dir))
    directory = drafter.export(tmp_path / "sglang", drafter.flat)
    tensors = load_file(directory / WEIGHTS)
    tensors["midlayers.mlp.up_proj.weight"] = tensors.pop("midlayer.mlp.up_proj.weight")
    save_file(tensors, directory / WEIGHTS)
    with pytest.raises(GateError) as refused:
        check_directory(directory, drafter.flat, drafter.table, drafter.wiring)
    assert "midlayer.mlp.up_proj.weight" in refused.value.where


@pytest.mark.slow
def test_vllm_serves_both_forms_alike(tiny_verifier_dir, write_config, tmp_path):
    """The flat directory is the same drafter: same answers, same drafts accepted."""
    from test_serve import MAX_NEW_TOKENS, NUM_DRAFTED, make_prompts, train_briefly

    from eagle3.config_file import load_config
    from eagle3.engine import Engine, Sampling
    from eagle3.serve import PromptSet, serve

    prompts = make_prompts()
    prompt_set = PromptSet("test", prompts, Sampling(0, MAX_NEW_TOKENS), tmp_path)
    drafter = train_briefly(tiny_verifier_dir, prompts, head_dim=32)
    config = load_config(write_config())
    runs = []
    for form in (drafter.form, drafter.flat):
        engine = Engine(
            config,
            drafter.verifier,
            drafter=drafter.export(tmp_path / form.directory, form),
            num_speculative_tokens=NUM_DRAFTED,
        )
        runs.append(serve(engine, prompt_set, config.verify.concurrency, NUM_DRAFTED))
        engine.close()
    assert runs[0].answers == runs[1].answers
    assert runs[0].acceptance == runs[1].acceptance
    assert runs[0].acceptance.acceptance_length > 1.3
