"""An exported directory round-trips, and every way it can be wrong is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from drafters import Drafter, open_verifier
from safetensors.torch import load_file, save_file

from eagle3.errors import GateError
from eagle3.export import CONFIG, WEIGHTS, publishing_directory, serving_tensors
from eagle3.exported import check_directory, check_head, check_loaders


@pytest.fixture(scope="module")
def drafter(tiny_verifier_dir) -> Drafter:
    return Drafter.random(open_verifier(tiny_verifier_dir))


@pytest.fixture(scope="module")
def exported(drafter, tmp_path_factory) -> Path:
    return drafter.export(tmp_path_factory.mktemp("export") / "drafter")


def check(drafter: Drafter, directory: Path) -> dict[str, torch.Tensor]:
    return check_directory(directory, drafter.form, drafter.table, drafter.wiring)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 4, "norm_before_fc": True, "norm_output": True},
        {"fc_norm": True, "norm_before_residual": True, "aux_layer_ids": (1, 3)},
        {"draft_vocab_size": 512},
        {
            "rope_theta": 5.0e4,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 256,
            },
        },
    ],
)
def test_round_trip_and_both_loaders(tiny_verifier_dir, tmp_path, changes):
    drafter = Drafter.random(open_verifier(tiny_verifier_dir), **changes)
    directory = drafter.export(tmp_path / "drafter")
    found = check(drafter, directory)
    assert set(found) == set(drafter.table)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(found[name], tensor.to(found[name].dtype)), name
    check_loaders(directory, drafter.section, drafter.wiring, found, drafter.verifier)


def test_every_served_key_stands_in_the_file(exported, drafter):
    """Also those equal to a library's default: a default may be another one elsewhere."""
    config = json.loads((exported / CONFIG).read_text())
    assert "model_type" not in config and "target_hidden_size" not in config
    for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        assert config[key] is False
    assert config["tie_word_embeddings"] is False
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    layer = config["transformer_layer_config"]
    assert layer["head_dim"] == 24 and layer["tie_word_embeddings"] is False
    assert layer["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert config["verifier_identity"] == drafter.verifier.identity
    assert config["wiring_contract"] == drafter.wiring.to_json()


def in_weights(change: Callable[[dict], None]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        tensors = load_file(directory / WEIGHTS)
        change(tensors)
        save_file(tensors, directory / WEIGHTS)

    return apply


def in_config(change: Callable[[dict], None]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        config = json.loads((directory / CONFIG).read_text())
        change(config)
        (directory / CONFIG).write_text(json.dumps(config))

    return apply


Q = "layers.0.self_attn.q_proj.weight"
CORRUPTIONS = {
    "missing tensor": (in_weights(lambda t: t.pop("fc.weight")), "fc.weight"),
    "missing map": (in_weights(lambda t: t.pop("d2t")), "d2t"),
    "extra tensor": (in_weights(lambda t: t.update({"fc.bias": torch.ones(64)})), "fc.bias"),
    "verifier_norm shipped": (
        in_weights(lambda t: t.update({"verifier_norm.weight": torch.ones(64).bfloat16()})),
        "verifier_norm.weight",
    ),
    "NaN": (in_weights(lambda t: t[Q][3].fill_(float("nan"))), Q),
    "wrong shape": (in_weights(lambda t: t.update({Q: t[Q][:64].clone()})), Q),
    "wrong dtype": (in_weights(lambda t: t.update({Q: t[Q].float()})), Q),
    "zero norm": (in_weights(lambda t: t["norm.weight"].zero_()), "norm.weight"),
    "rows nobody wrote": (in_weights(lambda t: t[Q][64:].zero_()), Q),
    "zero head": (in_weights(lambda t: t["lm_head.weight"].zero_()), "lm_head.weight"),
    "d2t absolute": (
        in_weights(lambda t: t.update({"d2t": t["d2t"] + torch.arange(128)})),
        "d2t",
    ),
    "truncated file": (
        lambda d: (d / WEIGHTS).write_bytes((d / WEIGHTS).read_bytes()[:5000]),
        WEIGHTS,
    ),
    "no file": (lambda d: (d / WEIGHTS).unlink(), WEIGHTS),
    "head_dim missing": (
        in_config(lambda c: c["transformer_layer_config"].pop("head_dim")),
        "transformer_layer_config.head_dim",
    ),
    "head_dim changed": (
        in_config(lambda c: c["transformer_layer_config"].update(head_dim=16)),
        "transformer_layer_config.head_dim",
    ),
    "rope missing": (
        in_config(lambda c: c["transformer_layer_config"].pop("rope_parameters")),
        "rope_parameters.rope_theta",
    ),
    "sliding window": (
        in_config(lambda c: c["transformer_layer_config"].update(sliding_window=2048)),
        "sliding_window",
    ),
    "norm_before_residual missing": (
        in_config(lambda c: c.pop("norm_before_residual")),
        "norm_before_residual",
    ),
    "layer ids with the last one": (
        in_config(lambda c: c["eagle_aux_hidden_state_layer_ids"].append(4)),
        "eagle_aux_hidden_state_layer_ids",
    ),
    "model_type at the top": (in_config(lambda c: c.update(model_type="llama")), "model_type"),
    "verifier's quantisation": (
        in_config(lambda c: c.update(quantization_config={"quant_method": "fp8"})),
        "quantization_config",
    ),
    "another map's digest": (
        in_config(lambda c: c["wiring_contract"].update(vocab_map="0" * 64)),
        "wiring_contract.vocab_map",
    ),
    "no contract": (in_config(lambda c: c.pop("wiring_contract")), "wiring_contract"),
    "config not JSON": (lambda d: (d / CONFIG).write_text("{"), CONFIG),
}


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_corrupted_export_is_refused_by_name(drafter, exported, tmp_path, kind):
    corrupt, name = CORRUPTIONS[kind]
    directory = tmp_path / "drafter"
    shutil.copytree(exported, directory)
    check(drafter, directory)  # intact before
    corrupt(directory)
    with pytest.raises(GateError) as refused:
        check(drafter, directory)
    assert name in refused.value.where


def test_another_map_than_the_trained_one_is_refused(tiny_verifier_dir, exported, drafter):
    """Same sizes, well formed, other tokens: only the digest can tell."""
    other = Drafter.random(open_verifier(tiny_verifier_dir), seed=1)
    assert other.sizes == drafter.sizes
    with pytest.raises(GateError, match="d2t|wiring_contract"):
        check_directory(exported, other.form, other.table, other.wiring)


def test_loaders_notice_another_value(drafter, exported, tmp_path):
    directory = tmp_path / "drafter"
    shutil.copytree(exported, directory)
    tensors = check(drafter, directory)
    in_weights(lambda t: t["fc.weight"][0].add_(1))(directory)
    with pytest.raises(GateError, match="fc.weight"):
        check_loaders(directory, drafter.section, drafter.wiring, tensors, drafter.verifier)
    shutil.copy(exported / WEIGHTS, directory / WEIGHTS)
    in_config(lambda c: c.pop("norm_before_residual"))(directory)  # vLLM then says True
    with pytest.raises(GateError, match="norm_before_residual"):
        check_loaders(directory, drafter.section, drafter.wiring, tensors, drafter.verifier)


def test_head_rows_belong_to_the_map(drafter, exported, tiny_verifier_dir):
    head = load_file(exported / WEIGHTS)["lm_head.weight"]
    lm_head = open_verifier(tiny_verifier_dir).lm_head()
    rows = lm_head[drafter.vocab_map.target_ids]
    check_head(exported, head, rows)
    offsets_as_ids = lm_head[drafter.vocab_map.d2t]
    for wrong in (offsets_as_ids, rows.roll(1, 0), rows * 1.01):
        with pytest.raises(GateError, match="lm_head.weight"):
            check_head(exported, head, wrong)


def test_value_that_overflows_is_refused(drafter, tmp_path):
    state = drafter.state_dict()
    state["fc.weight"] = state["fc.weight"].clone()
    state["fc.weight"][0, 0] = 3.4e38  # finite in float32, infinite in bfloat16
    save_file(state, tmp_path / "best.safetensors")
    with pytest.raises(GateError, match="cannot be served"):
        serving_tensors(tmp_path / "best.safetensors", drafter.table)


def test_directory_appears_whole_or_not_at_all(tmp_path):
    directory = tmp_path / "drafter"
    with pytest.raises(RuntimeError), publishing_directory(directory) as partial:
        (partial / "half").write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "drafter.partial").mkdir()  # left by a killed run
    (tmp_path / "drafter.partial" / "old").write_text("x")
    with publishing_directory(directory) as partial:
        (partial / "new").write_text("x")
        assert not directory.exists()
    assert [path.name for path in directory.iterdir()] == ["new"]
    assert not partial.exists()
