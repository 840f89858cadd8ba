"""The witness: a drafter's drafts, computed without an engine or a training library.

Reads a drafter directory, ours or anyone's, and the verifier's embedding. Shares no code with the
training step, speculators or vLLM, so what it predicts and what vLLM serves agree only if the
files say what was trained.

The engine's order of work, for a draft at position t (state of t, embedding of token t+1):
every position up to t is computed from the verifier's true states, and leaves its keys and
values; the output at t names token t+2. Then the chain: step k reads the drafter's own output of
step k-1 in place of a state and the embedding of the token it just drafted, at rope position
t+k, and attends to the true positions up to t and to the chain's own earlier steps. The next
draft starts from true states again, so chains never see each other.

Shapes: A drafts (asked positions) | n tokens | H hidden | N heads | G kv heads | D head_dim |
K drafted tokens
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch.nn.functional import linear, silu

from .config import DrafterSection
from .drafter import rope_parameters
from .published import Published

# Drafts computed together: bounds the attention scores (N x A x n) on long rows.
_DRAFTS_AT_ONCE = 256
_LAYER = "layers.0."


@dataclass(frozen=True)
class Replayed:
    """The drafts of one answer.

    Attributes:
        drafts: int64 ``[A, K]``, target token ids; row i was drafted once answer token i was known.
        truth: int64 ``[A, K]``, the token that is there: column k of row i is answer token i+1+k.
            -1 where the row ends before it.
    """

    drafts: torch.Tensor
    truth: torch.Tensor

    @property
    def matches(self) -> torch.Tensor:
        """bool ``[A, K]``, whether each draft is the token that is there
        (``acceptance.walk``'s input)."""
        return self.drafts == self.truth


class Replay:
    """A drafter in plain torch.

    Args:
        published: the drafter, in any form.
        embed_tokens: the verifier's, ``[vocab_size, H]``; used unless the drafter brings its own.
        dtype: the engine's, so that a draft two logits are nearly tied for is decided by similar
            rounding. float32 is for comparing with other implementations.
        device: where to compute.
    """

    def __init__(
        self,
        published: Published,
        embed_tokens: torch.Tensor,
        dtype: torch.dtype,
        device: str = "cpu",
    ) -> None:
        drafter = published.drafter
        self.num_heads, self.head_dim = drafter.num_attention_heads, drafter.head_dim
        self.num_kv_heads, self.eps = drafter.num_key_value_heads, drafter.rms_norm_eps
        self.norm_before_residual = drafter.norm_before_residual
        self.norm_before_fc, self.fc_norm = drafter.norm_before_fc, drafter.fc_norm
        self.norm_output = drafter.norm_output
        self.inv_freq, self.rope_scale = _rope(drafter)
        self.inv_freq = self.inv_freq.to(device)
        self.dtype, self.device = dtype, device
        self.weights = {}
        for name, tensor in published.load().items():
            self.weights[name] = tensor.to(device, dtype if tensor.is_floating_point() else None)
        self.embed_tokens = embed_tokens.to(device, dtype)
        if published.has_own_embedding:
            self.embed_tokens = self.weights["embed_tokens.weight"]
        self.target_ids = torch.arange(published.draft_vocab_size, device=device)
        if "d2t" in self.weights:
            self.target_ids = self.target_ids + self.weights["d2t"]

    def answer(
        self,
        input_ids: torch.Tensor,
        aux_hidden_states: torch.Tensor,
        *,
        answer_start: int,
        num_answer_tokens: int,
        num_draft_tokens: int,
    ) -> Replayed:
        """Draft at every position of one answer.

        Args:
            input_ids: int64 ``[n]``, prompt and answer. Tokens after the answer, if any, are what
                the verifier would go on with: an engine counts drafts that run past the end.
            aux_hidden_states: ``[n, num_aux, H]``.
            answer_start: index of the first answer token, at least 1.
        """
        first = answer_start - 1
        positions = torch.arange(first, first + num_answer_tokens, device=self.device)
        drafts = self.draft(input_ids, aux_hidden_states, positions, num_draft_tokens).cpu()
        named = positions.cpu()[:, None] + 2 + torch.arange(num_draft_tokens)  # token t+2+k
        known = named < len(input_ids)
        truth = input_ids[named.clamp_max(len(input_ids) - 1)].where(known, -1)
        return Replayed(drafts, truth)

    @torch.inference_mode()
    def draft(
        self,
        input_ids: torch.Tensor,
        aux_hidden_states: torch.Tensor,
        positions: torch.Tensor,
        num_draft_tokens: int,
    ) -> torch.Tensor:
        """Drafted target ids, int64 ``[A, K]``, at positions t (int64 ``[A]``, t + 1 < n)."""
        blocks = [
            torch.stack([self.target_ids[logits.argmax(-1)] for logits in chain], dim=1)
            for chain in self._chains(input_ids, aux_hidden_states, positions, num_draft_tokens)
        ]
        return torch.cat(blocks)

    @torch.inference_mode()
    def draft_along(
        self,
        input_ids: torch.Tensor,
        aux_hidden_states: torch.Tensor,
        positions: torch.Tensor,
        num_steps: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As training drafts: step k goes on with the row's own token t+1+k, whatever was drafted.

        Returns:
            Drafted target ids, int64 ``[A, K]``, and their margins, float32 ``[A, K]``.
        """
        own = positions[:, None] + 2 + torch.arange(num_steps)
        own = input_ids[own.clamp_max(len(input_ids) - 1)].to(self.device)
        ids, margins = [], []
        for chain in self._chains(input_ids, aux_hidden_states, positions, num_steps, own):
            best, apart = zip(*map(best_and_margin, chain), strict=True)
            ids.append(self.target_ids[torch.stack(best, dim=1)])
            margins.append(torch.stack(apart, dim=1))
        return torch.cat(ids).cpu(), torch.cat(margins).cpu()

    @torch.inference_mode()
    def top(
        self,
        input_ids: torch.Tensor,
        aux_hidden_states: torch.Tensor,
        position: int,
        num_draft_tokens: int,
        num_top: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The drafter's best tokens at each step of one chain, best first.

        Returns:
            Target ids, int64 ``[K, num_top]``, and their logits, float32.
        """
        asked = torch.tensor([position], device=self.device)
        (chain,) = self._chains(input_ids, aux_hidden_states, asked, num_draft_tokens)
        best = [logits[0].float().topk(num_top) for logits in chain]
        ids = torch.stack([self.target_ids[step.indices] for step in best])
        return ids.cpu(), torch.stack([step.values for step in best]).cpu()

    def _chains(
        self,
        input_ids: torch.Tensor,
        aux_hidden_states: torch.Tensor,
        positions: torch.Tensor,
        num_draft_tokens: int,
        tokens: torch.Tensor | None = None,
    ) -> Iterator[Iterator[torch.Tensor]]:
        """For each block of positions, the logits of its chains, step by step.

        Args:
            tokens: int64 ``[A, K]``, what the steps go on with instead of their own drafts.
        """
        states_nH = self._combine(aux_hidden_states[:-1].to(self.device, self.dtype).flatten(1))
        embeds_nH = self.embed_tokens[input_ids[1:].to(self.device)]  # token t+1 beside state t
        layer_input, residual_nH = self._layer_input(embeds_nH, states_nH)
        every = torch.arange(len(states_nH), device=self.device)
        prefix = self._keys_values(layer_input, every)
        blocks = positions.split(_DRAFTS_AT_ONCE)
        given = [None] * len(blocks) if tokens is None else tokens.split(_DRAFTS_AT_ONCE)
        for asked, ids in zip(blocks, given, strict=True):
            chain = self._chain(prefix, layer_input[asked], residual_nH[asked], asked, ids)
            yield islice(chain, num_draft_tokens)

    def _chain(
        self,
        prefix: tuple[torch.Tensor, torch.Tensor],
        layer_input: torch.Tensor,
        residual_AH: torch.Tensor,
        asked: torch.Tensor,
        tokens: torch.Tensor | None,
    ) -> Iterator[torch.Tensor]:
        """Yield the logits of step 0, 1, ..., each ``[A, draft_vocab_size]``, of a block."""
        chain_keys: list[torch.Tensor] = []
        chain_values: list[torch.Tensor] = []
        step = 0
        while True:
            query = self._heads("q", layer_input, self.num_heads)
            query = self._rotate(query, asked + step)
            attended = self._attend(query, prefix, chain_keys, chain_values, asked)
            state_AH = residual_AH + self._project("self_attn.o_proj", attended)
            inner = self._norm(_LAYER + "post_attention_layernorm", state_AH)
            gate = silu(self._project("mlp.gate_proj", inner))
            inner = gate * self._project("mlp.up_proj", inner)
            state_AH = state_AH + self._project("mlp.down_proj", inner)
            normed_AH = self._norm("norm", state_AH)
            logits = linear(normed_AH, self.weights["lm_head.weight"])
            yield logits

            step += 1
            own = self.target_ids[logits.argmax(-1)]
            drafted = own if tokens is None else tokens[:, step - 1]
            state_AH = normed_AH if self.norm_output else state_AH
            layer_input, residual_AH = self._layer_input(self.embed_tokens[drafted], state_AH)
            key, value = self._keys_values(layer_input, asked + step)
            chain_keys.append(key)
            chain_values.append(value)

    def _combine(self, aux: torch.Tensor) -> torch.Tensor:
        """Aux states side by side ``[n, num_aux * H]`` -> one state ``[n, H]``."""
        if self.norm_before_fc:
            aux = self._norm("input_norm", aux)
        if self.fc_norm:
            hidden = self.weights["norm.weight"].shape[0]
            chunks = aux.split(hidden, dim=-1)
            normed = [self._norm(f"fc_norm.{i}", chunk) for i, chunk in enumerate(chunks)]
            aux = torch.cat(normed, dim=-1)
        return linear(aux, self.weights["fc.weight"])

    def _layer_input(
        self, embeds: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``cat(norm(embedding), norm(state))`` ``[., 2H]``, and the residual ``[., H]``."""
        normed = self._norm(_LAYER + "hidden_norm", states)
        layer_input = torch.cat([self._norm(_LAYER + "input_layernorm", embeds), normed], dim=-1)
        return layer_input, normed if self.norm_before_residual else states

    def _keys_values(
        self, layer_input: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys and values, float32 ``[n, N, D]``, each kv head repeated for its group."""
        group = self.num_heads // self.num_kv_heads
        key = self._rotate(self._heads("k", layer_input, self.num_kv_heads), positions)
        value = self._heads("v", layer_input, self.num_kv_heads)
        return key.repeat_interleave(group, 1).float(), value.repeat_interleave(group, 1).float()

    def _attend(
        self,
        query: torch.Tensor,
        prefix: tuple[torch.Tensor, torch.Tensor],
        chain_keys: list[torch.Tensor],
        chain_values: list[torch.Tensor],
        asked: torch.Tensor,
    ) -> torch.Tensor:
        """Softmax attention in float32 over true positions <= t and t's own chain, ``[A, N*D]``."""
        query = query.float() * self.head_dim**-0.5
        keys, values = prefix
        num_true = len(keys)
        scores = torch.einsum("and,jnd->anj", query, keys)
        later = torch.arange(num_true, device=self.device) > asked[:, None]
        scores = scores.masked_fill(later[:, None], float("-inf"))
        own = [torch.einsum("and,and->an", query, key) for key in chain_keys]
        shares = torch.cat([scores, *(score[..., None] for score in own)], dim=-1).softmax(-1)
        attended = torch.einsum("anj,jnd->and", shares[..., :num_true], values)
        for step, value in enumerate(chain_values):
            attended = attended + shares[..., num_true + step, None] * value
        return attended.flatten(1).to(self.dtype)

    def _heads(self, which: str, layer_input: torch.Tensor, num_heads: int) -> torch.Tensor:
        projected = self._project(f"self_attn.{which}_proj", layer_input)
        return projected.unflatten(-1, (num_heads, self.head_dim))

    def _project(self, name: str, inputs: torch.Tensor) -> torch.Tensor:
        return linear(inputs, self.weights[f"{_LAYER}{name}.weight"])

    def _norm(self, name: str, inputs: torch.Tensor) -> torch.Tensor:
        """RMSNorm, computed in float32 and rounded once."""
        wide = inputs.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weights[f"{name}.weight"].float()).to(self.dtype)

    def _rotate(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """RoPE in the half-split layout: dimension i turns with dimension i + D/2."""
        angles = positions[:, None, None] * self.inv_freq  # [., 1, D/2]
        cos, sin = angles.cos() * self.rope_scale, angles.sin() * self.rope_scale
        cos, sin = cos.to(self.dtype), sin.to(self.dtype)
        low, high = heads.chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def _rope(drafter: DrafterSection) -> tuple[torch.Tensor, float]:
    """Inverse frequencies ``[D/2]`` and the factor on cos and sin, from head_dim alone.

    The scaled kinds (yarn, llama3, ...) are transformers' formulas.
    """
    if drafter.rope_scaling is None:
        exponents = torch.arange(0, drafter.head_dim, 2).float() / drafter.head_dim
        return drafter.rope_theta**-exponents, 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=drafter.hidden_size,
        num_attention_heads=drafter.num_attention_heads,
        head_dim=drafter.head_dim,
        max_position_embeddings=drafter.max_position_embeddings,
        rope_parameters=rope_parameters(drafter),
    )
    return ROPE_INIT_FUNCTIONS[drafter.rope_scaling["rope_type"]](config, "cpu")


def best_and_margin(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of logits ``[n, V]`` the index of the best, int64 ``[n]``, and how far the second is below it
    in units of the best (at least 1), float32 ``[n]``."""
    values, indices = logits.float().topk(2)
    best, second = values.unbind(1)
    return indices[:, 0], (best - second) / best.abs().clamp_min(1)
