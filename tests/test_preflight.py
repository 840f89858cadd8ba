"""``--check`` at Kimi-K2.5's full size, without its weights and without a GPU."""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
# The published text_config, as far as anything of ours or vLLM's config code reads it.
KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "media_placeholder_token_id": 163605,
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "kimi_k2",
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 163840,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
    },
}
WEIGHTS_BYTES = 595_000_000_000


@pytest.fixture
def kimi_dir(tmp_path, tiny_verifier_dir) -> Path:
    """Kimi's config and weight index, and a small tokenizer with Kimi's special tokens."""
    from transformers import AutoTokenizer

    directory = tmp_path / "kimi"
    directory.mkdir()
    tokenizer = AutoTokenizer.from_pretrained(tiny_verifier_dir)
    forced = yaml.safe_load((ROOT / "configs" / "kimi_k25_int4.yaml").read_text())["vocab"]
    tokenizer.add_special_tokens({"additional_special_tokens": forced["forced_tokens"]})
    tokenizer.save_pretrained(directory)
    (directory / "generation_config.json").write_text(
        json.dumps({"eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>")})
    )
    index = {"metadata": {"total_size": WEIGHTS_BYTES}, "weight_map": {}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(KIMI))
    return directory


def fake_driver(directory: Path, num_gpus: int, mebibytes: int) -> dict[str, str]:
    """An environment whose ``nvidia-smi`` lists such GPUs."""
    directory.mkdir()
    tool = directory / "nvidia-smi"
    listing = f"NVIDIA H200, {mebibytes}\\n" * num_gpus
    tool.write_text(f"#!/bin/sh\nprintf '{listing}'\n")
    tool.chmod(0o755)
    return {"PATH": f"{directory}:{os.environ['PATH']}"}


def run(
    script: str,
    kimi_dir: Path,
    *sets: str,
    config: str = "configs/kimi_k25_int4.yaml",
    environment: dict[str, str] | None = None,
) -> tuple[int, str]:
    """One ``--check``: exit code and screen."""
    overrides = [
        f"verifier.path={kimi_dir}",
        f"run.dir={kimi_dir.parent / 'runs'}",
        "data.sources=[{kind: package, name: chitchat, max_conversations: 100}]",
        "evaluation.prompt_sets=[]",
        "verify.gates.min_acceptance_length={heldout: 2.2}",
        *sets,
    ]
    words = [word for override in overrides for word in ("--set", override)]
    done = subprocess.run(
        [sys.executable, script, config, "--check", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **(environment or {})},
    )
    return done.returncode, done.stdout + done.stderr


def children_cpu_s() -> float:
    """Processor time of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize("script", ["04_train.py", "05_export.py", "06_verify.py"])
def test_whole_tensor_table_at_full_size(script, kimi_dir, tmp_path):
    environment = fake_driver(tmp_path / "bin", 8, 143_771)
    code, screen = run(script, kimi_dir, environment=environment)
    assert code == 0, screen
    for name, shape in {
        "layers.0.self_attn.q_proj.weight": "[8192, 14336]",
        "layers.0.self_attn.k_proj.weight": "[8192, 14336]",
        "layers.0.self_attn.o_proj.weight": "[7168, 8192]",
        "fc.weight": "[7168, 21504]",
        "lm_head.weight": "[32000, 7168]",
        "d2t": "[32000]",
    }.items():
        assert re.search(rf"{re.escape(name)} +shape='?{re.escape(shape)}'?", screen), name
    # fc + q, k, v + o + gate, up, down + four norms (two H each side) + the pruned head
    parameters = 7168 * 21504 + 3 * 8192 * 14336 + 7168 * 8192 + 3 * 18432 * 7168
    parameters += 4 * 7168 + 32000 * 7168
    assert f"{parameters:,}" in screen
    # speculators' own model is asked before it is trained; 05 and 06 load what 04 trained.
    assert ("rope_width=128" in screen) == (script == "04_train.py")
    if script == "06_verify.py":
        assert re.search(r"a GPU holds .*drafter='284\.\d MiB'", screen)
    assert not (kimi_dir.parent / "runs").exists()


@pytest.mark.parametrize(
    "script, library",
    [
        ("04_train.py", "from speculators.models.eagle3 import Eagle3DraftModel"),
        ("05_export.py", "from transformers import AutoTokenizer"),
    ],
)
def test_check_takes_little_more_than_importing_the_libraries(script, library, kimi_dir):
    """Processor time, which other work lengthens least; as a ratio, since a shared machine's own
    speed moves: 6 s and 12 s for the same check, an hour apart. With vLLM imported too 05's would
    be 1.6 times its libraries."""

    def import_s() -> float:
        before_s = children_cpu_s()
        subprocess.run([sys.executable, "-c", library], cwd=ROOT, check=True, capture_output=True)
        return children_cpu_s() - before_s

    earlier_s, begin_s = import_s(), children_cpu_s()
    code, screen = run(script, kimi_dir)
    took_s = children_cpu_s() - begin_s
    assert code in (0, 5), screen  # 5: the node has no such GPUs
    imports_s = max(earlier_s, import_s())
    print(f"{script} --check: {took_s:.1f} s of processor time, imports {imports_s:.1f}")
    assert took_s < 1.5 * imports_s


def test_second_preset(kimi_dir):
    """The whole vocabulary and YaRN; nothing else differs from the first, 01 and 02 are its own."""
    first, second = (
        yaml.safe_load((ROOT / "configs" / f"kimi_k25_{name}.yaml").read_text())
        for name in ("int4", "full_vocab")
    )
    for key in ("run.name", "vocab.draft_vocab_size", "drafter.intermediate_size"):
        section, name = key.split(".")
        assert first[section].pop(name) != second[section].pop(name)
    for name in ("rope_theta", "rope_scaling", "reference"):
        assert first["drafter"].pop(name) != second["drafter"].pop(name)
    assert first == second

    code, screen = run("04_train.py", kimi_dir, config="configs/kimi_k25_full_vocab.yaml")
    assert code == 0, screen
    assert "[163840, 7168]" in screen and "[12288, 7168]" in screen and "d2t" not in screen
    assert "rope_width=128" in screen


def test_departing_from_the_reference_is_refused(kimi_dir):
    for head_dim in (112, 64):
        code, screen = run("05_export.py", kimi_dir, f"drafter.head_dim={head_dim}")
        assert code == 2 and "head_dim 128" in screen and "drafter.reference" in screen
    on_purpose = ("drafter.head_dim=112", "drafter.reference=null")
    code, screen = run("03_build_vocab_map.py", kimi_dir, *on_purpose)
    assert code == 0, screen


def test_missing_gpus_are_named(kimi_dir, tmp_path):
    code, screen = run("02_gen_hidden_states.py", kimi_dir)
    assert code == 5 and "expected  8 GPUs" in screen and "found     none" in screen
    environment = fake_driver(tmp_path / "bin", 4, 143_771)
    code, screen = run("02_gen_hidden_states.py", kimi_dir, environment=environment)
    assert code == 5 and screen.count("H200") >= 4


def test_node_that_fits_and_one_that_does_not(kimi_dir, tmp_path):
    environment = fake_driver(tmp_path / "h200", 8, 143_771)
    code, screen = run("02_gen_hidden_states.py", kimi_dir, environment=environment)
    assert code == 0, screen
    assert "bytes_per_token=57353 plain=57344" in screen and "weights='69.3 GiB'" in screen
    assert re.search(r"time at_most_tokens=819200 assumed_tokens_per_s=20000 hours=0\.01", screen)
    environment = fake_driver(tmp_path / "a100", 8, 81_920)
    code, screen = run("02_gen_hidden_states.py", kimi_dir, environment=environment)
    assert code == 5 and "memory is too small" in screen


def test_disk_is_computed_before_anything(kimi_dir, tmp_path):
    environment = fake_driver(tmp_path / "bin", 8, 143_771)
    code, screen = run(
        "02_gen_hidden_states.py",
        kimi_dir,
        "capture.disk_budget_bytes=1000000000",
        environment=environment,
    )
    assert code == 5 and "budget" in screen and "43.8 GiB" in screen


def test_weights_are_not_downloaded_to_compare_inputs(kimi_dir):
    """They are part of what an artifact was made from; here only the metadata is."""
    data_dir = kimi_dir.parent / "runs" / "kimi_k25_int4" / "01_data"
    data_dir.mkdir(parents=True)
    (data_dir / "manifest.json").write_text("{}")
    code, screen = run("03_build_vocab_map.py", kimi_dir)
    assert code == 0 and "weights are not here" in screen, screen


def test_sources_and_template_are_tried_on_a_sample(kimi_dir, tmp_path):
    """Also in the other mode; a source that cannot be read is named before anything starts."""
    environment = fake_driver(tmp_path / "bin", 8, 143_771)
    code, screen = run("01_prepare_data.py", kimi_dir, environment=environment)
    assert code == 0, screen
    for mode in ("{'thinking': True}", "{'thinking': False}"):
        assert f"arguments=\"{mode}\" history='kept: turns share a row'" in screen
    assert re.search(r"source name=chitchat sample=32 usable=\d+", screen)
    missing = (
        "evaluation.prompt_sets=[{kind: local, name: a, path: no.jsonl, max_conversations: 1}]"
    )
    code, screen = run("01_prepare_data.py", kimi_dir, missing, environment=environment)
    assert code == 2 and "no.jsonl" in screen


def test_template_that_rewrites_history_is_named(tiny_kimi_dir):
    """Kimi's removes earlier thinking, and has none to remove in instant mode."""
    config = "configs/tiny_kimi_cpu.yaml"
    code, screen = run("03_build_vocab_map.py", tiny_kimi_dir, config=config)
    assert code == 0, screen
    for mode, history in (
        ("True", "rewritten: a row a turn"),
        ("False", "kept: turns share a row"),
    ):
        assert f"arguments=\"{{'thinking': {mode}}}\" history='{history}'" in screen


def test_key_that_vllm_reads_is_missing(kimi_dir):
    config = {**KIMI}
    config.pop("media_placeholder_token_id")
    (kimi_dir / "config.json").write_text(json.dumps(config))
    code, screen = run("01_prepare_data.py", kimi_dir)
    assert code == 2 and "media_placeholder_token_id" in screen
