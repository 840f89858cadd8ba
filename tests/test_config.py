"""The config schema: every mistake in a YAML is named, with the key to correct."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from eagle3.config import Config
from eagle3.config_file import load_config
from eagle3.errors import EXIT_CONFIG, ConfigError

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))
DEMO = ROOT / "configs" / "smollm2_cpu.yaml"
TREE = yaml.safe_load(DEMO.read_text())
# Mappings whose keys are the user's own, not the schema's.
FREE_MAPPINGS = ("data.chat_template_kwargs", "verify.gates.min_acceptance_length")


def _leaves(node: Any, path: tuple = ()) -> list[tuple]:
    """Paths of every schema key of a config tree, sections and list entries included."""
    if isinstance(node, list):
        return [p for i, entry in enumerate(node) for p in _leaves(entry, (*path, i))]
    if not isinstance(node, dict) or ".".join(map(str, path)) in FREE_MAPPINGS:
        return []
    return [p for key in node for p in [(*path, key), *_leaves(node[key], (*path, key))]]


KEYS = _leaves(TREE)


def _parent(tree: dict, path: tuple) -> Any:
    for part in path[:-1]:
        tree = tree[part]
    return tree


def _load(tree: dict, tmp_path: Path) -> Config:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return load_config(path)


def _error(tree: dict, tmp_path: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        _load(tree, tmp_path)
    assert caught.value.exit_code == EXIT_CONFIG
    return caught.value


def _with(key: str, value: Any) -> dict:
    tree = copy.deepcopy(TREE)
    path = tuple(key.split("."))
    _parent(tree, path)[path[-1]] = value
    return tree


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_config_loads(path):
    config = load_config(path)
    assert config.run_dir == config.run.dir / config.run.name


def test_the_keys_under_test_are_the_whole_schema():
    """The generated tests below cover a schema key that is added tomorrow."""

    def count(section) -> int:
        return sum(
            1 + (count(value) if hasattr(value := getattr(section, name), "fingerprint") else 0)
            for name in type(section).model_fields
        )

    in_lists = [path for path in KEYS if any(isinstance(part, int) for part in path)]
    assert len(KEYS) - len(in_lists) == count(load_config(DEMO))


@pytest.mark.parametrize("path", KEYS, ids=lambda path: ".".join(map(str, path)))
def test_a_missing_key_is_named(path, tmp_path):
    tree = copy.deepcopy(TREE)
    del _parent(tree, path)[path[-1]]
    error = _error(tree, tmp_path)
    key = ".".join(map(str, path))
    assert error.where.endswith(f": {key}") and error.fix == f"add {key}"


@pytest.mark.parametrize("path", KEYS, ids=lambda path: ".".join(map(str, path)))
def test_a_misspelt_key_is_named_with_the_right_one(path, tmp_path):
    """Misspelt, a key is unknown and missing at once; the user must read the one he typed."""
    tree = copy.deepcopy(TREE)
    parent = _parent(tree, path)
    parent[path[-1] + "z"] = parent.pop(path[-1])
    if path[-1] == "kind":  # without it no schema is known for the others
        assert _error(tree, tmp_path).fix == f"add {'.'.join(map(str, path))}"
        return
    error = _error(tree, tmp_path)
    assert error.found == path[-1] + "z"
    assert error.expected == f"did you mean {path[-1]}?"


def test_an_unknown_key_unlike_any_lists_the_valid_ones(tmp_path):
    error = _error(_with("train.qqq", 1), tmp_path)
    assert "learning_rate" in error.expected and "num_epochs" in error.expected


def test_head_dim_is_never_derived(tmp_path):
    tree = copy.deepcopy(TREE)
    del tree["drafter"]["head_dim"]
    assert "drafter.head_dim" in _error(tree, tmp_path).expected


@settings(max_examples=40)
@given(st.lists(st.integers(-2, 6), min_size=1, max_size=5))
def test_aux_layer_ids_load_only_strictly_ascending_from_one(tmp_path_factory, ids):
    directory = tmp_path_factory.getbasetemp()
    tree = _with("capture.aux_layer_ids", ids)
    if ids[0] >= 1 and all(a < b for a, b in zip(ids, ids[1:])):
        assert _load(tree, directory).capture.aux_layer_ids == tuple(ids)
    else:
        assert "strictly ascending" in _error(tree, directory).expected


def test_aux_layer_ids_beyond_the_verifier_are_refused(write_config):
    from eagle3.contract import Wiring
    from eagle3.verifier import Verifier

    config = load_config(write_config({"capture.aux_layer_ids": [1, 2, 4]}))
    verifier = Verifier.open(config.verifier)
    with pytest.raises(ConfigError) as caught:
        Wiring.at_capture(config, verifier)
    assert caught.value.where == "capture.aux_layer_ids" and "1 to 3" in caught.value.expected
    config = load_config(write_config({"capture.aux_layer_ids": [1, 2, 3]}))
    assert Wiring.at_capture(config, verifier).aux_layer_ids == (1, 2, 3)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run.name", ".."),
        ("run.name", "a/b"),
        ("verifier.dtype", "float16"),
        ("data.sources", []),
        ("data.regenerate", True),
        ("data.regenerate.temperature", -1),
        ("drafter.head_dim", 0),
        ("drafter.num_key_value_heads", 4),
        ("train.learning_rate", 0),
        ("train.learning_rate", float("nan")),
        ("train", "fast"),
        ("verify.num_speculative_tokens", 0),
    ],
)
def test_a_value_that_does_not_fit_is_named(key, value, tmp_path):
    error = _error(_with(key, value), tmp_path)
    assert error.where.split(": ")[1] in (key, key.rpartition(".")[0])


def test_an_unknown_source_kind_lists_the_known_ones(tmp_path):
    tree = copy.deepcopy(TREE)
    tree["data"]["sources"][0]["kind"] = "s3"
    error = _error(tree, tmp_path)
    assert error.where.endswith("data.sources.0.kind") and "'hub'" in error.expected


def test_regenerate_may_be_off(tmp_path):
    assert _load(_with("data.regenerate", False), tmp_path).data.regenerate is False


NUMBERS = [
    path
    for path in KEYS
    if isinstance(value := _parent(TREE, path)[path[-1]], int | float)
    and not isinstance(value, bool)
]


@pytest.mark.parametrize("path", NUMBERS, ids=lambda path: ".".join(map(str, path)))
def test_true_is_no_number(path, tmp_path):
    tree = copy.deepcopy(TREE)
    _parent(tree, path)[path[-1]] = True
    error = _error(tree, tmp_path)
    assert error.where.endswith(": " + ".".join(map(str, path))) and error.found == "True"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("capture.aux_layer_ids", [True, 15]),
        ("verify.gates.min_acceptance_length", {"heldout": True}),
        ("data.sources", [{"kind": "package", "name": "gsm8k", "max_conversations": True}]),
    ],
)
def test_true_is_no_number_inside_a_list_or_mapping(key, value, tmp_path):
    assert f": {key}." in _error(_with(key, value), tmp_path).where


@pytest.mark.parametrize(
    "text", ["train: {seed: 1}\ntrain: {seed: 2}\n", "train:\n  seed: 1\n  lr: 1\n  seed: 2\n"]
)
def test_a_key_given_twice_is_refused(text, tmp_path):
    """YAML readers keep the last one in silence."""
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert "a second time" in caught.value.found and "line" in caught.value.found
    with pytest.raises(ConfigError) as caught:
        load_config(DEMO, ("verify.gates.min_acceptance_length={heldout: 1.5, heldout: 1.6}",))
    assert "'heldout' stands here a second time" in caught.value.found


@pytest.mark.parametrize("text", ["[1", "just words", "", "\x00", "\xff\xfe"])
def test_a_file_that_is_no_config_is_refused(text, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError):
        load_config(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "nothing.yaml")
    assert caught.value.where == str(tmp_path / "nothing.yaml")


def test_set_overrides_keys_with_yaml_values():
    overrides = ("train.learning_rate=1e-4", "capture.aux_layer_ids=[3, 9]", "verify.gates={}")
    with pytest.raises(ConfigError):
        load_config(DEMO, overrides)
    config = load_config(DEMO, overrides[:2])
    assert config.train.learning_rate == 1e-4 and config.capture.aux_layer_ids == (3, 9)
    assert config.vocab == load_config(DEMO).vocab


@pytest.mark.parametrize(
    "override",
    ["train.seed", "seed=1", "trian.seed=1", "train.sede=1", "train.seed.x=1", "train.seed=[1", ""],
)
def test_a_wrong_set_is_refused(override):
    with pytest.raises(ConfigError) as caught:
        load_config(DEMO, (override,))
    assert caught.value.exit_code == EXIT_CONFIG


def test_a_config_is_frozen():
    config = load_config(DEMO)
    for section in (config, config.train, config.data.sources[0]):
        name = next(iter(type(section).model_fields))
        with pytest.raises(ValidationError):
            setattr(section, name, getattr(section, name))
