"""A drafter directory in either form that engines load, ours or downloaded, as one description.

speculators' form has ``speculators_config`` and keeps the layer's config in
``transformer_layer_config``; the flat form is a Llama config with
``architectures: ["LlamaForCausalLMEagle3"]``, as SpecForge writes and SGLang and vLLM load it.

    published = Published.open(directory, verifier)     # config.json and the tensors' headers
    published.drafter, published.aux_layer_ids          # what the files hold
    published.findings                                  # where an engine would serve otherwise
    tensors = published.load()                          # by speculators' names, whatever the form
    value_findings(published, tensors)

The description is of the files; where an engine falls back on a default that contradicts them,
a finding says so (``findings.py``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

from .config import DrafterSection
from .contract import Wiring
from .errors import ConfigError, GateError
from .export import CONFIG
from .findings import Finding, Header, config_findings, tensor_findings
from .flat import speculators_name
from .verifier import Verifier

FLAT_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
# llama_eagle3.py reads this where the config names no layers (in vLLM and in SGLang).
_REQUIRED = (
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
)


@dataclass(frozen=True)
class Published:
    """What a drafter directory holds.

    Attributes:
        form: how ``config.json`` is laid out.
        config: ``config.json`` as it stands.
        drafter: the geometry. ``head_dim`` left out of the config is taken from ``q_proj``.
        aux_layer_ids: as vLLM reads them: the state entering layer k, ascending.
        draft_vocab_size, vocab_size: rows of ``lm_head`` and of the embedding.
        num_speculative_tokens: drafted tokens it was made for, where the directory says.
        wiring: the contract it was exported with; None unless it is ours.
        headers: shape and dtype of each tensor by speculators' name (``layers.0.``, never
            ``midlayer.``).
        places: file and name in it of each tensor.
        findings: what an engine would serve otherwise, and what it would assume.
    """

    directory: Path
    form: Literal["speculators", "flat"]
    config: dict[str, Any]
    drafter: DrafterSection
    aux_layer_ids: tuple[int, ...]
    draft_vocab_size: int
    vocab_size: int
    num_speculative_tokens: int | None
    wiring: Wiring | None
    headers: dict[str, Header]
    places: dict[str, tuple[Path, str]]
    findings: tuple[Finding, ...]

    @classmethod
    def open(cls, directory: Path, verifier: Verifier) -> Published:
        """Read ``config.json`` and the tensors' names, shapes and dtypes; no values.

        Args:
            verifier: the model it drafts for; its weights are not read.

        Raises:
            ConfigError: this is no EAGLE-3 drafter of one Llama layer, in safetensors.
        """
        config = _read_config(directory)
        is_speculators = "speculators_config" in config
        layer = config.get("transformer_layer_config", {}) if is_speculators else config
        for key in _REQUIRED:
            if not isinstance(layer.get(key), int):
                raise _not_one(f"{directory / CONFIG}: {key}", "a whole number", layer.get(key))
        headers, places = _read_headers(directory)
        ids = named_layer_ids(config) or default_layer_ids(verifier.num_layers)
        try:
            drafter = _drafter(config, layer, headers)
        except ValidationError as error:
            where = directory / CONFIG
            raise _not_one(where, "a possible geometry", error.errors()[0]["msg"]) from error
        draft_vocab_size = config.get("draft_vocab_size") or layer["vocab_size"]
        wiring = config.get("wiring_contract")
        form = "speculators" if is_speculators else "flat"
        found = config_findings(form, config, layer, headers, ids, verifier)
        found += tensor_findings(
            headers,
            drafter,
            num_aux=len(ids),
            draft_vocab_size=draft_vocab_size,
            vocab_size=layer["vocab_size"],
        )
        return cls(
            directory=directory,
            form=form,
            config=config,
            drafter=drafter,
            aux_layer_ids=tuple(ids),
            draft_vocab_size=draft_vocab_size,
            vocab_size=layer["vocab_size"],
            num_speculative_tokens=_num_speculative_tokens(config),
            wiring=Wiring.from_json(wiring) if wiring else None,
            headers=headers,
            places=places,
            findings=tuple(found),
        )

    @property
    def has_own_embedding(self) -> bool:
        """Whether the engines embed with the drafter's own table (else with the verifier's)."""
        return "embed_tokens.weight" in self.places

    def load(self) -> dict[str, torch.Tensor]:
        """Every tensor by speculators' name, on the CPU, in the dtype it is stored in."""
        tensors = {}
        for name, (path, stored_name) in self.places.items():
            with safe_open(path, framework="pt") as file:
                tensors[name] = file.get_tensor(stored_name)
        return tensors


def require_servable(directory: Path, findings: Iterable[Finding]) -> None:
    """Refuse a drafter that would not be served as it is.

    Raises:
        GateError: naming the first fatal finding.
    """
    fatal = [finding for finding in findings if finding.fatal]
    if fatal:
        more = f" ({len(fatal)} such findings)" if len(fatal) > 1 else ""
        raise GateError(
            f"an engine would serve another drafter than these files hold{more}",
            where=f"{directory}: {fatal[0].key}",
            expected=fatal[0].expected,
            found=fatal[0].found,
            fix="correct the directory, or export the drafter again",
        )


def named_layer_ids(config: dict[str, Any]) -> list[int] | None:
    """The ids vLLM takes: those at the top level, else ``eagle_config``'s
    (``v1/worker/gpu_model_runner.py``, ``_get_eagle3_aux_layers_from_config``)."""
    key = "eagle_aux_hidden_state_layer_ids"
    return config.get(key) or (config.get("eagle_config") or {}).get(key)


def default_layer_ids(num_layers: int) -> list[int]:
    """What both engines capture when the config names no layers."""
    return [2, num_layers // 2, num_layers - 3]


def _drafter(
    config: dict[str, Any], layer: dict[str, Any], headers: dict[str, Header]
) -> DrafterSection:
    heads = layer["num_attention_heads"]
    head_dim = layer.get("head_dim")
    if head_dim is None and "layers.0.self_attn.q_proj.weight" in headers:
        head_dim = headers["layers.0.self_attn.q_proj.weight"][0][0] // heads
    theta, scaling = rope(layer)
    flags = {**(config.get("eagle_config") or {}), **config}
    # Left out, vLLM takes True in speculators' form and False in the flat one.
    is_speculators = "speculators_config" in config
    return DrafterSection(
        hidden_size=layer["hidden_size"],
        num_attention_heads=heads,
        num_key_value_heads=layer.get("num_key_value_heads") or heads,
        head_dim=head_dim or layer["hidden_size"] // heads,
        intermediate_size=layer["intermediate_size"],
        rms_norm_eps=layer.get("rms_norm_eps", 1e-6),  # LlamaConfig's default
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=layer.get("max_position_embeddings", 2048),
        norm_before_residual=flags.get("norm_before_residual", is_speculators),
        norm_before_fc=flags.get("norm_before_fc", False),
        fc_norm=flags.get("fc_norm", False),
        norm_output=flags.get("norm_output", False),
        reference=None,
    )


def rope(layer: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Theta and scaling (None for none) of a layer's config, new keys or old.

    transformers 5 keeps both in ``rope_parameters``; older configs have ``rope_theta`` beside
    ``rope_scaling``, whose kind may be called ``type``. Both engines read either.
    """
    parameters = dict(layer.get("rope_parameters") or layer.get("rope_scaling") or {})
    theta = parameters.pop("rope_theta", layer.get("rope_theta", 10000.0))
    kind = parameters.pop("rope_type", parameters.pop("type", "default"))
    return theta, None if kind == "default" else {"rope_type": kind, **parameters}


def _num_speculative_tokens(config: dict[str, Any]) -> int | None:
    methods = config.get("speculators_config", {}).get("proposal_methods") or [{}]
    return methods[0].get("speculative_tokens", config.get("num_speculative_tokens"))


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _not_one(path, "a readable JSON file", error) from error
    if "speculators_config" in config:
        kind = config.get("speculators_model_type")
        layer = config.get("transformer_layer_config", {}).get("model_type")
        if (kind, layer) != ("eagle3", "llama"):
            found = f"speculators_model_type {kind}, a layer of model_type {layer}"
            raise _not_one(path, "speculators_model_type eagle3 and a llama layer", found)
    elif not set(config.get("architectures") or []) & set(FLAT_ARCHITECTURES):
        expected = f"speculators_config, or architectures {list(FLAT_ARCHITECTURES)}"
        raise _not_one(f"{path}: architectures", expected, config.get("architectures"))
    return config


def _read_headers(directory: Path) -> tuple[dict[str, Header], dict[str, tuple[Path, str]]]:
    headers: dict[str, Header] = {}
    places: dict[str, tuple[Path, str]] = {}
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        found = sorted(path.name for path in directory.iterdir())
        raise _not_one(directory, "weights in safetensors", found)
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                for stored_name in file.keys():
                    part = file.get_slice(stored_name)
                    name = speculators_name(stored_name)
                    headers[name] = (tuple(part.get_shape()), part.get_dtype())
                    places[name] = (path, stored_name)
        except (OSError, SafetensorError) as error:
            raise _not_one(path, "a readable safetensors file", error) from error
    return headers, places


def _not_one(where: Any, expected: Any, found: Any) -> ConfigError:
    return ConfigError(
        "this is not an EAGLE-3 drafter of one Llama layer",
        where=where,
        expected=expected,
        found=found,
        fix="name a directory with config.json and *.safetensors of such a drafter",
    )
