"""The rule by which vLLM accepts drafts of sampled answers, asked of vLLM's own sampler."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

TEMPERATURES = (1.0, 0.5)


@pytest.fixture(scope="module")
def sampler():
    """vLLM's module, with the kernels that a worker on this machine registers."""
    import vllm._C  # noqa: F401
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    from eagle3 import vllm_cpu

    if not current_platform.is_cpu():
        pytest.skip("on a GPU the kernels need their tensors there")
    current_platform.register_triton_kernel_overrides()
    vllm_cpu.prepare()
    return rejection_sampler


def emitted(sampler, drafts: torch.Tensor, logits: torch.Tensor, temperatures: list[float]):
    """vLLM's emitted tokens ``[num_requests, K + 1]`` for the same drafts of every request."""
    num_requests, num_drafted = len(temperatures), len(drafts)
    ends = torch.arange(1, num_requests + 1).int() * num_drafted
    metadata = SimpleNamespace(
        all_greedy=False,
        all_random=True,
        temperature=torch.tensor(temperatures),
        top_k=None,
        top_p=None,
        generators={},
    )
    scaled = sampler.apply_sampling_constraints(logits.repeat(num_requests, 1), ends, metadata)
    return sampler.rejection_sample(
        drafts.repeat(num_requests).int(),
        [num_drafted] * num_requests,
        num_drafted,
        ends,
        None,  # no draft probabilities: drafts are greedy
        scaled,
        torch.zeros(num_requests, 1).int(),
        metadata,
    )


def test_a_draft_is_accepted_with_the_verifiers_probability(sampler):
    torch.manual_seed(0)
    num_requests, vocab_size = 20000, 11
    logits = torch.randn(2, vocab_size, generator=torch.Generator().manual_seed(0))
    drafts = logits.argmax(-1)
    drafts[1] = (drafts[1] + 1) % vocab_size  # an unlikely one
    temperatures = [t for t in TEMPERATURES for _ in range(num_requests)]
    tokens = emitted(sampler, drafts, logits, temperatures).view(len(TEMPERATURES), num_requests, 3)
    for temperature, rows in zip(TEMPERATURES, tokens, strict=True):
        chances = (logits / temperature).softmax(-1)
        is_first = rows[:, 0] == drafts[0]
        assert is_first.float().mean() == pytest.approx(chances[0, drafts[0]].item(), abs=0.015)
        # Accepted exactly where the draft is what was emitted: only then does the step go on.
        assert torch.equal(rows[:, 1] >= 0, is_first)
        share = (rows[is_first, 1] == drafts[1]).float().mean()
        assert share == pytest.approx(chances[1, drafts[1]].item(), abs=0.025)
        # Drafting changes nothing in what is said.
        said = torch.bincount(rows[:, 0].long(), minlength=vocab_size) / num_requests
        assert torch.allclose(said, chances[0], atol=0.015)
