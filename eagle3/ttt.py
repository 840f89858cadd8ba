"""The training step: EAGLE-3's training-time test on speculators' weights.

Equals speculators' ``Eagle3DraftModel.forward`` where both supervise the same positions (a test
holds loss and gradients together), at a fraction of its work: queries, MLP and logits only where
something is supervised, the target distribution once a batch instead of once a TTT step, no dense
attention across packed rows, and no ``[positions, vocabulary]`` tensor kept for the backward pass:
the head's gradient is formed in the forward pass, chunk by chunk.

EAGLE-3: Li et al., arXiv 2503.01840, section 3. Losses: KL, and the LK hybrid of Samarin et al.,
"LK Losses", arXiv 2602.23881.

Shapes: M positions, S supervised ones, B rows, L keys and Q queries a row (padded), K TTT steps,
H hidden size, V draft vocabulary, N query heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import rotate_half

from .batches import Batch

# Logits formed at a time: they stay in the last-level cache of a CPU, and fill a GPU.
_CHUNK_LOGITS = {"cpu": 1 << 21, "cuda": 1 << 27}
_LK_ETA = 3.0  # the paper's best hybrid setting, and speculators' default


@dataclass(frozen=True)
class StepResult:
    """What one forward pass yields; nothing in it waits for the device.

    Attributes:
        loss: scalar, the sum over TTT steps of ``decay^k`` times the mean over valid positions.
        loss_per_ttt_step: ``[K]``, those means, detached.
        matches: bool ``[K, S]``, the drafted token is the row's token (False where not valid).
    """

    loss: torch.Tensor
    loss_per_ttt_step: torch.Tensor
    matches: torch.Tensor


class TTTStep(nn.Module):
    """Forward of one batch through ``ttt_steps`` chained drafter steps.

    Args:
        drafter: speculators' ``Eagle3DraftModel``; its parameters are trained in place.
        loss: ``kl_div`` or ``lk_hybrid``.
        ttt_step_loss_decay: weight of TTT step k is this to the power k.
    """

    def __init__(self, drafter: Any, *, loss: str, ttt_step_loss_decay: float) -> None:
        super().__init__()
        self.drafter, self.loss, self.decay = drafter, loss, ttt_step_loss_decay
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
        targets = self._targets(batch)
        hidden = self._combine(batch.aux_hidden_states)  # [M, H]
        chain_keys: list[torch.Tensor] = []
        chain_values: list[torch.Tensor] = []
        keys = values = None
        losses, matches = [], []
        for k in range(len(batch.input_ids)):
            embeds = model.embed_tokens(batch.input_ids[k])  # [M, H]
            if k > 0:  # only supervised positions are continued
                embeds = embeds[batch.supervised]
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

            weights = batch.valid[k] / batch.valid[k].sum().clamp_min(1)
            loss, drafted = HeadLoss.apply(
                normed, model.lm_head.weight, targets, batch.target_index[k], weights, self.loss
            )
            losses.append(loss)
            drafted_ids = self.target_ids[drafted]
            matches.append((drafted_ids == batch.next_token_ids[k]) & batch.valid[k])
        total = sum(self.decay**k * loss for k, loss in enumerate(losses))
        return StepResult(total, torch.stack(losses).detach(), torch.stack(matches))

    @torch.no_grad()
    def _targets(self, batch: Batch) -> torch.Tensor:
        """The verifier's distribution over the draft vocabulary, ``[S, V]``, once a batch.

        Kept in the compute dtype: bfloat16 under autocast, like the logits it is compared with.
        """
        model = self.drafter
        states = model.verifier_norm(batch.last_hidden_states.to(model.verifier_norm.weight.dtype))
        weight = model.verifier_lm_head.weight
        probabilities = []
        for part in states.split(_chunk_rows(states, len(weight))):
            logits = F.linear(part, weight)
            probabilities.append(logits.float().softmax(-1).to(logits.dtype))
        return torch.cat(probabilities)

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


class HeadLoss(torch.autograd.Function):
    """lm_head and loss in one pass, ``[positions, V]`` never kept.

    The gradient with respect to the logits has a closed form, so it is applied to the head right
    away, chunk by chunk; the backward pass only scales what the forward pass found.

    KL(p || q) = sum p log p - sum p z + logsumexp(z), gradient q - p.
    LK hybrid: w KL + (1 - w) TV with w = exp(-eta alpha) held fixed, alpha = sum min(p, q),
    TV = 1 - alpha, gradient of TV with respect to z_j: q_j (s - [q_j <= p_j]), s = the mass of q
    where q <= p.
    """

    @staticmethod
    def forward(ctx, normed, weight, targets, target_index, weights, kind):
        """Args: normed ``[S, H]``, weight ``[V, H]``, targets ``[S, V]``, target_index and weights
        ``[S]``. Returns the weighted sum of the losses and the drafted ids (argmax) ``[S]``."""
        dtype = targets.dtype
        states, head = normed.to(dtype), weight.to(dtype)
        need_states, need_head = ctx.needs_input_grad[:2]
        grad_states = torch.empty_like(states) if need_states else None
        grad_head = torch.zeros_like(weight, dtype=torch.float32) if need_head else None
        loss = normed.new_zeros((), dtype=torch.float32)
        drafted = torch.empty(len(states), dtype=torch.int64, device=states.device)
        for rows in torch.arange(len(states), device="cpu").split(_chunk_rows(states, len(head))):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            logits = (states[part] @ head.T).float()
            p = targets[target_index[part]].float()
            drafted[part] = logits.argmax(-1)
            log_z = logits.logsumexp(-1, keepdim=True)
            cross_entropy = log_z[:, 0] - (p * logits).sum(-1)
            q = logits.sub_(log_z).exp_()
            kl = cross_entropy + torch.xlogy(p, p).sum(-1)
            if kind == "kl_div":
                each, gradient = kl, q - p
            else:
                alpha = torch.minimum(p, q).sum(-1)
                below = q <= p
                mass = (q * below).sum(-1, keepdim=True)
                share = torch.exp(-_LK_ETA * alpha)[:, None]
                each = share[:, 0] * kl + (1 - share[:, 0]) * (1 - alpha)
                gradient = share * (q - p) + (1 - share) * q * (mass - below.float())
            loss += (each * weights[part]).sum()
            if need_states or need_head:
                gradient = gradient.mul_(weights[part, None]).to(dtype)
                if need_states:
                    grad_states[part] = gradient @ head
                if need_head:
                    grad_head += (gradient.T @ states[part]).float()
        ctx.save_for_backward(grad_states, grad_head)
        ctx.normed_dtype = normed.dtype
        ctx.mark_non_differentiable(drafted)
        return loss, drafted

    @staticmethod
    def backward(ctx, grad_loss, _grad_drafted):
        grad_states, grad_head = ctx.saved_tensors
        if grad_states is not None:
            grad_states = grad_states.to(ctx.normed_dtype) * grad_loss
        if grad_head is not None:
            grad_head = grad_head * grad_loss
        return grad_states, grad_head, None, None, None, None


def _chunk_rows(states: torch.Tensor, vocab_size: int) -> int:
    return max(_CHUNK_LOGITS.get(states.device.type, 1 << 21) // vocab_size, 1)
