"""What differs between verifier families; everything else reads plain config keys.

Rows of a table, not branches elsewhere: a new family is a new entry here.
"""

from __future__ import annotations

from typing import Any

# Keys vLLM 0.32.0 reads from a family's top-level config without a default, and where.
REQUIRED_KEYS = {
    "kimi_k25": {
        "media_placeholder_token_id": "v1/worker/gpu_model_runner.py, when eagle3 is on",
        "text_config": "the decoder's own config",
    },
}

# Model types whose ``set_eagle3_layers_to_capture`` was read in SGLang 0.5.23, and whether it adds
# one to the layer ids of a drafter's ``eagle_config`` whatever they are, or only where the first
# is 1. After that SGLang counts as vLLM does: the state entering layer k.
_SGLANG_ADDS_ONE = {
    "llama": "always",
    "mistral": "always",
    "qwen2": "always",
    "qwen3": "always",
    "qwen3_moe": "always",
    "deepseek_v2": "where the first is 1",
    "deepseek_v3": "where the first is 1",
    "kimi_k2": "where the first is 1",
}


def is_multimodal(config: dict[str, Any]) -> bool:
    """Whether the decoder is one part of a larger model, whose text is all we use."""
    return "text_config" in config


def required_keys(config: dict[str, Any]) -> dict[str, str]:
    """Keys the config must have for vLLM to serve it with a drafter, and who reads them."""
    return REQUIRED_KEYS.get(config.get("model_type", ""), {})


def sglang_captures(written_ids: list[int], text_config: dict[str, Any]) -> list[int] | None:
    """The layers SGLang captures for a drafter whose ``eagle_config`` says ``written_ids``.

    None where this verifier family's rule was not read.

    >>> sglang_captures([1, 29, 57], {"model_type": "kimi_k2"})
    [2, 30, 58]
    """
    rule = _SGLANG_ADDS_ONE.get(text_config.get("model_type", ""))
    if rule is None:
        return None
    adds_one = rule == "always" or written_ids[0] == 1
    return [i + adds_one for i in written_ids]


def sglang_layer_ids(aux_layer_ids: list[int], text_config: dict[str, Any]) -> list[int] | None:
    """The ids to write for SGLang to capture these layers; None where there are none.

    As they are, where SGLang reads them so: vLLM then reads the same.

    >>> sglang_layer_ids([2, 30, 58], {"model_type": "kimi_k2"})
    [2, 30, 58]
    >>> sglang_layer_ids([2, 15, 27], {"model_type": "llama"})
    [1, 14, 26]
    >>> sglang_layer_ids([1, 2, 4], {"model_type": "kimi_k2"})  # SGLang adds one to [1, 2, 4]
    """
    for written_ids in (list(aux_layer_ids), [i - 1 for i in aux_layer_ids]):
        if sglang_captures(written_ids, text_config) == list(aux_layer_ids):
            return written_ids
    return None


def kv_bytes_per_token(text_config: dict[str, Any], tensor_parallel_size: int) -> int:
    """KV cache bytes of one token on one GPU, in bfloat16.

    Multi-head latent attention keeps one latent and one rope key a layer, on every GPU alike
    (vLLM does not split it); others keep their share of the KV heads, at least one.

    >>> kimi = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    >>> kv_bytes_per_token(kimi, 8)
    70272
    """
    layers = text_config["num_hidden_layers"]
    if "kv_lora_rank" in text_config:
        return 2 * layers * (text_config["kv_lora_rank"] + text_config["qk_rope_head_dim"])
    heads = text_config["num_attention_heads"]
    head_dim = text_config.get("head_dim") or text_config["hidden_size"] // heads
    kv_heads = text_config.get("num_key_value_heads", heads)
    return 2 * 2 * layers * max(kv_heads // tensor_parallel_size, 1) * head_dim
