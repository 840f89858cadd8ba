"""Three places of vLLM 0.32.0's CPU build: two stop a Kimi-like verifier without need, one is
wrong. Nothing is done on a GPU.
"""

from __future__ import annotations

import torch


def prepare() -> None:
    """Before an engine starts in this process; calling it again changes nothing."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _let_kernels_be_looked_for()
        _declare_blocks_of_16()
        _expand_temperatures()


def _let_kernels_be_looked_for() -> None:
    """``triton_utils/dispatcher.py`` reads the ``__dict__`` of every object of every module.
    llvmlite's library answers any name, this one too, with a C function, and the search fails
    where llvmlite is imported before it: Kimi's model class imports it, Llama's does not.
    """
    from llvmlite.binding import ffi

    ffi.lib._fntab["__dict__"] = {}


def _declare_blocks_of_16() -> None:
    """Without AMX, MLA has KV blocks of 16 tokens and a drafter shares its block table.
    ``cpu_attn.py`` has a kernel for them (``vec16``, in ``_get_attn_isa``) and declares 32 only.
    """
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(
        lambda kv_cache_spec=None: [MultipleOf(16)]
    )


def _expand_temperatures() -> None:
    """``cpu_triton_utils.py`` expands a temperature a request into a copy of the output that it
    drops: drafts of sampled requests would be verified at whatever lay in memory.
    """
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """What vLLM's function of this name says of itself (``v1/sample/rejection_sampler.py``).

    >>> expand_batch_to_tokens(torch.tensor([0.5, 0.0]), torch.tensor([2, 3]), 3, 0, 1)
    tensor([0.5000, 0.5000, 1.0000])
    """
    num_tokens_each = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    values = x.where(x != replace_from, replace_to)
    return values.repeat_interleave(num_tokens_each, output_size=num_tokens)
