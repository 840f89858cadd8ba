"""What only serving shows: vLLM reads other files than the replay, the files were wrong from
training on and fit each other, or capture hands over other states than vLLM's drafter reads.

The drafter is the demo's kind (fc_norm, norm_output) on the tiny verifier, in float32: every draft
of vLLM's that is not the replay's is the sabotage's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle3.export import CONFIG
from tests.sabotages import (
    DOWN,
    GATE,
    HIDDEN_NORM,
    INPUT_NORM,
    UP,
    K,
    Q,
    Tensors,
    V,
    drop,
    in_config,
    in_weights,
    put,
    set_ids,
    set_layer,
    set_rope,
    swap,
)

APART, ALIKE = "vLLM drafted", "served as they are"


@dataclass(frozen=True)
class ServedSabotage:
    """One mistake.

    Attributes:
        apply: makes it, in a directory.
        position: of the chain, at which vLLM's drafts and the replay's first part; None where it
            does not come to that.
        names: what 06's error must say.
    """

    name: str
    apply: Callable[[Path], None]
    position: int | None = 0
    names: str = APART


# The directory is changed between 06's check of it and vLLM: as if vLLM read it otherwise.
READ_OTHERWISE = [
    ServedSabotage("vLLM takes half the head_dim", set_layer(head_dim=32)),
    ServedSabotage("vLLM takes another RoPE theta", set_rope(rope_theta=100.0)),
    ServedSabotage(
        "vLLM takes norm_before_residual for true",
        in_config(lambda c, layer: c.update(norm_before_residual=True)),
    ),
    ServedSabotage("vLLM hands over the next layers' states", set_ids([2, 3, 4])),
    ServedSabotage("vLLM finds no d2t", drop("d2t")),
    ServedSabotage("vLLM finds no lm_head", drop("lm_head.weight")),
    ServedSabotage("vLLM finds no hidden_norm", drop(HIDDEN_NORM)),
    ServedSabotage(
        "vLLM passes over norm_output",
        in_config(lambda c, layer: c.update(norm_output=False)),
        position=1,
    ),
    ServedSabotage(
        "vLLM stops drafting at max_position_embeddings",
        set_layer(max_position_embeddings=64),
        position=None,
        names="max_position_embeddings",
    ),
]


def heads_rows_permuted(tensors: Tensors) -> torch.Tensor:
    return tensors["lm_head.weight"].roll(1, 0)


def aux_states_permuted(tensors: Tensors) -> torch.Tensor:
    low, mid, high = tensors["fc.weight"].chunk(3, dim=1)
    return torch.cat([mid, low, high], dim=1)


def other_basis(tensors: Tensors) -> None:
    """A working drafter of a verifier that is this one with its hidden dimensions renumbered."""
    hidden = len(tensors["norm.weight"])
    order = torch.randperm(hidden, generator=torch.Generator().manual_seed(0))
    for name, tensor in tensors.items():
        if name in ("d2t", "t2d"):
            continue
        if len(tensor) == hidden:
            tensor = tensor[order]
        if tensor.dim() == 2 and tensor.shape[1] % hidden == 0 and "o_proj" not in name:
            tensor = torch.cat([part[:, order] for part in tensor.split(hidden, dim=1)], dim=1)
        tensors[name] = tensor


def of_another_verifier(directory: Path) -> None:
    in_weights(other_basis)(directory)
    config = json.loads((directory / CONFIG).read_text())
    config["verifier_identity"]["weights"] = "0" * 64
    (directory / CONFIG).write_text(json.dumps(config))


def norms_apart(tensors: Tensors) -> None:
    """The embedding's norm four times what it was, a quarter of it read: that rounds nothing."""
    tensors[INPUT_NORM] = tensors[INPUT_NORM] * 4
    hidden = len(tensors[INPUT_NORM])
    for name in (Q, K, V):
        tensors[name] = torch.cat([tensors[name][:, :hidden] / 4, tensors[name][:, hidden:]], dim=1)


def gate_and_up_apart(tensors: Tensors) -> None:
    """Twice the units, the new ones in pairs that cancel: silu(a) * b and silu(a) * -b."""
    generator = torch.Generator().manual_seed(0)
    half, hidden = len(tensors[UP]) // 2, tensors[UP].shape[1]
    gate, up, down = torch.randn(3, half, hidden, generator=generator) / hidden**0.5
    tensors[GATE] = torch.cat([tensors[GATE], gate, gate])
    tensors[UP] = torch.cat([tensors[UP], up, -up])
    tensors[DOWN] = torch.cat([tensors[DOWN], down.T, down.T], dim=1)


def set_apart(directory: Path) -> None:
    """The same drafter, in which no tensor nearly does for another of its shape.

    The one trained on the tiny verifier hardly uses its MLP, and its two input norms stay alike:
    to swap either pair would be no mistake anyone could find.
    """
    in_weights(norms_apart)(directory)
    in_weights(gate_and_up_apart)(directory)

    def widen(config: dict[str, Any], layer: dict[str, Any]) -> None:
        layer["intermediate_size"] *= 2
        config["wiring_contract"]["drafter"]["intermediate_size"] *= 2

    in_config(widen)(directory)


# Somebody else's drafter (06 --drafter), whose files fit each other.
GUESTS = [
    ServedSabotage(
        "lm_head's rows are other tokens'", put("lm_head.weight", heads_rows_permuted), names=ALIKE
    ),
    ServedSabotage(
        "fc reads the layers in another order", put("fc.weight", aux_states_permuted), names=ALIKE
    ),
    ServedSabotage(
        "trained for another verifier of the same shape",
        of_another_verifier,
        names="verifier_identity.weights",
    ),
    ServedSabotage(
        "input_layernorm and hidden_norm swapped", swap(INPUT_NORM, HIDDEN_NORM), names=ALIKE
    ),
    ServedSabotage("its gate and up swapped", swap(GATE, UP), names=ALIKE),
    ServedSabotage(
        "its heads of q in another order",
        put(Q, lambda t: t[Q].unflatten(0, (4, -1)).flip(0).flatten(0, 1)),
        names=ALIKE,
    ),
]


@dataclass(frozen=True)
class CaptureSabotage:
    """The worker keeps other states than it should, in 02 and in 06 alike.

    Attributes:
        change: ``change(runner, states)``: the states of a step, aux ones and then the last.
        names: what the error must say.
        script: whose error it is.
    """

    name: str
    change: Callable[[Any, list[torch.Tensor]], list[torch.Tensor]]
    names: str
    script: str = "06_verify.py"


def embedding_first(runner: Any, states: list[torch.Tensor]) -> list[torch.Tensor]:
    ids = runner.input_ids.gpu[: len(states[0])]
    return [runner.model.model.embed_tokens(ids), *states[1:]]


CAPTURE = [
    CaptureSabotage(
        "the last state is kept after the norm",
        lambda runner, states: [*states[:-1], runner.model.model.norm(states[-1])],
        "argmax(lm_head(norm(last state)))",
        "02_gen_hidden_states.py",
    ),
    CaptureSabotage(
        "a layer's state is kept in place of the last one",
        lambda runner, states: [*states[:-1], states[-2]],
        "argmax(lm_head(norm(last state)))",
        "02_gen_hidden_states.py",
    ),
    CaptureSabotage("the embedding is kept in place of a layer", embedding_first, APART),
    CaptureSabotage(
        "aux states are kept in another order",
        lambda runner, states: [states[1], states[0], *states[2:]],
        APART,
    ),
]
