"""What an operator meets when he runs a script again, changes the config, or redoes a stage."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from eagle3 import fingerprint as fingerprint_module
from eagle3.config_file import load_config
from eagle3.files import write_text
from eagle3.fingerprint import STAGES
from tests.runs import Run, start_script


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


def test_the_last_line_is_what_the_run_lacks_first(write_config, capsys):
    """Whichever script says it, and with the flag it needs."""
    run = Run(write_config)
    run.make(), run.make("03_vocab")
    assert f"next command='python 02_gen_hidden_states.py {run.path}'" in _last_line(capsys)
    run.make("02_hidden"), run.make("04_train"), run.make("05_export"), run.make("06_verify")
    report = run.config.run_dir / "06_verify" / "report.html"
    assert _last_line(capsys).endswith(f"06_verify the run is complete report={report}")
    changed = Run(write_config, ("train.seed=7",))
    with changed.stage("03_vocab"):
        last = f"python 04_train.py {run.path} --set train.seed=7 --redo'"
        assert _last_line(capsys).endswith(last)


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
    monkeypatch.setitem(fingerprint_module.STAGES, "01_data", newer)
    assert f"version: {spec.version} -> {spec.version + 1}" in run.refused().found


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


def test_a_redo_killed_while_it_throws_a_half_away_reuses_nothing_of_it(run, monkeypatch):
    run.make(text="old rows")
    with run.stage(redo=True) as stage:
        write_text(stage.directory / "part-0", "of the first redo")

    def cut_short(path: Path) -> None:
        (path / "fingerprint.json").unlink()  # what said from what it was made goes first
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", cut_short)
    with pytest.raises(KeyboardInterrupt), run.stage(redo=True):
        pass
    monkeypatch.undo()
    with run.stage() as stage:
        assert not (stage.directory / "part-0").exists()
        assert (_old(run) / "rows.txt").read_text() == "old rows"
        stage.commit(files=[], counts={})
    assert sorted(path.name for path in run.config.run_dir.glob("*01_data*")) == [
        ".01_data.lock",
        ".01_data.turn.lock",
        "01_data",
    ]


REDO = (
    "from eagle3.stage import Stage\n"
    "from eagle3.files import write_text\n"
    "with Stage(invocation.load_config(), '01_data', invocation) as stage:\n"
    "    print('entered', flush=True)\n"
    "    if not stage.done:\n"
    "        for part in range(10):\n"
    "            write_text(stage.directory / f'part-{part}', 'new')\n"
    "        write_text(stage.directory / 'rows.txt', f'rows of {os.getpid()}')\n"
    "        stage.commit(files=['rows.txt'], counts={})\n"
)


def test_a_redo_killed_anywhere_never_leaves_less_than_one_whole_output(run, tmp_path):
    seed = 5
    moments = random.Random(seed)
    run.make(text="old rows")
    published = 0
    for _ in range(8):
        process = start_script(tmp_path, REDO, run.path, "--redo")
        process.stdout.readline()
        time.sleep(moments.random() * 0.1)
        process.kill()
        process.communicate()
        whole = [
            directory
            for directory in (run.config.run_dir / "01_data", _old(run))
            if (directory / "manifest.json").is_file() and (directory / "rows.txt").is_file()
        ]
        assert whole, f"seed {seed}"
        published += (whole[0] / "rows.txt").read_text() == f"rows of {process.pid}"
    print(f"of 8 redos killed (seed {seed}) {published} had published")
    process = start_script(tmp_path, REDO, run.path)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert run.open().path("rows.txt").is_file() and not _old(run).exists()


# --- judged again ---


def test_other_gates_keep_what_was_measured(write_config, capsys):
    """06 is entered again with everything in place; only a verdict is missing."""
    Run(write_config).make_all()
    other = Run(write_config, ("verify.gates.max_predicted_served_gap=0.5",))
    before = other.files()
    with other.stage("06_verify") as stage:
        assert not stage.done and (stage.directory / "rows.txt").read_text() == "rows"
        assert "max_predicted_served_gap: 0.03 -> 0.5" in capsys.readouterr().out
        assert not (stage.directory / "manifest.json").exists()
        stage.commit(files=["rows.txt"], counts={})
    with other.stage("06_verify") as stage:
        assert stage.done
    after = other.files()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {
        f"06_verify/{name}" for name in ("manifest.json", "fingerprint.json", "config.yaml")
    }


def test_other_gates_do_not_hide_another_change(write_config):
    Run(write_config).make_all()
    sets = ("verify.gates.max_predicted_served_gap=0.5", "verify.concurrency=2")
    assert "verify.concurrency: 8 -> 2" in Run(write_config, sets).refused("06_verify").found


def test_measurements_that_changed_are_not_judged(write_config):
    Run(write_config).make_all()
    other = Run(write_config, ("verify.gates.max_predicted_served_gap=0.5",))
    rows = other.config.run_dir / "06_verify" / "rows.txt"
    rows.write_text("swor")
    assert other.refused("06_verify").where == str(rows)
    assert (rows.parent / "manifest.json").is_file()


def test_measurements_that_are_missing_are_made_again(write_config):
    Run(write_config).make_all()
    other = Run(write_config, ("verify.gates.max_predicted_served_gap=0.5",))
    (other.config.run_dir / "06_verify" / "rows.txt").write_text("ro")
    with other.stage("06_verify") as stage:
        assert not stage.done and not (stage.directory / "rows.txt").exists()
    other.make("06_verify")
    with other.stage("06_verify") as stage:
        assert stage.done
