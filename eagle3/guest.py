"""A drafter that is not the run's own, verified on the run's prompts beside its own 06.

What is measured goes to ``06_verify.<name>-<8 hex>/``, a digest of everything it is measured on:
the drafter's files, the run's artifacts, ``verify`` and 06's version. So nothing there can be
stale: another drafter, or the same one trained on, has a directory of its own. There is no
manifest, because nothing is made from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from .artifact import Artifact, open_artifact
from .config import Config
from .errors import ConfigError
from .files import sampled_sha256, sha256_json, write_json
from .findings import Finding, value_findings
from .fingerprint import difference, expected_fingerprint, open_verifier
from .locks import StageLock
from .published import Published, require_servable
from .script import Invocation, log
from .verifier import Verifier
from .vocab import VocabMap

_INPUTS = ("01_data", "02_hidden")
_FILES = ("*.json", "*.safetensors")


@dataclass
class Guest:
    """An entered verification of a guest. Use as a context manager.

    Attributes:
        drafter: its directory.
        inputs: the run's artifacts it is verified on.
        directory: where the measurements go.
        findings: what was odd about the drafter's files, once read.
    """

    config: Config
    invocation: Invocation
    drafter: Path
    inputs: dict[str, Artifact] = field(init=False)
    directory: Path = field(init=False)
    findings: tuple[Finding, ...] = ()

    def __enter__(self) -> Guest:
        log.stage = "06_verify guest"
        if not self.drafter.is_dir():
            raise ConfigError(
                "there is no such drafter",
                where="--drafter",
                expected="a directory with config.json and *.safetensors",
                found=self.drafter,
                fix="correct the path",
            )
        self.inputs = {name: open_artifact(self.config, name, self.invocation) for name in _INPUTS}
        self.inputs["01_data"].verify_checksums()  # 02's rows are checked as they are read
        digests = {name: artifact.digest for name, artifact in self.inputs.items()}
        fingerprint = expected_fingerprint(self.config, "06_verify", digests)
        fingerprint["config"]["verify"].pop("gates")  # they judge, and change nothing measured
        fingerprint["drafter"] = {
            path.name: sampled_sha256(path)
            for pattern in _FILES
            for path in sorted(self.drafter.glob(pattern))
        }
        name = f"06_verify.{self.drafter.resolve().name}-{sha256_json(fingerprint)[:8]}"
        self.directory = self.config.run_dir / name
        self.directory.mkdir(exist_ok=True)
        self._lock = StageLock(self.config.run_dir, name, None)
        self._lock.take()
        log.open(self.directory / "log.txt")
        write_json(self.directory / "fingerprint.json", fingerprint)
        log("start", drafter=self.drafter, output=self.directory)
        return self

    def __exit__(self, *_exception: object) -> None:
        self._lock.close()

    @property
    def verifier(self) -> Verifier:
        return open_verifier(self.config.verifier)

    def published(self) -> Published:
        """Read the drafter, and say what an engine would make of it.

        Raises:
            ConfigError: no EAGLE-3 drafter.
            GateError: an engine would serve another than the files hold.
        """
        published = Published.open(self.drafter, self.verifier)
        self.findings = tuple(findings_of(published, self.verifier))
        for finding in self.findings:
            log("finding", fatal=finding.fatal, says=finding)
        require_servable(self.drafter, self.findings)
        return published


def findings_of(published: Published, verifier: Verifier) -> list[Finding]:
    """Everything odd about a drafter's files, the values and what they were exported as included.

    A drafter of 05's carries its contract and its verifier's identity: its own files must not
    contradict them. One made for another verifier may still be of use: it is only said.
    """
    tensors = published.load()
    found = [*published.findings, *value_findings(tensors, verifier.vocab_size)]
    if published.wiring is not None:
        trained = published.wiring.to_json()
        served = {
            "aux_layer_ids": list(published.aux_layer_ids),
            "drafter": published.drafter.fingerprint(),
        }
        if "d2t" in tensors and "t2d" in tensors:
            served["vocab_map"] = VocabMap(tensors["d2t"], tensors["t2d"]).digest
        found += [
            Finding(key, f"as trained (its wiring_contract), {then}", str(now), True)
            for key, now, then in difference(served, {key: trained[key] for key in served})
        ]
    identity = published.config.get("verifier_identity", {})
    found += [
        Finding(f"verifier_identity.{part}", f"this verifier's, {expected}", identity[part], False)
        for part, expected in verifier.identity.items()
        if part in identity and identity[part] != expected
    ]
    return found
