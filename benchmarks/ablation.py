"""What each choice of the recipe is worth, by served acceptance length at equal training tokens.

    python -m benchmarks.ablation configs/smollm2_cpu.yaml            # every row, one after the other
    python -m benchmarks.ablation configs/smollm2_cpu.yaml ROW SEED   # one row
    python -m benchmarks.ablation configs/smollm2_cpu.yaml table      # what has been measured so far

Needs the run's 01 to 03. A row trains a fresh drafter on the same TRAIN_TOKENS tokens, exports it
and serves the held-out prompts greedily, as 06 does. ``speculators`` rows are its recipe: its
forward, its mask, its norm flags, KL, three steps; optimizer (AdamW), schedule and batches are those
of the other rows. Both sides go over the same three learning rates; the best of each has three seeds.
Results are lines of ``runs/<name>/ablation.jsonl``; a row measured before is not measured again.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from speculators.losses import resolve_loss_config

from benchmarks.train import fresh_drafter
from eagle3.artifact import open_artifact
from eagle3.batches import Row, RowReader, collate
from eagle3.config import Config
from eagle3.config_file import load_config
from eagle3.contract import Wiring
from eagle3.drafter import BORROWED, tensor_table
from eagle3.engine import Engine, Sampling
from eagle3.export import serving_tensors, speculators_form, write_directory
from eagle3.files import write_tensors
from eagle3.fingerprint import open_verifier
from eagle3.plan import plan_epoch, trainable_rows
from eagle3.rows import TokenRows
from eagle3.schedule import cosine_with_warmup
from eagle3.script import Invocation, log
from eagle3.serve import serve
from eagle3.shard_plan import open_states
from eagle3.ttt import TTTStep
from eagle3.validation import validate
from eagle3.vocab import VocabMap

TRAIN_TOKENS = 64_000
SPECULATORS = "speculators"
# Overrides of the config. Rows that begin with "speculators" train with its step.
_ITS_FLAGS = (
    "drafter.norm_before_residual=true",
    "drafter.fc_norm=false",
    "drafter.norm_output=false",
)
ROWS: dict[str, tuple[str, ...]] = {
    "defaults": (),
    "rate_halved": ("train.learning_rate=3.5e-4",),
    "rate_doubled": ("train.learning_rate=1.4e-3",),
    "speculators": _ITS_FLAGS,
    "speculators_rate_halved": (*_ITS_FLAGS, "train.learning_rate=3.5e-4"),
    "speculators_rate_doubled": (*_ITS_FLAGS, "train.learning_rate=1.4e-3"),
    "no_norms": ("drafter.fc_norm=false", "drafter.norm_output=false"),
    "lk_hybrid": ("train.loss=lk_hybrid",),
    "ttt_1": ("train.ttt_steps=1",),
    "ttt_5": ("train.ttt_steps=5",),
    "layers_15_27": ("capture.aux_layer_ids=[15, 27]",),
    "batch_1024": ("train.batch_tokens=1024",),
}
SEEDED = ("defaults", "speculators")
SEEDS = (0, 1, 2)
SERVED_TOGETHER = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("row", nargs="?")
    parser.add_argument("seed", nargs="?", type=int, default=0)
    arguments = parser.parse_args()
    config = load_config(arguments.config)
    results = config.run_dir / "ablation.jsonl"
    if arguments.row == "table":
        return print(table(read(results)))
    todo = [(arguments.row, arguments.seed)] if arguments.row else list(everything())
    for row, seed in todo:
        if any((line["row"], line["seed"]) == (row, seed) for line in read(results)):
            continue
        found = {"row": row, "seed": seed, **measure(arguments.config, row, seed)}
        with open(results, "a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
        log(row, **found)
    print(table(read(results)))


def measure(config_path: Path, row: str, seed: int) -> dict[str, Any]:
    """Train one row, export it, serve it."""
    made = load_config(config_path)
    config = load_config(config_path, (*ROWS[row], f"train.seed={seed}"))
    invocation = Invocation("benchmarks.ablation", config_path, (), False, False)
    data, hidden, vocab_artifact = (
        open_artifact(made, name, invocation) for name in ("01_data", "02_hidden", "03_vocab")
    )
    rows = TokenRows.load(data.path("rows.safetensors"))
    vocab = VocabMap.load(vocab_artifact.path("vocab_map.safetensors"))
    reader = SomeLayers(rows, open_states(hidden, rows, made))
    reader.slots = [made.capture.aux_layer_ids.index(i) for i in config.capture.aux_layer_ids]
    drafter = fresh_drafter(config, vocab)
    start_s = time.monotonic()
    train(config, row, drafter, reader, first_tokens(config, rows))
    seconds = time.monotonic() - start_s
    step = TTTStep(drafter, loss=config.train.loss, ttt_step_loss_decay=1.0)
    held_out = [i for i in range(rows.num_rows) if rows.is_validation[i]]
    plan = plan_epoch(held_out, rows.lengths, config.train.batch_tokens, 0)
    with torch.autocast("cpu", torch.bfloat16):
        simulated = validate(step, reader, plan, config.verify.num_speculative_tokens)
    prompts = json.loads(data.path("prompts.json").read_text(encoding="utf-8"))["heldout"]
    served = serve_held_out(config, drafter, vocab, prompts)
    return {
        "served": round(served.acceptance_length, 4),
        "per_position": [round(share, 4) for share in served.per_position],
        "simulated": round(simulated.acceptance.acceptance_length, 4),
        "train_seconds": round(seconds, 1),
    }


class SomeLayers(RowReader):
    """Rows with the aux states of some of the captured layers, by slot."""

    slots: list[int]

    def __getitem__(self, row_id: int) -> Row:
        row = super().__getitem__(row_id)
        return replace(row, aux_hidden_states=row.aux_hidden_states[:, self.slots])


def first_tokens(config: Config, rows: TokenRows) -> list[list[int]]:
    """The first batches of the training plan, TRAIN_TOKENS in all."""
    plan = plan_epoch(
        trainable_rows(rows)[0], rows.lengths, config.train.batch_tokens, config.train.seed
    )
    num_tokens = 0
    for index, batch in enumerate(plan):
        num_tokens += int(rows.lengths[batch].sum())
        if num_tokens >= TRAIN_TOKENS:
            return plan[: index + 1]
    return plan


def train(config: Config, row: str, drafter: Any, reader: RowReader, plan: list[list[int]]) -> None:
    """04's loop without its book-keeping: the same optimizer and schedule for every row."""
    section = config.train
    if row.startswith(SPECULATORS):
        loss_of = lambda rows: speculators_loss(drafter, rows, section.ttt_steps)
    else:
        step = TTTStep(drafter, loss=section.loss, ttt_step_loss_decay=section.ttt_step_loss_decay)
        loss_of = lambda rows: step(collate(rows, section.ttt_steps)).loss
    trainable = [p for p in drafter.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trainable, lr=section.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    warmup_steps = math.ceil(section.warmup_share * len(plan))
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: cosine_with_warmup(done, warmup_steps, len(plan))
    )
    for batch in plan:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of([reader[row_id] for row_id in batch])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, section.max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def speculators_loss(drafter: Any, rows: list[Row], ttt_steps: int) -> torch.Tensor:
    """Its forward on packed rows, shifted as its ``shift_batch`` does, its own mask and metrics."""
    lengths = [len(row.input_ids) - 1 for row in rows]
    _, loss, _ = drafter(
        torch.cat([row.aux_hidden_states[:-1].flatten(1) for row in rows])[None].float(),
        torch.cat([row.input_ids[1:] for row in rows])[None],
        torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None],
        loss_mask=torch.cat([row.loss_mask[1:] for row in rows])[None],
        position_ids=torch.cat([torch.arange(1, n + 1) for n in lengths])[None],
        verifier_last_hidden_states=torch.cat([row.last_hidden_states[1:] for row in rows])[None],
        ttt_steps=ttt_steps,
        loss_config=resolve_loss_config("kl_div", "eager"),
    )
    return loss


def serve_held_out(config: Config, drafter: Any, vocab: VocabMap, prompts: list[Any]) -> Any:
    """Acceptance counted by vLLM on the held-out prompts, greedy."""
    verifier = open_verifier(config.verifier)
    wiring = Wiring.at_capture(config, verifier).bind(
        vocab_map=vocab.digest, drafter=config.drafter
    )
    sizes = {"draft_vocab_size": len(vocab.d2t), "vocab_size": verifier.vocab_size}
    num_drafted = config.verify.num_speculative_tokens
    with tempfile.TemporaryDirectory() as scratch:
        state = drafter.state_dict()
        trained = {n: t.contiguous() for n, t in state.items() if n not in BORROWED}
        write_tensors(Path(scratch) / "trained.safetensors", trained)
        table = tensor_table(config.drafter, num_aux=len(config.capture.aux_layer_ids), **sizes)
        tensors = serving_tensors(Path(scratch) / "trained.safetensors", table)
        directory = Path(scratch) / "drafter"
        directory.mkdir()
        form = speculators_form(config.drafter, wiring, **sizes, num_speculative_tokens=num_drafted)
        write_directory(directory, tensors, form, wiring, verifier)
        engine = Engine(
            config,
            verifier,
            drafter=directory,
            num_speculative_tokens=num_drafted,
            max_num_seqs=SERVED_TOGETHER,
        )
        sampling = Sampling(temperature=0, max_new_tokens=config.evaluation.max_new_tokens)
        run = serve(engine, "heldout", prompts, sampling, num_drafted)
        engine.close()
    return run.acceptance


def everything() -> list[tuple[str, int]]:
    """Every row once, and those that are compared with each other on three seeds."""
    return [(row, seed) for row in ROWS for seed in (SEEDS if row in SEEDED else SEEDS[:1])]


def read(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines]


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown: a row's mean over its seeds, and the overrides that make it."""
    shown = [
        "| row | overrides | seeds | served | simulated | training s |",
        "|---|---|---|---|---|---|",
    ]
    for row, overrides in ROWS.items():
        found = [line for line in lines if line["row"] == row]
        if found:
            served = [line["served"] for line in found]
            spread = f" ({', '.join(f'{x:.3f}' for x in served)})" if len(served) > 1 else ""
            mean = {
                key: statistics.mean(line[key] for line in found)
                for key in ("served", "simulated", "train_seconds")
            }
            shown.append(
                f"| {row} | {' '.join(f'`{o}`' for o in overrides)} | {len(found)} "
                f"| {mean['served']:.3f}{spread} | {mean['simulated']:.3f} "
                f"| {mean['train_seconds']:.0f} |"
            )
    return "\n".join(shown)


if __name__ == "__main__":
    main()
