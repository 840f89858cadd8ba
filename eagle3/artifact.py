"""The published outputs of the stages, verified on opening.

An artifact is what its manifest says it is: no manifest, no artifact.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import Config
from .contract import Wiring
from .errors import DamagedError, OutdatedError, StaleInputError
from .files import sha256_file
from .fingerprint import STAGES, difference, expected_fingerprint, show_differences
from .manifest import read_manifest
from .script import Invocation


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

    def checksums(self) -> Iterator[tuple[str, str, str]]:
        """Read every file: its name, the manifest's SHA-256, and the one found ("" without it)."""
        for name, entry in self.manifest["files"].items():
            path = self.directory / name
            yield name, entry["sha256"], sha256_file(path) if path.is_file() else ""

    def verify_checksums(self) -> None:
        """Read every file and compare it with the manifest.

        Raises:
            StaleInputError: naming the first file whose content changed.
        """
        for name, expected, found in self.checksums():
            if found != expected:
                path = self.directory / name
                raise StaleInputError(
                    "a published file changed after it was checked",
                    where=path,
                    expected=f"sha256 {expected}",
                    found=f"sha256 {found}",
                    fix=f"remove {path}: its stage makes it again and keeps the rest",
                    script=STAGES[self.manifest["stage"]].script,
                )


def open_artifact(
    config: Config,
    name: str,
    invocation: Invocation,
    opened: dict[str, Artifact] | None = None,
) -> Artifact:
    """Open a stage's output, verifying that it is complete, intact and what the config asks for.

    Args:
        opened: artifacts verified already, by stage; this one and those it was made from are
            added. Whoever opens several passes the same one: each is verified once.

    Raises:
        StaleInputError: missing, incomplete, damaged, edited, or made from something else.
    """
    opened = {} if opened is None else opened
    if name in opened:
        return opened[name]
    spec = STAGES[name]
    directory = config.run_dir / name
    manifest = read_manifest(directory, spec, invocation)
    for upstream in spec.inputs:
        open_artifact(config, upstream, invocation, opened)
    require_same(config, name, manifest["fingerprint"], invocation, opened)
    require_files(directory, manifest, invocation)
    opened[name] = Artifact(directory, manifest)
    return opened[name]


def require_files(directory: Path, manifest: dict[str, Any], invocation: Invocation) -> None:
    """Every file of a manifest is there and of its size.

    Raises:
        DamagedError: naming the first that is not, and how many there are; the stage run again
            makes them again and keeps the rest.
    """
    damaged: dict[Path, int | None] = {}
    for name, entry in manifest["files"].items():
        path = f"{directory}/{name}"  # no Path: there may be thousands
        found_bytes = os.stat(path).st_size if os.path.isfile(path) else None
        if found_bytes != entry["bytes"]:
            damaged[Path(path)] = found_bytes
    if damaged:
        path, found_bytes = next(iter(damaged.items()))
        more = f", and {len(damaged) - 1} more like it" if len(damaged) > 1 else ""
        error = DamagedError(
            "a published file is missing" if found_bytes is None else "a file was truncated",
            where=path,
            expected=f"{manifest['files'][str(path.relative_to(directory))]['bytes']} bytes",
            found=("no file" if found_bytes is None else f"{found_bytes} bytes") + more,
            fix="its stage makes it again and keeps the rest",
            command=invocation.command(STAGES[manifest["stage"]].script),
        )
        error.paths = tuple(damaged)
        raise error


def require_same(
    config: Config,
    name: str,
    found: dict[str, Any],
    invocation: Invocation,
    opened: dict[str, Artifact],
) -> None:
    """Compare what a stage on disk, finished or not, was made from with what it would be now.

    Args:
        found: the fingerprint on disk.
        opened: the stage's inputs are among them.

    Raises:
        OutdatedError: showing the differences.
    """
    spec = STAGES[name]
    digests = {upstream: opened[upstream].digest for upstream in spec.inputs}
    differences = difference(found, expected_fingerprint(config, name, digests))
    if differences:
        error = OutdatedError(
            f"{name} on disk was made from something else than the config now asks for; "
            "nothing was touched",
            where=f"{config.run_dir / name}: {differences[0][0]}",
            expected="the same config, inputs, verifier and stage version",
            found=show_differences(differences),
            fix="put the change back, or redo that stage (the old output is kept until then)",
            command=invocation.command(spec.script, "--redo"),
        )
        error.differences = tuple(differences)
        raise error
