"""One recipe, measured: a fresh drafter trained on so many tokens, exported, served greedily.

``ours`` trains with ``TTTStep`` and 04's optimizers; ``speculators`` with its own forward, on its
own shift, mask and KL, and with its own trainer's optimizers and warm-up (both train with Muon by
default, down a line to zero). Batches are the same for both.
"""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from speculators.losses import resolve_loss_config
from speculators.train.config.schema import OptimizerArgs
from speculators.train.optimizers import build_optimizers

from benchmarks.train import fresh_drafter, packed
from eagle3.artifact import open_artifact
from eagle3.batches import Row, RowReader, collate
from eagle3.config import Config
from eagle3.config_file import load_config
from eagle3.contract import Wiring
from eagle3.drafter import (
    BORROWED,
    start_at_last_aux_state,
    start_queries_as_keys,
    tensor_table,
)
from eagle3.eight_bit import dequantise, quantise
from eagle3.engine import Engine, Sampling
from eagle3.export import serving_tensors, speculators_form, write_directory
from eagle3.files import write_tensors
from eagle3.fingerprint import open_verifier
from eagle3.optimizers import make_optimizers, step_all
from eagle3.plan import plan_epoch, trainable_rows
from eagle3.rows import TokenRows
from eagle3.schedule import schedule
from eagle3.script import Invocation
from eagle3.serve import PromptSet, serve
from eagle3.shard_plan import open_states
from eagle3.ttt import TTTStep
from eagle3.validation import validate
from eagle3.vocab import VocabMap

LAYERS = (2, 7, 15, 22, 27)  # captured once; a recipe reads some of them
SERVED_TOGETHER = 16


@dataclass(frozen=True)
class Recipe:
    """What is trained: whose step, on how many tokens, and what differs from the config.

    Attributes:
        side: ``ours`` or ``speculators``.
        overrides: of the config, ``key=value``.
        random: ``fc`` or ``queries``, which ours then starts as speculators does, at random.
        our_optimizer: speculators' forward with 04's optimizers and warm-up.
    """

    side: str
    overrides: tuple[str, ...]
    num_tokens: int
    random: str = ""
    our_optimizer: bool = False


def capture_layers(config_path: Path) -> Config:
    """The states of all ``LAYERS``, by 02 itself, in a run of its own beside the run's stages."""
    made = load_config(config_path)
    overrides = (
        f"run.dir={made.run_dir}",
        "run.name=layers",
        f"capture.aux_layer_ids={list(LAYERS)}",
    )
    config = load_config(config_path, overrides)
    for name in ("01_data", "03_vocab"):
        link = config.run_dir / name
        link.parent.mkdir(exist_ok=True)
        if not link.exists():
            link.symlink_to((made.run_dir / name).resolve())
    words = [flag for override in overrides for flag in ("--set", override)]
    command = [sys.executable, "02_gen_hidden_states.py", str(config_path), *words]
    subprocess.run(command, check=True)
    return config


def measure(config_path: Path, captured: Config, recipe: Recipe, seed: int) -> dict[str, Any]:
    """Train one recipe, export it, serve the run's prompts.

    Args:
        captured: the run of ``capture_layers``.
    """
    config = load_config(config_path, (*recipe.overrides, f"train.seed={seed}"))
    invocation = Invocation("benchmarks.ablation", config_path, (), False, False)
    data, hidden, vocab_artifact = (
        open_artifact(captured, name, invocation) for name in ("01_data", "02_hidden", "03_vocab")
    )
    rows = TokenRows.load(data.path("rows.safetensors"))
    vocab = VocabMap.load(vocab_artifact.path("vocab_map.safetensors"))
    reader = SomeLayers(rows, open_states(hidden, rows, captured))
    reader.slots = [LAYERS.index(i) for i in config.capture.aux_layer_ids]
    reader.in_8_bits = config.capture.state_dtype == "int8"
    drafter = fresh_drafter(config, vocab)
    plan = first_tokens(config, rows, recipe.num_tokens)
    start_s = time.monotonic()
    train(config, recipe, drafter, reader, plan)
    seconds = time.monotonic() - start_s
    step = TTTStep(drafter, loss=config.train.loss, ttt_step_loss_decay=1.0)
    held_out = [i for i in range(rows.num_rows) if rows.is_validation[i]]
    validation_plan = plan_epoch(held_out, rows.lengths, config.train.batch_tokens, 0)
    with torch.autocast("cpu", torch.bfloat16):
        simulated = validate(step, reader, validation_plan, config.verify.num_speculative_tokens)
    prompts = json.loads(data.path("prompts.json").read_text(encoding="utf-8"))
    return {
        "served": serve_prompts(config, drafter, vocab, prompts),
        "simulated": round(simulated.acceptance.acceptance_length, 4),
        "tokens": sum(int(rows.lengths[batch].sum()) for batch in plan),
        "train_seconds": round(seconds, 1),
    }


class SomeLayers(RowReader):
    """Rows with the aux states of some of the captured layers, by slot; rounded where 02's
    ``capture.state_dtype`` would have rounded them."""

    slots: list[int]
    in_8_bits: bool

    def __getitem__(self, row_id: int) -> Row:
        row = super().__getitem__(row_id)
        aux, last = row.aux_hidden_states[:, self.slots], row.last_hidden_states
        if self.in_8_bits:
            aux, last = (dequantise(*quantise(states), states.dtype) for states in (aux, last))
        return replace(row, aux_hidden_states=aux, last_hidden_states=last)


def first_tokens(config: Config, rows: TokenRows, num_tokens: int) -> list[list[int]]:
    """The first batches of the plan, so many tokens in all, in several passes if need be."""
    train_rows, batch_tokens = trainable_rows(rows)[0], config.train.batch_tokens
    found: list[list[int]] = []
    left, epoch = num_tokens, 0
    while True:
        for batch in plan_epoch(train_rows, rows.lengths, batch_tokens, config.train.seed + epoch):
            if left <= 0:
                return found
            found.append(batch)
            left -= int(rows.lengths[batch].sum())
        epoch += 1


def train(
    config: Config, recipe: Recipe, drafter: Any, reader: RowReader, plan: list[list[int]]
) -> None:
    """04's loop without its book-keeping."""
    section = config.train
    if recipe.side == "speculators":
        loss_of = lambda rows: speculators_loss(drafter, rows, section.ttt_steps)
    else:
        if recipe.random != "fc":
            start_at_last_aux_state(drafter)
        if recipe.random != "queries":
            start_queries_as_keys(drafter)
        step = TTTStep(drafter, loss=section.loss, ttt_step_loss_decay=section.ttt_step_loss_decay)
        loss_of = lambda rows: step(collate(rows, section.ttt_steps)).loss
    trainable = [p for p in drafter.parameters() if p.requires_grad]
    optimizers, warmup_share = make_optimizers(section, trainable), section.warmup_share
    together = [optimizers]
    if recipe.side == "speculators" and not recipe.our_optimizer:
        optimizers, warmup_share = speculators_optimizers(drafter, section.learning_rate)
        together = [[optimizer] for optimizer in optimizers]  # its trainer's, one after another
    schedulers = [schedule(optimizer, warmup_share, len(plan)) for optimizer in optimizers]
    for batch in plan:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of([reader[row_id] for row_id in batch])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, section.max_grad_norm)
        for group in together:
            step_all(group)
        for scheduler in schedulers:
            scheduler.step()
        for parameter in trainable:
            parameter.grad = None


def speculators_optimizers(drafter: Any, learning_rate: float) -> tuple[list[Any], float]:
    """Its optimizers with its defaults for all but the rate, and its share of steps to warm up
    (``speculators/train/config/schema.py``; ``trainer.py``, ``_resolve_scheduler_steps``)."""
    settings = OptimizerArgs(lr=learning_rate, muon_lr=learning_rate)
    return build_optimizers(drafter, settings), 0.01


def speculators_loss(drafter: Any, rows: list[Row], ttt_steps: int) -> torch.Tensor:
    """Its forward on packed rows, shifted as its ``shift_batch`` does, its own mask and metrics."""
    inputs = packed(rows)
    inputs["hidden_states"] = inputs["hidden_states"].float()
    _, loss, _ = drafter(
        **inputs,
        loss_mask=torch.cat([row.loss_mask[1:] for row in rows])[None],
        ttt_steps=ttt_steps,
        loss_config=resolve_loss_config("kl_div", "eager"),
    )
    return loss


def serve_prompts(
    config: Config, drafter: Any, vocab: VocabMap, prompts: dict[str, list[Any]]
) -> dict[str, float]:
    """Acceptance length counted by vLLM, greedy, set by set."""
    verifier = open_verifier(config.verifier)
    wiring = Wiring.at_capture(config, verifier).bind(
        vocab_map=vocab.digest, drafter=config.drafter
    )
    sizes = {"draft_vocab_size": len(vocab.d2t), "vocab_size": verifier.vocab_size}
    num_drafted = config.verify.num_speculative_tokens
    found = {}
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
        for name, ids in prompts.items():
            prompt_set = PromptSet(name, ids, sampling, Path(scratch))
            run = serve(engine, prompt_set, SERVED_TOGETHER, num_drafted)
            found[name] = round(run.acceptance.acceptance_length, 4)
        engine.close()
    return found
