"""The wiring contract: the alignment rule, and that every field is compared."""

from __future__ import annotations

import doctest
import json
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import eagle3.contract
from eagle3.config_file import load_config
from eagle3.contract import Wiring, supervised_positions
from eagle3.errors import EXIT_STALE, ConfigError, StaleInputError
from eagle3.verifier import Verifier


@pytest.fixture
def wiring(write_config) -> Wiring:
    config = load_config(write_config())
    at_capture = Wiring.at_capture(config, Verifier.open(config.verifier))
    return at_capture.bind(vocab_map="a" * 64, drafter=config.drafter)


def test_the_examples_in_the_docstrings_hold():
    found = doctest.testmod(eagle3.contract)
    assert found.attempted >= 2 and found.failed == 0


@pytest.mark.parametrize(
    ("loss_mask", "ttt_step", "positions"),
    [
        ([0, 0, 1, 1, 1], 0, [1, 2]),  # P0 P1 A2 A3 E4
        ([0, 0, 1, 1, 1], 1, [1]),
        ([0, 0, 1, 1, 1], 2, []),
        ([0, 1, 1, 0, 1, 1, 1], 0, [0, 3, 4]),  # two turns: none reaches over the prompt between
        ([0, 1, 1, 0, 1, 1, 1], 1, [3]),
        ([0, 0, 1], 0, []),  # a one-token answer: the verifier itself emits it
        ([], 0, []),
    ],
)
def test_supervised_positions(loss_mask, ttt_step, positions):
    assert supervised_positions(loss_mask, ttt_step) == positions


@given(st.lists(st.integers(0, 1), max_size=20), st.integers(0, 4))
def test_each_further_step_supervises_a_subset_whose_tokens_exist(loss_mask, step):
    here, further = (supervised_positions(loss_mask, s) for s in (step, step + 1))
    assert set(further) <= set(here)
    for t in here:  # embeds t+1, predicts t+2 .. t+2+step: all there, all the assistant's
        assert loss_mask[t + 1 : t + 3 + step] == [1] * (step + 2)


def test_a_contract_survives_json(wiring):
    assert Wiring.from_json(json.loads(json.dumps(wiring.to_json()))) == wiring
    wiring.require_equal(replace(wiring), where="here", fix="nothing")


@pytest.mark.parametrize("name", [field.name for field in fields(Wiring)])
def test_a_difference_in_any_field_is_named(wiring, name):
    other = {"aux_layer_ids": (1, 2), "num_verifier_layers": 5, "hidden_size": 65, "drafter": {}}
    found = replace(wiring, **{name: other.get(name, "another")})
    with pytest.raises(StaleInputError) as caught:
        wiring.require_equal(found, where="05_export", fix="redo 05")
    error = caught.value
    assert error.exit_code == EXIT_STALE and error.where == "05_export" and error.fix == "redo 05"
    assert error.what.endswith(f": {name}")
    shown = {"aux_layer_ids": [1, 2]}.get(name, getattr(found, name))
    assert error.found == str(shown) and error.found != error.expected


def test_the_drafter_must_have_the_verifiers_hidden_size(write_config):
    config = load_config(write_config({"drafter.hidden_size": 128}))
    with pytest.raises(ConfigError) as caught:
        Wiring.at_capture(config, Verifier.open(config.verifier))
    assert caught.value.where == "drafter.hidden_size" and caught.value.expected == "64"
