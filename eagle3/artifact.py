"""The six stages and their published outputs, verified on opening.

Fingerprint = declared config sections + upstream digests + verifier identity + stage version. An
artifact is what a manifest says it is: no manifest, no artifact.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import Config, LocalSource, VerifierSection
from .contract import Wiring
from .errors import StaleInputError
from .files import sampled_sha256, sha256_file, sha256_json
from .script import Invocation
from .verifier import Verifier

MANIFEST = "manifest.json"
FINGERPRINT = "fingerprint.json"


@dataclass(frozen=True)
class StageSpec:
    """What a stage is made from; ``version`` is bumped by hand when its output changes meaning."""

    name: str
    script: str
    version: int
    sections: tuple[str, ...]
    inputs: tuple[str, ...]


STAGES = {
    spec.name: spec
    for spec in (
        StageSpec("01_data", "01_prepare_data.py", 1, ("verifier", "data", "evaluation"), ()),
        StageSpec("02_hidden", "02_gen_hidden_states.py", 2, ("capture",), ("01_data",)),
        StageSpec("03_vocab", "03_build_vocab_map.py", 1, ("vocab",), ("01_data",)),
        StageSpec(
            "04_train",
            "04_train.py",
            1,
            ("drafter", "train"),
            ("01_data", "02_hidden", "03_vocab"),
        ),
        StageSpec("05_export", "05_export.py", 1, (), ("03_vocab", "04_train")),
        StageSpec(
            "06_verify", "06_verify.py", 1, ("verify",), ("01_data", "02_hidden", "05_export")
        ),
    )
}


@dataclass(frozen=True)
class Artifact:
    """A published stage output whose manifest and file sizes were checked on opening."""

    directory: Path
    manifest: dict[str, Any]

    @property
    def digest(self) -> str:
        """Hash of what was made (not of when and where): downstream fingerprints carry it."""
        return self.manifest["digest"]

    @property
    def counts(self) -> dict[str, Any]:
        return self.manifest["counts"]

    @property
    def wiring(self) -> Wiring:
        return Wiring.from_json(self.manifest["wiring"])

    def path(self, name: str) -> Path:
        """A file of the artifact; only names the manifest lists exist."""
        assert name in self.manifest["files"], name
        return self.directory / name

    def verify_checksums(self) -> None:
        """Read every file and compare it with the manifest.

        Raises:
            StaleInputError: naming the first file whose content changed.
        """
        for name, entry in self.manifest["files"].items():
            found = sha256_file(self.directory / name)
            if found != entry["sha256"]:
                raise StaleInputError(
                    "a published file changed after it was checked",
                    where=self.directory / name,
                    expected=f"sha256 {entry['sha256']}",
                    found=f"sha256 {found}",
                    fix=f"run {STAGES[self.manifest['stage']].script} with --redo",
                )


@functools.lru_cache(maxsize=2)
def open_verifier(section: VerifierSection) -> Verifier:
    """The verifier of a config, opened once a process."""
    return Verifier.open(section)


def expected_fingerprint(config: Config, name: str, inputs: dict[str, Artifact]) -> dict[str, Any]:
    """The fingerprint a stage would have if it were run now."""
    spec = STAGES[name]
    fingerprint: dict[str, Any] = {
        "stage": spec.name,
        "version": spec.version,
        "config": {name: getattr(config, name).fingerprint() for name in spec.sections},
        "inputs": {name: artifact.digest for name, artifact in inputs.items()},
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
    return json.loads(json.dumps(fingerprint))


def open_artifact(config: Config, name: str, invocation: Invocation) -> Artifact:
    """Open a stage's output, verifying that it is complete, intact and what the config asks for.

    Raises:
        StaleInputError: missing, incomplete, damaged, edited, or made from something else.
    """
    spec = STAGES[name]
    directory = config.run_dir / name
    manifest = read_manifest(directory, spec, invocation)
    inputs = {upstream: open_artifact(config, upstream, invocation) for upstream in spec.inputs}
    differences = difference(manifest["fingerprint"], expected_fingerprint(config, name, inputs))
    if differences:
        key, found, expected = differences[0]
        raise StaleInputError(
            f"{name} was made from something else than the config now asks for "
            f"({len(differences)} difference{'s' if len(differences) > 1 else ''})",
            where=f"{directory}: {key}",
            expected=expected,
            found=found,
            fix=f"put {key} back, or redo that stage",
            command=invocation.command(spec.script, "--redo"),
        )
    artifact = Artifact(directory, manifest)
    for file_name, entry in manifest["files"].items():
        path = directory / file_name
        found_bytes = path.stat().st_size if path.is_file() else None
        if found_bytes != entry["bytes"]:
            raise StaleInputError(
                "a published file is missing" if found_bytes is None else "a file was truncated",
                where=path,
                expected=f"{entry['bytes']} bytes",
                found="no file" if found_bytes is None else f"{found_bytes} bytes",
                command=invocation.command(spec.script, "--redo"),
            )
    return artifact


def read_manifest(directory: Path, spec: StageSpec, invocation: Invocation) -> dict[str, Any]:
    path = directory / MANIFEST
    if not path.is_file():
        started = (directory / FINGERPRINT).is_file()
        raise StaleInputError(
            f"{spec.name} is {'not finished' if started else 'not there'}",
            where=path,
            expected="a manifest, written last by the stage",
            found="an unfinished run of the stage" if started else "nothing",
            command=invocation.command(spec.script),
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        intact = manifest.pop("self_digest") == sha256_json(manifest)
    except (ValueError, KeyError, AttributeError):
        intact = False
    if not intact:
        raise StaleInputError(
            "the manifest was edited or damaged",
            where=path,
            expected="the content its own digest was taken of",
            found="another content",
            fix="restore the file, or redo that stage",
            command=invocation.command(spec.script, "--redo"),
        )
    return manifest


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
    return [] if found == expected else [(key.removeprefix("config."), found, expected)]
