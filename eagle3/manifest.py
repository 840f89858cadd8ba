"""What a stage says of its output, in its directory.

``fingerprint.json``, written first: what it is being made from. ``manifest.json``, written last:
that, what was made, how large each file is and its SHA-256; where and when, which is never
compared.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

from .errors import StaleInputError
from .files import sha256_file, sha256_json, write_json
from .fingerprint import StageSpec
from .machine import versions
from .script import Invocation

MANIFEST = "manifest.json"
FINGERPRINT = "fingerprint.json"


def read_fingerprint(directory: Path, spec: StageSpec, invocation: Invocation) -> dict[str, Any]:
    """What a stage on disk was made from, or began to be made from; {} if there is none.

    Raises:
        StaleInputError: what says so is damaged.
    """
    if (directory / MANIFEST).is_file():
        return read_manifest(directory, spec, invocation)["fingerprint"]
    path = directory / FINGERPRINT
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StaleInputError(
            "an unfinished stage does not say what it was made from",
            where=path,
            expected="the JSON written when it began",
            found=error,
            fix="start it over",
            command=invocation.command(spec.script, "--redo"),
        ) from error


def read_manifest(directory: Path, spec: StageSpec, invocation: Invocation) -> dict[str, Any]:
    """A finished stage's manifest.

    Raises:
        StaleInputError: it is not there, or damaged.
    """
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
            fix=f"remove {path}: its stage writes it again and keeps the rest",
            command=invocation.command(spec.script),
        )
    return manifest


def write_manifest(
    directory: Path,
    made: dict[str, Any],
    files: list[str],
    checksums: dict[str, str],
    seconds: float,
    identity: dict[str, Any] | None = None,
) -> None:
    """Publish the manifest of a stage whose files are all published.

    Args:
        made: stage, fingerprint, counts, wiring and results.
        checksums: SHA-256 of files already hashed when they were written.
        seconds: what this run of the stage took.
        identity: what the digest is taken of, where it is not all that was made.
    """
    entries = {
        name: {
            "bytes": (directory / name).stat().st_size,
            "sha256": checksums.get(name) or sha256_file(directory / name),
        }
        for name in sorted(files)
    }
    made = {**made, "files": entries}
    environment = {"host": platform.node(), "versions": versions(), "seconds": round(seconds, 1)}
    manifest = {**made, "digest": sha256_json(identity or made), "environment": environment}
    write_json(directory / MANIFEST, {**manifest, "self_digest": sha256_json(manifest)})
