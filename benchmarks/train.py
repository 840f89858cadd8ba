"""Our training step against speculators' own, on the same rows, precision and batches.

    python -m benchmarks.train configs/smollm2_cpu.yaml

Needs the run's 01 to 03. In one process, for 1K and 2K tokens a batch: forward, backward, clipping
and AdamW of ``Eagle3DraftModel.forward`` (eager attention and loss: its Triton ones need a GPU) and
of ``TTTStep``, the same rows packed. Loss side by side with speculators' mask replaced by ours (see
``contract``); tokens/s; peak resident memory above what was there before; the FLOPs our step does
against the rate of a plain matrix product measured here. The last line is JSON.
"""

import ctypes
import gc
import json
import re
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from speculators.losses import compound_loss, exp_loss_decay, resolve_loss_config
from speculators.models.eagle3 import core
from torch.utils.flop_counter import FlopCounterMode

from eagle3.artifact import open_artifact
from eagle3.batches import Batch, Row, RowReader, collate
from eagle3.config import Config
from eagle3.contract import Wiring
from eagle3.drafter import build, speculators_config
from eagle3.fingerprint import open_verifier
from eagle3.plan import plan_epoch, trainable_rows
from eagle3.rows import TokenRows
from eagle3.script import Invocation, log, run_script
from eagle3.shard_plan import open_states
from eagle3.ttt import TTTStep
from eagle3.vocab import VocabMap

NUM_BATCHES = 6  # timed; two more warm up
BATCH_TOKENS = (1024, 2048)


def main(invocation: Invocation) -> None:
    config = invocation.load_config()
    data, hidden, vocab_artifact = (
        open_artifact(config, name, invocation) for name in ("01_data", "02_hidden", "03_vocab")
    )
    rows = TokenRows.load(data.path("rows.safetensors"))
    reader = RowReader(rows, open_states(hidden, rows, config))
    vocab = VocabMap.load(vocab_artifact.path("vocab_map.safetensors"))
    matrix_flops = matrix_rate()
    figures = {}
    for batch_tokens in BATCH_TOKENS:
        plan = plan_epoch(trainable_rows(rows)[0], rows.lengths, batch_tokens, 0)
        batches = [[reader[i] for i in ids] for ids in plan[: NUM_BATCHES + 2]]
        figures[batch_tokens] = compare(config, invocation, vocab, batches, matrix_flops)
        log(f"{batch_tokens} tokens a batch", **figures[batch_tokens])
    print(
        json.dumps(
            {
                "compared": "training tokens/s, TTTStep against speculators' forward",
                "matrix_gflops": round(matrix_flops / 1e9),
                **{str(size): figure for size, figure in figures.items()},
                "ratio": min(figure["ratio"] for figure in figures.values()),
            }
        )
    )


def compare(
    config: Config,
    invocation: Invocation,
    vocab: VocabMap,
    batches: list[list[Row]],
    matrix_flops: float,
) -> dict[str, Any]:
    """Both steps over the same batches, one after the other; medians over batches."""
    steps, decay = config.train.ttt_steps, config.train.ttt_step_loss_decay
    found = {}
    for name in ("speculators", "ours"):
        model = fresh_drafter(config, vocab)
        if name == "ours":
            step = TTTStep(model, loss="kl_div", ttt_step_loss_decay=decay)
            laid_out = [collate(rows, steps) for rows in batches]
            forward = lambda batch: step(batch).loss  # noqa: E731
        else:
            laid_out = [(packed(rows), collate(rows, steps)) for rows in batches]
            forward = partial(speculators_loss, model, steps, decay)
        found[name] = measure(model, forward, laid_out)
    with FlopCounterMode(display=False) as counter, torch.autocast("cpu", torch.bfloat16):
        step(laid_out[2]).loss.backward()
    tokens = [sum(len(row.input_ids) for row in rows) for rows in batches]
    rates = {
        name: statistics.median(n / s for n, s in zip(tokens[2:], seconds, strict=True))
        for name, (seconds, _, _) in found.items()
    }
    flops_per_s = counter.get_total_flops() / tokens[2] * rates["ours"]
    return {
        "ours_tokens_per_s": round(rates["ours"]),
        "speculators_tokens_per_s": round(rates["speculators"]),
        "ratio": round(rates["ours"] / rates["speculators"], 2),
        "ours_loss": round(found["ours"][1], 4),
        "speculators_loss": round(found["speculators"][1], 4),
        "ours_peak_mib": round(found["ours"][2] / 2**20),
        "speculators_peak_mib": round(found["speculators"][2] / 2**20),
        "share_of_matrix_rate": round(flops_per_s / matrix_flops, 2),
    }


def measure(
    model: Any, forward: Callable[[Any], torch.Tensor], laid_out: list[Any]
) -> tuple[list[float], float, float]:
    """Seconds of each timed batch, the first batch's loss, peak bytes above the start."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-5, fused=True)
    seconds, first_loss, start_bytes = [], None, reset_peak()
    for batch in laid_out:
        start_s = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16):
            loss = forward(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start_s)
        first_loss = loss.item() if first_loss is None else first_loss
    return seconds[2:], first_loss, peak_bytes() - start_bytes


def fresh_drafter(config: Config, vocab: VocabMap) -> Any:
    torch.manual_seed(config.train.seed)
    verifier = open_verifier(config.verifier)
    wiring = Wiring.at_capture(config, verifier)
    drafter_config = speculators_config(
        wiring,
        config.drafter,
        draft_vocab_size=len(vocab.d2t),
        verifier=verifier,
        num_speculative_tokens=3,
    )
    model = build(drafter_config, verifier, vocab)
    model.lm_head.weight.requires_grad_(False)  # as speculators trains
    return model


def packed(rows: list[Row]) -> dict[str, torch.Tensor]:
    """Rows as speculators' collator gives them to its forward, shifted, without a loss mask."""
    return {
        "hidden_states": torch.cat([r.aux_hidden_states[:-1].flatten(1) for r in rows])[None],
        "input_ids": torch.cat([r.input_ids[1:] for r in rows])[None],
        "document_ids": torch.cat(
            [torch.full((len(r.input_ids) - 1,), i) for i, r in enumerate(rows)]
        )[None],
        "position_ids": torch.cat([torch.arange(1, len(r.input_ids)) for r in rows])[None],
        # It forms a target everywhere, also where none is kept and nothing is supervised.
        "verifier_last_hidden_states": torch.cat(
            [r.last_hidden_states[1:].nan_to_num() for r in rows]
        )[None],
    }


def speculators_loss(
    model: Any, ttt_steps: int, decay: float, laid_out: tuple[dict[str, torch.Tensor], Batch]
) -> torch.Tensor:
    """Its forward, its loss, our mask."""
    inputs, batch = laid_out
    losses = resolve_loss_config("kl_div", "eager")
    supervised = torch.zeros(ttt_steps, inputs["input_ids"].shape[1], dtype=torch.bool)
    supervised[:, batch.supervised] = batch.valid

    def aligned(logits, targets, loss_mask, prev_correct, k, step_decay, loss_config=None):
        end = logits.shape[1] - k
        value, _ = compound_loss(
            logits[:, :end],
            targets[:, k:],
            supervised[k][None, :end],
            torch.full((1, end), k),
            loss_config=losses,
            decay_fn=partial(exp_loss_decay, gamma=step_decay),
        )
        return value, {}

    core.compute_metrics = aligned
    return model(**inputs, ttt_steps=ttt_steps, ttt_step_loss_decay=decay)[1]


def matrix_rate() -> float:
    """FLOP/s of a bf16 product of the drafter's size, the best of several."""
    a = torch.randn(1024, 1152, dtype=torch.bfloat16)
    b = torch.randn(1152, 1152, dtype=torch.bfloat16)
    best = 0.0
    for _ in range(30):
        start_s = time.perf_counter()
        for _ in range(10):
            torch.nn.functional.linear(a, b)
        best = max(best, 10 * 2 * 1024 * 1152**2 / (time.perf_counter() - start_s))
    return best


def reset_peak() -> int:
    """Give freed memory back, reset the kernel's peak; what is resident now, bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status).group(1)) * 1024


if __name__ == "__main__":
    run_script(main, __doc__)
