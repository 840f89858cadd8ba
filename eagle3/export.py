"""The exported drafter: a directory an engine loads, built beside its place and renamed into it.

Most mistakes in such a directory fail without an error in the engines: a tensor left out is
left uninitialised, a ``head_dim`` left out truncates q, k and v, a ``norm_before_residual`` left
out means True. So ``config.json`` has every key that an engine reads (speculators' own
serialisation drops those equal to transformers' defaults), and ``exported.py`` compares keys and
tensors with what the run's config says they are.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from .config import DrafterSection
from .contract import Wiring
from .drafter import layer_config
from .errors import GateError
from .files import PARTIAL_SUFFIX, fsync_directory, write_json, write_tensors
from .verifier import Verifier

DRAFTER = "drafter"
WEIGHTS, CONFIG = "model.safetensors", "config.json"
# Written for people and for a later 06; no engine reads them.
OWN_KEYS = ("wiring_contract", "verifier_identity", "verifier")


@dataclass(frozen=True)
class Form:
    """One way a drafter lies on disk.

    Attributes:
        directory: its name under ``05_export``.
        config: the part of ``config.json`` that decides how the drafter is served.
        stored_as: a tensor's name in speculators' format -> its name in the file.
    """

    directory: str
    config: dict[str, Any]
    stored_as: Callable[[str], str] = str


def speculators_form(
    drafter: DrafterSection,
    wiring: Wiring,
    *,
    draft_vocab_size: int,
    vocab_size: int,
    num_speculative_tokens: int,
) -> Form:
    """speculators' format, which vLLM loads.

    Keys as vLLM's ``transformers_utils/configs/speculators/algos.py`` reads them. There is no
    top-level ``model_type``: with one, vLLM does not recognise the format. The layer ids are the
    drafter's inputs, without the last state. vLLM counts the states from
    ``num_aux_hidden_states`` inside the layer's config, and else assumes three.
    """
    layer = layer_config(drafter, vocab_size)
    layer["num_aux_hidden_states"] = len(wiring.aux_layer_ids)
    config = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3DraftModel"],
        "transformer_layer_config": layer,
        "draft_vocab_size": draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(wiring.aux_layer_ids),
        "norm_before_residual": drafter.norm_before_residual,
        "norm_before_fc": drafter.norm_before_fc,
        "fc_norm": drafter.fc_norm,
        "norm_output": drafter.norm_output,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": num_speculative_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
        },
    }
    return Form(DRAFTER, config)


def write_directory(
    directory: Path,
    tensors: dict[str, torch.Tensor],
    form: Form,
    wiring: Wiring,
    verifier: Verifier,
) -> None:
    """Write ``model.safetensors`` and ``config.json``.

    Args:
        tensors: as ``serving_tensors`` gives them.
    """
    config = {
        **form.config,
        "wiring_contract": wiring.to_json(),
        "verifier_identity": verifier.identity,
    }
    named = {
        "name_or_path": str(verifier.directory.resolve()),
        "architectures": verifier.config.get("architectures", []),
    }
    if "speculators_config" in config:
        config["speculators_config"] = {**config["speculators_config"], "verifier": named}
        config["speculators_version"] = importlib.metadata.version("speculators")
    else:
        config["verifier"] = named
    stored = {form.stored_as(name): tensor for name, tensor in tensors.items()}
    write_tensors(directory / WEIGHTS, stored, metadata={"format": "pt"})
    write_json(directory / CONFIG, config)


def serving_tensors(
    checkpoint: Path, table: dict[str, tuple[tuple[int, ...], torch.dtype]]
) -> dict[str, torch.Tensor]:
    """Read 04's float32 state dict and cast each tensor to the dtype it is served in.

    Raises:
        GateError: a value is finite in float32 and not in bfloat16, or was never finite.
    """
    tensors = {}
    for name, tensor in load_file(checkpoint).items():
        dtype = table[name][1] if name in table else tensor.dtype
        tensors[name] = tensor.to(dtype).contiguous()
        if dtype.is_floating_point and not torch.isfinite(tensors[name]).all():
            raise GateError(
                "a trained tensor cannot be served",
                where=f"{checkpoint}: {name}",
                expected=f"finite values in {dtype}",
                found=f"{int((~torch.isfinite(tensors[name])).sum())} values that are not",
                fix="train again with a lower train.learning_rate",
            )
    return tensors


@contextmanager
def publishing_directory(directory: Path) -> Iterator[Path]:
    """Yield a fresh partial directory; on a clean exit fsync it and rename it into place.

    The body fills the directory and checks it; if the body raises, nothing appears under the
    final name.
    """
    partial = directory.with_name(directory.name + PARTIAL_SUFFIX)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
        fsync_directory(partial)  # its files were fsynced one by one
        if directory.exists():  # of a run that stopped before its manifest, or damaged
            shutil.rmtree(directory)
        os.rename(partial, directory)
        fsync_directory(directory.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
