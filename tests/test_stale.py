"""A changed config key makes exactly the stages stale that compute from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3.config import Config
from eagle3.config_file import load_config
from eagle3.errors import ConfigError
from eagle3.fingerprint import STAGES, expected_fingerprint
from tests.runs import Run

ROOT = Path(__file__).resolve().parent.parent

# Which stages read a section, and the keys that say how a run uses a machine. Written out here, so
# that a key marked by mistake in the schema fails.
READERS = {
    "verifier": {"01_data"},
    "data": {"01_data"},
    "evaluation": {"01_data"},
    "capture": {"02_hidden"},
    "vocab": {"03_vocab"},
    "drafter": {"04_train"},
    "train": {"04_train"},
    "verify": {"06_verify"},
    "run": set(),
    "engine": set(),
    "assumed_tokens_per_s": set(),
}
OPERATIONAL = {
    "verifier.path",
    "capture.disk_budget_bytes",
    "drafter.reference",
    "train.log_every_steps",
    "train.checkpoint_every_steps",
}


def _scalar_keys(section: Any, prefix: str) -> list[str]:
    """Dotted keys of a section that ``--set`` can change; a list counts as one."""
    return [
        key
        for name in type(section).model_fields
        for value in [getattr(section, name)]
        for key in (
            _scalar_keys(value, f"{prefix}{name}.")
            if hasattr(value, "fingerprint")
            else [f"{prefix}{name}"]
        )
    ]


KEYS = _scalar_keys(load_config(ROOT / "configs" / "smollm2_cpu.yaml"), "")


def _another(run: Run, key: str, other_verifier: Path) -> Config:
    """The run's config with another valid value at a key."""
    old = run.config
    for part in key.split("."):
        old = getattr(old, part)
    geometry = ("num_attention_heads", "num_key_value_heads", "head_dim")
    reference = {name: getattr(run.config.drafter, name) for name in geometry} | {"source": "x"}
    candidates = {
        bool: [not old],
        int: [1, 2, 3],
        float: [0.25, 0.5],
        str: ["other", "bfloat16", "no"],
        type(Path()): ["other"],
        tuple: [
            [],
            [1, 2],
            [{"kind": "package", "name": "gsm8k", "max_conversations": 1}],
            [{"chat_template_kwargs": {}, "temperature": 0.5, "top_p": 1.0}],
        ],
        dict: [{"extra": 0.5}],
        type(None): ["main", {"rope_type": "linear", "factor": 2.0}, reference],
    }[type(old)]
    if key == "verifier.path":
        candidates = [str(other_verifier)]
    for value in candidates:
        try:
            config = load_config(run.path, (f"{key}={json.dumps(value)}",))
        except ConfigError:
            continue
        if config != run.config:
            return config
    raise AssertionError(f"no other valid value for {key}")


@pytest.mark.parametrize("key", KEYS)
def test_what_a_stage_computes_from_makes_it_stale_and_nothing_else_does(
    key, run, tiny_verifier_dir, tmp_path
):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.symlink_to(tiny_verifier_dir)
    changed = _another(run, key, elsewhere)
    stale = {
        name
        for name in STAGES
        if expected_fingerprint(changed, name, {}) != expected_fingerprint(run.config, name, {})
    }
    assert stale == (set() if key in OPERATIONAL else READERS[key.partition(".")[0]])


def test_a_local_source_edited_in_place_makes_01_stale(write_config, tmp_path):
    source = tmp_path / "chats.jsonl"
    source.write_text('{"messages": []}\n')
    local = {"kind": "local", "name": "chats", "path": str(source), "max_conversations": None}
    config = load_config(write_config({"data.sources": [local]}))
    before = expected_fingerprint(config, "01_data", {})
    assert before == expected_fingerprint(config, "01_data", {})
    source.write_text('{"messages": [1]}\n')
    assert expected_fingerprint(config, "01_data", {}) != before
