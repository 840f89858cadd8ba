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


def is_multimodal(config: dict[str, Any]) -> bool:
    """Whether the decoder is one part of a larger model, whose text is all we use."""
    return "text_config" in config


def required_keys(config: dict[str, Any]) -> dict[str, str]:
    """Keys the config must have for vLLM to serve it with a drafter, and who reads them."""
    return REQUIRED_KEYS.get(config.get("model_type", ""), {})


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
