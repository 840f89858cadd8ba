"""What a training step costs at a config's full size, and the floor it has on one H200.

    python -m benchmarks.train_cost configs/kimi_k25_int4.yaml

No GPU is used, no verifier opened. FLOPs of the matrix products are a formula, which
``tests/test_train_cost.py`` holds to torch's own counter; bytes moved and peak memory are counted
on the step itself, run on tensors without storage (``full_size``). ``docs/training.md`` reads the
figures. Try ``--set train.ttt_steps=7`` and ``--set train.batch_tokens=2048``. The last line is
JSON.
"""

import json
from typing import NamedTuple

from benchmarks.full_size import H200_BYTES_PER_S, H200_FLOPS, count, empty_batch
from eagle3.batches import Batch
from eagle3.config import Config, DrafterSection
from eagle3.script import Invocation, log, run_script
from eagle3.shard_plan import plain_bytes

# AdamW reads p, g, m, v and writes p, m, v; clipping reads g, then scales it: all float32.
OPTIMIZER_BYTES = 4 * (7 + 3)


def main(invocation: Invocation) -> None:
    config = invocation.load_config()
    batch = empty_batch(config)
    parts = step_flops(config.drafter, config.vocab.draft_vocab_size, batch)
    for name, part in parts.items():
        log(
            f"{name}, MFLOP a position and TTT step",
            of="every position" if part.rows == len(batch.input_ids) else "supervised ones",
            ttt_steps=part.times,
            forward=f"{part.forward / part.rows / part.times / 1e6:.0f}",
            backward=f"{part.backward / part.rows / part.times / 1e6:.0f}",
        )
    counting, num_trained = count(config, batch)
    flops = sum(part.forward + part.backward for part in parts.values())
    optimizer_s = OPTIMIZER_BYTES * num_trained / H200_BYTES_PER_S
    most_s = flops / H200_FLOPS
    unfused_s = counting.h200_s + optimizer_s
    token_bytes = plain_bytes(config)
    figures = {
        "tokens": batch.num_tokens,
        "supervised": len(batch.supervised),
        "ttt_steps": len(batch.valid),
        "trained_weights": num_trained,
        "gflop_per_token": round(flops / batch.num_tokens / 1e9, 2),
        "moved_by_products_gb": round(counting.product_bytes / 1e9, 1),
        "moved_nothing_fused_gb": round(counting.moved_bytes / 1e9, 1),
        "optimizer_gb": round(OPTIMIZER_BYTES * num_trained / 1e9, 1),
        "muon_products_ms": round(1e3 * muon_flops(config) / H200_FLOPS, 1),
        "peak_gb": round(counting.peak_bytes / 1e9, 1),
    }
    for name, seconds in (("products_alone", most_s), ("nothing_fused", unfused_s)):
        rate = batch.num_tokens / seconds
        figures[name] = {
            "ms": round(1e3 * seconds, 1),
            "tokens_per_s": round(rate),
            "states_read_gb_per_s": round(rate * token_bytes / 1e9, 2),
        }
    print(json.dumps({"counted": "a training step at full size; no GPU ran it", **figures}))


class Part(NamedTuple):
    """FLOPs of a kind of product, over ``rows`` positions in ``times`` TTT steps, all together."""

    rows: int
    times: int
    forward: int
    backward: int


def step_flops(drafter: DrafterSection, draft_vocab_size: int, batch: Batch) -> dict[str, Part]:
    """FLOPs of a step's matrix products.

    A product of ``[n, a]`` and ``[a, b]`` is 2 n a b. Its backward pass is two of the same size,
    one where no gradient of the input is asked for, none where the head's is found in the forward
    pass. Attention is over whole rows, the masked half too: scores and values; then both again and
    the gradients of queries, keys and values. The chain's own keys are no matrix products.
    """
    every, supervised, steps = len(batch.input_ids), len(batch.supervised), len(batch.valid)
    hidden, aux_width = drafter.hidden_size, batch.aux_hidden_states.shape[1]
    q_width = drafter.num_attention_heads * drafter.head_dim
    kv_width = 2 * drafter.num_key_value_heads * drafter.head_dim
    num_pairs = sum(q * k for q, k in zip(batch.rows.num_queries, batch.rows.num_keys, strict=True))

    def products(rows: int, inner: int, columns: int, times: int, backward: int) -> Part:
        flops = 2 * rows * inner * columns * times
        return Part(rows, times, flops, backward * flops)

    has_norm = drafter.norm_before_fc or drafter.fc_norm  # its weight asks for a gradient
    scores = 2 * num_pairs * q_width * steps
    parts = {
        "fc": products(every, aux_width, hidden, 1, backward=2 if has_norm else 1),
        "k, v of step 0": products(every, 2 * hidden, kv_width, 1, backward=2),
        "q of step 0": products(supervised, 2 * hidden, q_width, 1, backward=2),
        "attention over the rows": Part(supervised, steps, 2 * scores, 5 * scores),
        "o_proj": products(supervised, q_width, hidden, steps, backward=2),
        "MLP": products(supervised, hidden, 3 * drafter.intermediate_size, steps, backward=2),
        "targets": products(supervised, hidden, 2 * draft_vocab_size, 1, backward=0),
        "head, gradient included": products(
            supervised, hidden, 2 * draft_vocab_size, steps, backward=0
        ),
    }
    if steps > 1:
        parts["q, k, v of later steps"] = products(
            supervised, hidden, q_width + kv_width, steps - 1, backward=2
        )
    return parts


def muon_flops(config: Config) -> int:
    """FLOPs of a step of Muon's, whatever the batch (``torch.optim.Muon``: five iterations).

    An iteration on ``[n, m]``, n the smaller, is X X^T, its square, and their sum times X.
    """
    drafter, num_aux = config.drafter, len(config.capture.aux_layer_ids)
    hidden, inner = drafter.hidden_size, drafter.intermediate_size
    q_width = drafter.num_attention_heads * drafter.head_dim
    kv_width = drafter.num_key_value_heads * drafter.head_dim
    matrices = [(q_width, 2 * hidden), *[(kv_width, 2 * hidden)] * 2, (hidden, q_width)]
    matrices += [(hidden, inner)] * 3 + [(hidden, num_aux * hidden)]
    return sum(5 * (4 * min(m) ** 2 * max(m) + 2 * min(m) ** 3) for m in matrices)


if __name__ == "__main__":
    run_script(main, __doc__)
