"""States in 8 bits: int8 codes, one bfloat16 scale for every 32 values of a token's state.

A residual stream has a few channels far above the rest (a hundred times and more on the first
token of a row). A scale a token, as hs-connectors keeps with float8_e4m3 codes (``fp8_utils``),
leaves the others few of its bits; a scale a group keeps the damage inside the group. Measured on
the demo's states by ``python -m benchmarks.eight_bit``.

The worker imports this module inside vLLM's processes, and quantises where the states are computed.
"""

from __future__ import annotations

import torch

GROUP = 32
_MOST = 127
# Half a step is 1/254 of a group's largest value: sqrt(32)/254 of a state's norm at the very most.
MAX_RELATIVE_ERROR = 2**-5


def quantise(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[..., H]`` states -> int8 codes ``[..., H]``, bfloat16 scales ``[..., H / 32]``.

    A group with a value that is not finite gets a scale that is not finite.
    """
    groups = states.float().unflatten(-1, (-1, GROUP))
    scales = (groups.abs().amax(-1) / _MOST).bfloat16()
    steps = scales.float().clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    codes = (groups / steps).round().clamp(-_MOST, _MOST).to(torch.int8)
    return codes.flatten(-2), scales


def dequantise(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Codes times scales, ``[..., H]`` in ``dtype``: codes are exact in bfloat16 too."""
    groups = codes.to(dtype).unflatten(-1, (-1, GROUP))
    return (groups * scales.to(dtype)[..., None]).flatten(-2)


def bytes_per_state(hidden_size: int) -> int:
    """
    >>> bytes_per_state(7168)  # against 14,336 in bfloat16
    7616
    """
    return hidden_size + hidden_size // GROUP * 2
