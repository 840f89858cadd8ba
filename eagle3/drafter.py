"""The drafter's geometry: its config, its tensor table, and speculators' model built from both.

speculators' ``Eagle3DraftModel`` defines weights and format; its config is always built from the
run's ``drafter`` section. (Derived from a Kimi verifier it would take head_dim 64 from the
DeepSeek class, and a plain Llama config would answer hidden_size // heads.)
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .config import DrafterSection
from .contract import Wiring
from .verifier import Verifier
from .vocab import VocabMap

# Tensors of Eagle3DraftModel that belong to the verifier: never trained, never exported.
BORROWED = ("embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight")


def tensor_table(
    drafter: DrafterSection, *, num_aux: int, draft_vocab_size: int, vocab_size: int
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Every exported tensor's shape and dtype, from the config alone.

    Names and shapes are what vLLM's ``llama_eagle3.py`` loads. The first layer's q, k and v read
    cat(embedding, hidden), twice the hidden size; attention is heads x head_dim wide, which need
    not be the hidden size. The embedding is not exported: the engines share the verifier's.
    Without vocabulary pruning there is no d2t/t2d: vLLM refuses a map it does not need.
    """
    hidden, inner = drafter.hidden_size, drafter.intermediate_size
    q_width = drafter.num_attention_heads * drafter.head_dim
    kv_width = drafter.num_key_value_heads * drafter.head_dim
    shapes = {
        "fc.weight": (hidden, num_aux * hidden),
        "layers.0.input_layernorm.weight": (hidden,),
        "layers.0.hidden_norm.weight": (hidden,),
        "layers.0.self_attn.q_proj.weight": (q_width, 2 * hidden),
        "layers.0.self_attn.k_proj.weight": (kv_width, 2 * hidden),
        "layers.0.self_attn.v_proj.weight": (kv_width, 2 * hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, q_width),
        "layers.0.post_attention_layernorm.weight": (hidden,),
        "layers.0.mlp.gate_proj.weight": (inner, hidden),
        "layers.0.mlp.up_proj.weight": (inner, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "lm_head.weight": (draft_vocab_size, hidden),
    }
    if drafter.norm_before_fc:
        shapes["input_norm.weight"] = (num_aux * hidden,)
    if drafter.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (hidden,) for i in range(num_aux)}
    table = {name: (shape, torch.bfloat16) for name, shape in shapes.items()}
    if draft_vocab_size != vocab_size:
        table["d2t"] = ((draft_vocab_size,), torch.int64)
        table["t2d"] = ((vocab_size,), torch.bool)
    return table


def num_parameters(table: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> int:
    """Weights in a tensor table, the vocabulary map not counted."""
    return sum(math.prod(shape) for shape, dtype in table.values() if dtype.is_floating_point)


def rope_parameters(drafter: DrafterSection) -> dict[str, Any]:
    """RoPE as transformers 5 and vLLM read it: theta inside, whatever the scaling."""
    scaling = drafter.rope_scaling or {"rope_type": "default"}
    return {**scaling, "rope_theta": drafter.rope_theta}


def layer_config(drafter: DrafterSection, vocab_size: int) -> dict[str, Any]:
    """The Llama layer's config, every key that an engine reads written out."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": drafter.hidden_size,
        "intermediate_size": drafter.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": drafter.num_attention_heads,
        "num_key_value_heads": drafter.num_key_value_heads,
        "head_dim": drafter.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": drafter.rms_norm_eps,
        "rope_parameters": rope_parameters(drafter),
        "max_position_embeddings": drafter.max_position_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def speculators_config(
    wiring: Wiring,
    drafter: DrafterSection,
    *,
    draft_vocab_size: int,
    verifier: Verifier,
    num_speculative_tokens: int,
) -> Any:
    """speculators' ``Eagle3SpeculatorConfig`` for this run."""
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    layer = LlamaConfig(**layer_config(drafter, verifier.vocab_size))
    layer._attn_implementation = "eager"  # speculators' default needs a GPU
    return Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=draft_vocab_size,
        norm_before_residual=drafter.norm_before_residual,
        norm_before_fc=drafter.norm_before_fc,
        fc_norm=drafter.fc_norm,
        norm_output=drafter.norm_output,
        eagle_aux_hidden_state_layer_ids=list(wiring.aux_layer_ids),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=num_speculative_tokens)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(
                name_or_path=str(verifier.directory),
                architectures=verifier.config.get("architectures", []),
            ),
        ),
    )


def build(config: Any, verifier: Verifier, vocab: VocabMap) -> Any:
    """speculators' ``Eagle3DraftModel`` in float32, its head started from the verifier's.

    The embedding, the final norm and the pruned head are copied from the verifier's checkpoint by
    exact tensor name (speculators looks them up by suffix and falls back silently).

    Args:
        config: from ``speculators_config``.

    Returns:
        The model; embedding, verifier norm and verifier head frozen, everything else trainable.
    """
    from speculators.models.eagle3 import Eagle3DraftModel

    model = Eagle3DraftModel(config).float()
    head = verifier.lm_head()[vocab.target_ids].float()
    borrowed = {
        "embed_tokens.weight": verifier.embed_tokens().float(),
        "verifier_norm.weight": verifier.final_norm().float(),
        "verifier_lm_head.weight": head,
        "lm_head.weight": head.clone(),
    }
    if model.use_draft_vocab:
        borrowed |= {"d2t": vocab.d2t, "t2d": vocab.t2d}
    # The norm's epsilon is the verifier's own where the drafter's differs.
    model.verifier_norm.variance_epsilon = verifier.rms_norm_eps
    _, unexpected = model.load_state_dict(borrowed, strict=False)
    assert not unexpected, unexpected
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in BORROWED)
        assert torch.isfinite(parameter).all(), f"{name} was left uninitialised"
    return model


@torch.no_grad()
def start_at_last_aux_state(model: Any) -> None:
    """Let ``fc`` of a fresh drafter hand on the last aux state and nothing of the others.

    The drafter then begins in the coordinates of the verifier's residual stream, which the head
    reads, instead of learning them. A state that comes normed is handed on at twice its size: what
    the one layer adds is then the smaller part from the start. Reasons: docs/training.md.
    """
    width = model.fc.out_features
    is_normed = model.fc_norm is not None or model.input_norm is not None
    model.fc.weight.zero_()
    model.fc.weight[:, -width:].fill_diagonal_(2 if is_normed else 1)


@torch.no_grad()
def start_queries_as_keys(model: Any) -> None:
    """Give each query head of a fresh drafter the weights of the key head it reads.

    Query and key of one position are then the same vector before RoPE: attention begins at the
    position itself and at those alike, instead of anywhere. Reasons: docs/training.md.
    """
    attention = model.layers[0].self_attn
    heads = attention.k_proj.weight.unflatten(0, (-1, attention.head_dim))
    repeated = heads.repeat_interleave(attention.num_key_value_groups, dim=0)
    attention.q_proj.weight.copy_(repeated.flatten(0, 1))
