"""Published files are damaged; the operator types what the screen says until all is well again."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle3.errors import EXIT_DONE, EXIT_STALE
from eagle3.fingerprint import STAGES
from tests.kill.victim import ROOT, assert_equal

pytestmark = pytest.mark.kill


def flip(path: Path) -> None:
    """One bit, near the end: of a tensor, not of what says where tensors lie."""
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def delete(path: Path) -> None:
    path.unlink()


def swap(path: Path) -> None:
    """With the next shard."""
    number = int(path.stem.removeprefix("shard-"))
    other = path.with_name(f"shard-{number + 1:05d}.safetensors")
    aside = path.rename(path.with_name("aside"))
    other.rename(path)
    aside.rename(other)


def edit(path: Path) -> None:
    path.write_text(path.read_text().replace('"files"', '"Files"', 1))


DAMAGE: dict[str, list[tuple[Callable[[Path], None], str]]] = {
    "01_data": [
        (delete, "prompts.json"),
        (flip, "rows.safetensors"),
        (truncate, "token_counts.safetensors"),
        (edit, "manifest.json"),
    ],
    "02_hidden": [
        (flip, "shard-00003.safetensors"),
        (truncate, "shard-00005.safetensors"),
        (delete, "shard-00007.safetensors"),
        (swap, "shard-00010.safetensors"),
        (edit, "manifest.json"),
    ],
    "03_vocab": [(flip, "vocab_map.safetensors"), (delete, "coverage.png")],
    "04_train": [(flip, "best.safetensors"), (delete, "metrics.jsonl"), (edit, "manifest.json")],
    "05_export": [(truncate, "drafter/model.safetensors"), (flip, "drafter/config.json")],
}


@pytest.mark.parametrize("stage", DAMAGE)
def test_typing_what_the_screen_says_mends_it(stage, start_from, undisturbed):
    reader = next(name for name, spec in STAGES.items() if stage in spec.inputs)
    if stage == "02_hidden":
        reader = "04_train"
    run = start_from(reader)
    damaged = run.stage.parent / stage
    sound = {path: path.stat().st_ino for path in damaged.rglob("*") if path.is_file()}
    for damage, name in DAMAGE[stage]:
        damage(damaged / name)
        sound.pop(damaged / name)
        if damage is swap:
            sound.pop(damaged / "shard-00011.safetensors")
    named: set[str] = set()
    for _ in range(3 * len(DAMAGE[stage])):
        code, screen = run()
        if code == EXIT_DONE:
            break
        assert code == EXIT_STALE and "Traceback" not in screen, screen[-6000:]
        where = re.search(r" where     (\S+)", screen)[1].rstrip(",")
        named.add(where)
        print(f"{Path(where).name}: {re.search(r' error     (.*)', screen)[1]}")
        if "row changed on disk" not in screen:  # that one is found when it is read
            assert {path.name for path in run.stage.iterdir()} <= UNTOUCHED
        obey(screen)
    assert code == EXIT_DONE, screen[-6000:]
    # Truncated and missing files are counted and come back together: the first one is named.
    assert {
        str(damaged / name) for damage, name in DAMAGE[stage] if damage in (flip, edit)
    } <= named
    assert_equal(damaged, undisturbed[stage])
    if reader not in ("01_data", "06_verify"):
        assert_equal(run.stage, undisturbed[reader])
    if stage == "02_hidden":
        shards = {path: inode for path, inode in sound.items() if path.suffix == ".safetensors"}
        assert shards and {path: path.stat().st_ino for path in shards} == shards


UNTOUCHED = {"log.txt", "config.yaml", "fingerprint.json", "ended.json", "progress.json"}


def obey(screen: str) -> None:
    """Do what the last line says: remove a file, if it says so, and run the command."""
    step = re.search(r" next      (.*)", screen)[1]
    if remove := re.match(r"remove ([^\s:]+)", step):
        Path(remove[1]).unlink()
    words = shlex.split(step.rpartition("then: ")[2])
    assert words[0] == "python"
    done = subprocess.run(
        [sys.executable, *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == EXIT_DONE, done.stdout[-6000:] + done.stderr[-2000:]


def test_06_measures_again_only_what_is_damaged(undisturbed, start_from):
    run = start_from("06_verify")
    import shutil

    shutil.copytree(undisturbed["06_verify"], run.stage)
    files = json.loads((run.stage / "manifest.json").read_text())["files"]
    served = next(name for name in files if name.startswith("served_"))
    kept = {name: (run.stage / name).stat().st_ino for name in files if "baseline_" in name}
    (run.stage / served).unlink()
    screen = run.finish()
    assert f"{served}" in screen and (run.stage / served).is_file()
    assert {name: (run.stage / name).stat().st_ino for name in kept} == kept
