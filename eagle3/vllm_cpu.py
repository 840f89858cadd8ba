"""Two places where vLLM 0.32.0's CPU build stops a Kimi-like verifier without need.

Neither touches what is computed, and neither is done on a GPU.
"""

from __future__ import annotations


def prepare() -> None:
    """Before an engine starts in this process; calling it again changes nothing."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _let_kernels_be_looked_for()
        _declare_blocks_of_16()


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
