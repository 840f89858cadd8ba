"""The training step: EAGLE-3's training-time test on speculators' weights.

Equals speculators' ``Eagle3DraftModel.forward`` where both supervise the same positions (a test
holds loss and gradients together), at a fraction of its work:

- queries, MLP and logits only where something is supervised;
- the target distribution once a batch instead of once a TTT step;
- at TTT step k position t embeds token t+1+k, which step 0 embedded at position t+k: that half of
  q, k and v is computed once and looked up;
- attention row by row (``attention``), the loss chunk by chunk (``losses``): nothing of size
  positions x positions or positions x vocabulary is kept for the backward pass.

EAGLE-3: Li et al., arXiv 2503.01840, section 3.

Shapes: M positions, S supervised ones, K TTT steps, H hidden size, V draft vocabulary, N query
heads, G key heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, rms_norm

from .attention import attend
from .batches import Batch
from .losses import HeadLoss, Targets, drafted


@dataclass(frozen=True)
class StepResult:
    """What one forward pass yields; nothing in it waits for the device.

    Attributes:
        loss: scalar, the sum over TTT steps of ``decay^k`` times the mean over valid positions
            (their sum over ``Batch.divisors``).
        loss_per_ttt_step: ``[K]``, those means, detached.
        matches: bool ``[K, S]``, the drafted token is the row's token (False where not valid);
            None where nobody asked.
        drafts: int64 ``[K, S]``, the target ids drafted (anything where not valid); None likewise.
    """

    loss: torch.Tensor
    loss_per_ttt_step: torch.Tensor
    matches: torch.Tensor | None
    drafts: torch.Tensor | None


class TTTStep(nn.Module):
    """Forward of one batch through ``ttt_steps`` chained drafter steps.

    Args:
        drafter: speculators' ``Eagle3DraftModel``; its parameters are trained in place, its
            lm_head stays as it is (the verifier's rows, as speculators trains).
        loss: one of ``losses.LOSSES``.
        ttt_step_loss_decay: weight of TTT step k is this to the power k.
    """

    def __init__(self, drafter: Any, *, loss: str, ttt_step_loss_decay: float) -> None:
        super().__init__()
        self.drafter, self.loss, self.decay = drafter, loss, ttt_step_loss_decay
        drafter.lm_head.weight.requires_grad_(False)
        layer = drafter.config.transformer_layer_config
        self.num_heads, self.num_kv_heads = layer.num_attention_heads, layer.num_key_value_heads
        self.head_dim = layer.head_dim
        if drafter.use_draft_vocab:
            target_ids = drafter.d2t + torch.arange(len(drafter.d2t))
        else:
            target_ids = torch.arange(drafter.draft_vocab_size)
        self._heads: dict[Any, torch.Tensor] = {}
        self.register_buffer("target_ids", target_ids, persistent=False)

    def forward(self, batch: Batch, *, with_matches: bool = False) -> StepResult:
        model, layer = self.drafter, self.drafter.layers[0]
        head = self._frozen_head(model.lm_head.weight)
        targets = self._targets(batch, head)
        embed_weight, hidden_weight = self._qkv_weights()
        q_width = self.num_heads * self.head_dim
        supervised = batch.supervised
        embeds = normed_by(layer.input_layernorm, model.embed_tokens(batch.input_ids))  # [M, H]
        hidden = self._combine(batch.aux_hidden_states)  # [M, H]
        normed = normed_by(layer.hidden_norm, hidden)
        rotation = self._rotation(batch.position_ids)

        # Step 0: all positions give keys and values; from here on only supervised ones count.
        embeds_kv = linear(embeds, embed_weight[q_width:])  # [M, 2 G D]
        keys, values = self._keys_values(
            embeds_kv + linear(normed, hidden_weight[q_width:]), rotation
        )
        embeds_q = linear(embeds[supervised], embed_weight[:q_width])  # [S, N D]
        embeds_qkv = torch.cat([embeds_q, embeds_kv[supervised]], dim=-1)
        hidden, normed = hidden[supervised], normed[supervised]
        projected = embeds_q + linear(normed, hidden_weight[:q_width])
        chain_keys: list[torch.Tensor] = []
        chain_values: list[torch.Tensor] = []
        losses, drafts = [], []
        for k in range(len(batch.valid)):
            rotation = self._rotation(batch.position_ids[supervised] + k)
            if k > 0:
                # Where valid, position t+k is k entries after t; elsewhere nothing is asked.
                normed = normed_by(layer.hidden_norm, hidden)
                qkv = embeds_qkv.roll(-k, 0) + linear(normed, hidden_weight)
                projected, projected_kv = qkv.split([q_width, qkv.shape[1] - q_width], dim=1)
                key, value = self._keys_values(projected_kv, rotation)
                chain_keys.append(key)
                chain_values.append(value)
            queries = Rotate.apply(projected.unflatten(1, (-1, self.head_dim)), *rotation)
            attended = attend(queries, keys, values, chain_keys, chain_values, batch.rows)
            residual = normed if layer.norm_before_residual else hidden
            hidden = residual + layer.self_attn.o_proj(attended.flatten(1))
            hidden = hidden + layer.mlp(normed_by(layer.post_attention_layernorm, hidden))  # [S, H]
            normed = normed_by(model.norm, hidden)
            if model.config.norm_output:
                hidden = normed
            weights = batch.valid[k] / batch.divisors[k]
            index = batch.target_index[k]
            losses.append(HeadLoss.apply(normed, head, targets, index, weights, self.loss))
            if with_matches:
                drafts.append(self.target_ids[drafted(normed, head)])
        total = sum(self.decay**k * loss for k, loss in enumerate(losses))
        found = torch.stack(drafts) if drafts else None
        matches = None if found is None else (found == batch.next_token_ids) & batch.valid
        return StepResult(total, torch.stack(losses).detach(), matches, found)

    @torch.no_grad()
    def aims(self, batch: Batch) -> torch.Tensor:
        """Target ids the loss pulls towards, int64 ``[K, S]``: the likeliest of the targets."""
        head = self._frozen_head(self.drafter.verifier_lm_head.weight)
        return self.target_ids[drafted(self._target_states(batch), head)][batch.target_index]

    @torch.no_grad()
    def _targets(self, batch: Batch, head: torch.Tensor) -> Targets:
        verifier_head = self._frozen_head(self.drafter.verifier_lm_head.weight)
        return Targets.of(self._target_states(batch).to(head.dtype), verifier_head, head, self.loss)

    def _target_states(self, batch: Batch) -> torch.Tensor:
        """The verifier's last states, normed, ``[S, H]``."""
        norm = self.drafter.verifier_norm
        return norm(batch.last_hidden_states.to(norm.weight.dtype))

    def _frozen_head(self, weight: torch.Tensor) -> torch.Tensor:
        """A head in the compute dtype, cast once: no step changes it."""
        dtype = self._compute_dtype(weight)
        key = (weight.data_ptr(), dtype)
        if key not in self._heads:
            self._heads[key] = weight.detach().to(dtype)
        return self._heads[key]

    def _compute_dtype(self, weight: torch.Tensor) -> torch.dtype:
        """What products are computed in: bfloat16 under autocast."""
        device = weight.device.type
        autocast = torch.is_autocast_enabled(device)
        return torch.get_autocast_dtype(device) if autocast else weight.dtype

    def _qkv_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """q, k and v's weights on the embedding and on the hidden state, ``[(N + 2 G) D, H]``."""
        attention = self.drafter.layers[0].self_attn
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        weights = [p.weight for p in projections]
        return SplitWeights.apply(self._compute_dtype(weights[0]), *weights)

    def _combine(self, states: torch.Tensor) -> torch.Tensor:
        """``fc`` over the aux states, after whichever input norm the config has."""
        model = self.drafter
        states = states.to(model.fc.weight.dtype)
        if model.input_norm is not None:
            states = normed_by(model.input_norm, states)
        if model.fc_norm is not None:
            parts = states.chunk(len(model.fc_norm), dim=-1)
            normed = [
                normed_by(norm, part) for norm, part in zip(model.fc_norm, parts, strict=True)
            ]
            states = torch.cat(normed, dim=-1)
        return model.fc(states).to(states.dtype)

    def _keys_values(
        self, projected: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[n, 2 G D]`` to rotated keys and values, ``[n, N, D]``, grouped heads repeated."""
        keys, values = projected.unflatten(1, (2, -1, self.head_dim)).unbind(1)
        keys = Rotate.apply(keys, *rotation)
        repeats = self.num_heads // self.num_kv_heads
        if repeats > 1:
            keys, values = (x.repeat_interleave(repeats, dim=1) for x in (keys, values))
        return keys, values

    def _rotation(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines ``[n, 1, D / 2]``, from the drafter's own head_dim."""
        tables = self.drafter.rotary_emb(self.drafter.fc.weight, position_ids[None])
        return tuple(table[0, :, None, : self.head_dim // 2] for table in tables)


def normed_by(norm: Any, states: torch.Tensor) -> torch.Tensor:
    """A ``LlamaRMSNorm`` through torch's fused kernel."""
    return rms_norm(states, norm.weight.shape, norm.weight, norm.variance_epsilon)


class SplitWeights(torch.autograd.Function):
    """Weights ``[n_i, 2 H]`` stacked, cast and split in halves of columns, in one pass over them.

    Returns:
        Two ``[sum n_i, H]``.
    """

    @staticmethod
    def forward(ctx, dtype, *weights):
        ctx.sizes, ctx.dtype = [len(weight) for weight in weights], weights[0].dtype
        shape = (2, sum(ctx.sizes), weights[0].shape[1] // 2)
        halves = torch.empty(shape, dtype=dtype, device=weights[0].device)
        for part, weight in zip(halves.split(ctx.sizes, dim=1), weights, strict=True):
            part.copy_(weight.unflatten(1, (2, -1)).transpose(0, 1))
        return halves[0], halves[1]

    @staticmethod
    def backward(ctx, *grads):
        found = []
        for parts in zip(*(grad.split(ctx.sizes) for grad in grads), strict=True):
            grad = parts[0].new_empty((len(parts[0]), 2, parts[0].shape[1]), dtype=ctx.dtype)
            for half, part in enumerate(parts):
                grad[:, half] = part
            found.append(grad.flatten(1))
        return None, *found


class Rotate(torch.autograd.Function):
    """RoPE in the halves convention (``rotate_half`` in transformers), ``[n, heads, D]``.

    A rotation: its backward pass is the rotation by the opposite angle.
    """

    @staticmethod
    def forward(ctx, heads, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotated(heads, cos.to(heads.dtype), sin.to(heads.dtype))

    @staticmethod
    def backward(ctx, grad):
        cos, sin = (table.to(grad.dtype) for table in ctx.saved_tensors)
        return _rotated(grad, cos, -sin), None, None


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    output = torch.empty_like(heads)
    (left, right), (out_left, out_right) = heads.chunk(2, -1), output.chunk(2, -1)
    torch.mul(left, cos, out=out_left).addcmul_(right, sin, value=-1)
    torch.mul(right, cos, out=out_right).addcmul_(left, sin)
    return output
