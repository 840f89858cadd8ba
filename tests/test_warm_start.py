"""A run that starts from an existing drafter: its map, its weights, and what does not fit."""

from __future__ import annotations

import pytest
import torch
from drafters import Drafter, open_verifier

from eagle3.config_file import load_config
from eagle3.drafter import BORROWED, build, speculators_config
from eagle3.errors import ConfigError
from eagle3.warm_start import load_weights, map_of, start


@pytest.fixture
def started(tiny_verifier_dir, tmp_path, write_config):
    """An exported drafter, and a config that starts from it."""
    verifier = open_verifier(tiny_verifier_dir)
    existing = Drafter.random(verifier, head_dim=32, fc_norm=True, norm_output=True)
    directory = existing.export(tmp_path / "existing")

    def config(**changes):
        return load_config(write_config({"vocab.warm_start_from": str(directory), **changes}))

    return existing, verifier, config


def fresh(existing: Drafter, verifier) -> torch.nn.Module:
    config = speculators_config(
        existing.wiring,
        existing.section,
        draft_vocab_size=len(existing.vocab_map.d2t),
        verifier=verifier,
        num_speculative_tokens=3,
    )
    return build(config, verifier, existing.vocab_map)


@pytest.mark.parametrize("form", ["speculators", "flat"])
def test_map_and_weights_are_the_existing_drafters(started, form, tmp_path):
    existing, verifier, config = started
    changes = {}
    if form == "flat":
        directory = existing.export(tmp_path / "flat", existing.flat)
        changes["vocab.warm_start_from"] = str(directory)
    vocab_map, hashes = map_of(config(**changes), verifier)
    assert vocab_map.digest == existing.vocab_map.digest and "model.safetensors" in hashes
    model = fresh(existing, verifier)
    load_weights(model, config(**changes), verifier)
    for name, tensor in existing.model.state_dict().items():
        if name not in BORROWED:
            assert torch.equal(model.state_dict()[name].bfloat16(), tensor.bfloat16()), name


def test_without_one_fc_hands_on_the_last_aux_state(started):
    existing, verifier, config = started
    model = fresh(existing, verifier)
    start(model, config(**{"vocab.warm_start_from": None}), verifier)
    states = torch.randn(3, 5, model.fc.out_features)  # three aux states of five positions
    times = 2 if model.fc_norm is not None else 1  # normed states are handed on at twice their size
    assert torch.equal(model.fc(states.transpose(0, 1).flatten(1)), times * states[-1])


def test_without_one_a_position_attends_to_itself_most(started):
    existing, verifier, config = started
    model = fresh(existing, verifier)
    start(model, config(**{"vocab.warm_start_from": None}), verifier)
    attention = model.layers[0].self_attn
    torch.manual_seed(0)
    inputs = torch.nn.functional.normalize(torch.randn(50, attention.q_proj.in_features), dim=-1)
    queries = attention.q_proj(inputs).unflatten(1, (-1, attention.head_dim))
    keys = attention.k_proj(inputs).unflatten(1, (-1, attention.head_dim))
    keys = keys.repeat_interleave(attention.num_key_value_groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", queries, keys)
    assert torch.equal(queries, keys)
    assert (scores.argmax(-1) == torch.arange(50)).float().mean() > 0.9


def test_with_one_training_starts_at_its_weights(started):
    existing, verifier, config = started
    model = fresh(existing, verifier)
    start(model, config(), verifier)
    assert torch.equal(model.fc.weight, existing.model.fc.weight.bfloat16().float())


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"capture.aux_layer_ids": [1, 2]}, "capture.aux_layer_ids"),
        ({"drafter.rope_theta": 50000.0}, "drafter.rope_theta"),
        ({"drafter.norm_before_residual": True}, "drafter.norm_before_residual"),
    ],
)
def test_another_kind_of_drafter_is_refused(started, changes, key):
    existing, verifier, config = started
    with pytest.raises(ConfigError, match="another kind") as caught:
        load_weights(fresh(existing, verifier), config(**changes), verifier)
    assert key in caught.value.expected


def test_another_draft_vocabulary_size_is_refused(started):
    _, verifier, config = started
    with pytest.raises(ConfigError) as caught:
        map_of(config(**{"vocab.draft_vocab_size": 64}), verifier)
    assert caught.value.found == "128"
