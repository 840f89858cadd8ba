"""One working drafter, broken one way at a time where it is made: 05 refuses each by name.

The drafter is random: what is tested is whether the files are the ones meant. Mistakes that only
computing or serving can show are in tests/e2e/test_sabotage_served.py.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drafters import GEOMETRY, Drafter
from drafters import open_verifier as open_drafters_verifier
from inputs import publish_rows, publish_shards
from runs import load_script
from sabotages import BOTH, EXPORT, UPSTREAM, Sabotage, Upstream
from training_sabotages import TRAINING

from eagle3 import testimony
from eagle3.batches import RowReader
from eagle3.config_file import load_config
from eagle3.errors import ConfigError, GateError, StaleInputError
from eagle3.files import write_tensors
from eagle3.fingerprint import open_verifier
from eagle3.flat import speculators_name
from eagle3.guest import findings_of
from eagle3.published import Published, require_servable
from eagle3.rows import TokenRows
from eagle3.script import Invocation
from eagle3.shard_plan import open_states
from eagle3.stage import Stage

# Multi-head, so that q and k have one shape; scaled RoPE, so that scaling can be lost.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
DRAFTER = {**GEOMETRY, "num_key_value_heads": 4, "rope_scaling": YARN}


class Run:
    """A run finished up to 04, and 05 as an operator runs it."""

    def __init__(self, config_path: Path, drafter: Drafter) -> None:
        self.config_path, self.drafter = config_path, drafter
        self.verifier_dir = drafter.verifier.directory
        self.config = load_config(config_path)
        self.export = self.config.run_dir / "05_export"

    def train(self, model: Any, overrides: tuple[str, ...] = ()) -> None:
        """04, the training left out: the weights, and what the training code does with them."""
        config = load_config(self.config_path, overrides)
        invocation = Invocation("test", self.config_path, overrides, check=False, redo=True)
        with Stage(config, "04_train", invocation) as stage:
            rows = TokenRows.load(stage.inputs["01_data"].path("rows.safetensors"))
            reader = RowReader(rows, open_states(stage.inputs["02_hidden"], rows, config))
            write_tensors(stage.directory / "best.safetensors", self.drafter.state_dict())
            said = testimony.testify(model, config.train.loss, reader, config.train.ttt_steps)
            said.save(stage.directory / testimony.TESTIMONY)
            files = ["best.safetensors", testimony.TESTIMONY]
            stage.commit(files=files, counts={}, wiring=self.drafter.wiring)

    def run_05(
        self,
        sabotage: Callable[[Path, str], None] = lambda directory, form: None,
        overrides: tuple[str, ...] = (),
    ) -> None:
        """05, with something done to each directory between its writing and its checks."""
        open_verifier.cache_clear()  # another process would read it anew
        script = load_script("05_export.py")
        write = script.write_directory

        def write_and_break(directory, tensors, form, *args):
            write(directory, tensors, form, *args)
            sabotage(directory, form.directory)

        script.write_directory = write_and_break
        script.main(
            Invocation("05_export.py", self.config_path, overrides, check=False, redo=False)
        )


@pytest.fixture(scope="module")
def made(tiny_verifier_dir, tmp_path_factory) -> Run:
    """The run, made once; ``run`` copies nothing of it, it starts 05 afresh."""
    from conftest import config_writer

    directory = tmp_path_factory.mktemp("sabotage")
    verifier_dir = directory / "verifier"
    shutil.copytree(tiny_verifier_dir, verifier_dir)
    path = config_writer(directory, verifier_dir)(
        {f"drafter.{key}": value for key, value in DRAFTER.items()}
    )
    drafter = Drafter.random(
        open_drafters_verifier(verifier_dir), num_key_value_heads=4, rope_scaling=YARN
    )
    rows = publish_rows(path, 12, 4)
    publish_shards(path, rows, lean=0)
    run = Run(path, drafter)
    invocation = Invocation("test", path, (), check=False, redo=False)
    with Stage(run.config, "03_vocab", invocation) as stage:
        drafter.vocab_map.save(stage.directory / "vocab_map.safetensors")
        stage.commit(files=["vocab_map.safetensors"], counts={})
    run.train(copy.deepcopy(drafter.model))
    return run


@pytest.fixture
def run(made) -> Run:
    yield made
    shutil.rmtree(made.export, ignore_errors=True)


def test_the_good_drafter_passes_in_both_forms(run):
    run.run_05()
    for form in BOTH:
        published = Published.open(run.export / form, run.drafter.verifier)
        assert [f for f in findings_of(published, run.drafter.verifier) if f.fatal] == []


CASES = [(sabotage, form) for sabotage in EXPORT for form in sabotage.forms]


@pytest.mark.parametrize(("sabotage", "form"), CASES, ids=lambda x: getattr(x, "name", x))
def test_05_refuses_by_name_and_publishes_nothing(run, sabotage: Sabotage, form: str):
    def apply(directory: Path, written: str) -> None:
        if written == form:
            sabotage.apply(directory)

    with pytest.raises(GateError) as refused:
        run.run_05(apply)
    error = refused.value
    assert sabotage.names in speculators_name(error.where), error
    assert error.expected != error.found and error.fix
    assert not (run.export / form).exists() and not (run.export / "manifest.json").exists()


@pytest.mark.parametrize(("sabotage", "form"), CASES, ids=lambda x: getattr(x, "name", x))
def test_what_is_noticed_without_the_run(run, tmp_path, sabotage: Sabotage, form: str):
    """The same directory, as if downloaded: refused where its own files contradict themselves."""
    directory = run.drafter.export(
        tmp_path / "drafter", run.drafter.form if form == "drafter" else run.drafter.flat
    )
    sabotage.apply(directory)
    try:
        published = Published.open(directory, run.drafter.verifier)
        require_servable(directory, findings_of(published, run.drafter.verifier))
    except (ConfigError, GateError) as error:
        assert sabotage.alone, error
        named = sabotage.names if sabotage.alone is True else sabotage.alone
        assert named in speculators_name(error.where), error
    else:
        assert not sabotage.alone


@pytest.mark.parametrize("upstream", UPSTREAM, ids=lambda upstream: upstream.name)
def test_what_changed_since_is_refused_by_name(run, upstream: Upstream):
    overrides = (upstream.override,) if upstream.override else ()
    path = None
    if upstream.file:
        root, _, name = upstream.file.partition("/")
        path = run.verifier_dir / name if root == "verifier" else run.config.run_dir / upstream.file
        whole = path.read_bytes()
        assert upstream.change(whole) != whole
        path.write_bytes(upstream.change(whole))
    try:
        with pytest.raises(StaleInputError) as refused:
            run.run_05(overrides=overrides)
    finally:
        if path:
            path.write_bytes(whole)
    assert upstream.names in refused.value.where, refused.value
    assert not (run.export / "manifest.json").exists()


@pytest.mark.parametrize("sabotage", TRAINING, ids=lambda sabotage: sabotage.name)
def test_what_training_did_otherwise_is_named(run, tmp_path, monkeypatch, sabotage):
    """The files are what 04 published and the config says; what training did is not."""
    shutil.copytree(run.config.run_dir, tmp_path / "runs" / run.config.run_dir.name)
    overrides = (f"run.dir={tmp_path / 'runs'}",)
    model = copy.deepcopy(run.drafter.model)
    with monkeypatch.context() as patch:
        sabotage.apply(patch, model)
        run.train(model, overrides)
    with pytest.raises(GateError) as refused:
        run.run_05(overrides=overrides)
    error = refused.value
    assert "testimony.safetensors" in error.where and sabotage.names in error.where, error
    if sabotage.step is not None:
        assert f"TTT step {sabotage.step}" in error.where, error


def test_there_are_enough_of_them():
    names = [sabotage.name for sabotage in (*EXPORT, *UPSTREAM, *TRAINING)]
    assert len(set(names)) == len(names) >= 30
