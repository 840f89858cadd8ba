"""Make a verifier of Kimi-K2.5's kind, tiny and with random weights, in bfloat16 and in INT4.

Writes models/tiny-kimi (bfloat16) and models/tiny-kimi-int4 (compressed-tensors pack-quantized,
routed experts only, as the public release). The bfloat16 experts are the INT4 ones decompressed,
so the two are the same model. MLA, a dense first layer, sigmoid-routed experts beside a shared
one, YaRN, names and shards are Kimi-K2.5's; sizes are the least vLLM runs on CPU.

    .venv/bin/python tools/make_tiny_kimi.py

Takes seconds and 8 MB; the same files every time. If it stops, run the same command again: each
directory is complete or absent.
"""

from __future__ import annotations

import base64
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

SOURCES = Path(__file__).resolve().parent / "tiny_kimi"
MODELS = Path(__file__).resolve().parent.parent / "models"
NAME, INT4_NAME = "tiny-kimi", "tiny-kimi-int4"
SEED = 0

# Kimi's special tokens in Kimi's order; theirs start at 163584.
SPECIAL_TOKENS = (
    *("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|start_header_id|>"),
    *("<|end_header_id|>", "[EOT]", "<|im_system|>", "<|tool_calls_section_begin|>"),
    *("<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
    *("<|tool_call_end|>", "<|im_middle|>", "<|media_begin|>", "<|media_content|>"),
    *("<|media_end|>", "<|media_pad|>", "<think>", "</think>", "[UNK]", "[PAD]"),
)
VOCAB_SIZE, NUM_ORDINARY = 416, 384
ID = {token: NUM_ORDINARY + i for i, token in enumerate(SPECIAL_TOKENS)}
# Ordinary tokens above the single bytes: every beginning of these words, shortest first.
WORDS = (
    "the and you that what how have this with for are not can about there from would is it a to "
    "in of do on me my we be if so at as he she they but or an like know good time think just "
    "want get going your been some more when who will one really all out up people work now"
)

CONFIG = json.loads((SOURCES / "config.json").read_text(encoding="utf-8"))
QUANTIZATION = json.loads((SOURCES / "quantization_config.json").read_text(encoding="utf-8"))
TEXT = CONFIG["text_config"]
assert CONFIG["media_placeholder_token_id"] == ID["<|media_pad|>"]
assert TEXT["eos_token_id"] == ID["<|im_end|>"] and TEXT["vocab_size"] == VOCAB_SIZE


def main() -> None:
    MODELS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=MODELS, prefix=".making-") as scratch:
        for name, is_int4 in ((NAME, False), (INT4_NAME, True)):
            destination = MODELS / name
            if destination.is_dir():
                print(f"already there: {destination}")
                continue
            write_directory(Path(scratch) / name, is_int4)
            (Path(scratch) / name).rename(destination)
            print(f"made: {destination}")


def write_directory(directory: Path, is_int4: bool) -> None:
    """One of the two forms."""
    directory.mkdir()
    text_config = {**TEXT}
    if is_int4:
        text_config["quantization_config"] = QUANTIZATION
    write_json(directory / "config.json", {**CONFIG, "text_config": text_config})
    write_json(
        directory / "generation_config.json",
        {"eos_token_id": ID["<|im_end|>"], "max_length": TEXT["max_position_embeddings"]},
    )
    write_weights(directory, is_int4)
    write_tokenizer(directory)


def write_weights(directory: Path, is_int4: bool) -> None:
    """Two shards and their index."""
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    shards: tuple[dict, dict] = ({}, {})
    scheme = QuantizationScheme(**QUANTIZATION["config_groups"]["group_0"])
    num_layers = TEXT["num_hidden_layers"]
    for name, tensor in random_weights().items():
        numbers = [int(part) for part in name.split(".") if part.isdigit()]
        first_half = "embed_tokens" in name or (numbers and numbers[0] < num_layers // 2)
        shard = shards[0 if first_half else 1]
        if ".mlp.experts." in name:
            packed = quantized(tensor, scheme)
            if not is_int4:
                packed = PackedQuantizationCompressor.decompress(packed, scheme)
                packed = {"weight": packed["weight"]}
            module = name.removesuffix("weight")
            shard.update({module + key: value.contiguous() for key, value in packed.items()})
        else:
            shard[name] = tensor
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, directory / name, metadata={"format": "pt"})
    num_bytes = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    weight_map = {
        key: name for name, shard in zip(names, shards, strict=True) for key in sorted(shard)
    }
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    write_json(directory / "model.safetensors.index.json", index)


def quantized(weight: torch.Tensor, scheme: QuantizationScheme) -> dict[str, torch.Tensor]:
    """``weight_packed``, ``weight_scale``, ``weight_shape`` of a bfloat16 ``[out, in]`` weight."""
    arguments: QuantizationArgs = scheme.weights
    groups = weight.unflatten(-1, (-1, arguments.group_size))
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments)
    state = {"weight": weight, "weight_scale": scale.to(weight.dtype)}
    return PackedQuantizationCompressor.compress(state, scheme)


def random_weights() -> dict[str, torch.Tensor]:
    """Every tensor of the language model, bfloat16 but for the routing bias.

    Projections keep the scale of what they read, except those that write to the residual stream:
    small enough there for the last token to say most about the next one (what a drafter can
    learn), large enough for the context to change it. The head is large, so that one token stands
    out and greedy answers are not decided by rounding. A routed expert adds little, as among
    Kimi's 384: which one is chosen may be decided by rounding. Norms are uneven: leaving one out
    shows.
    """
    random = torch.Generator().manual_seed(SEED)
    weights: dict[str, torch.Tensor] = {}
    hidden, heads = TEXT["hidden_size"], TEXT["num_attention_heads"]
    q_lora, kv_lora = TEXT["q_lora_rank"], TEXT["kv_lora_rank"]
    nope, rope, value = TEXT["qk_nope_head_dim"], TEXT["qk_rope_head_dim"], TEXT["v_head_dim"]
    inner = TEXT["moe_intermediate_size"]

    def linear(name: str, num_out: int, num_in: int, gain: float = 1.0) -> None:
        weight = torch.randn(num_out, num_in, generator=random) * gain / num_in**0.5
        weights[f"language_model.{name}.weight"] = weight.to(torch.bfloat16)

    def norm(name: str, size: int) -> None:
        weight = 0.5 + torch.rand(size, generator=random)
        weights[f"language_model.{name}.weight"] = weight.to(torch.bfloat16)

    def mlp(name: str, inner: int, gain: float) -> None:
        linear(f"{name}.gate_proj", inner, hidden)
        linear(f"{name}.up_proj", inner, hidden)
        linear(f"{name}.down_proj", hidden, inner, gain)

    linear("model.embed_tokens", VOCAB_SIZE, hidden, hidden**0.5)
    for number in range(TEXT["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        attention = f"{layer}.self_attn"
        norm(f"{layer}.input_layernorm", hidden)
        linear(f"{attention}.q_a_proj", q_lora, hidden)
        norm(f"{attention}.q_a_layernorm", q_lora)
        linear(f"{attention}.q_b_proj", heads * (nope + rope), q_lora)
        linear(f"{attention}.kv_a_proj_with_mqa", kv_lora + rope, hidden)
        norm(f"{attention}.kv_a_layernorm", kv_lora)
        linear(f"{attention}.kv_b_proj", heads * (nope + value), kv_lora)
        linear(f"{attention}.o_proj", hidden, heads * value, 0.5)
        norm(f"{layer}.post_attention_layernorm", hidden)
        if number < TEXT["first_k_dense_replace"]:
            mlp(f"{layer}.mlp", TEXT["intermediate_size"], 0.5)
            continue
        linear(f"{layer}.mlp.gate", TEXT["n_routed_experts"], hidden)
        bias = torch.randn(TEXT["n_routed_experts"], generator=random) * 0.1
        weights[f"language_model.{layer}.mlp.gate.e_score_correction_bias"] = bias
        mlp(f"{layer}.mlp.shared_experts", inner, 0.5)
        for expert in range(TEXT["n_routed_experts"]):
            mlp(f"{layer}.mlp.experts.{expert}", inner, 0.05)
    norm("model.norm", hidden)
    linear("lm_head", VOCAB_SIZE, hidden, 4.0)
    return weights


def write_tokenizer(directory: Path) -> None:
    """The code, the chat template, the ranks, and the config that names the code."""
    for path in (*SOURCES.glob("*.py"), SOURCES / "chat_template.jinja"):
        shutil.copy(path, directory)
    words = [f" {word}" for word in WORDS.split()]
    pieces = [word[:end] for word in words for end in range(2, len(word) + 1)]
    tokens = [bytes([i]) for i in range(256)] + [p.encode() for p in dict.fromkeys(pieces)]
    assert len(tokens) >= NUM_ORDINARY, len(tokens)
    lines = [f"{base64.b64encode(t).decode()} {i}\n" for i, t in enumerate(tokens[:NUM_ORDINARY])]
    (directory / "tiktoken.model").write_text("".join(lines), encoding="ascii")
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "TinyKimiTokenizer",
            "auto_map": {"AutoTokenizer": ["tokenization_tiny_kimi.TinyKimiTokenizer", None]},
            "added_tokens_decoder": {
                str(i): {"content": token, "special": True, **flags} for token, i in ID.items()
            },
            "bos_token": "[BOS]",
            "eos_token": "<|im_end|>",
            "unk_token": "[UNK]",
            "pad_token": "[PAD]",
            "clean_up_tokenization_spaces": False,
            "model_max_length": TEXT["max_position_embeddings"],
        },
    )


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
