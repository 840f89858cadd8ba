"""What an engine makes of a published drafter: the defaults it would fall back on, by name.

Most mistakes in such a directory load without an error. Each rule here says what is missing or
odd, what vLLM 0.32.0 (``llama_eagle3.py``, ``speculators/algos.py``) or SGLang 0.5.23
(``llama_eagle3.py``) would then do, and whether that is another drafter than the files hold.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from .config import DrafterSection
from .drafter import BORROWED, tensor_table
from .family import sglang_captures
from .verifier import Verifier

# Shape, and dtype as safetensors names it ("BF16").
Header = tuple[tuple[int, ...], str]

ABSENT = "absent"
_DTYPES = {torch.int64: ("I64",), torch.bool: ("BOOL",), torch.bfloat16: ("BF16", "F16", "F32")}
_NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True)
class Finding:
    """One thing an operator should know of a published drafter.

    Attributes:
        key: config key or tensor name.
        fatal: as it stands, an engine would serve another drafter than the files hold, or none.
    """

    key: str
    expected: str
    found: str
    fatal: bool

    def __str__(self) -> str:
        return f"{self.key}: expected {self.expected}; found {self.found}"


def config_findings(
    form: str,
    config: dict[str, Any],
    layer: dict[str, Any],
    headers: dict[str, Header],
    layer_ids: list[int],
    verifier: Verifier,
) -> list[Finding]:
    """What ``config.json`` leaves out or says oddly.

    Args:
        layer: the Llama layer's part of it (all of it in the flat form).
        layer_ids: as vLLM reads them, or its default.
    """
    geometry = _geometry(layer, headers, verifier)
    if form == "speculators":
        geometry = [replace(row, key=f"transformer_layer_config.{row.key}") for row in geometry]
    return [
        *geometry,
        *_layers(form, config, layer, headers, layer_ids, verifier),
        *_vocabulary(config, layer, headers),
        *(_speculators_keys(config, layer) if form == "speculators" else _flat_keys(config)),
    ]


def _geometry(
    layer: dict[str, Any], headers: dict[str, Header], verifier: Verifier
) -> list[Finding]:
    found = []
    heads, head_dim = layer["num_attention_heads"], layer.get("head_dim")
    served = head_dim or layer["hidden_size"] // heads
    width = _rows(headers, "layers.0.self_attn.q_proj.weight", heads * served) // heads
    if head_dim is None or served != width:
        says = str(head_dim) if head_dim else f"{ABSENT}: derived as {served}"
        found.append(Finding("head_dim", f"{width}, q_proj's rows a head", says, served != width))
    defaults = {"num_key_value_heads": "num_attention_heads", "rms_norm_eps": "1e-6"}
    for key, default in defaults.items():
        if layer.get(key) is None:
            found.append(Finding(key, "a value", f"{ABSENT}: {default} is assumed", False))
    if not (layer.get("rope_parameters") or layer.get("rope_theta")):
        says = f"{ABSENT}: theta 10000 is assumed"
        found.append(Finding("rope_parameters", "the theta it was trained with", says, False))
    expected = {
        "num_hidden_layers": (1,),
        "hidden_act": ("silu", None),
        "hidden_size": (verifier.hidden_size,),
        "vocab_size": (verifier.vocab_size,),
        "target_hidden_size": (verifier.hidden_size,),
        "quantization_config": (None,),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        # vLLM does not read it; SGLang would alias lm_head to the embedding.
        "tie_word_embeddings": (False, None),
    }
    for key, values in expected.items():
        value = layer.get(key, values[-1])
        if value not in values:  # a target_hidden_size of null too: vLLM multiplies it
            found.append(Finding(key, repr(values[0]), repr(value), True))
    if layer.get("sliding_window") is not None:
        says = f"{layer['sliding_window']}: the engines attend to everything"
        found.append(Finding("sliding_window", "none", says, False))
    context = verifier.text_config.get("max_position_embeddings", 0)
    positions = layer.get("max_position_embeddings")
    if positions is None or positions < context:
        says = f"{positions or ABSENT}: drafts beyond it are not trusted"
        found.append(Finding("max_position_embeddings", f"the verifier's, {context}", says, False))
    return found


def _rows(headers: dict[str, Header], name: str, default: int) -> int:
    """Rows of a tensor; the default where it is missing, which is a finding of its own."""
    return headers[name][0][0] if name in headers else default


def _layers(
    form: str,
    config: dict[str, Any],
    layer: dict[str, Any],
    headers: dict[str, Header],
    layer_ids: list[int],
    verifier: Verifier,
) -> list[Finding]:
    key = "eagle_aux_hidden_state_layer_ids"
    nested = (config.get("eagle_config") or {}).get(key)
    found = []
    if not (config.get(key) or nested):
        says = f"{ABSENT}: {layer_ids} is assumed"
        found.append(Finding(key, "the layers it was trained on", says, False))
    last = verifier.num_layers
    if sorted(set(layer_ids)) != layer_ids or not (1 <= layer_ids[0] and layer_ids[-1] <= last):
        says = f"{layer_ids}: vLLM sorts, drops or refuses these"
        found.append(Finding(key, f"ascending ids from 1 to {last}", says, True))
    if "fc.weight" in headers:
        num_states = headers["fc.weight"][0][-1] // layer["hidden_size"]
        if num_states != len(layer_ids):
            found.append(Finding(key, f"{num_states} ids, as fc reads", f"{layer_ids}", True))
    count = layer.get("num_aux_hidden_states")
    # vLLM counts from num_aux_hidden_states, else from eagle_config, else takes three.
    served = count or (len(nested) if nested else 3)
    if served != len(layer_ids):
        says = f"{count or ABSENT}: vLLM takes {served}"
        found.append(Finding("num_aux_hidden_states", str(len(layer_ids)), says, True))
    if form == "flat" and nested:
        reads = sglang_captures(nested, verifier.text_config)
        if reads != layer_ids:
            says = f"{nested}: vLLM captures {layer_ids}, SGLang {reads or 'unknown'}"
            key = f"eagle_config.{key}"
            found.append(Finding(key, "ids both engines read as the same layers", says, False))
    return found


def _vocabulary(
    config: dict[str, Any], layer: dict[str, Any], headers: dict[str, Header]
) -> list[Finding]:
    size = config.get("draft_vocab_size")
    if size is None:
        says = f"{ABSENT}: vLLM takes vocab_size, SGLang stops"
        return [Finding("draft_vocab_size", "rows of lm_head", says, False)]
    rows = _rows(headers, "lm_head.weight", size)
    if rows != size:
        return [Finding("draft_vocab_size", f"{rows}, rows of lm_head", str(size), True)]
    return []


def _speculators_keys(config: dict[str, Any], layer: dict[str, Any]) -> list[Finding]:
    found = []
    if "model_type" in config:
        says = f"{config['model_type']!r}: vLLM then takes it for another format"
        found.append(Finding("model_type", "no such key at the top level", says, True))
    if "norm_before_residual" not in config:
        says = f"{ABSENT}: vLLM takes true, speculators false"
        found.append(Finding("norm_before_residual", "true or false", says, True))
    speculators = config["speculators_config"]
    if not (speculators.get("proposal_methods") or [{}])[0].get("speculative_tokens"):
        key = "speculators_config.proposal_methods"
        found.append(Finding(key, "speculative_tokens, which vLLM reads", ABSENT, True))
    if not (speculators.get("verifier") or {}).get("name_or_path"):
        key = "speculators_config.verifier"
        found.append(Finding(key, "name_or_path, which vLLM reads", ABSENT, True))
    for key in ("rms_norm_eps", "max_position_embeddings", "num_key_value_heads"):
        if key not in layer:  # no config class fills it in on this path
            where = f"transformer_layer_config.{key}"
            found.append(Finding(where, "a value: vLLM has no default", ABSENT, True))
    return found


def _flat_keys(config: dict[str, Any]) -> list[Finding]:
    found = []
    if config.get("model_type") is None:
        found.append(Finding("model_type", "llama", f"{ABSENT}: vLLM finds no config class", True))
    elif config["model_type"] != "llama":
        says = f"{config['model_type']!r}: another config class fills in what is left out"
        found.append(Finding("model_type", "llama", says, False))
    if config["architectures"] != ["LlamaForCausalLMEagle3"]:
        says = f"{config['architectures']}: SGLang knows the first name only"
        found.append(Finding("architectures", "['LlamaForCausalLMEagle3']", says, False))
    if config.get("norm_before_residual"):
        says = "true: SGLang does not implement it"
        found.append(Finding("norm_before_residual", "false for both engines", says, False))
    return found


def tensor_findings(
    headers: dict[str, Header],
    drafter: DrafterSection,
    *,
    num_aux: int,
    draft_vocab_size: int,
    vocab_size: int,
) -> list[Finding]:
    """Names, shapes and dtypes against the table the geometry asks for.

    A missing tensor is left uninitialised or zero; one that no parameter takes is dropped or
    stops the engine. The embedding may be there; t2d is for training alone.
    """
    table = tensor_table(
        drafter, num_aux=num_aux, draft_vocab_size=draft_vocab_size, vocab_size=vocab_size
    )
    optional = {"embed_tokens.weight": ((vocab_size, drafter.hidden_size), torch.bfloat16)}
    found = []
    for name in sorted(table.keys() | headers.keys()):
        if name not in headers:
            found.append(Finding(name, "this tensor", ABSENT, name != "t2d"))
            continue
        shape, dtype = headers[name]
        expected = table.get(name) or optional.get(name)
        if expected is None:
            kind = "the verifier's own" if name in BORROWED else "no parameter of this geometry"
            if not name.endswith("rotary_emb.inv_freq"):  # both engines pass over it
                found.append(Finding(name, "no such tensor", f"{list(shape)}, {kind}", True))
        elif shape != expected[0] or dtype not in _DTYPES[expected[1]]:
            says = f"{dtype} {list(shape)}"
            found.append(Finding(name, f"{expected[1]} {list(expected[0])}", says, True))
    return found


def value_findings(tensors: dict[str, torch.Tensor], vocab_size: int) -> list[Finding]:
    """What only the values show: not finite, never written, a vocabulary map that is none."""
    found = []
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            continue
        if num_bad := int((~torch.isfinite(tensor)).sum()):
            found.append(Finding(name, "finite values", f"{num_bad} that are not", True))
        # Memory nobody wrote is often zero. A row of a table of tokens may be: verifiers pad.
        rows = tensor.flatten(1) if tensor.dim() > 1 else tensor[None]
        num_zero = int((rows == 0).all(1).sum())
        is_token_table = name in ("lm_head.weight", "embed_tokens.weight")
        if num_zero == len(rows) or (num_zero and not is_token_table):
            says = f"{num_zero} of {len(rows)} all zero"
            found.append(Finding(name, "rows that were trained", says, True))
    if "d2t" in tensors:
        found += _map_findings(tensors["d2t"], tensors.get("t2d"), vocab_size)
    return found


def _map_findings(d2t: torch.Tensor, t2d: torch.Tensor | None, vocab_size: int) -> list[Finding]:
    """d2t holds offsets: draft id i stands for target id ``i + d2t[i]``."""
    ids = torch.arange(len(d2t)) + d2t
    expected = f"offsets: i + d2t[i] are distinct ids below {vocab_size}"
    says = f"{ids[:4].tolist()}... up to {int(ids.max())} (are these absolute ids?)"
    if ids.min() < 0 or ids.max() >= vocab_size or len(ids.unique()) < len(ids):
        return [Finding("d2t", expected, says, True)]
    if t2d is not None and not torch.equal(t2d.nonzero().flatten(), ids.sort().values):
        names = f"t2d's tokens, {t2d.nonzero().flatten()[:4].tolist()}..."
        return [Finding("d2t", names, says, True)]
    if t2d is None and not d2t.any():
        return [Finding("d2t", "a chosen vocabulary", f"the first {len(d2t)} ids", False)]
    return []
