"""Training that does otherwise than the export says: nothing in the files shows it, 05 does.

Each breaks the training code (or what it reads) as it is; the config, the contract and the
exported directory stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from eagle3.attention import RowSpans
from eagle3.batches import Batch, Row, RowReader
from eagle3.ttt import TTTStep

AIMED, DRAFTED = "the token aimed at", "the token drafted"


@dataclass(frozen=True)
class TrainingSabotage:
    """One mistake of training.

    Attributes:
        apply: makes it: ``apply(monkeypatch, model)``.
        names: what the error's ``where`` must say.
        step: the TTT step at which it must be found; None where it depends.
    """

    name: str
    apply: Callable[[pytest.MonkeyPatch, Any], None]
    names: str
    step: int | None = 0


def in_rows(change: Callable[[Row, Any], Row]) -> Callable[[pytest.MonkeyPatch, Any], None]:
    """``change(row, model)`` of what the trainer reads from the shards."""

    def apply(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
        read = RowReader.__getitem__
        monkeypatch.setattr(RowReader, "__getitem__", lambda r, i: change(read(r, i), model))

    return apply


def in_batch(change: Callable[[Batch], Batch]) -> Callable[[pytest.MonkeyPatch, Any], None]:
    def apply(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
        forward = TTTStep.forward
        monkeypatch.setattr(TTTStep, "forward", lambda s, b, **kw: forward(s, change(b), **kw))

    return apply


def in_model(change: Callable[[Any], Any]) -> Callable[[pytest.MonkeyPatch, Any], None]:
    return lambda monkeypatch, model: change(model)


def in_states(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Of the aux states ``[n, 3, H]``."""
    return in_rows(lambda row, _: replace(row, aux_hidden_states=change(row.aux_hidden_states)))


def embedding_first(row: Row, model: Any) -> Row:
    states = row.aux_hidden_states.clone()
    states[:, 0] = model.embed_tokens.weight[row.input_ids]
    return replace(row, aux_hidden_states=states)


def one_row(batch: Batch) -> RowSpans:
    return RowSpans((len(batch.supervised),), (len(batch.input_ids),), batch.supervised)


def rope(theta: float, width: int | None = None) -> Callable[[Any], None]:
    """Unscaled frequencies; of another width the first ones of it."""

    def change(model: Any) -> None:
        inv_freq = model.rotary_emb.inv_freq
        width_or_own = width or 2 * len(inv_freq)
        exponents = torch.arange(0, width_or_own, 2) / width_or_own
        inv_freq.copy_((theta**-exponents)[: len(inv_freq)])
        model.rotary_emb.attention_scaling = 1.0

    return change


def swap_q_and_k(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    attention = model.layers[0].self_attn
    swapped = {"q_proj": attention.k_proj, "k_proj": attention.q_proj}
    qkv = TTTStep._qkv_weights

    def with_names_swapped(step: TTTStep) -> Any:
        attention.q_proj, attention.k_proj = swapped["q_proj"], swapped["k_proj"]
        try:
            return qkv(step)
        finally:
            attention.q_proj, attention.k_proj = swapped["k_proj"], swapped["q_proj"]

    monkeypatch.setattr(TTTStep, "_qkv_weights", with_names_swapped)


def chain_stands_still(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    """Every step of a chain at the position of step 0."""
    rotation, first = TTTStep._rotation, {}

    def at_step_0(step: TTTStep, position_ids: torch.Tensor) -> Any:
        # All positions come first, then the supervised ones, step by step.
        return rotation(step, first.setdefault(len(position_ids), position_ids))

    monkeypatch.setattr(TTTStep, "_rotation", at_step_0)


TRAINING = [
    TrainingSabotage(
        "loss mask shifted by one, later",
        in_rows(lambda row, _: replace(row, loss_mask=row.loss_mask.roll(1))),
        "positions supervised",
    ),
    TrainingSabotage(
        "loss mask shifted by one, earlier",
        in_rows(lambda row, _: replace(row, loss_mask=row.loss_mask.roll(-1))),
        "positions supervised",
    ),
    TrainingSabotage(
        "prompts supervised too",
        in_rows(lambda row, _: replace(row, loss_mask=torch.ones_like(row.loss_mask))),
        "positions supervised",
    ),
    TrainingSabotage(
        "last state after the norm, normed again",
        in_rows(
            lambda row, model: replace(
                row, last_hidden_states=model.verifier_norm(row.last_hidden_states)
            )
        ),
        AIMED,
    ),
    TrainingSabotage(
        "a layer's state in place of the last one",
        in_rows(lambda row, _: replace(row, last_hidden_states=row.aux_hidden_states[:, -1])),
        AIMED,
    ),
    TrainingSabotage(
        "targets of the token before",
        in_rows(lambda row, _: replace(row, last_hidden_states=row.last_hidden_states.roll(1, 0))),
        AIMED,
    ),
    TrainingSabotage(
        "the final norm of another verifier",
        in_model(lambda model: model.verifier_norm.weight.data.copy_(torch.rand(64) + 0.5)),
        AIMED,
    ),
    TrainingSabotage(
        "aux states permuted", in_states(lambda states: states[:, [1, 0, 2]]), DRAFTED
    ),
    TrainingSabotage(
        "aux states of the token before", in_states(lambda states: states.roll(1, 0)), DRAFTED
    ),
    TrainingSabotage("the embedding in place of a layer", in_rows(embedding_first), DRAFTED),
    TrainingSabotage(
        "embedding of the token itself, not of the next",
        in_batch(lambda batch: replace(batch, input_ids=batch.input_ids.roll(1))),
        DRAFTED,
    ),
    TrainingSabotage(
        "rows see each other",
        in_batch(lambda batch: replace(batch, rows=one_row(batch))),
        DRAFTED,
        step=None,
    ),
    TrainingSabotage("RoPE of another theta", in_model(rope(500.0)), DRAFTED),
    TrainingSabotage("RoPE without its scaling", in_model(rope(10000.0)), DRAFTED, step=None),
    TrainingSabotage(
        "RoPE from the doubled hidden size", in_model(rope(10000.0, 2 * 64 // 4)), DRAFTED
    ),
    TrainingSabotage("q and k swapped in training and back", swap_q_and_k, DRAFTED),
    TrainingSabotage(
        "norm_before_residual trained, not said",
        in_model(lambda model: setattr(model.layers[0], "norm_before_residual", True)),
        DRAFTED,
    ),
    TrainingSabotage(
        "norm_output trained, not said",
        in_model(lambda model: setattr(model.config, "norm_output", True)),
        DRAFTED,
        step=1,
    ),
    TrainingSabotage("positions of the chain stand still", chain_stands_still, DRAFTED, step=1),
    TrainingSabotage(
        "another norm epsilon in training",
        in_model(lambda model: setattr(model.layers[0].hidden_norm, "variance_epsilon", 0.1)),
        DRAFTED,
    ),
    TrainingSabotage(
        "the embedding of another verifier",
        in_model(lambda model: model.embed_tokens.weight.data.mul_(-1)),
        DRAFTED,
    ),
]
