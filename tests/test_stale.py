"""Every key of the schema in turn: a change either cannot touch what is finished, and is accepted,
or makes exactly the right stages stale, with the difference shown. Nothing is reused or redone in
silence."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle3 import config as schema
from eagle3.config_file import load_config
from eagle3.errors import EXIT_DONE, EXIT_STALE, ConfigError
from eagle3.fingerprint import expected_fingerprint
from eagle3.run_state import look
from tests.conftest import config_writer
from tests.runs import ROOT, Run
from tests.test_vocab import publish_data

# Which stage reads a section, which stages come after it, and the keys that say how a run uses a
# machine. Written out here, so that a key marked by mistake in the schema fails.
READERS = {
    "verifier": "01_data",
    "data": "01_data",
    "evaluation": "01_data",
    "capture": "02_hidden",
    "vocab": "03_vocab",
    "drafter": "04_train",
    "train": "04_train",
    "verify": "06_verify",
}
AFTER = {
    "01_data": {"02_hidden", "03_vocab", "04_train", "05_export", "06_verify"},
    "02_hidden": {"04_train", "05_export", "06_verify"},
    "03_vocab": {"04_train", "05_export", "06_verify"},
    "04_train": {"05_export", "06_verify"},
    "05_export": {"06_verify"},
    "06_verify": set(),
}
OPERATIONAL = (
    "engine.",
    "assumed_tokens_per_s.",
    "verifier.path",
    "capture.disk_budget_bytes",
    "drafter.reference",
    "train.trackers",
    "train.log_every_steps",
    "train.checkpoint_every_steps",
)
VERDICT = "verify.gates."
# Another run altogether: nothing of this one is looked at.
ELSEWHERE = ("run.name", "run.dir")
# One key alone cannot change: the reference must be what the drafter is, a source's kind decides
# its other keys (below, sources are exchanged whole).
BOUND = (
    "drafter.reference.num_attention_heads",
    "drafter.reference.num_key_value_heads",
    "drafter.reference.head_dim",
    "data.sources.0.kind",
    "data.sources.1.kind",
    "data.sources.2.kind",
    "evaluation.prompt_sets.0.kind",
)
GEOMETRY = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


def everything(directory: Path) -> dict[str, Any]:
    """Overrides that give every part of the schema a value."""
    return {
        "verifier.revision": "main",
        "data.chat_template_kwargs": {"thinking": False},
        "data.regenerate.other_modes": [
            {"chat_template_kwargs": {"thinking": True}, "temperature": 1.0, "top_p": 0.95}
        ],
        "data.sources": [
            {"kind": "package", "name": "chitchat", "max_conversations": 16},
            {"kind": "hub", "name": "hub", "path": "a/b", "split": "train", "max_conversations": 4},
            {
                "kind": "local",
                "name": "local",
                "path": str(directory / "chats.jsonl"),
                "max_conversations": 4,
            },
        ],
        "drafter.norm_before_fc": False,  # the two exclude each other
        "drafter.fc_norm": False,
        "drafter.rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "drafter.reference": {"source": "a published drafter", **GEOMETRY},
    }


def leaves(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Paths to everything in a config that is no section and no list of sections."""
    if isinstance(value, schema.Section):
        for name in type(value).model_fields:
            yield from leaves(getattr(value, name), (*path, name))
    elif isinstance(value, tuple) and value and isinstance(value[0], schema.Section):
        for index, entry in enumerate(value):
            yield from leaves(entry, (*path, index))
    else:
        yield path


def at(tree: Any, path: tuple) -> Any:
    for part in path:
        tree = tree[part]
    return tree


def other_values(old: Any) -> list[Any]:
    """What a value of its type may be instead."""
    candidates: dict[type, list[Any]] = {
        bool: [not old],
        int: [1, 2, 3],
        float: [0.25, 0.5, 2.0],
        str: ["other", "bfloat16", "no", "human_eval", "nla", "int8", "muon"],
        list: [[1, 2], ["<|im_end|>"], ["wandb"]],
        type(None): ["a/path", 2],
        dict: [{"extra": 0.5}, {"heldout": 1.4}],
    }
    return [value for value in candidates[type(old)] if value != old]


@dataclass
class Finished:
    """A run whose six stages are done, and ways to change its config."""

    path: Path

    @property
    def run(self) -> Run:
        return Run(lambda: self.path)

    def changed(self, edits: dict[tuple, Any]) -> Run:
        """The same run under a config with other values; written beside the first one.

        Raises:
            ConfigError: the schema refuses them.
        """
        tree = yaml.safe_load(self.path.read_text())
        for path, value in edits.items():
            at(tree, path[:-1])[path[-1]] = value
        other = self.path.with_name("changed.yaml")
        other.write_text(yaml.safe_dump(tree))
        load_config(other)
        return Run(lambda: other)


@pytest.fixture(scope="module")
def finished(tiny_verifier_dir, tmp_path_factory) -> Finished:
    directory = tmp_path_factory.mktemp("finished")
    (directory / "chats.jsonl").write_text('{"messages": []}\n')
    made = Finished(config_writer(directory, tiny_verifier_dir)(everything(directory)))
    made.run.make_all()
    return made


def _template() -> schema.Config:
    """The config of ``finished``, known before there is a verifier: for the list of keys."""
    tree = yaml.safe_load((ROOT / "configs" / "smollm2_cpu.yaml").read_text())
    for key, value in {**everything(Path()), **_geometry()}.items():
        *sections, leaf = key.split(".")
        at(tree, tuple(sections))[leaf] = value
    return schema.Config.model_validate(tree)


def _geometry() -> dict[str, Any]:
    return {f"drafter.{name}": value for name, value in GEOMETRY.items()}


KEYS = list(leaves(_template()))


def dotted(path: tuple) -> str:
    return ".".join(map(str, path))


def test_the_keys_under_test_are_the_whole_schema():
    """A key added tomorrow is one of them; a kind of section added tomorrow is missed here."""

    def sections(value: Any) -> set[type]:
        if isinstance(value, schema.Section):
            inside = (sections(getattr(value, name)) for name in type(value).model_fields)
            return {type(value)}.union(*inside)
        return set().union(*map(sections, value)) if isinstance(value, tuple) else set()

    assert sections(_template()) == set(schema.Section.__subclasses__())


def change(finished: Finished, path: tuple, tiny_verifier_dir: Path) -> Run:
    """Another valid value at a key."""
    edits: dict[tuple, Any] = {}
    if path[0] == "drafter" and path[1] in GEOMETRY:  # to depart from the reference on purpose
        edits["drafter", "reference"] = None
    old = at(yaml.safe_load(finished.path.read_text()), path)
    candidates = other_values(old)
    if dotted(path) == "verifier.path":
        elsewhere = finished.path.with_name("elsewhere")
        if not elsewhere.exists():
            elsewhere.symlink_to(tiny_verifier_dir)
        candidates = [str(elsewhere)]
    for value in candidates:
        try:
            run = finished.changed({**edits, path: value})
        except ConfigError:
            continue
        if run.config != finished.run.config:
            return run
    raise AssertionError(f"no other valid value for {dotted(path)}")


@pytest.mark.parametrize("path", [p for p in KEYS if dotted(p) not in BOUND], ids=dotted)
def test_a_changed_key(path, finished, tiny_verifier_dir):
    key = dotted(path)
    before = finished.run.files()
    run = change(finished, path, tiny_verifier_dir)
    found = look(run.config, run.invocation())
    if key in ELSEWHERE:
        assert {state.state for state in found.values()} == {"not started"}
        return
    direct = None if key.startswith(OPERATIONAL) else READERS[path[0]]
    after = AFTER[direct] if direct else set()
    for name, state in found.items():
        if name == direct:
            assert state.state == "stale"
            assert state.why[0].startswith(key) and " -> " in state.why[0]
            if key.startswith(VERDICT):  # judged again by the plain command: test_stage.py
                assert state.command.endswith(str(run.path))
                continue
            error = run.refused(name)
            assert error.exit_code == EXIT_STALE and error.found == state.why[0]
            assert error.command == state.command and error.command.endswith(" --redo")
        elif name in after:
            assert state.state == "stale" and "its input" in state.why[0]
            error = run.refused(name)
            assert error.exit_code == EXIT_STALE and f"{direct}: {key}" in error.where
        else:
            assert state.state == "done"
            with run.stage(name) as stage:
                assert stage.done
    assert finished.run.files() == before


@pytest.mark.parametrize("path", [p for p in KEYS if dotted(p) in BOUND], ids=dotted)
def test_a_key_bound_to_others_cannot_change_alone(path, finished):
    old = at(yaml.safe_load(finished.path.read_text()), path)
    for value in [*other_values(old), "hub", "local", "package"]:
        if value != old:
            with pytest.raises(ConfigError):
                finished.changed({path: value})


@pytest.mark.parametrize(
    ("path", "value", "stale"),
    [
        (("data", "sources"), [{"kind": "package", "name": "gsm8k", "max_conversations": 1}], 6),
        (("data", "regenerate"), False, 6),
        (("data", "regenerate", "other_modes"), [], 6),
        (("evaluation", "prompt_sets"), [], 6),
        (("drafter", "rope_scaling"), None, 3),
        (("drafter", "reference"), None, 0),
    ],
)
def test_a_part_given_or_taken_away(path, value, stale, finished):
    run = finished.changed({path: value})
    states = [found.state for found in look(run.config, run.invocation()).values()]
    assert states == ["done"] * (6 - stale) + ["stale"] * stale


def test_two_changes_are_both_shown_and_put_back_nothing_is_stale(finished):
    run = finished.changed({("data", "seed"): 7, ("data", "sources", 2, "max_conversations"): 5})
    found = run.refused("01_data").found
    assert found == "data.seed: 0 -> 7; data.sources.2.max_conversations: 4 -> 5"
    for name in AFTER:
        with finished.run.stage(name) as stage:
            assert stage.done


def test_a_local_source_edited_in_place_makes_01_stale(write_config, tmp_path):
    source = tmp_path / "chats.jsonl"
    source.write_text('{"messages": []}\n')
    local = {"kind": "local", "name": "chats", "path": str(source), "max_conversations": None}
    config = load_config(write_config({"data.sources": [local]}))
    before = expected_fingerprint(config, "01_data", {})
    assert before == expected_fingerprint(config, "01_data", {})
    source.write_text('{"messages": [1]}\n')
    assert expected_fingerprint(config, "01_data", {}) != before


def test_a_drafter_to_start_from_edited_in_place_makes_03_stale(write_config, tmp_path):
    start = tmp_path / "drafter"
    start.mkdir()
    (start / "model.safetensors").write_bytes(b"weights")
    config = load_config(write_config({"vocab.warm_start_from": str(start)}))
    before = expected_fingerprint(config, "03_vocab", {})
    assert before == expected_fingerprint(config, "03_vocab", {})
    (start / "model.safetensors").write_bytes(b"Weights")
    assert expected_fingerprint(config, "03_vocab", {}) != before


def test_a_script_as_it_is_typed(write_config):
    """03, for real: done, refused over its own key, content with another stage's, redone."""

    def script(*flags: str) -> tuple[int, str]:
        words = [sys.executable, str(ROOT / "03_build_vocab_map.py"), str(path), *flags]
        done = subprocess.run(words, capture_output=True, text=True)
        return done.returncode, done.stdout

    path = write_config({"vocab.draft_vocab_size": 5})
    publish_data(path)
    assert script()[0] == EXIT_DONE
    changed = ("--set", "vocab.draft_vocab_size=6")
    code, screen = script(*changed)
    assert code == EXIT_STALE and "found     vocab.draft_vocab_size: 5 -> 6" in screen
    redo = f"python 03_build_vocab_map.py {path} --set vocab.draft_vocab_size=6 --redo"
    assert screen.splitlines()[-1].endswith(redo)
    code, screen = script("--set", "capture.shard_bytes=1000000")
    assert code == EXIT_DONE and "already done" in screen
    code, screen = script(*changed, "--redo")
    assert code == EXIT_DONE and "draft vocabulary size=6" in screen
