"""The six stages, what each is made from, and how two makings differ.

Fingerprint = declared config sections + upstream digests + verifier identity + stage version.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .config import Config, LocalSource, VerifierSection
from .files import sampled_sha256
from .verifier import Verifier


@dataclass(frozen=True)
class StageSpec:
    """What a stage is made from.

    Attributes:
        version: bumped by hand when its output changes meaning.
        checked_when_read: its files are too large to be read whole beforehand; whoever reads a
            part of one compares that part's own checksum.
    """

    name: str
    script: str
    version: int
    sections: tuple[str, ...]
    inputs: tuple[str, ...]
    checked_when_read: bool = False


STAGES = {
    spec.name: spec
    for spec in (
        StageSpec("01_data", "01_prepare_data.py", 1, ("verifier", "data", "evaluation"), ()),
        StageSpec("02_hidden", "02_gen_hidden_states.py", 3, ("capture",), ("01_data",), True),
        StageSpec("03_vocab", "03_build_vocab_map.py", 1, ("vocab",), ("01_data",)),
        StageSpec(
            "04_train",
            "04_train.py",
            3,
            ("drafter", "train"),
            ("01_data", "02_hidden", "03_vocab"),
        ),
        StageSpec(
            "05_export",
            "05_export.py",
            3,
            (),
            ("01_data", "02_hidden", "03_vocab", "04_train"),
        ),
        StageSpec(
            "06_verify", "06_verify.py", 2, ("verify",), ("01_data", "02_hidden", "05_export")
        ),
    )
}

# The command that runs 02 and 04 in turns, where ``capture.round_tokens`` asks for it.
ROUNDS = "-m eagle3.rounds"


@functools.lru_cache(maxsize=2)
def open_verifier(section: VerifierSection) -> Verifier:
    """The verifier of a config, opened once a process."""
    return Verifier.open(section)


def expected_fingerprint(
    config: Config, name: str, input_digests: dict[str, str]
) -> dict[str, Any]:
    """The fingerprint a stage would have if it were run now.

    Args:
        input_digests: of the stage's input artifacts, by stage name.
    """
    spec = STAGES[name]
    fingerprint: dict[str, Any] = {
        "stage": spec.name,
        "version": spec.version,
        "config": {name: getattr(config, name).fingerprint() for name in spec.sections},
        "inputs": input_digests,
    }
    if "verifier" in spec.sections:
        # Where the verifier lies is not what it is: only its identity counts.
        fingerprint["config"]["verifier"].pop("path")
        fingerprint["verifier"] = open_verifier(config.verifier).identity
    if "data" in spec.sections:  # a local file edited in place is another source
        fingerprint["files"] = {
            source.name: sampled_sha256(source.path)
            for source in config.data.sources
            if isinstance(source, LocalSource) and source.path.is_file()
        }
    if "vocab" in spec.sections and (start := config.vocab.warm_start_from):  # likewise
        paths = sorted([*start.glob("*.json"), *start.glob("*.safetensors")])
        fingerprint["warm_start"] = {path.name: sampled_sha256(path) for path in paths}
    return json.loads(json.dumps(fingerprint))


def difference(found: Any, expected: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    """Every leaf at which two fingerprints differ: (key, found, expected)."""
    if isinstance(found, dict) and isinstance(expected, dict):
        return [
            row
            for name in sorted(found.keys() | expected.keys())
            for row in difference(
                found.get(name, "absent"), expected.get(name, "absent"), f"{key}.{name}".strip(".")
            )
        ]
    if _entries(found) and _entries(expected) and len(found) == len(expected):
        return [
            row
            for index, (old, new) in enumerate(zip(found, expected, strict=True))
            for row in difference(old, new, f"{key}.{index}")
        ]
    return [] if found == expected else [(key.removeprefix("config."), found, expected)]


def is_verdict(differences: Sequence[tuple[str, Any, Any]]) -> bool:
    """Whether only what judges a stage's measurements differs, nothing that was measured."""
    return all(key.startswith("verify.gates.") for key, _, _ in differences)


def _entries(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)


def show_differences(differences: Sequence[tuple[str, Any, Any]]) -> str:
    """``data.seed: 0 -> 7; ...``, the first five."""
    shown = "; ".join(f"{key}: {old} -> {new}" for key, old, new in differences[:5])
    return shown + (f"; and {len(differences) - 5} more" if len(differences) > 5 else "")
