"""Ways a drafter can be made wrong, and what notices each: the list behind tests/test_sabotage.py.

A sabotage of an export is done to the directory as it is written, before anything is checked or
hashed: a mistake in the code that makes it, not damage done later (checksums find that).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eagle3.export import CONFIG, WEIGHTS
from eagle3.flat import flat_name, speculators_name

Tensors = dict[str, torch.Tensor]
Change = Callable[[bytes], bytes]
IDS = "eagle_aux_hidden_state_layer_ids"
LAYER = "layers.0."
BOTH = ("drafter", "sglang")


@dataclass(frozen=True)
class Sabotage:
    """One mistake.

    Attributes:
        name: of the test.
        apply: makes it, in an exported directory.
        names: what the error must name: a key or a tensor.
        alone: whether the directory is refused by itself too, without the run it came from (what
            06 says of somebody else's drafter before serving it); a string where that names
            something else.
        forms: directories of 05 it can be made in.
    """

    name: str
    apply: Callable[[Path], None]
    names: str
    alone: bool | str
    forms: tuple[str, ...] = BOTH


def in_config(change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> Callable[[Path], None]:
    """``change(config, layer)``: the whole of ``config.json``, and the Llama layer's part."""

    def apply(directory: Path) -> None:
        config = json.loads((directory / CONFIG).read_text())
        change(config, config.get("transformer_layer_config", config))
        (directory / CONFIG).write_text(json.dumps(config))

    return apply


def in_weights(change: Callable[[Tensors], Any]) -> Callable[[Path], None]:
    """``change(tensors)``, by speculators' names in either form."""

    def apply(directory: Path) -> None:
        stored = load_file(directory / WEIGHTS)
        is_flat = any(name != speculators_name(name) for name in stored)
        tensors = {speculators_name(name): tensor for name, tensor in stored.items()}
        change(tensors)
        rename = flat_name if is_flat else str
        save_file(
            {rename(name): tensor.contiguous() for name, tensor in tensors.items()},
            directory / WEIGHTS,
        )

    return apply


def set_layer(**values: Any) -> Callable[[Path], None]:
    return in_config(lambda config, layer: layer.update(values))


def set_rope(**values: Any) -> Callable[[Path], None]:
    return in_config(lambda config, layer: layer["rope_parameters"].update(values))


def set_ids(written: list[int]) -> Callable[[Path], None]:
    return in_config(lambda config, layer: config.update({IDS: written}))


def drop(name: str) -> Callable[[Path], None]:
    return in_weights(lambda tensors: tensors.pop(name))


def put(name: str, value: Callable[[Tensors], torch.Tensor]) -> Callable[[Path], None]:
    return in_weights(lambda tensors: tensors.update({name: value(tensors)}))


def swap(one: str, other: str) -> Callable[[Path], None]:
    def change(tensors: Tensors) -> None:
        tensors[one], tensors[other] = tensors[other], tensors[one]

    return in_weights(change)


def other_map(tensors: Tensors) -> None:
    """Another vocabulary of the same size, well formed: its head's rows stay."""
    t2d = torch.zeros_like(tensors["t2d"])
    t2d[-len(tensors["d2t"]) :] = True
    tensors["t2d"] = t2d
    tensors["d2t"] = t2d.nonzero().flatten() - torch.arange(len(tensors["d2t"]))


def states_in_another_order(tensors: Tensors) -> torch.Tensor:
    """fc's columns as if it read cat(mid, low, high)."""
    low, mid, high = tensors["fc.weight"].chunk(3, dim=1)
    return torch.cat([mid, low, high], dim=1)


def fp16_overflow(tensors: Tensors) -> torch.Tensor:
    """Through float16 on the way, one value being beyond its range."""
    weights = tensors["fc.weight"].clone()
    weights[0, 0] = 1e5
    return weights.half().bfloat16()


Q, K, V = (f"{LAYER}self_attn.{name}_proj.weight" for name in "qkv")
GATE, UP, DOWN = (f"{LAYER}mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
HIDDEN_NORM, INPUT_NORM = f"{LAYER}hidden_norm.weight", f"{LAYER}input_layernorm.weight"

# The drafter of tests/test_sabotage.py: hidden 64, 4 query heads and 4 key heads of 24, three aux
# states [1, 2, 3] of 4 layers, 128 of 512 tokens, YaRN.
EXPORT = [
    Sabotage(
        "head_dim removed", in_config(lambda c, layer: layer.pop("head_dim")), "head_dim", True
    ),
    Sabotage("head_dim as hidden / heads (112 in Kimi)", set_layer(head_dim=16), "head_dim", True),
    Sabotage(
        "head_dim as the verifier's rope part (64 in Kimi)",
        set_layer(head_dim=12),
        "head_dim",
        True,
    ),
    Sabotage("head_dim from the doubled hidden size", set_layer(head_dim=32), "head_dim", True),
    Sabotage(
        "heads halved",
        set_layer(num_attention_heads=2, num_key_value_heads=2),
        "num_attention_heads",
        "head_dim",
    ),
    Sabotage("RoPE theta another", set_rope(rope_theta=1e6), "rope_theta", True),
    Sabotage(
        "RoPE scaling dropped",
        in_config(
            lambda c, layer: layer.update(
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0}
            )
        ),
        "rope_parameters",
        "rope_scaling",
    ),
    Sabotage("RoPE factor another", set_rope(factor=2.0), "factor", True),
    Sabotage(
        "RoPE parameters missing",
        in_config(lambda c, layer: layer.pop("rope_parameters")),
        "rope_parameters",
        "rope_scaling",
    ),
    Sabotage("norm epsilon another", set_layer(rms_norm_eps=1e-6), "rms_norm_eps", True),
    Sabotage("aux ids off by one", set_ids([2, 3, 4]), IDS, "aux_layer_ids"),
    Sabotage("aux ids permuted", set_ids([2, 1, 3]), IDS, True),
    Sabotage("two aux ids", set_ids([1, 3]), IDS, True),
    Sabotage("four aux ids, the last state's among them", set_ids([1, 2, 3, 4]), IDS, True),
    Sabotage("aux ids in SGLang's convention", set_ids([0, 1, 2]), IDS, True),
    Sabotage(
        "SGLang's aux ids in vLLM's convention",
        in_config(lambda c, layer: c["eagle_config"].update({IDS: [1, 2, 3]})),
        IDS,
        False,
        ("sglang",),
    ),
    Sabotage(
        "aux ids for SGLang missing",
        in_config(lambda c, layer: c.pop("eagle_config")),
        "eagle_config",
        False,
        ("sglang",),
    ),
    Sabotage(
        "number of aux states missing or wrong",
        set_layer(num_aux_hidden_states=2),
        "num_aux_hidden_states",
        True,
    ),
    Sabotage(
        "d2t holds absolute ids",
        put("d2t", lambda t: t["d2t"] + torch.arange(len(t["d2t"]))),
        "d2t",
        True,
    ),
    Sabotage("d2t shifted by one", put("d2t", lambda t: t["d2t"].roll(1)), "d2t", True),
    Sabotage("d2t zeros", put("d2t", lambda t: torch.zeros_like(t["d2t"])), "d2t", True),
    Sabotage("d2t missing", drop("d2t"), "d2t", True),
    Sabotage("d2t and t2d from another map", in_weights(other_map), "d2t", "vocab_map"),
    Sabotage("t2d disagrees with d2t", put("t2d", lambda t: t["t2d"].roll(1)), "d2t", True),
    Sabotage("t2d missing", drop("t2d"), "t2d", False),
    Sabotage(
        "draft_vocab_size another",
        in_config(lambda c, layer: c.update(draft_vocab_size=512)),
        "draft_vocab_size",
        True,
    ),
    Sabotage("lm_head missing", drop("lm_head.weight"), "lm_head.weight", True),
    Sabotage(
        "lm_head transposed",
        put("lm_head.weight", lambda t: t["lm_head.weight"].T),
        "lm_head.weight",
        "draft_vocab_size",
    ),
    Sabotage(
        "lm_head's rows permuted",
        put("lm_head.weight", lambda t: t["lm_head.weight"].flip(0)),
        "lm_head.weight",
        False,
    ),
    Sabotage(
        "lm_head pruned with d2t as ids",
        put("lm_head.weight", lambda t: t["lm_head.weight"][t["d2t"] % 128]),
        "lm_head.weight",
        False,
    ),
    Sabotage(
        "lm_head of another verifier",
        put("lm_head.weight", lambda t: t["lm_head.weight"].roll(1, 1)),
        "lm_head.weight",
        False,
    ),
    Sabotage("fc missing", drop("fc.weight"), "fc.weight", True),
    Sabotage(
        "fc's states in another order",
        put("fc.weight", states_in_another_order),
        "fc.weight",
        False,
    ),
    Sabotage("a norm missing", drop(HIDDEN_NORM), HIDDEN_NORM, True),
    Sabotage(
        "a norm of ones",
        put(HIDDEN_NORM, lambda t: torch.ones_like(t[HIDDEN_NORM])),
        HIDDEN_NORM,
        False,
    ),
    Sabotage("two norms swapped", swap(INPUT_NORM, HIDDEN_NORM), INPUT_NORM, False),
    Sabotage(
        "norm_output on",
        in_config(lambda c, layer: c.update(norm_output=True)),
        "norm_output",
        True,
    ),
    Sabotage(
        "norm_before_fc on",
        in_config(lambda c, layer: c.update(norm_before_fc=True)),
        "norm_before_fc",
        "input_norm.weight",
    ),
    Sabotage("fc_norm on", in_config(lambda c, layer: c.update(fc_norm=True)), "fc_norm", True),
    Sabotage(
        "norm_before_residual on",
        in_config(lambda c, layer: c.update(norm_before_residual=True)),
        "norm_before_residual",
        True,
    ),
    Sabotage(
        "norm_before_residual absent (vLLM takes true)",
        in_config(lambda c, layer: c.pop("norm_before_residual")),
        "norm_before_residual",
        True,
        ("drafter",),
    ),
    Sabotage("q and k swapped", swap(Q, K), Q, False),
    Sabotage("gate and up swapped", swap(GATE, UP), GATE, False),
    Sabotage(
        "q's heads in another order",
        put(Q, lambda t: t[Q].unflatten(0, (4, 24)).flip(0).flatten(0, 1)),
        Q,
        False,
    ),
    Sabotage("a row nobody wrote", in_weights(lambda t: t[Q][5].zero_()), Q, True),
    Sabotage("NaN in one row", in_weights(lambda t: t[Q][3].fill_(float("nan"))), Q, True),
    Sabotage("overflow in float16", put("fc.weight", fp16_overflow), "fc.weight", True),
    Sabotage(
        "weights in float16", put("fc.weight", lambda t: t["fc.weight"].half()), "fc.weight", False
    ),
    Sabotage(
        "weights of another checkpoint",
        in_weights(lambda t: t["fc.weight"].mul_(1.01)),
        "fc.weight",
        False,
    ),
    Sabotage("a tensor too many", put("fc.bias", lambda t: torch.ones(64)), "fc.bias", True),
    Sabotage(
        "verifier_norm shipped",
        put("verifier_norm.weight", lambda t: torch.ones(64).bfloat16()),
        "verifier_norm.weight",
        True,
    ),
    Sabotage(
        "a name SGLang skips",
        in_weights(lambda t: t.update({"midlayers.mlp.up_proj.weight": t.pop(UP)})),
        "mlp.up_proj",
        True,
    ),
    Sabotage(
        "weights cut short",
        lambda d: (d / WEIGHTS).write_bytes((d / WEIGHTS).read_bytes()[:-100]),
        WEIGHTS,
        True,
    ),
    Sabotage(
        "tie_word_embeddings true", set_layer(tie_word_embeddings=True), "tie_word_embeddings", True
    ),
    Sabotage(
        "max_position_embeddings too small",
        set_layer(max_position_embeddings=64),
        "max_position_embeddings",
        True,
    ),
    Sabotage(
        "a sliding window nobody serves", set_layer(sliding_window=512), "sliding_window", False
    ),
    Sabotage(
        "the verifier's quantisation inherited",
        set_layer(quantization_config={"quant_method": "compressed-tensors"}),
        "quantization_config",
        True,
    ),
    Sabotage("hidden layers two", set_layer(num_hidden_layers=2), "num_hidden_layers", True),
    Sabotage(
        "model_type at the top (vLLM takes another format)",
        in_config(lambda c, layer: c.update(model_type="llama")),
        "model_type",
        True,
        ("drafter",),
    ),
    Sabotage(
        "EAGLE where EAGLE-3 is meant",
        in_config(lambda c, layer: c.update(architectures=["LlamaForCausalLMEagle"])),
        "architectures",
        True,
        ("sglang",),
    ),
    Sabotage(
        "made for the verifier's other revision",
        in_config(lambda c, layer: c["verifier_identity"].update(weights="0" * 64)),
        "verifier_identity.weights",
        False,
    ),
    Sabotage(
        "the contract of another drafter",
        in_config(lambda c, layer: c["wiring_contract"].update(vocab_map="0" * 64)),
        "wiring_contract.vocab_map",
        "vocab_map",
    ),
]


@dataclass(frozen=True)
class Upstream:
    """What 05 reads changed after it was made: 05 refuses, naming it.

    Attributes:
        file: under the run's directory or the verifier's.
        change: of its bytes.
        override: ``--set`` of the operator's instead.
        names: what the error must name.
    """

    name: str
    names: str
    file: str = ""
    change: Change = bytes
    override: str = ""


def flip_last_bit(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


UPSTREAM = [
    Upstream(
        "the verifier's weights of another revision",
        "verifier.weights",
        "verifier/model.safetensors",
        flip_last_bit,
    ),
    Upstream(
        "another chat template",
        "verifier.chat_template",
        "verifier/chat_template.jinja",
        lambda content: content.replace(b"assistant", b"model"),
    ),
    Upstream(
        "another tokenizer",
        "verifier.tokenizer",
        "verifier/tokenizer.json",
        lambda content: content.replace(b"bridge", b"ridge"),
    ),
    Upstream(
        "another end of turn",
        "verifier.end_of_turn",
        "verifier/generation_config.json",
        lambda content: content.replace(b'"eos_token_id": 1', b'"eos_token_id": 2'),
    ),
    Upstream(
        "04's weights changed after training",
        "best.safetensors",
        "04_train/best.safetensors",
        flip_last_bit,
    ),
    Upstream(
        "04's weights cut short",
        "best.safetensors",
        "04_train/best.safetensors",
        lambda content: content[:-100],
    ),
    Upstream(
        "head_dim set otherwise after training", "drafter.head_dim", override="drafter.head_dim=32"
    ),
    Upstream(
        "aux layers set otherwise after capture",
        "capture.aux_layer_ids",
        override="capture.aux_layer_ids=[1, 2]",
    ),
    Upstream(
        "another draft vocabulary after training",
        "vocab.draft_vocab_size",
        override="vocab.draft_vocab_size=64",
    ),
]
