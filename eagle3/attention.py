"""Attention of one TTT step: a row's true positions, then the chain's own earlier steps.

A chain continuing position t sees the keys of step 0 up to t, and of steps 1 to k only its own
(``extend_dense_mask_for_draft_tokens`` in speculators; the drafter's KV cache in vLLM). So there
are no dense scores across packed rows, and the chain's part is one product a key.

Rows are computed one by one, long ones in blocks of queries, and nothing of size queries x keys is
kept for the backward pass: it is formed again from the logsumexp (Dao et al., FlashAttention,
arXiv 2205.14135). The row's part and the chain's are joined by their logsumexps, as blocks are in
ring attention (Liu et al., arXiv 2310.01889): given the joint output and the joint logsumexp, a
block's backward pass gives exactly its share of the gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

# Scores formed at a time: they stay in the last-level cache of a CPU; 1 GiB of float32 on a GPU.
_BLOCK_SCORES = {"cpu": 1 << 20, "cuda": 1 << 28}


@dataclass(frozen=True)
class RowSpans:
    """Where each row's queries and keys lie among those of the batch.

    Attributes:
        num_queries, num_keys: one a row, in order.
        last_key: int64 ``[S]``, the last key of its row that each query may see, from 0 within
            the row; ascending within a row.
    """

    num_queries: tuple[int, ...]
    num_keys: tuple[int, ...]
    last_key: torch.Tensor


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    chain_keys: list[torch.Tensor],
    chain_values: list[torch.Tensor],
    rows: RowSpans,
) -> torch.Tensor:
    """Attention of TTT step k.

    Args:
        queries: ``[S, N, D]``, of every row's supervised positions, rows end to end.
        keys, values: step 0's, ``[M, N, D]``, of every row's positions.
        chain_keys, chain_values: one ``[S, N, D]`` a step from 1 to k.
        rows: where the rows lie.

    Returns:
        ``[S, N, D]``.
    """
    return _Attend.apply(queries, keys, values, rows, *chain_keys, *chain_values)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, queries, keys, values, rows, *chain):
        scale = queries.shape[-1] ** -0.5
        output = torch.empty_like(queries)
        log_sums = queries.new_empty(queries.shape[:2], dtype=torch.float32)  # [S, N]
        for q, k, bias in _blocks(rows, queries):
            output[q], log_sums[q] = _forward(queries[q], keys[k], values[k], bias, scale)
        num_steps = len(chain) // 2
        if num_steps:
            own = _own_scores(queries, chain[:num_steps], scale)
            joint = torch.logsumexp(torch.stack([log_sums, *own]), dim=0)
            output *= (log_sums - joint).exp_()[..., None].to(output.dtype)
            for score, value in zip(own, chain[num_steps:], strict=True):
                output.addcmul_(value, (score - joint).exp_()[..., None].to(output.dtype))
            log_sums = joint
        ctx.save_for_backward(queries, keys, values, output, log_sums, *chain)
        ctx.rows, ctx.scale = rows, scale
        return output

    @staticmethod
    def backward(ctx, grad):
        queries, keys, values, output, log_sums, *chain = ctx.saved_tensors
        scale, num_steps = ctx.scale, len(chain) // 2
        grad = grad.contiguous()
        grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in (queries, keys, values))
        for q, k, bias in _blocks(ctx.rows, queries):
            found = _backward(
                grad[q], queries[q], keys[k], values[k], output[q], log_sums[q], bias, scale
            )
            grad_q[q] = found[0]
            grad_k[k] += found[1]
            grad_v[k] += found[2]
        grad_chain = [None] * len(chain)
        if num_steps:
            delta = (grad * output).sum(-1).float()
            own = _own_scores(queries, chain[:num_steps], scale)
            for j, score in enumerate(own):
                key, value = chain[j], chain[num_steps + j]
                share = (score - log_sums).exp_()
                grad_score = share * ((grad * value).sum(-1).float() - delta) * scale
                grad_score = grad_score[..., None].to(queries.dtype)
                grad_q.addcmul_(grad_score, key)
                grad_chain[j] = grad_score * queries
                grad_chain[num_steps + j] = share[..., None].to(queries.dtype) * grad
        return grad_q, grad_k, grad_v, None, *grad_chain


def _own_scores(
    queries: torch.Tensor, chain_keys: tuple[torch.Tensor, ...], scale: float
) -> list[torch.Tensor]:
    """Each chain step's score, float32 ``[S, N]``."""
    return [(queries * key).sum(-1).float() * scale for key in chain_keys]


def _blocks(rows: RowSpans, queries: torch.Tensor) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Queries, the keys they may see, and 0 or -inf ``[q, k]`` for each pair, block by block."""
    query_begin = key_begin = 0
    for num_queries, num_keys in zip(rows.num_queries, rows.num_keys, strict=True):
        size = max(_BLOCK_SCORES[queries.device.type] // (num_keys * queries.shape[1]), 1)
        for begin in range(query_begin, query_begin + num_queries, size):
            q = slice(begin, min(begin + size, query_begin + num_queries))
            seen = torch.arange(num_keys, device=queries.device) <= rows.last_key[q, None]
            bias = queries.new_zeros(seen.shape).masked_fill_(~seen, float("-inf"))
            yield q, slice(key_begin, key_begin + num_keys), bias
        query_begin += num_queries
        key_begin += num_keys


def _forward(queries, keys, values, bias, scale):
    """One block: ``[q, N, D]`` and the logsumexp ``[q, N]``, from products per head."""
    q, k, v = (x.transpose(0, 1) for x in (queries, keys, values))
    scores = torch.baddbmm(bias[None], q, k.transpose(1, 2), alpha=scale)
    largest = scores.amax(-1, keepdim=True)
    shares = (scores - largest).exp_()
    total = shares.sum(-1, dtype=torch.float32)
    log_sums = largest[..., 0].float() + total.log()
    return torch.bmm(shares, v).div(total[..., None]).transpose(0, 1), log_sums.T


def _backward(grad, queries, keys, values, output, log_sums, bias, scale):
    """The block's share of the gradients, each ``[n, N, D]``; between products all is float32."""
    g, q, k, v = (x.transpose(0, 1) for x in (grad, queries, keys, values))
    scores = torch.baddbmm(bias[None], q, k.transpose(1, 2), alpha=scale)
    shares = (scores.float() - log_sums.T[..., None]).exp_()
    delta = (grad * output).sum(-1, dtype=torch.float32).T
    grad_shares = torch.bmm(g, v.transpose(1, 2)).float()
    grad_scores = ((grad_shares - delta[..., None]) * shares).mul_(scale).to(grad.dtype)
    shares = shares.to(grad.dtype)
    found = (
        torch.bmm(grad_scores, k),
        torch.bmm(grad_scores.transpose(1, 2), q),
        torch.bmm(shares.transpose(1, 2), g),
    )
    return [x.transpose(0, 1) for x in found]


if torch.cuda.is_available():
    _forward = torch.compile(_forward, dynamic=True)
    _backward = torch.compile(_backward, dynamic=True)
