"""Published files are damaged; the operator types what the screen says until all is well again."""

from __future__ import annotations

import copy
import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle3.errors import EXIT_DONE, EXIT_STALE
from eagle3.fingerprint import STAGES
from tests.kill import tally
from tests.kill.victim import Run, assert_equal, differing, entries

pytestmark = pytest.mark.kill


def flip(path: Path) -> None:
    """One bit, in the middle: of a tensor, not of what says where tensors lie."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def delete(path: Path) -> None:
    path.unlink()


def neighbour(shard: Path) -> Path:
    return shard.with_name(f"shard-{int(shard.stem.removeprefix('shard-')) + 1:05d}.safetensors")


def swap(path: Path) -> None:
    """With the next shard."""
    other = neighbour(path)
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
        (truncate, "shard-00005.safetensors"),
        (delete, "shard-00007.safetensors"),
        (edit, "manifest.json"),
        (swap, "shard-00010.safetensors"),
        (flip, "shard-00003.safetensors"),
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
    sound = {path: path.stat().st_ino for path in damaged.glob("shard-*.safetensors")}

    def harm(damage: Callable[[Path], None], name: str) -> None:
        damage(damaged / name)
        tally.count(stage, tally.DAMAGED)
        sound.pop(damaged / name, None)
        if damage is swap:
            sound.pop(neighbour(damaged / name), None)

    for damage, name in DAMAGE[stage]:
        harm(damage, name)
        named = {step(run)}
        if damage is swap and differing(damaged, undisturbed[stage]):  # the other one of the two
            named.add(step(run))
        assert str(damaged / name) in named
        assert_equal(damaged, undisturbed[stage])

    for damage, name in DAMAGE[stage]:  # all at once
        harm(damage, name)
    named = set()
    while where := step(run):
        # A stage that makes one file again may mend others: not all are named, and none twice.
        assert where not in named
        named.add(where)
    assert_equal(damaged, undisturbed[stage])
    if reader != "06_verify":  # that one measures
        assert_equal(run.stage, undisturbed[reader])
    if stage == "02_hidden":
        assert sound and {path: path.stat().st_ino for path in sound} == sound


def step(run: Run) -> str | None:
    """Run a reader. If it refuses it has changed nothing, says what is wrong, and is obeyed: the
    file it named; None if it came to its end."""
    before = work(run)
    code, screen = run()
    if code == EXIT_DONE:
        return None
    assert code == EXIT_STALE and "Traceback" not in screen, screen[-6000:]
    where = re.search(r" where     (\S+)", screen)[1].rstrip(",")
    print(f"{Path(where).name}: {re.search(r' error     (.*)', screen)[1]}")
    if "row changed on disk" not in screen:  # that one is found when it is read
        assert work(run) == before
    obey(run, screen)
    return where


def work(run: Run) -> list[tuple[str, int, int]]:
    """What is in a stage's directory, without what it says of itself."""
    words = ("log.txt", "config.yaml", "fingerprint.json", "ended.json", "progress.json")
    return sorted(entry for entry in entries(run.stage) if entry[0] not in words)


def obey(run: Run, screen: str) -> None:
    """Do what the last line says: remove a file, if it says so, and run the command."""
    said = re.search(r" next      (.*)", screen)[1]
    if remove := re.match(r"remove ([^\s:]+)", said):
        Path(remove[1]).unlink()
    words = shlex.split(said.rpartition("then: ")[2])
    assert words[0] == "python"
    typed = copy.copy(run)
    typed.words = words[1:]
    typed.finish()


def test_06_measures_again_only_what_is_damaged(undisturbed, start_from):
    run = start_from("06_verify")
    shutil.copytree(undisturbed["06_verify"], run.stage)
    files = json.loads((run.stage / "manifest.json").read_text())["files"]
    served = next(name for name in files if name.startswith("served_"))
    kept = {name: (run.stage / name).stat().st_ino for name in files if "baseline_" in name}
    (run.stage / served).unlink()
    screen = run.finish()
    assert f"{served}" in screen and (run.stage / served).is_file()
    assert {name: (run.stage / name).stat().st_ino for name in kept} == kept
