"""Damage to what was published is found by the stage and by the next."""

from __future__ import annotations

import pytest

from eagle3.artifact import Artifact
from eagle3.errors import StaleInputError
from eagle3.files import write_text


def test_a_missing_upstream_gives_its_command(run):
    error = run.refused("03_vocab")
    assert error.command == f"python 01_prepare_data.py {run.path}" and error.found == "nothing"
    with run.stage():
        pass
    error = run.refused("03_vocab")
    assert error.command == f"python 01_prepare_data.py {run.path}" and "unfinished" in error.found


def make_two(run) -> Artifact:
    """A finished stage of two files."""
    with run.stage() as stage:
        assert not stage.done
        for name in ("other.txt", "rows.txt"):
            if not (stage.directory / name).exists():
                write_text(stage.directory / name, "rows")
        return stage.commit(files=["rows.txt", "other.txt"], counts={})


@pytest.mark.parametrize("damage", ["truncated", "grown", "missing"])
def test_a_damaged_file_is_named_downstream_and_made_again_by_its_stage(damage, run):
    artifact = make_two(run)
    other, rows = artifact.path("other.txt"), artifact.path("rows.txt")
    if damage == "missing":
        rows.unlink()
    else:
        rows.write_text("ro" if damage == "truncated" else "rows and more")
    error = run.refused("03_vocab")
    assert error.where == str(rows)
    assert error.command == f"python 01_prepare_data.py {run.path}"
    kept = other.stat().st_ino
    with run.stage() as stage:
        assert not stage.done and not rows.exists() and other.stat().st_ino == kept
    assert str(rows) in (artifact.directory / "log.txt").read_text()
    assert make_two(run).digest == artifact.digest
    assert other.stat().st_ino == kept
    run.open()


def test_all_damaged_files_are_counted(run):
    artifact = make_two(run)
    for name in ("other.txt", "rows.txt"):
        artifact.path(name).unlink()
    error = run.refused("03_vocab")
    assert error.where.endswith("other.txt") and "1 more" in error.found


@pytest.mark.parametrize("damage", ["edited", "garbled"])
def test_a_damaged_manifest_is_named_and_written_again_once_removed(damage, run):
    artifact = run.make()
    manifest = artifact.directory / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(
        text.replace('"too long": 2', '"too long": 1') if damage == "edited" else text[:100]
    )
    for name in ("01_data", "03_vocab"):
        error = run.refused(name)
        assert error.where == str(manifest) and f"remove {manifest}" in error.fix
        assert error.command == f"python 01_prepare_data.py {run.path}"
    manifest.unlink()
    with run.stage() as stage:
        assert not stage.done and artifact.path("rows.txt").is_file()
    assert run.make().digest == artifact.digest


def test_the_next_stage_reads_every_input_file_before_it_begins(run):
    """Sizes do not show a flipped bit; hidden states alone are compared as they are read."""
    artifact, hidden = run.make(), run.make("02_hidden")
    run.make("03_vocab")
    for made in (artifact, hidden):
        made.path("rows.txt").write_text("swor")
    with run.stage("03_vocab") as stage:
        assert stage.done  # nothing would be read
    (run.config.run_dir / "03_vocab" / "manifest.json").unlink()
    error = run.refused("03_vocab")
    assert error.where == str(artifact.path("rows.txt")) and "changed" in error.what
    assert error.fix.startswith(f"remove {artifact.path('rows.txt')}")
    assert error.script == "01_prepare_data.py"
    artifact.path("rows.txt").unlink()
    run.make()
    run.make("03_vocab")
    with run.stage("04_train") as stage:
        assert not stage.done


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
