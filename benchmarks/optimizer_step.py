"""An optimizer step of ``train.optimizer`` on CPU: each core whole matrices, or all cores each one.

    python -m benchmarks.optimizer_step configs/smollm2_cpu.yaml

By turns, on weights of the drafter's shapes and random gradients; needs no run. Prints the median
of each in milliseconds and the median of the ratios, turn by turn.
"""

import statistics
import time

import torch

from eagle3.drafter import tensor_table
from eagle3.optimizers import make_optimizers, step_all
from eagle3.script import Invocation, log, run_script

NUM_TURNS = 40


def main(invocation: Invocation) -> None:
    config = invocation.load_config()
    size = config.vocab.draft_vocab_size
    num_aux = len(config.capture.aux_layer_ids)
    table = tensor_table(config.drafter, num_aux=num_aux, draft_vocab_size=size, vocab_size=size)
    del table["lm_head.weight"]  # frozen
    weights = [torch.nn.Parameter(torch.randn(shape) * 0.02) for shape, _ in table.values()]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizers = make_optimizers(config.train, weights)
    shared_s, dealt_s = [], []
    for _ in range(NUM_TURNS):
        begin_s = time.perf_counter()
        for optimizer in optimizers:
            optimizer.step()
        middle_s = time.perf_counter()
        step_all(optimizers)
        dealt_s.append(time.perf_counter() - middle_s)
        shared_s.append(middle_s - begin_s)
    log(
        "optimizer step",
        cores=torch.get_num_threads(),
        all_cores_each_matrix_ms=round(1e3 * statistics.median(shared_s), 1),
        each_core_whole_matrices_ms=round(1e3 * statistics.median(dealt_s), 1),
        ratio=round(statistics.median(a / b for a, b in zip(shared_s, dealt_s, strict=True)), 2),
    )


if __name__ == "__main__":
    run_script(main, __doc__)
