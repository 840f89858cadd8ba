"""What 8 bits cost: ours, hs-connectors' and a plain int8, on captured states, in one process.

    python -m benchmarks.eight_bit configs/smollm2_cpu.yaml

Reads the first shard of a finished 02 (validation rows, kept as they were computed). For each way:
bytes a state, the relative error of the aux states and of the last state (mean over tokens of the
norm of the difference over the norm), and what that does to the training target: the divergence of
the verifier's next-token distribution in nats, and how often its argmax changes. hs-connectors
keeps one scale for all states of a token. The last line is JSON.
"""

import json

import torch
from hs_connectors.fp8_utils import dequantize_fp8_tensor, quantize_tensor_to_fp8

from eagle3.artifact import open_artifact
from eagle3.capture import VerifierHead, relative_error
from eagle3.eight_bit import bytes_per_state, dequantise, quantise
from eagle3.fingerprint import open_verifier
from eagle3.rows import TokenRows
from eagle3.script import Invocation, log, run_script
from eagle3.shard_plan import open_shards, plan_shards

NUM_TOKENS = 1024  # a distribution over the whole vocabulary each


def main(invocation: Invocation) -> None:
    config = invocation.load_config()
    data, hidden = (open_artifact(config, name, invocation) for name in ("01_data", "02_hidden"))
    rows = TokenRows.load(data.path("rows.safetensors"))
    shard = open_shards(hidden, plan_shards(rows, config, hidden.wiring)[:1])[0]
    captured = [shard.row(index) for index in range(shard.num_rows)]
    states = torch.cat(
        [torch.cat([r.aux_hidden_states, r.last_hidden_states[:, None]], dim=1) for r in captured]
    )
    states = states[~states[:, -1].isnan().any(-1)][:NUM_TOKENS]
    head = VerifierHead(open_verifier(config.verifier), config.verifier.dtype)
    exact = head.logits(states[:, -1]).log_softmax(-1)
    hidden_size = states.shape[-1]
    ways = {
        "int8, a scale for 32 values": (ours, bytes_per_state(hidden_size)),
        "float8_e4m3, a scale a token (hs-connectors)": (theirs, hidden_size + 1),
        "int8, a scale a state": (plain, hidden_size + 4),
    }
    figures = {}
    for name, (way, num_bytes) in ways.items():
        coded = way(states)
        errors = relative_error(coded, states).mean(0)
        found = head.logits(coded[:, -1]).log_softmax(-1)
        figures[name] = {
            "bytes": num_bytes,
            "aux_error": round(float(errors[:-1].mean()), 4),
            "last_error": round(float(errors[-1]), 4),
            "target_kl": float(f"{(exact.exp() * (exact - found)).sum(-1).mean():.2g}"),
            "argmax_changes": round(
                float((exact.argmax(-1) != found.argmax(-1)).float().mean()), 4
            ),
        }
        log(name, **figures[name])
    print(json.dumps({"bytes_bfloat16": 2 * hidden_size, "tokens": len(states), **figures}))


def ours(states: torch.Tensor) -> torch.Tensor:
    return dequantise(*quantise(states), torch.bfloat16)


def theirs(states: torch.Tensor) -> torch.Tensor:
    return dequantize_fp8_tensor(*quantize_tensor_to_fp8(states), torch.bfloat16)


def plain(states: torch.Tensor) -> torch.Tensor:
    scales = states.float().abs().amax(-1, keepdim=True) / 127
    return ((states.float() / scales).round() * scales).bfloat16()


if __name__ == "__main__":
    run_script(main, __doc__)
