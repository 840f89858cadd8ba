"""The six scripts as an operator runs them: real vLLM, a real chat model, stopped and damaged.

One small run on SmolLM2, killed in the middle of 02 and of 04 and run again; then the artifacts
are damaged one by one, and the next stage must say so before it computes anything.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
CONFIG = "configs/smollm2_cpu.yaml"
SCRIPTS = [
    "01_prepare_data.py",
    "02_gen_hidden_states.py",
    "03_build_vocab_map.py",
    "04_train.py",
    "05_export.py",
    "06_verify.py",
]


class Operator:
    """Types commands at the repository's root and reads what the screen says."""

    def __init__(self, run_dir: Path, verifier: Path) -> None:
        self.run = run_dir / "smollm2_cpu"
        self.overrides = [
            f"run.dir={run_dir}",
            f"verifier.path={verifier}",
            "data.sources=[{kind: package, name: chitchat, max_conversations: 220}]",
            "data.regenerate.max_new_tokens=64",
            "data.num_validation_prompts=16",
            "evaluation.prompt_sets=[{kind: package, name: mt_bench, max_conversations: 8}]",
            "evaluation.max_new_tokens=48",
            "capture.shard_bytes=16777216",
            "train.num_epochs=3",
            "train.checkpoint_every_steps=8",
            "verify.gates.min_acceptance_length={heldout: 1.1, mt_bench: 1.0}",
        ]

    def words(self, script: str, *flags: str) -> list[str]:
        sets = [word for override in self.overrides for word in ("--set", override)]
        return [sys.executable, script, CONFIG, *sets, *flags]

    def __call__(self, script: str, *flags: str) -> tuple[int, str]:
        done = subprocess.run(
            self.words(script, *flags), cwd=ROOT, capture_output=True, text=True, timeout=900
        )
        return done.returncode, done.stdout + done.stderr

    def kill_when(self, script: str, appears: str) -> None:
        """Run a script and SIGKILL it once a file matching ``appears`` is there."""
        process = subprocess.Popen(
            self.words(script), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        deadline = time.monotonic() + 600
        while not list(self.run.glob(appears)):
            assert process.poll() is None, process.communicate()[0].decode()[-3000:]
            assert time.monotonic() < deadline, f"{appears} never came"
            time.sleep(0.2)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def operator(smollm2_dir, tmp_path_factory) -> Operator:
    """A finished run; 02 and 04 were killed once on the way."""
    operator = Operator(tmp_path_factory.mktemp("runs"), smollm2_dir)
    operator.screens = {}
    for script in SCRIPTS:
        if script == "02_gen_hidden_states.py":
            operator.kill_when(script, "02_hidden/shard-00000.json")
        if script == "04_train.py":
            operator.kill_when(script, "04_train/checkpoints/step-00000008.pt")
        code, screen = operator(script)
        assert code == 0, f"{script}\n{screen[-4000:]}"
        operator.screens[script] = screen
    return operator


def test_the_drafter_accepts_when_served(operator):
    report = json.loads((operator.run / "06_verify" / "report.json").read_text())
    assert report["verdict"] == "pass" and all(gate["ok"] for gate in report["gates"])
    served, predicted = report["served"]["heldout"], report["predicted"]
    assert served["acceptance_length"] >= 1.1
    assert abs(predicted["acceptance_length"] / served["acceptance_length"] - 1) <= 0.03
    assert len(served["acceptance_per_position"]) == 3
    assert served["tokens_per_s"] > 0 and report["baseline"]["mt_bench"]["tokens_per_s"] > 0
    lossless = report["lossless"]
    assert lossless["compared"] > 16 and lossless["unexplained"] == 0
    assert all(each["is_near_tie"] for each in lossless["differences"])
    # At temperature 1 the draws differ from run to run, what they were given does not.
    sampled = report["sampled"]["heldout_sampled"]
    assert sampled["served"]["acceptance_length"] > 1.05
    low, high = sampled["served"]["interval"]
    assert (
        low <= sampled["predicted"]["interval"][1] and sampled["predicted"]["interval"][0] <= high
    )
    # vLLM's own drafter drafts what the replay drafts, but where rounding swaps two tokens.
    for apart in report["apart"].values():
        drafts = apart["drafts"]
        assert drafts["compared"][0] > 100
        assert drafts["equal"][0] > 0.95 * drafts["compared"][0]
    assert (operator.run / "06_verify" / "report.html").is_file()
    assert list((operator.run / "06_verify").glob("*.png"))


def test_killed_stages_went_on(operator):
    """The killed 02 kept its first shard, the killed 04 went on from its checkpoint."""
    assert re.search(r"published='\d.*MiB'", operator.screens["02_gen_hidden_states.py"])
    assert "resumed" in operator.screens["04_train.py"]
    steps = [
        json.loads(line)["step"]
        for line in (operator.run / "04_train" / "metrics.jsonl").read_text().splitlines()
        if json.loads(line)["kind"] == "train"
    ]
    assert steps == sorted(set(steps))


def test_the_screen_names_the_next_command(operator):
    """Each script's next command is the one that runs the next script, overrides included."""
    for script, following in zip(SCRIPTS, SCRIPTS[1:], strict=False):
        line = [s for s in operator.screens[script].splitlines() if " next command=" in s][-1]
        command = line.split("command=", 1)[1].strip("\"'")
        assert following in command and CONFIG in command
        assert all(shlex.quote(o).strip("'") in command for o in operator.overrides[:2])


def test_done_stages_say_so_and_touch_nothing(operator):
    before = {p: p.stat().st_mtime_ns for p in operator.run.rglob("*") if p.suffix != ".lock"}
    for script in SCRIPTS:
        code, screen = operator(script)
        assert code == 0 and "already done" in screen
    after = {p: p.stat().st_mtime_ns for p in operator.run.rglob("*") if p.suffix != ".lock"}
    assert {p: t for p, t in after.items() if p.is_file()} == {
        p: t for p, t in before.items() if p.is_file()
    }


def test_changed_config_is_refused_with_the_difference(operator):
    code, screen = operator("02_gen_hidden_states.py", "--set", "capture.aux_layer_ids=[3, 15, 27]")
    assert code == 3 and "[2, 15, 27] -> [3, 15, 27]" in screen and "--redo" in screen
    code, screen = operator("04_train.py", "--set", "data.seed=1")
    assert code == 3 and "data.seed" in screen and "01_prepare_data.py" in screen
    assert (operator.run / "02_hidden" / "manifest.json").is_file()


@pytest.mark.parametrize(
    ("damage", "next_script", "named"),
    [
        ("truncate", "04_train.py", "shard-00001.safetensors"),
        ("delete", "04_train.py", "shard-00001.safetensors"),
        ("edit_manifest", "04_train.py", "manifest.json"),
        ("truncate_weights", "06_verify.py", "model.safetensors"),
    ],
)
def test_damage_is_named_by_the_next_stage(operator, damage, next_script, named):
    folder = "05_export" if damage == "truncate_weights" else "02_hidden"
    path = next((operator.run / folder).rglob(named))
    whole = path.read_bytes()
    try:
        if damage == "delete":
            path.unlink()
        elif damage == "edit_manifest":
            path.write_bytes(whole.replace(b'"tokens"', b'"Tokens"', 1))
        else:
            path.write_bytes(whole[:-100])
        code, screen = operator(next_script)
        assert code == 3 and named in screen and "next " in screen
    finally:
        path.write_bytes(whole)
    code, _ = operator(next_script)
    assert code == 0
