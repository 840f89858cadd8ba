"""A verifier whose config class is code of its own, unknown to transformers: only where trusted."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from drafters import Drafter
from safetensors.torch import load_file

from eagle3.config import VerifierSection
from eagle3.errors import ConfigError
from eagle3.export import WEIGHTS
from eagle3.exported import check_loaders
from eagle3.verifier import Verifier

ROOT = Path(__file__).resolve().parent.parent
# A Llama under a name of its own; running the code leaves a trace.
CODE = """
from pathlib import Path
from transformers import LlamaConfig

Path({trace!r}).touch()

class OwnConfig(LlamaConfig):
    model_type = "{model_type}"
"""


@pytest.fixture
def own_dir(tiny_verifier_dir, tmp_path, request) -> Path:
    """The tiny verifier with a config class of its own; a type per test, types are registered."""
    directory = Path(shutil.copytree(tiny_verifier_dir, tmp_path / "own"))
    model_type = request.node.name
    code = CODE.format(trace=str(tmp_path / "ran"), model_type=model_type)
    (directory / "configuration_own.py").write_text(code)
    config = json.loads((directory / "config.json").read_text())
    config |= {"model_type": model_type, "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def open_verifier(directory: Path, *, trusted: bool) -> Verifier:
    return Verifier.open(
        VerifierSection(
            path=str(directory), revision=None, trust_remote_code=trusted, dtype="float32"
        )
    )


def test_not_trusted(own_dir, tmp_path):
    with pytest.raises(ConfigError) as refused:
        open_verifier(own_dir, trusted=False)
    error = refused.value
    assert error.where == "verifier.trust_remote_code" and "OwnConfig" in error.expected
    assert "verifier.trust_remote_code: true" in error.fix
    assert not (tmp_path / "ran").exists()


def test_code_for_a_type_that_transformers_knows_is_not_needed(own_dir, tmp_path):
    config = json.loads((own_dir / "config.json").read_text())
    (own_dir / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    assert len(open_verifier(own_dir, trusted=False).tokenizer) == 512
    assert not (tmp_path / "ran").exists()


def test_both_loaders_where_trusted(own_dir, tmp_path):
    """speculators' loader opens the verifier's config, and knows nothing of trust."""
    drafter = Drafter.random(open_verifier(own_dir, trusted=True))
    directory = drafter.export(tmp_path / "drafter")
    tensors = load_file(directory / WEIGHTS)
    for _ in range(2):  # the class is registered once
        check_loaders(directory, drafter.section, drafter.wiring, tensors, drafter.verifier)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(("trusted", "code"), [(True, 0), (False, 2)])
def test_check(own_dir, write_config, trusted, code):
    config = write_config({"verifier.path": str(own_dir), "verifier.trust_remote_code": trusted})
    done = subprocess.run(
        [sys.executable, "05_export.py", str(config), "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == code, done.stdout + done.stderr
    if not trusted:
        for line in (
            "error     the verifier's config class is code shipped with it, which may not run",
            "where     verifier.trust_remote_code",
            "expected  true, to run configuration_own.OwnConfig",
            "found     False",
            "next      read that code",
        ):
            assert line in done.stdout
