"""The two forms of the tiny Kimi-like checkpoint: what needs no engine to be read from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle3.config import VerifierSection
from eagle3.verifier import Verifier
from tools.decompress_experts import decompress_directory
from tools.make_tiny_kimi import write_directory


def open_verifier(directory: Path) -> Verifier:
    return Verifier.open(
        VerifierSection(
            path=str(directory), revision=None, trust_remote_code=True, dtype="bfloat16"
        )
    )


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor, from the files the index names."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    tensors = {}
    for name in sorted(set(index["weight_map"].values())):
        found = load_file(directory / name)
        assert {key for key, file in index["weight_map"].items() if file == name} == set(found)
        tensors |= found
    return tensors


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]) and tensor.dtype == theirs[name].dtype, name


@pytest.mark.parametrize("is_int4", [False, True])
def test_it_is_made_the_same_every_time(tiny_kimi_dir, tiny_kimi_int4_dir, tmp_path, is_int4):
    write_directory(tmp_path / "again", is_int4)
    made = tiny_kimi_int4_dir if is_int4 else tiny_kimi_dir
    assert open_verifier(tmp_path / "again").identity == open_verifier(made).identity


def test_only_routed_experts_are_packed(tiny_kimi_dir, tiny_kimi_int4_dir):
    plain, packed = tensors_of(tiny_kimi_dir), tensors_of(tiny_kimi_int4_dir)
    same = {name: tensor for name, tensor in plain.items() if ".mlp.experts." not in name}
    assert_same(same, {name: packed[name] for name in same})
    rest = packed.keys() - same.keys()
    assert len(rest) == 3 * (len(plain) - len(same)) > 0
    for name in rest:
        assert ".mlp.experts." in name
        assert name.endswith(("weight_packed", "weight_scale", "weight_shape"))
        if name.endswith("weight_packed"):
            assert packed[name].dtype == torch.int32
            module = name.removesuffix("weight_packed")
            num_out, num_in = packed[f"{module}weight_shape"].tolist()
            assert plain[f"{module}weight"].shape == (num_out, num_in)
            assert packed[name].shape == (num_out, num_in // 8)
            assert packed[f"{module}weight_scale"].shape == (num_out, num_in // 32)


def test_decompressed_experts_are_the_bfloat16_forms(tiny_kimi_dir, tiny_kimi_int4_dir, tmp_path):
    decompress_directory(tiny_kimi_int4_dir, tmp_path / "plain")
    assert_same(tensors_of(tmp_path / "plain"), tensors_of(tiny_kimi_dir))
    assert open_verifier(tmp_path / "plain").identity == open_verifier(tiny_kimi_dir).identity


def test_a_checkpoint_without_packed_experts_is_not_decompressed(tiny_kimi_dir, tmp_path):
    with pytest.raises(ValueError, match="no quantization_config"):
        decompress_directory(tiny_kimi_dir, tmp_path / "plain")
    assert not (tmp_path / "plain").exists()


def test_what_a_drafter_borrows_is_the_same_in_both_forms(tiny_kimi_dir, tiny_kimi_int4_dir):
    """Read from two shards under the prefix, the decoder's sizes from ``text_config``."""
    plain, packed = open_verifier(tiny_kimi_dir), open_verifier(tiny_kimi_int4_dir)
    tensors = tensors_of(tiny_kimi_dir)
    for verifier in (plain, packed):
        assert (verifier.num_layers, verifier.hidden_size, verifier.vocab_size) == (5, 128, 416)
        for found, name in (
            (verifier.embed_tokens(), "language_model.model.embed_tokens.weight"),
            (verifier.lm_head(), "language_model.lm_head.weight"),
            (verifier.final_norm(), "language_model.model.norm.weight"),
        ):
            assert torch.equal(found, tensors[name])
    assert not torch.equal(plain.embed_tokens(), plain.lm_head())


def test_the_two_forms_are_two_verifiers(tiny_kimi_dir, tiny_kimi_int4_dir):
    plain, packed = (open_verifier(d).identity for d in (tiny_kimi_dir, tiny_kimi_int4_dir))
    assert {key for key in plain if plain[key] != packed[key]} == {"config", "weights"}


def test_the_tokenizers_code_is_part_of_the_identity(tiny_kimi_dir, tmp_path):
    for path in tiny_kimi_dir.iterdir():
        if path.suffix == ".py":
            text = path.read_text() + "\n# changed\n"
            (tmp_path / path.name).write_text(text)
        else:
            (tmp_path / path.name).symlink_to(path)
    ours, theirs = open_verifier(tmp_path).identity, open_verifier(tiny_kimi_dir).identity
    assert {key for key in ours if ours[key] != theirs[key]} == {"tokenizer"}
