"""The training step: EAGLE-3's training-time test on speculators' weights.

Equals speculators' ``Eagle3DraftModel.forward`` where both supervise the same positions (a test
holds loss and gradients together), at a fraction of its work: queries, MLP and logits only where
something is supervised, the target distribution once a batch instead of once a TTT step, no dense
attention across packed rows, and no ``[positions, vocabulary]`` tensor kept: neither the
verifier's distribution nor the drafter's.

EAGLE-3: Li et al., arXiv 2503.01840, section 3.

Shapes: M positions, S supervised ones, B rows, L keys and Q queries a row (padded), K TTT steps,
H hidden size, V draft vocabulary, N query heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.models.llama.modeling_llama import rotate_half

from .batches import Batch

# Logits formed at a time: they stay in the last-level cache of a CPU, and fill a GPU.
_CHUNK_LOGITS = {"cpu": 1 << 21, "cuda": 1 << 27}


@dataclass(frozen=True)
class StepResult:
    """What one forward pass yields; nothing in it waits for the device.

    Attributes:
        loss: scalar, the sum over TTT steps of ``decay^k`` times the mean over valid positions
            (their sum over ``Batch.divisors``).
        loss_per_ttt_step: ``[K]``, those means, detached.
        matches: bool ``[K, S]``, the drafted token is the row's token (False where not valid);
            None in training mode, where nobody asks.
    """

    loss: torch.Tensor
    loss_per_ttt_step: torch.Tensor
    matches: torch.Tensor | None


class TTTStep(nn.Module):
    """Forward of one batch through ``ttt_steps`` chained drafter steps.

    Args:
        drafter: speculators' ``Eagle3DraftModel``; its parameters are trained in place, its
            lm_head stays as it is (the verifier's rows, as speculators trains).
        ttt_step_loss_decay: weight of TTT step k is this to the power k.
    """

    def __init__(self, drafter: Any, *, ttt_step_loss_decay: float) -> None:
        super().__init__()
        self.drafter, self.decay = drafter, ttt_step_loss_decay
        drafter.lm_head.weight.requires_grad_(False)
        layer = drafter.config.transformer_layer_config
        self.num_heads, self.num_kv_heads = layer.num_attention_heads, layer.num_key_value_heads
        self.head_dim = layer.head_dim
        if drafter.use_draft_vocab:
            target_ids = drafter.d2t + torch.arange(len(drafter.d2t))
        else:
            target_ids = torch.arange(drafter.draft_vocab_size)
        self.register_buffer("target_ids", target_ids, persistent=False)

    def forward(self, batch: Batch) -> StepResult:
        model, layer = self.drafter, self.drafter.layers[0]
        expected, neg_entropy = self._targets(batch)
        hidden = self._combine(batch.aux_hidden_states)  # [M, H]
        head = self._head()
        chain_keys: list[torch.Tensor] = []
        chain_values: list[torch.Tensor] = []
        keys = values = None
        losses, matches = [], []
        for k in range(len(batch.input_ids)):
            # All positions give keys; only supervised ones are continued.
            ids = batch.input_ids[k] if k == 0 else batch.input_ids[k, batch.supervised]
            embeds = model.embed_tokens(ids)
            normed = layer.hidden_norm(hidden)
            inputs = torch.cat([layer.input_layernorm(embeds), normed], dim=-1)
            residual = normed if layer.norm_before_residual else hidden
            if k == 0:
                keys, values = self._keys_values(inputs, batch.position_ids)
                keys = self._pad(keys, batch.key_index)  # [B, N, L, D]
                values = self._pad(values, batch.key_index)
                inputs, residual = inputs[batch.supervised], residual[batch.supervised]
            position_ids = batch.position_ids[batch.supervised] + k
            if k > 0:
                key, value = self._keys_values(inputs, position_ids)
                chain_keys.append(self._pad(key, batch.query_index))  # [B, N, Q, D]
                chain_values.append(self._pad(value, batch.query_index))
            queries = self._heads(layer.self_attn.q_proj(inputs), self.num_heads)
            queries = self._pad(self._rotate(queries, position_ids), batch.query_index)
            attended = attend(
                queries, keys, values, batch.attention_mask, chain_keys, chain_values
            )  # [B, N, Q, D]
            attended = attended.transpose(1, 2).flatten(2).flatten(0, 1)[batch.query_slot]
            hidden = residual + layer.self_attn.o_proj(attended)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))  # [S, H]
            normed = model.norm(hidden)
            if model.config.norm_output:
                hidden = normed

            weights = batch.valid[k] / batch.divisors[k]
            losses.append(
                HeadKL.apply(
                    normed,
                    head,
                    expected[batch.target_index[k]],
                    neg_entropy[batch.target_index[k]],
                    weights,
                )
            )
            if not self.training:
                drafted_ids = self.target_ids[self._drafted(normed, head)]
                matches.append((drafted_ids == batch.next_token_ids[k]) & batch.valid[k])
        total = sum(self.decay**k * loss for k, loss in enumerate(losses))
        found = torch.stack(matches) if matches else None
        return StepResult(total, torch.stack(losses).detach(), found)

    @torch.no_grad()
    def _targets(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The verifier's distribution p over the draft vocabulary, once a batch, as the two things
        the loss needs of it: ``p W`` ``[S, H]`` and ``sum p log p`` ``[S]``, W the drafter's head.
        """
        model = self.drafter
        states = model.verifier_norm(batch.last_hidden_states.to(model.verifier_norm.weight.dtype))
        head = self._head()
        verifier_head = model.verifier_lm_head.weight.to(head.dtype)
        states = states.to(head.dtype)
        expected = torch.empty_like(states)
        neg_entropy = torch.empty(len(states), device=states.device)
        for part in _chunks(states, len(head)):
            log_p = (states[part] @ verifier_head.T).float().log_softmax(-1)
            p = log_p.exp()
            neg_entropy[part] = (p * log_p).sum(-1)
            expected[part] = p.to(head.dtype) @ head
        return expected, neg_entropy

    def _head(self) -> torch.Tensor:
        """lm_head's weight in the compute dtype (bfloat16 under autocast)."""
        weight = self.drafter.lm_head.weight.detach()
        device = weight.device.type
        if torch.is_autocast_enabled(device):
            return weight.to(torch.get_autocast_dtype(device))
        return weight

    def _drafted(self, normed: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """Draft ids, argmax over the draft vocabulary, ``[S]``."""
        states = normed.to(head.dtype)
        parts = [(states[part] @ head.T).argmax(-1) for part in _chunks(states, len(head))]
        return torch.cat(parts)

    def _combine(self, states: torch.Tensor) -> torch.Tensor:
        """``fc`` over the aux states, after whichever input norm the config has."""
        model = self.drafter
        states = states.to(model.fc.weight.dtype)
        if model.input_norm is not None:
            states = model.input_norm(states)
        if model.fc_norm is not None:
            chunks = states.chunk(len(model.fc_norm), dim=-1)
            normed = [norm(chunk) for norm, chunk in zip(model.fc_norm, chunks, strict=True)]
            states = torch.cat(normed, dim=-1)
        return model.fc(states).to(states.dtype)

    def _heads(self, projected: torch.Tensor, num_heads: int) -> torch.Tensor:
        return projected.unflatten(-1, (num_heads, self.head_dim))

    def _keys_values(
        self, inputs: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        attention = self.drafter.layers[0].self_attn
        keys = self._rotate(self._heads(attention.k_proj(inputs), self.num_kv_heads), position_ids)
        return keys, self._heads(attention.v_proj(inputs), self.num_kv_heads)

    def _rotate(self, heads: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """RoPE on ``[n, heads, D]``; the tables come from the drafter's own head_dim."""
        cos, sin = self.drafter.rotary_emb(heads, position_ids[None])
        cos, sin = cos[0, :, None], sin[0, :, None]
        return (heads * cos + rotate_half(heads) * sin).to(heads.dtype)

    def _pad(self, heads: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """``[n, heads, D]`` gathered to ``[B, N, length, D]``, grouped heads repeated."""
        padded = heads[index].transpose(1, 2)
        return padded.repeat_interleave(self.num_heads // heads.shape[1], dim=1)


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    chain_keys: list[torch.Tensor],
    chain_values: list[torch.Tensor],
) -> torch.Tensor:
    """Attention of TTT step k: the row's true positions up to t, then the chain's own steps.

    A chain continuing position t sees the keys of step 0 up to t, and of steps 1 to k only its
    own (``extend_dense_mask_for_draft_tokens`` in speculators; the drafter's KV cache in vLLM).

    Args:
        queries: ``[B, N, Q, D]``.
        keys, values: step 0's, ``[B, N, L, D]``; ``mask`` bool ``[B, 1, Q, L]``.
        chain_keys, chain_values: one ``[B, N, Q, D]`` a step from 1 to k.

    Returns:
        ``[B, N, Q, D]``.
    """
    scale = queries.shape[-1] ** -0.5
    scores = (queries @ keys.transpose(-1, -2)).float() * scale
    scores = scores.masked_fill(~mask, float("-inf"))
    own = [(queries * key).sum(-1, keepdim=True).float() * scale for key in chain_keys]
    shares = torch.cat([scores, *own], dim=-1).softmax(-1).to(values.dtype)
    num_keys = keys.shape[-2]
    attended = shares[..., :num_keys] @ values
    for j, value in enumerate(chain_values):
        attended = attended + shares[..., num_keys + j, None] * value
    return attended


class HeadKL(torch.autograd.Function):
    """lm_head and KL(verifier || drafter) in one pass, no ``[positions, V]`` tensor kept.

    With logits z = W h, q = softmax(z) and the verifier's distribution p over the same V tokens:
    KL = sum p log p - h . (p W) + logsumexp(z), and its gradient with respect to h is
    q W - p W. So p is only needed as ``p W``, the head's row the verifier expects, which like the
    entropy is computed once a batch; q is formed chunk by chunk and applied to the head at once.
    The backward pass scales what the forward pass found. The head is frozen: no gradient of W.
    """

    @staticmethod
    def forward(ctx, normed, weight, expected, neg_entropy, weights):
        """Args: normed ``[S, H]``, weight ``[V, H]``, expected = p W ``[S, H]``, neg_entropy =
        sum p log p ``[S]``, weights ``[S]``. Returns the weighted sum of the S divergences."""
        states = normed.to(weight.dtype)
        drafted = torch.empty_like(states)  # q W
        log_z = neg_entropy.new_empty(len(states))
        for part in _chunks(states, len(weight)):
            logits = states[part] @ weight.T
            log_z[part] = torch.logsumexp(logits.float(), dim=-1)
            drafted[part] = logits.softmax(-1) @ weight
        each = neg_entropy - (states.float() * expected.float()).sum(-1) + log_z
        gradient = (drafted.float() - expected.float()) * weights[:, None]
        ctx.save_for_backward(gradient.to(normed.dtype))
        return (each * weights).sum()

    @staticmethod
    def backward(ctx, grad_loss):
        (gradient,) = ctx.saved_tensors
        return gradient * grad_loss, None, None, None, None


def _chunks(states: torch.Tensor, vocab_size: int) -> list[slice]:
    """Slices of the positions whose logits are formed together."""
    size = max(_CHUNK_LOGITS[states.device.type] // vocab_size, 1)
    return [slice(begin, begin + size) for begin in range(0, len(states), size)]
