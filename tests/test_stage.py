"""What an operator meets when he runs a script again, changes the config, or loses a file."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle3 import stage as stage_module
from eagle3.artifact import STAGES, Artifact, expected_fingerprint, open_artifact
from eagle3.config import Config
from eagle3.config_file import load_config
from eagle3.errors import ConfigError, GateError, NoRoomError, StaleInputError
from eagle3.files import write_text
from eagle3.script import Invocation
from eagle3.stage import Stage

ROOT = Path(__file__).resolve().parent.parent


class Run:
    """A run of the tiny verifier whose stages write one small file instead of working."""

    def __init__(self, write_config, overrides: tuple[str, ...] = ()) -> None:
        self.path = write_config()
        self.overrides = overrides

    @property
    def config(self) -> Config:
        return load_config(self.path, self.overrides)

    def invocation(self, **flags: bool) -> Invocation:
        flags = {"check": False, "redo": False, **flags}
        return Invocation("01_prepare_data.py", self.path, self.overrides, **flags)

    def stage(self, name: str = "01_data", **flags: bool) -> Stage:
        return Stage(self.config, name, self.invocation(**flags))

    def make(self, name: str = "01_data", text: str = "rows", **flags: bool) -> Artifact:
        with self.stage(name, **flags) as stage:
            assert not stage.done
            write_text(stage.directory / "rows.txt", text)
            counts = {"in": 3, "out": 1, "dropped": {"too long": 2}}
            return stage.commit(files=["rows.txt"], counts=counts)

    def open(self, name: str = "01_data") -> Artifact:
        return open_artifact(self.config, name, self.invocation())

    def refused(self, name: str = "01_data", **flags: bool) -> StaleInputError:
        with pytest.raises(StaleInputError) as caught, self.stage(name, **flags):
            pass
        return caught.value

    def files(self) -> dict[str, bytes]:
        """Everything under the run, locks and logs aside."""
        directory = self.config.run_dir
        return {
            str(path.relative_to(directory)): path.read_bytes()
            for path in sorted(directory.rglob("*"))
            if path.is_file() and path.name != "log.txt" and not path.name.startswith(".")
        }


@pytest.fixture
def run(write_config) -> Run:
    return Run(write_config)


def _last_line(capsys) -> str:
    return capsys.readouterr().out.splitlines()[-1]


# --- running again ---


def test_a_finished_stage_says_so_and_changes_nothing(run, capsys):
    run.make()
    before = run.files()
    capsys.readouterr()
    with run.stage() as stage:
        assert stage.done
    lines = capsys.readouterr().out.splitlines()
    assert "already done" in lines[0] and len(lines) == 2
    assert f"next command='python 02_gen_hidden_states.py {run.path}'" in lines[1]
    assert run.files() == before


def test_a_partial_stage_continues(run):
    with run.stage() as stage:
        write_text(stage.directory / "part-0", "finished before the stop")
    with run.stage() as stage:
        assert not stage.done
        assert (stage.directory / "part-0").read_text() == "finished before the stop"
        stage.commit(files=["part-0"], counts={})
    assert run.open().path("part-0").is_file()


def test_the_manifest_tells_what_was_made_and_the_banner_from_what(run, capsys):
    artifact = run.make()
    assert artifact.counts == {"in": 3, "out": 1, "dropped": {"too long": 2}}
    assert artifact.manifest["files"]["rows.txt"]["bytes"] == 4
    artifact.verify_checksums()
    saved = artifact.directory / "config.yaml"
    assert load_config(saved) == run.config
    screen = capsys.readouterr().out
    log = (artifact.directory / "log.txt").read_text()
    assert screen.strip() in log  # the log has every line of the screen
    for part in ("versions", "torch=", "devices", "output", "next"):
        assert part in screen


def test_counts_that_do_not_add_up_are_our_bug(run):
    with run.stage() as stage, pytest.raises(AssertionError):
        stage.commit(files=[], counts={"in": 3, "out": 1, "dropped": {"too long": 1}})
    assert not (stage.directory / "manifest.json").exists()


def test_the_last_stage_names_no_next_command(run, capsys):
    run.stage("06_verify").say_next()
    assert "the run is complete" in _last_line(capsys)


# --- something else than before ---


def test_a_changed_config_is_refused_with_the_difference_and_the_command(write_config):
    Run(write_config).make()
    changed = Run(write_config, ("data.seed=7", "data.max_length_tokens=64"))
    before = changed.files()
    error = changed.refused()
    assert error.exit_code == 3
    assert "data.seed: 0 -> 7" in error.found and "data.max_length_tokens: 128 -> 64" in error.found
    flags = "--set data.seed=7 --set data.max_length_tokens=64 --redo"
    assert error.command == f"python 01_prepare_data.py {changed.path} {flags}"
    assert changed.files() == before


def test_a_changed_config_is_refused_over_a_partial_stage_too(write_config):
    with Run(write_config).stage():
        pass
    assert "data.seed: 0 -> 7" in Run(write_config, ("data.seed=7",)).refused().found


def test_downstream_of_a_changed_stage_is_refused_until_it_is_redone(write_config):
    run = Run(write_config)
    run.make(), run.make("03_vocab")
    changed = Run(write_config, ("data.seed=7",))
    error = changed.refused("03_vocab")
    assert error.where.endswith("01_data: data.seed")
    assert error.command.startswith("python 01_prepare_data.py")

    changed.make(redo=True, text="other rows")
    error = changed.refused("03_vocab")
    assert error.command.startswith("python 03_build_vocab_map.py") and "--redo" in error.command
    changed.make("03_vocab", redo=True)
    changed.open("03_vocab")


def test_redoing_the_very_same_makes_nothing_stale(run):
    run.make(), run.make("03_vocab")
    run.make(redo=True)
    run.open("03_vocab")


def test_another_stage_version_is_refused(run, monkeypatch):
    run.make()
    spec = STAGES["01_data"]
    newer = type(spec)(spec.name, spec.script, spec.version + 1, spec.sections, spec.inputs)
    monkeypatch.setitem(stage_module.STAGES, "01_data", newer)
    assert f"version: {spec.version} -> {spec.version + 1}" in run.refused().found


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


# --- damage ---


def test_a_missing_upstream_gives_its_command(run):
    error = run.refused("03_vocab")
    assert error.command == f"python 01_prepare_data.py {run.path}" and error.found == "nothing"
    with run.stage():
        pass
    error = run.refused("03_vocab")
    assert error.command == f"python 01_prepare_data.py {run.path}" and "unfinished" in error.found


@pytest.mark.parametrize("damage", ["truncated", "grown", "missing", "edited", "garbled"])
def test_damage_is_found_by_the_stage_and_by_the_next(damage, run):
    artifact = run.make()
    rows, manifest = artifact.path("rows.txt"), artifact.directory / "manifest.json"
    if damage == "truncated":
        rows.write_text("ro")
    elif damage == "grown":
        rows.write_text("rows and more")
    elif damage == "missing":
        rows.unlink()
    elif damage == "edited":
        manifest.write_text(manifest.read_text().replace('"too long": 2', '"too long": 1'))
    else:
        manifest.write_text(manifest.read_text()[:100])
    for name in ("01_data", "03_vocab"):
        error = run.refused(name)
        assert error.where == str(manifest if damage in ("edited", "garbled") else rows)
        assert error.command == f"python 01_prepare_data.py {run.path} --redo"
    run.make(redo=True)
    run.open()


def test_same_size_other_content_is_found_by_checksums(run):
    artifact = run.make()
    artifact.path("rows.txt").write_text("swor")
    with pytest.raises(StaleInputError) as caught:
        run.open().verify_checksums()
    assert caught.value.where == str(artifact.path("rows.txt"))


def test_a_finished_stage_is_known_by_its_manifest_alone(run):
    artifact = run.make()
    (artifact.directory / "fingerprint.json").unlink()
    with run.stage() as stage:
        assert stage.done


# --- redo ---


def _old(run: Run) -> Path:
    return run.config.run_dir / "01_data.old"


def test_redo_keeps_the_old_output_until_the_new_is_published(run):
    run.make(text="old rows")
    with run.stage(redo=True) as stage:
        assert not stage.done and not (stage.directory / "rows.txt").exists()
        assert (_old(run) / "rows.txt").read_text() == "old rows"
        write_text(stage.directory / "rows.txt", "new rows")
        stage.commit(files=["rows.txt"], counts={})
    assert not _old(run).exists() and run.open().path("rows.txt").read_text() == "new rows"


def test_an_interrupted_redo_keeps_the_finished_output_when_redone(run):
    run.make(text="old rows")
    for _ in range(2):
        with run.stage(redo=True) as stage:
            write_text(stage.directory / "rows.txt", "half of the n")
        assert (_old(run) / "rows.txt").read_text() == "old rows"
    run.make(redo=True, text="new rows")
    assert not _old(run).exists()


def test_an_interrupted_redo_continues_without_the_flag(run):
    """As the message after an interruption says; the old output goes once the new is there."""
    run.make(text="old rows")
    with run.stage(redo=True) as stage:
        write_text(stage.directory / "part-0", "kept")
    with run.stage() as stage:
        assert not stage.done and (stage.directory / "part-0").exists()
        stage.commit(files=["part-0"], counts={})
    assert not _old(run).exists()


def test_a_redo_that_died_after_publishing_loses_nothing(run):
    run.make(text="new rows")
    _old(run).mkdir()
    (_old(run) / "rows.txt").write_text("old rows")
    with run.stage(redo=True):
        assert (_old(run) / "rows.txt").read_text() == "new rows"
    with run.stage() as stage:
        stage.commit(files=[], counts={})
    _old(run).mkdir()
    with run.stage() as stage:
        assert stage.done
    assert not _old(run).exists()


def test_redo_of_nothing_is_a_first_run(run):
    run.make(redo=True)
    assert not _old(run).exists()


# --- as processes ---


def _script(tmp_path: Path, body: str, config: Path, *flags: str, **popen: Any) -> subprocess.Popen:
    """Start a script whose ``main(invocation)`` is ``body``."""
    path = tmp_path / "01_prepare_data.py"
    imports = (
        "import os, sys, time\n"
        "from eagle3.errors import *\n"
        "from eagle3.script import log, run_script, stop_flag\n"
    )
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    path.write_text(f"{imports}def main(invocation):\n{lines}run_script(main, 'A script.')\n")
    return subprocess.Popen(
        [sys.executable, str(path), str(config), *flags],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **popen,
    )


PARTS = 'where="HERE", expected="THIS", found="THAT", fix="do it"'


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("pass", 0),
        ("raise RuntimeError('ours')", 1),
        (f"raise ConfigError('WHAT', {PARTS})", 2),
        (f"raise StaleInputError('WHAT', {PARTS})", 3),
        (f"raise GateError('WHAT', {PARTS})", 4),
        (f"raise NoRoomError('WHAT', {PARTS})", 5),
        ("raise Interrupted", 75),
        ("invocation.load_config()", 2),
    ],
)
def test_exit_codes(body, code, tmp_path):
    process = _script(tmp_path, body, tmp_path / "no config.yaml", "--set", "train.seed=1")
    screen, errors = process.communicate(timeout=60)
    assert process.returncode == code
    command = f"python 01_prepare_data.py '{tmp_path}/no config.yaml' --set train.seed=1"
    if code in (2, 3, 4, 5):
        assert "Traceback" not in screen + errors
        assert screen.splitlines()[-1].endswith(f", then: {command}")
    if "WHAT" in body:
        for line in ("error     WHAT", "where     HERE", "expected  THIS", "found     THAT"):
            assert line in screen
    if code == 1:
        assert "RuntimeError: ours" in errors and "bug" in screen
    if code == 75:
        assert repr(command) in screen or f'"{command}"' in screen


@pytest.mark.parametrize("kind", [ConfigError, StaleInputError, GateError, NoRoomError])
def test_errors_cross_process_borders_whole(kind):
    error = kind("what", where="a", expected="b", found="c", fix="d", command="e")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind and vars(copy) == vars(error)


def test_a_stop_signal_finishes_the_unit_and_exits_75(tmp_path):
    body = (
        "print('started', flush=True)\n"
        "while stop_flag.signal_name is None: time.sleep(0.02)\n"
        "print('unit done', flush=True)\n"
        "stop_flag.raise_if_set()\n"
        "print('next unit')"
    )
    process = _script(tmp_path, body, tmp_path / "config.yaml")
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGTERM)
    screen, errors = process.communicate(timeout=60)
    assert process.returncode == 75 and not errors
    assert screen.splitlines()[-2] == "unit done"
    assert f"python 01_prepare_data.py {tmp_path / 'config.yaml'}" in screen.splitlines()[-1]


def test_a_second_stop_signal_stops_at_once(tmp_path):
    body = "print('started', flush=True)\nwhile True: time.sleep(0.05)"
    process = _script(tmp_path, body, tmp_path / "config.yaml")
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGINT)
    assert "again to stop now" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 75


ENTER = (
    "from eagle3.stage import Stage\n"
    "from eagle3.files import write_text\n"
    "with Stage(invocation.load_config(), '01_data', invocation) as stage:\n"
)


def test_a_second_process_is_refused_and_a_killed_one_frees_the_stage(run, tmp_path):
    body = ENTER + "    print('entered', flush=True)\n    time.sleep(600)"
    process = _script(tmp_path, body, run.path)
    try:
        while process.stdout.readline() != "entered\n":
            assert process.poll() is None, process.stderr.read()
        error = run.refused()
        assert error.found.startswith(f"pid {process.pid} on ")
    finally:
        process.kill()
        process.communicate()
    with run.stage() as stage:
        assert not stage.done


def test_a_disk_full_to_the_last_byte_is_exit_5(write_config, small_disk, tmp_path):
    """The log is on the full disk too: that must not turn the error into a bug."""
    body = ENTER + (
        "    with open(stage.directory.parent / 'filler', 'wb', buffering=0) as file:\n"
        "        try:\n"
        "            while file.write(bytes(512)): pass\n"
        "        except OSError: pass\n"
        "    log('x' * 10000)\n"
        "    write_text(stage.directory / 'rows.txt', 'rows')"
    )
    path = write_config({"run.dir": str(small_disk / "runs")})
    process = _script(tmp_path, body, path)
    screen, errors = process.communicate(timeout=60)
    assert process.returncode == 5, errors
    assert "the disk is full" in screen and "Traceback" not in screen + errors


def test_a_local_source_edited_in_place_makes_01_stale(write_config, tmp_path):
    source = tmp_path / "chats.jsonl"
    source.write_text('{"messages": []}\n')
    local = {"kind": "local", "name": "chats", "path": str(source), "max_conversations": None}
    config = load_config(write_config({"data.sources": [local]}))
    before = expected_fingerprint(config, "01_data", {})
    assert before == expected_fingerprint(config, "01_data", {})
    source.write_text('{"messages": [1]}\n')
    assert expected_fingerprint(config, "01_data", {}) != before
