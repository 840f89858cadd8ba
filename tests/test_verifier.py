"""The verifier's files: identity, and the three tensors a drafter borrows."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from eagle3.config import VerifierSection
from eagle3.errors import EXIT_CONFIG, ConfigError
from eagle3.verifier import Verifier

ROOT = Path(__file__).resolve().parent.parent


def open_at(path: Path) -> Verifier:
    section = VerifierSection(
        path=str(path), revision=None, trust_remote_code=False, dtype="float32"
    )
    return Verifier.open(section)


@pytest.fixture
def copied(tiny_verifier_dir, tmp_path) -> Path:
    """The tiny verifier, free to be changed."""
    return Path(shutil.copytree(tiny_verifier_dir, tmp_path / "copied"))


def _edit_json(path: Path, **values) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _edit_one_weight(directory: Path) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.2.mlp.up_proj.weight"][3, 5] += 1
    save_file(tensors, path, metadata={"format": "pt"})


def _swap_two_merges(directory: Path) -> None:
    path = directory / "tokenizer.json"
    tree = json.loads(path.read_text())
    first, second, *rest = tree["model"]["merges"]
    tree["model"]["merges"] = [second, first, *rest]
    path.write_text(json.dumps(tree))


CHANGES = {
    "weights": _edit_one_weight,
    "config": lambda d: _edit_json(d / "config.json", rms_norm_eps=1e-3),
    "chat_template": lambda d: (d / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    ),
    "tokenizer": _swap_two_merges,
    "end_of_turn": lambda d: _edit_json(d / "generation_config.json", eos_token_id=[1, 7]),
}


@pytest.mark.parametrize("part", CHANGES)
def test_identity_changes_with_each_part_alone(part, copied):
    before = open_at(copied).identity
    CHANGES[part](copied)
    after = open_at(copied).identity
    assert {name for name in before if before[name] != after[name]} == {part}


def test_identity_does_not_change_with_the_place(tiny_verifier_dir, copied):
    assert open_at(copied).identity == open_at(tiny_verifier_dir).identity


def _prefixed(directory: Path, prefix: str) -> None:
    """Make the checkpoint look like a multimodal one: prefixed tensors, nested config."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    if prefix == "language_model.":  # Kimi K2.5, LLaVA
        renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    else:  # as transformers saves its own multimodal classes
        renamed = {
            name.replace("model.", "model.language_model.", 1): tensor
            for name, tensor in tensors.items()
        }
    renamed["vision_tower.norm.weight"] = torch.zeros(64)
    save_file(renamed, path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(
        json.dumps({"architectures": ["Some"], "model_type": "some", "text_config": config})
    )


@pytest.mark.parametrize("layout", ["single", "sharded", "language_model.", "model.language_model"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_borrowed_tensors_are_transformers_own(layout, tied, tiny_verifier_dir, tmp_path):
    directory = Path(shutil.copytree(tiny_verifier_dir, tmp_path / "verifier"))
    config = LlamaConfig.from_pretrained(directory, tie_word_embeddings=tied)
    torch.manual_seed(1)
    model = LlamaForCausalLM(config)
    torch.nn.init.normal_(model.model.norm.weight)
    (directory / "model.safetensors").unlink()
    model.save_pretrained(directory, max_shard_size="100KB" if layout == "sharded" else "1GB")
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    num_files = len(list(directory.glob("*.safetensors")))
    assert num_files > 1 if layout == "sharded" else num_files == 1
    if "." in layout:
        _prefixed(directory, layout)

    verifier = open_at(directory)
    assert torch.equal(verifier.embed_tokens(), reference.get_input_embeddings().weight)
    assert torch.equal(verifier.lm_head(), reference.get_output_embeddings().weight)
    assert torch.equal(verifier.final_norm(), reference.model.norm.weight)
    assert torch.equal(verifier.lm_head(), verifier.embed_tokens()) is tied
    assert (verifier.num_layers, verifier.hidden_size, verifier.vocab_size) == (4, 64, 512)


@pytest.mark.parametrize("tied", [False, True])
def test_a_config_that_does_not_say_whether_the_head_is_tied(tied, copied):
    """Gemma's leaves it out, being its class's default."""
    config = json.loads((copied / "config.json").read_text())
    del config["tie_word_embeddings"]
    (copied / "config.json").write_text(json.dumps(config))
    tensors = load_file(copied / "model.safetensors")
    expected = tensors["lm_head.weight"]
    if tied:
        del tensors["lm_head.weight"]
        expected = tensors["model.embed_tokens.weight"]
        save_file(tensors, copied / "model.safetensors")
    assert torch.equal(open_at(copied).lm_head(), expected)


def test_a_tensor_that_is_missing_or_of_another_shape_is_named(copied):
    _edit_json(copied / "config.json", vocab_size=513)
    with pytest.raises(ConfigError) as caught:
        open_at(copied).embed_tokens()
    assert caught.value.expected == "(513, 64)" and caught.value.found == "(512, 64)"
    path = copied / "model.safetensors"
    tensors = load_file(path)
    del tensors["lm_head.weight"]
    save_file(tensors, path)
    with pytest.raises(ConfigError) as caught:
        open_at(copied).lm_head()
    assert "lm_head.weight" in caught.value.where


@pytest.mark.parametrize(
    ("generation_eos", "config_eos", "expected"),
    [([1, 7], 1, (1, 7)), (3, 1, (3,)), (None, 2, (2,)), (None, None, (1,))],
)
def test_end_of_turn_ids_come_from_generation_config_first(
    generation_eos, config_eos, expected, copied
):
    _edit_json(copied / "generation_config.json", eos_token_id=generation_eos)
    _edit_json(copied / "config.json", eos_token_id=config_eos)
    assert open_at(copied).end_of_turn_ids == expected


def test_a_missing_directory_is_refused(tmp_path):
    with pytest.raises(ConfigError) as caught:
        open_at(tmp_path / "nothing")
    assert caught.value.exit_code == EXIT_CONFIG and str(tmp_path) in caught.value.where


def test_a_hub_name_that_cannot_be_reached_is_refused():
    with pytest.raises(ConfigError) as caught:
        open_at(Path("nobody/no-such-model"))
    assert "nobody/no-such-model" in caught.value.where


def test_no_chat_template_is_refused(copied):
    (copied / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError) as caught:
        _ = open_at(copied).tokenizer
    assert "chat template" in caught.value.what


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_no_weights_or_no_config_is_refused(name, copied):
    (copied / name).unlink()
    with pytest.raises(ConfigError) as caught:
        open_at(copied)
    assert str(copied) in caught.value.where


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b'{"hidden_size": 64,', b"\xff\xfe"])
def test_a_damaged_config_is_named(name, content, copied):
    (copied / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        _ = open_at(copied).identity
    assert caught.value.exit_code == EXIT_CONFIG and caught.value.where == str(copied / name)


def test_identity_knows_what_the_tokenizer_would_load(copied):
    """The template's file wins over the tokenizer's config, and further named templates count."""
    from transformers import AutoTokenizer

    before = open_at(copied).identity
    (copied / "additional_chat_templates").mkdir()
    (copied / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    named = open_at(copied).identity
    assert {name for name in before if before[name] != named[name]} == {"chat_template"}
    assert set(AutoTokenizer.from_pretrained(copied).chat_template) == {"default", "tool_use"}

    shutil.rmtree(copied / "additional_chat_templates")
    template = (copied / "chat_template.jinja").read_text()
    (copied / "chat_template.jinja").unlink()
    _edit_json(copied / "tokenizer_config.json", chat_template=template)
    assert AutoTokenizer.from_pretrained(copied).chat_template == template
    assert open_at(copied).identity["chat_template"] == before["chat_template"]


def test_asking_for_the_identity_loads_no_heavy_library(copied):
    code = (
        "import sys; from pathlib import Path; from eagle3.config import VerifierSection\n"
        "from eagle3.verifier import Verifier\n"
        f"section = VerifierSection(path={str(copied)!r}, revision=None, "
        "trust_remote_code=False, dtype='float32')\n"
        "Verifier.open(section).identity\n"
        "print({'torch', 'transformers', 'numpy', 'safetensors'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "set()\n", done.stderr
