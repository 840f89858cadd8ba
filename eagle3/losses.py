"""The training losses, each one pass over lm_head: no ``[positions, V]`` tensor outlives a chunk.

With p the verifier's distribution over the draft vocabulary, z = W h the drafter's logits and
q = softmax(z), alpha = sum min(p, q) is the rate at which rejection sampling accepts (Leviathan et
al., arXiv 2211.17192). The losses, named as in speculators:

    kl_div      KL(p || q)                                     EAGLE-3, Li et al., arXiv 2503.01840
    lk_hybrid   l KL + (1 - l)(1 - alpha), l = exp(-3 alpha)   LK losses, Samarin et al.,
    nla         -log alpha                                     arXiv 2602.23881

The gradient of each with respect to z is ``q (a - b [q < p]) - c p`` with three numbers a
position, so one product with W gives the gradient with respect to h, ``p W`` being known:

    kl_div      a = 1                  b = 0           c = 1
    lk_hybrid   a = l + (1 - l) s      b = 1 - l       c = l
    nla         a = s / alpha          b = 1 / alpha   c = 0         s = sum q [q < p]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LOSSES = ("kl_div", "lk_hybrid", "nla")
# Logits formed at a time: they stay in the last-level cache of a CPU, and fill a GPU.
_CHUNK_LOGITS = {"cpu": 1 << 21, "cuda": 1 << 27}
_ETA = 3.0  # the paper's best setting, speculators' default
_LEAST_ALPHA = 1e-5  # as speculators clamps it


@dataclass(frozen=True)
class Targets:
    """The verifier's distribution p over the draft vocabulary at S positions, once a batch.

    Attributes:
        expected: ``[S, H]``, ``p W``: the head's row the verifier expects.
        neg_entropy: float32 ``[S]``, ``sum p log p``.
        p: ``[S, V]`` in the head's dtype where the loss asks for it, else None.
    """

    expected: torch.Tensor
    neg_entropy: torch.Tensor
    p: torch.Tensor | None

    @classmethod
    def of(
        cls, states: torch.Tensor, verifier_head: torch.Tensor, head: torch.Tensor, loss: str
    ) -> Targets:
        """From the verifier's normed last states ``[S, H]`` and both heads ``[V, H]``."""
        expected = torch.empty_like(states)
        neg_entropy = torch.empty(len(states), device=states.device)
        p = None if loss == "kl_div" else states.new_empty(len(states), len(head))
        for part in chunks(states, len(head)):
            logits = states[part] @ verifier_head.T
            chunk = logits.softmax(-1)
            of_logits = (chunk * logits).sum(-1, dtype=torch.float32)
            neg_entropy[part] = of_logits - log_sum(logits, chunk)
            expected[part] = chunk @ head
            if p is not None:
                p[part] = chunk
        return cls(expected, neg_entropy, p)


class HeadLoss(torch.autograd.Function):
    """lm_head and a loss over its logits, forward and backward in one pass over the vocabulary.

    The backward pass scales what the forward pass found. The head is frozen: no gradient of W.
    """

    @staticmethod
    def forward(ctx, normed, head, targets, index, weights, loss):
        """The weighted sum of the losses at S positions.

        Args:
            normed: ``[S, H]``; head: ``[V, H]``; targets: ``Targets``.
            index: int64 ``[S]``, the entry of ``targets`` each position is judged by.
            weights: float32 ``[S]``; loss: one of ``LOSSES``.
        """
        states = normed.to(head.dtype)
        expected, neg_entropy = targets.expected[index], targets.neg_entropy[index]
        gradient = torch.empty_like(states)
        each = neg_entropy - (states.float() * expected.float()).sum(-1)  # and log z: KL
        for part in chunks(states, len(head)):
            logits = states[part] @ head.T
            if loss == "kl_div":
                q = logits.softmax(-1)
                each[part] += log_sum(logits, q)
                gradient[part] = q @ head
                continue
            logits = logits.float()
            kl = each[part] + logits.logsumexp(-1)
            q, p = logits.softmax(-1), targets.p[index[part]]
            below = q < p
            s = (q * below).sum(-1)
            alpha = torch.minimum(q, p).sum(-1)
            if loss == "lk_hybrid":
                share = torch.exp(-_ETA * alpha)
                each[part] = share * kl + (1 - share) * (1 - alpha)
                a, b, c = share + (1 - share) * s, 1 - share, share
            else:
                alpha = alpha.clamp_min(_LEAST_ALPHA)
                each[part] = -alpha.log()
                a, b, c = s / alpha, 1 / alpha, torch.zeros_like(alpha)
            q *= torch.where(below, (a - b)[:, None], a[:, None])
            gradient[part] = q.to(head.dtype) @ head
            expected[part] *= c[:, None].to(expected.dtype)
        gradient = (gradient.float() - expected.float()) * weights[:, None]
        ctx.save_for_backward(gradient.to(normed.dtype))
        return (each * weights).sum()

    @staticmethod
    def backward(ctx, grad_loss):
        (gradient,) = ctx.saved_tensors
        return gradient * grad_loss, None, None, None, None, None


def log_sum(logits: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """``logsumexp`` of logits whose softmax is q, float32 ``[S]``.

    From the largest entries alone, one pass over each: far closer than the logits' own rounding.
    """
    return logits.amax(-1).float() - q.amax(-1).float().log()


def drafted(normed: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """Draft ids, argmax over the draft vocabulary, int64 ``[S]``."""
    states = normed.to(head.dtype)
    return torch.cat([(states[part] @ head.T).argmax(-1) for part in chunks(states, len(head))])


def chunks(states: torch.Tensor, vocab_size: int) -> list[slice]:
    """Slices of the positions whose logits are formed together."""
    size = max(_CHUNK_LOGITS[states.device.type] // vocab_size, 1)
    return [slice(begin, begin + size) for begin in range(0, len(states), size)]
