"""Verifiers and configs the tests run on.

``tiny_verifier_dir`` is a random-weight Llama that loads in milliseconds; ``smollm2_dir`` is the
demo's real one. ``write_config`` writes the shipped demo config, shrunk to the tiny verifier.
"""

from __future__ import annotations

import os

# Before any library reads them: no test talks to a hub.
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false")

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import settings

from tests.runs import Run

ROOT = Path(__file__).resolve().parent.parent
SMOLLM2 = ROOT / "models" / "smollm2-135m-instruct"
TINY_KIMI = ROOT / "models" / "tiny-kimi"
TINY_KIMI_INT4 = ROOT / "models" / "tiny-kimi-int4"
VOCAB_SIZE = 512

# A busy machine is slow, not wrong.
settings.register_profile("eagle3", deadline=None)
settings.load_profile("eagle3")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Enough different words for a vocabulary of 512.
TOKENIZER_TEXT = """
The harbour was quiet when the fishermen came back before dawn, and nobody counted their baskets.
She asked whether the library would open on Sunday, because her brother wanted to borrow a map.
Please write a short answer: what makes bread rise, and why does cold butter stay firm?
Seven children walked across the bridge, carrying lanterns, apples, and a very old umbrella.
If the train leaves at nine and travels sixty miles an hour, when does it reach the northern city?
I think you should ask your doctor; this assistant cannot examine a patient or promise a cure.
Computers store numbers as patterns of bits, and programs describe how those patterns change.
Yesterday the mayor announced another plan for cleaner streets, better schools and safer parks.
Music, painting, mathematics: every subject looks difficult until somebody explains it kindly.
Thank you for helping me understand the difference between weather, climate and a single season.
Give three reasons people keep gardens, then list the tools they need and what each tool is for.
The system checks every message from the user before it continues with the following question.
"""


@pytest.fixture(scope="session")
def tiny_verifier_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat-tuned verifier's files with random float32 weights: 4 layers, hidden 64, vocab 512.

    The norms' weights are random too: a test that forgets the final norm must fail.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("tiny_verifier")
    tokenizer = _tiny_tokenizer()
    assert len(tokenizer) == VOCAB_SIZE
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the least vLLM takes on CPU
        max_position_embeddings=1024,
        initializer_range=0.1,  # logits far enough apart for greedy answers to be stable
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def _tiny_tokenizer():
    """Byte-level BPE with ChatML's special tokens; the end of a turn ends generation."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TOKENIZER_TEXT.strip().splitlines(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
    )


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The demo's verifier, made on first use (about 30 s)."""
    subprocess.run([sys.executable, str(ROOT / "tools" / "make_demo_verifier.py")], check=True)
    return SMOLLM2


@pytest.fixture(scope="session")
def tiny_kimi_dir() -> Path:
    """A tiny random verifier of Kimi-K2.5's kind in bfloat16, made on first use (seconds)."""
    subprocess.run([sys.executable, str(ROOT / "tools" / "make_tiny_kimi.py")], check=True)
    return TINY_KIMI


@pytest.fixture(scope="session")
def tiny_kimi_int4_dir(tiny_kimi_dir: Path) -> Path:
    """The same model, its experts in INT4."""
    return TINY_KIMI_INT4


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, to fill up; needs the right to mount one."""
    directory = tmp_path / "small_disk"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(directory)],
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.strip()}")
    yield directory
    # Lazily: a log file in it may still be open.
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


@pytest.fixture
def write_config(tmp_path: Path, tiny_verifier_dir: Path) -> Callable[..., Path]:
    """``write_config({"train.seed": 1})`` -> path of a config for the tiny verifier.

    The demo's config with every size that costs time shrunk; its artifacts go to
    ``tmp_path/runs/tiny``. Overrides are dotted keys and come last.
    """
    return config_writer(tmp_path, tiny_verifier_dir)


@pytest.fixture
def run(write_config: Callable[..., Path]) -> Run:
    """A run whose stages are made in a moment."""
    return Run(write_config)


def config_writer(tmp_path: Path, tiny_verifier_dir: Path) -> Callable[..., Path]:
    """``write_config`` in a directory of the caller's, for fixtures that outlive one test."""
    shrunk = {
        "run.name": "tiny",
        "run.dir": str(tmp_path / "runs"),
        "verifier.path": str(tiny_verifier_dir),
        "verifier.dtype": "float32",
        "engine.max_num_seqs": 8,
        "engine.cpu_kv_cache_gib": 1,
        "data.sources": [
            {"kind": "package", "name": "chitchat", "max_conversations": 16},
            {"kind": "package", "name": "chatterbot", "max_conversations": 8},
        ],
        "data.regenerate.max_new_tokens": 16,
        "data.max_length_tokens": 128,
        "data.num_validation_prompts": 4,
        "evaluation.prompt_sets": [{"kind": "package", "name": "mt_bench", "max_conversations": 4}],
        "evaluation.max_new_tokens": 16,
        "capture.aux_layer_ids": [1, 2, 3],
        "capture.shard_bytes": 1 << 18,
        "vocab.draft_vocab_size": 128,
        "drafter.hidden_size": 64,
        "drafter.num_attention_heads": 4,
        "drafter.num_key_value_heads": 2,
        "drafter.head_dim": 32,  # attention width 128, twice the hidden size
        "drafter.intermediate_size": 96,
        "drafter.max_position_embeddings": 1024,
        "train.num_epochs": 1,
        "train.batch_tokens": 256,
        "train.optimizer": "adamw",  # muon rounds to bfloat16: a last bit elsewhere shows
        "train.learning_rate": 7e-4,
        "train.validations_per_epoch": 2,
    }

    def write(overrides: dict[str, Any] | None = None, name: str = "config.yaml") -> Path:
        tree = yaml.safe_load((ROOT / "configs" / "smollm2_cpu.yaml").read_text())
        for key, value in {**shrunk, **(overrides or {})}.items():
            *sections, leaf = key.split(".")
            node = tree
            for section in sections:
                node = node[section]
            node[leaf] = value
        path = tmp_path / name
        path.write_text(yaml.safe_dump(tree, sort_keys=False))
        return path

    return write
