"""Damage to what was published is found by the stage and by the next."""

from __future__ import annotations

import pytest

from eagle3.errors import StaleInputError


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
