"""A working drafter, broken where only serving can show it: 06 says which drafts, and where."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3 import worker
from eagle3.errors import GateError
from eagle3.fingerprint import STAGES, open_verifier
from eagle3.script import Invocation
from tests.conftest import config_writer
from tests.runs import load_script
from tests.served_sabotages import (
    CAPTURE,
    GUESTS,
    READ_OTHERWISE,
    CaptureSabotage,
    ServedSabotage,
    set_apart,
)

pytestmark = [pytest.mark.slow, pytest.mark.sabotage]
SCRIPTS = [spec.script for spec in STAGES.values()]
SETTINGS = {
    "data.sources": [{"kind": "package", "name": "chitchat", "max_conversations": 120}],
    "data.regenerate.temperature": 0.1,  # at 1 a random verifier says anything
    "data.regenerate.max_new_tokens": 32,
    "data.max_length_tokens": 256,
    "data.num_validation_prompts": 12,
    "evaluation.prompt_sets": [{"kind": "package", "name": "chatterbot", "max_conversations": 12}],
    "evaluation.max_new_tokens": 32,
    "drafter.num_key_value_heads": 4,
    "drafter.head_dim": 64,
    "train.mixed_precision": "no",
    "train.learning_rate": 3.0e-3,
    "train.num_epochs": 12,
    "train.validations_per_epoch": 1,
    "verify.gates.min_acceptance_length": {"heldout": 1.25, "chatterbot": 1.2},
}


class Run:
    """The scripts in this process, on copies of one finished run."""

    def __init__(self, config: Path, run_dir: Path) -> None:
        self.config, self.run_dir = config, run_dir

    @property
    def directory(self) -> Path:
        return self.run_dir / "tiny"

    def __call__(self, name: str, *sets: str, drafter: Path | None = None, **patches: Any) -> None:
        """Run a script; ``patches`` replace what it imported."""
        open_verifier.cache_clear()
        script = load_script(name)
        for what, replacement in patches.items():
            setattr(script, what, replacement)
        overrides = (f"run.dir={self.run_dir}", *sets)
        script.main(
            Invocation(name, self.config, overrides, check=False, redo=False, drafter=drafter)
        )

    def copy(self, run_dir: Path, *stages: str) -> Run:
        for stage in stages:
            shutil.copytree(self.directory / stage, run_dir / "tiny" / stage)
        return Run(self.config, run_dir)

    @property
    def report(self) -> dict[str, Any]:
        return json.loads((self.directory / "06_verify" / "report.json").read_text())


@pytest.fixture(scope="module")
def finished(tiny_verifier_dir, tmp_path_factory) -> Run:
    """The six scripts, the last of which finds nothing wrong."""
    torch.set_num_threads(1)  # tensors this small are slower on several
    directory = tmp_path_factory.mktemp("served")
    config = config_writer(directory, tiny_verifier_dir)(SETTINGS)
    run = Run(config, directory / "runs")
    for script in SCRIPTS:
        run(script)
    return run


def test_the_good_drafter_raises_no_alarm(finished):
    """Every draft of vLLM's is the replay's, and enough of them are right and wrong to tell."""
    assert finished.report["verdict"] == "pass"
    served = finished.report["served"]["heldout"]
    assert 0.03 < served["acceptance_per_position"][2] < served["acceptance_per_position"][0] < 0.97
    for apart in finished.report["apart"].values():
        assert apart["drafts"]["equal"] == apart["drafts"]["compared"]
        assert min(apart["drafts"]["compared"]) > 30


@pytest.mark.parametrize("apart", [False, True], ids=["as it is", "set apart"])
@pytest.mark.parametrize("form", ["drafter", "sglang"])
def test_nor_does_it_as_a_guest_in_either_form(finished, tmp_path, form, apart):
    guest = shutil.copytree(finished.directory / "05_export" / form, tmp_path / form)
    if apart:
        set_apart(guest)
    run = finished.copy(tmp_path / "runs", "01_data", "02_hidden")
    run("06_verify.py", drafter=guest)
    (directory,) = run.directory.glob("06_verify.*-*")
    report = json.loads((directory / "report.json").read_text())
    assert report["verdict"] == "pass"
    assert report["served"]["heldout"]["num_drafts"] > 30
    for name, served in report["served"].items():
        own = finished.report["served"][name]
        assert served["acceptance_per_position"] == own["acceptance_per_position"]


@pytest.mark.parametrize("sabotage", READ_OTHERWISE, ids=lambda sabotage: sabotage.name)
def test_what_vllm_reads_otherwise_is_placed(finished, tmp_path, sabotage: ServedSabotage):
    stages = ("01_data", "02_hidden", "03_vocab", "04_train", "05_export")
    run = finished.copy(tmp_path / "runs", *stages)
    serve_with = load_script("06_verify.py").serve_with

    def serve_another(config: Any, verifier: Any, drafter: Path, sets: Any) -> None:
        broken = shutil.copytree(drafter, tmp_path / "broken")
        sabotage.apply(broken)
        serve_with(config, verifier, broken, sets)

    with pytest.raises(GateError) as refused:
        run("06_verify.py", serve_with=serve_another)
    said = str(refused.value)
    print(sabotage.name, said, sep="\n")
    assert sabotage.names in said
    if sabotage.position is None:
        return
    assert "differing_drafts" in refused.value.what
    first = run.report["apart"]["heldout"]["drafts"]["first"]
    compared = run.report["apart"]["heldout"]["drafts"]
    differs = [a > b for a, b in zip(compared["compared"], compared["equal"], strict=True)]
    assert differs.index(True) == sabotage.position
    assert f"at token {first['token_position']}, draft position" in said


@pytest.mark.parametrize("sabotage", GUESTS, ids=lambda sabotage: sabotage.name)
def test_a_guest_trained_on_something_else_is_told_from_one_served_otherwise(
    finished, tmp_path, sabotage: ServedSabotage
):
    guest = shutil.copytree(finished.directory / "05_export" / "drafter", tmp_path / "guest")
    set_apart(guest)
    sabotage.apply(guest)
    run = finished.copy(tmp_path / "runs", "01_data", "02_hidden")
    own = finished.report["served"]["heldout"]["acceptance_length"]
    gate = f"verify.gates.min_acceptance_length={{heldout: {own - 0.005}}}"
    with pytest.raises(GateError) as refused:
        run("06_verify.py", gate, drafter=guest)
    said = str(refused.value)
    print(sabotage.name, said, sep="\n")
    assert sabotage.names in said and "min_acceptance_length.heldout" in refused.value.what
    assert "differing_drafts" not in refused.value.what


@pytest.mark.parametrize("sabotage", CAPTURE, ids=lambda sabotage: sabotage.name)
def test_states_that_vllms_drafter_never_sees(
    finished, tmp_path, monkeypatch, sabotage: CaptureSabotage
):
    """The worker is wrong in the whole run: captured, trained, replayed; vLLM's drafter is not."""
    copy = worker._Capture._copy

    def copy_others(self: Any, scheduler_output: Any, states: list[torch.Tensor]) -> None:
        copy(self, scheduler_output, sabotage.change(self.runner, states))

    monkeypatch.setattr(worker._Capture, "_copy", copy_others)
    run = finished.copy(tmp_path / "runs", "01_data", "03_vocab")
    for script in ("02_gen_hidden_states.py", "04_train.py", "05_export.py", "06_verify.py"):
        if script == sabotage.script:
            with pytest.raises(GateError) as refused:
                run(script)
            break
        run(script)
    said = str(refused.value)
    print(sabotage.name, said, sep="\n")
    assert sabotage.names in said
