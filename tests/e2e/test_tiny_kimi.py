"""The six scripts on a verifier of Kimi's kind, as an operator runs them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
CONFIG = "configs/tiny_kimi_cpu.yaml"
SCRIPTS = sorted(path.name for path in ROOT.glob("0[1-6]_*.py"))


def run(
    script: str, run_dir: Path, *overrides: str, drafter: Path | None = None
) -> tuple[int, str]:
    sets = [word for key in (f"run.dir={run_dir}", *overrides) for word in ("--set", key)]
    guest = ["--drafter", str(drafter)] if drafter else []
    done = subprocess.run(
        [sys.executable, script, CONFIG, *sets, *guest],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def finished(tiny_kimi_dir, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs")
    for script in SCRIPTS:
        code, screen = run(script, run_dir, "train.num_epochs=5")
        assert code == 0, f"{script}\n{screen[-4000:]}"
    return run_dir / "tiny_kimi"


def test_served_as_predicted_and_lossless(finished):
    report = json.loads((finished / "06_verify" / "report.json").read_text())
    assert report["verdict"] == "pass"
    for name, served in report["served"].items():
        predicted = report["predicted"][name]["acceptance_length"]
        assert abs(predicted / served["acceptance_length"] - 1) <= 0.03, name
        assert served["acceptance_length"] > 1.2
    prompts = json.loads((finished / "01_data" / "prompts.json").read_text())
    assert report["lossless"]["unexplained"] == 0
    assert report["lossless"]["compared"] == sum(map(len, prompts.values())) > 16


def test_a_drafter_from_elsewhere_is_verified_beside_the_runs_own(finished, tmp_path):
    """The same drafter as a guest, under another name: the same drafts, the same prediction."""
    guest = tmp_path / "downloaded"
    shutil.copytree(finished / "05_export" / "drafter", guest)
    own = {path: path.stat().st_mtime_ns for path in (finished / "06_verify").iterdir()}
    code, screen = run("06_verify.py", finished.parent, "train.num_epochs=5", drafter=guest)
    assert code == 0, screen[-4000:]
    assert {path: path.stat().st_mtime_ns for path in (finished / "06_verify").iterdir()} == own
    (directory,) = finished.glob("06_verify.downloaded-*")
    reports = [
        json.loads((d / "report.json").read_text()) for d in (finished / "06_verify", directory)
    ]
    mine, theirs = reports
    assert theirs["predicted"]["validation"] == mine["predicted"]["validation"]
    assert theirs["served"]["heldout"]["num_answers"] == mine["served"]["heldout"]["num_answers"]
    assert (directory / "report.html").is_file() and not (directory / "manifest.json").exists()
    # Other weights are another drafter: measured anew, and refused before an engine starts here.
    config = json.loads((guest / "config.json").read_text())
    config["transformer_layer_config"]["head_dim"] = 64
    (guest / "config.json").write_text(json.dumps(config))
    code, screen = run("06_verify.py", finished.parent, "train.num_epochs=5", drafter=guest)
    assert code == 4 and "q_proj" in screen and "engine ready" not in screen
    assert len(list(finished.glob("06_verify.downloaded-*"))) == 2


@pytest.mark.exhaustive
def test_serving_benchmark(finished):
    """Every set, concurrency and number of drafted tokens; run again, nothing is served again."""
    sets = ["--set", f"run.dir={finished.parent}", "--set", "train.num_epochs=5"]
    command = [sys.executable, "-m", "benchmarks.serving", CONFIG, *sets]
    subprocess.run(command, cwd=ROOT, check=True, timeout=900)
    bench = finished / "bench"
    results = json.loads((bench / "results.json").read_text())
    rows = {(r["set"], r["concurrency"], r["drafted_tokens"]): r for r in results["rows"]}
    assert {(c, k) for name, c, k in rows if name == "heldout"} == {
        (c, k) for c in (1, 2, 4, 8) for k in (0, 3)
    }
    lengths = [rows["heldout_as_06", 8, k]["acceptance_length"] for k in range(1, 8)]
    assert lengths[0] < lengths[2] and max(lengths) < 8
    assert len(results["predicted"]) == 7
    for row in rows.values():
        assert abs(sum(tokens for tokens, _ in row["blocks"]) - row["num_tokens"]) == 0
    report = (bench / "report.md").read_text()
    assert "| 3 | " in report and " no |" not in report  # predicted and served overlap
    served = {path: path.stat().st_mtime_ns for path in bench.glob("k*/*")}
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    assert {path: path.stat().st_mtime_ns for path in bench.glob("k*/*")} == served


def test_wiring(finished):
    """What the exported drafter says of itself is what was captured, and its heads are 128 wide."""
    config = json.loads((finished / "05_export" / "drafter" / "config.json").read_text())
    wiring = config["wiring_contract"]
    assert config["eagle_aux_hidden_state_layer_ids"] == wiring["aux_layer_ids"] == [1, 2, 4]
    assert wiring["num_verifier_layers"] == 5 and wiring["hidden_size"] == 128
    layer = config["transformer_layer_config"]
    assert layer["head_dim"] == 128 and layer["num_attention_heads"] == 2
    assert config["speculators_config"]["verifier"]["architectures"] == [
        "KimiK25ForConditionalGeneration"
    ]
    with safe_open(finished / "05_export" / "drafter" / "model.safetensors", "pt") as file:
        assert file.get_slice("layers.0.self_attn.q_proj.weight").get_shape() == [256, 256]
        assert file.get_slice("layers.0.self_attn.o_proj.weight").get_shape() == [128, 256]
        kept = file.get_tensor("t2d").nonzero().flatten().tolist()
    special = json.loads((ROOT / "models/tiny-kimi/tokenizer_config.json").read_text())
    ids = {token["content"]: int(i) for i, token in special["added_tokens_decoder"].items()}
    assert {ids["<|im_end|>"], ids["<think>"], ids["<|tool_call_begin|>"]} <= set(kept)


def test_rows_begin_with_the_thinking_prompt(finished):
    preview = (finished / "01_data" / "preview.md").read_text()
    context = next(line for line in preview.splitlines() if line.startswith("context"))
    asks = "<|im_assistant|>assistant<|im_middle|><think>"
    assert context.replace("·", "").endswith(asks)


def test_code_nobody_trusted_does_not_run(finished, tmp_path):
    code, screen = run(SCRIPTS[0], tmp_path, "verifier.trust_remote_code=false")
    assert code == 2 and "verifier.trust_remote_code: true" in screen
