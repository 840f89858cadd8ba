"""Is an exported drafter what the run's config says it is? Tensor by tensor, key by key.

The check reads nothing but the directory and the expectation, so 05 runs it before publishing
and 06 before serving. ``check_loaders`` adds what the two libraries themselves make of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from .config import Config, DrafterSection
from .contract import Wiring
from .drafter import BORROWED, rope_parameters, tensor_table
from .errors import GateError
from .export import CONFIG, OWN_KEYS, WEIGHTS, Form
from .flat import servable_forms
from .remote_code import register_config_class
from .verifier import Verifier
from .vocab import VocabMap

_ABSENT = "absent"
# Free to differ: where the verifier lies, and who wrote the file.
_UNCHECKED = (
    "speculators_config.verifier",
    "speculators_version",
    *OWN_KEYS,
)


def check_export(directory: Path, config: Config, wiring: Wiring, verifier: Verifier) -> None:
    """Every form 05 published, against the run's config (``check_directory``).

    Args:
        directory: ``05_export``.
    """
    sizes = {"draft_vocab_size": config.vocab.draft_vocab_size, "vocab_size": verifier.vocab_size}
    table = tensor_table(config.drafter, num_aux=len(wiring.aux_layer_ids), **sizes)
    sizes["num_speculative_tokens"] = config.train.ttt_steps
    for form in servable_forms(config.drafter, wiring, verifier, **sizes):
        check_directory(directory / form.directory, form, table, wiring)
        check_verifier(directory / form.directory, verifier.identity)


def check_directory(
    directory: Path,
    form: Form,
    table: dict[str, tuple[tuple[int, ...], torch.dtype]],
    wiring: Wiring,
) -> dict[str, torch.Tensor]:
    """Read an exported drafter back and compare it with what it should be.

    Args:
        table: shape and dtype of each tensor, by speculators' names (``drafter.tensor_table``).

    Returns:
        The tensors as read, by speculators' names.

    Raises:
        GateError: naming the tensor or the key that is missing, too many, or wrong.
    """
    _check_config(directory / CONFIG, form.config, wiring)
    path = directory / WEIGHTS
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise _wrong(path, "a readable safetensors file", error) from error
    _check_tensors(path, tensors, {form.stored_as(name): row for name, row in table.items()})
    if "d2t" in table:
        _check_map(path, VocabMap(tensors["d2t"], tensors["t2d"]), wiring)
    return {name: tensors[form.stored_as(name)] for name in table}


def _check_config(path: Path, served: dict[str, Any], wiring: Wiring) -> None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _wrong(path, "a readable JSON file", error) from error
    expected_leaves, found_leaves = _leaves(served), _leaves(found)
    for key in sorted(expected_leaves.keys() | found_leaves.keys()):
        expected, value = expected_leaves.get(key, _ABSENT), found_leaves.get(key, _ABSENT)
        if value != expected and not key.startswith(_UNCHECKED):
            raise _wrong(f"{path}: {key}", repr(expected), repr(value))
    for key, expected in wiring.to_json().items():
        value = found.get("wiring_contract", {}).get(key, _ABSENT)
        if value != expected:
            raise _wrong(f"{path}: wiring_contract.{key}", repr(expected), repr(value))


def _leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` -> ``{"a.b": 1}``; lists are leaves."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            leaves |= _leaves(value, f"{prefix}{key}.")
        else:
            leaves[prefix + key] = value
    return leaves


def _check_tensors(
    path: Path,
    tensors: dict[str, torch.Tensor],
    table: dict[str, tuple[tuple[int, ...], torch.dtype]],
) -> None:
    for name in sorted(table.keys() | tensors.keys()):
        where = f"{path}: {name}"
        if name not in tensors:
            raise _wrong(where, "this tensor: an engine would leave it uninitialised", _ABSENT)
        tensor = tensors[name]
        found = f"{tensor.dtype} {list(tensor.shape)}"
        if name not in table:
            kind = "the verifier's own, shared when served" if name in BORROWED else "nobody's"
            raise _wrong(where, f"no such tensor: it is {kind}", found)
        shape, dtype = table[name]
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise _wrong(where, f"{dtype} {list(shape)}", found)
        if not dtype.is_floating_point:
            continue
        if not torch.isfinite(tensor).all():
            num_bad = int((~torch.isfinite(tensor)).sum())
            raise _wrong(where, "finite values", f"{num_bad} that are not")
        # Memory nobody wrote is often zero. A row of the head may be: verifiers pad theirs.
        rows = tensor.flatten(1) if tensor.dim() > 1 else tensor[None]
        num_zero = int((rows == 0).all(1).sum())
        if num_zero == len(rows) or (num_zero and name != "lm_head.weight"):
            raise _wrong(where, "rows that were trained", f"{num_zero} of {len(rows)} all zero")


def _check_map(path: Path, found: VocabMap, wiring: Wiring) -> None:
    """d2t holds offsets (target = draft + d2t[draft]), names exactly t2d's tokens, and is the map
    the head was trained with. Read as offsets, absolute ids name other tokens than t2d does."""
    expected = found.t2d.nonzero().flatten()
    if not torch.equal(found.target_ids, expected):
        raise _wrong(
            f"{path}: d2t",
            f"offsets: draft id i stands for target id i + d2t[i], {expected[:4].tolist()}...",
            f"target ids {found.target_ids[:4].tolist()}... (are these absolute ids?)",
        )
    if found.digest != wiring.vocab_map:
        raise _wrong(f"{path}: d2t", f"the trained map, {wiring.vocab_map}", found.digest)


def check_written(
    directory: Path,
    form: Form,
    table: dict[str, tuple[tuple[int, ...], torch.dtype]],
    wiring: Wiring,
    trained: dict[str, torch.Tensor],
    verifier: Verifier,
) -> dict[str, torch.Tensor]:
    """``check_directory``, and the values: 04's, the verifier's head, this very verifier.

    Args:
        trained: 04's float32 state dict.

    Returns:
        The tensors as read, by speculators' names.

    Raises:
        GateError: naming the tensor or the key.
    """
    found = check_directory(directory, form, table, wiring)
    path = directory / WEIGHTS
    check_verifier(directory, verifier.identity)
    head = verifier.lm_head()
    if "d2t" in found:
        head = head[VocabMap(found["d2t"], found["t2d"]).target_ids]
    check_head(path, found["lm_head.weight"], head)
    check_weights(path, found, trained)
    return found


def check_weights(
    path: Path, found: dict[str, torch.Tensor], trained: dict[str, torch.Tensor]
) -> None:
    """The exported tensors are 04's, each rounded once.

    Args:
        found: by speculators' names, as exported.
        trained: 04's float32 state dict.

    Raises:
        GateError: naming a tensor that was changed on the way.
    """
    for name, tensor in found.items():
        if not torch.equal(tensor, trained[name].to(tensor.dtype)):
            num_other = int((tensor != trained[name].to(tensor.dtype)).sum())
            says = f"{num_other} of {tensor.numel()} values are others"
            raise _wrong(f"{path}: {name}", "04's values", says)


def check_verifier(directory: Path, identity: dict[str, str]) -> None:
    """The drafter was made for this verifier, not for another of the same shape.

    Args:
        identity: the verifier's (``Verifier.identity``).

    Raises:
        GateError: naming the part that differs.
    """
    path = directory / CONFIG
    found = json.loads(path.read_text(encoding="utf-8")).get("verifier_identity", {})
    for part, expected in identity.items():
        if found.get(part) != expected:
            where = f"{path}: verifier_identity.{part}"
            raise _wrong(where, f"this verifier's, {expected}", repr(found.get(part, _ABSENT)))


def check_head(path: Path, head: torch.Tensor, verifier_rows: torch.Tensor) -> None:
    """The head is the verifier's own, row by row at the map's target ids: training leaves it so.

    Args:
        head: bf16 ``[draft_vocab_size, hidden]``, the exported ``lm_head.weight``.
        verifier_rows: the verifier's head at the map's target ids, same shape.

    Raises:
        GateError: a row is another token's, or another verifier's.
    """
    num_other = int((head != verifier_rows.to(head.dtype)).any(1).sum())
    if num_other:
        found = f"{num_other} of {len(head)} rows are not"
        raise _wrong(f"{path}: lm_head.weight", "the verifier's rows of the map's tokens", found)


def check_loaders(
    directory: Path,
    drafter: DrafterSection,
    wiring: Wiring,
    tensors: dict[str, torch.Tensor],
    verifier: Verifier,
) -> None:
    """Open the directory with speculators' loader and with vLLM's config code.

    Args:
        tensors: as ``check_directory`` returns them.
        verifier: speculators' loader opens it too.

    Raises:
        GateError: speculators reads another tensor, or vLLM another value, than was exported.
    """
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig

    register_config_class(verifier.directory, verifier.config)
    config = Eagle3SpeculatorConfig.from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = "eager"  # the default needs a GPU
    loaded = Eagle3DraftModel.from_pretrained(directory, config=config).state_dict()
    for name, tensor in tensors.items():
        if name not in loaded or not torch.equal(loaded[name].to(tensor.dtype), tensor):
            raise _wrong(f"{directory}: {name} in speculators", "the exported tensor", "another")

    read = SpeculatorsConfig.from_pretrained(directory)
    expected = {
        "head_dim": drafter.head_dim,
        "num_attention_heads": drafter.num_attention_heads,
        "num_key_value_heads": drafter.num_key_value_heads,
        "rope_parameters": rope_parameters(drafter),
        "max_position_embeddings": drafter.max_position_embeddings,
        "eagle_aux_hidden_state_layer_ids": list(wiring.aux_layer_ids),
        "num_aux_hidden_states": len(wiring.aux_layer_ids),
        "norm_before_residual": drafter.norm_before_residual,
        "norm_before_fc": drafter.norm_before_fc,
        "fc_norm": drafter.fc_norm,
        "norm_output": drafter.norm_output,
        "architectures": ["Eagle3LlamaForCausalLM"],
    }
    for key, value in expected.items():
        found = getattr(read, key, _ABSENT)
        if found != value:
            raise _wrong(f"{directory}: {key} in vLLM", repr(value), repr(found))


def _wrong(where: Any, expected: Any, found: Any) -> GateError:
    return GateError(
        "the exported drafter is not what the config says",
        where=where,
        expected=expected,
        found=found,
        fix="restore the directory, or redo 05 (05_export.py with --redo)",
    )
