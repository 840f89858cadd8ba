"""Train the EAGLE-3 drafter on the captured states.

reads   01_data/rows.safetensors, 02_hidden/shard-*.safetensors, 03_vocab/vocab_map.safetensors
writes  04_train/best.safetensors     float32, best simulated acceptance length on validation
        04_train/testimony.safetensors   what it supervised, aimed at and drafted on a few rows
        04_train/metrics.jsonl, curves.png   loss, accuracy per position, acceptance length
        04_train/checkpoints/         the last two, and the best; training state in float32

run     python 04_train.py configs/smollm2_cpu.yaml
        accelerate launch --multi_gpu --num_processes 8 04_train.py CONFIG   (docs/several_boxes.md)
time    the demo's two passes over 189K tokens: six minutes on two cores

If it stops, run the same command again: it goes on from the last checkpoint as if never stopped.
Where states come in rounds it trains on those that are there, and python -m eagle3.rounds goes on.
"""

import torch

from eagle3.batches import RowReader
from eagle3.config import Config
from eagle3.contract import Wiring
from eagle3.drafter import build, speculators_config, tensor_table
from eagle3.errors import GateError
from eagle3.files import write_tensors
from eagle3.loop import Trainer, trained_state
from eagle3.plan import plan_epoch, require_both, trainable_rows
from eagle3.preflight import check
from eagle3.ranks import Ranks
from eagle3.rows import TokenRows
from eagle3.script import Invocation, log, run_script
from eagle3.shard_plan import open_states, rounds_of
from eagle3.stage import Stage
from eagle3.testimony import TESTIMONY, testify
from eagle3.ttt import TTTStep
from eagle3.vocab import VocabMap
from eagle3.warm_start import start


def main(invocation: Invocation) -> None:
    if invocation.check:  # before a GPU is touched
        return check(invocation.load_config(), "04_train", invocation)
    ranks = Ranks.join()
    config = ranks.agree(invocation.load_config)
    with ranks, Stage(config, "04_train", invocation, ranks) as stage:
        if stage.done:
            return
        rows = TokenRows.load(stage.inputs["01_data"].path("rows.safetensors"))
        vocab = VocabMap.load(stage.inputs["03_vocab"].path("vocab_map.safetensors"))
        hidden = stage.inputs["02_hidden"]
        wiring = Wiring.at_capture(config, stage.verifier)
        wiring.require_equal(
            hidden.wiring,
            where=hidden.directory,
            fix="capture again with the config's aux layers",
        )
        wiring = wiring.bind(vocab_map=vocab.digest, drafter=config.drafter)
        reader = RowReader(rows, open_states(hidden, rows, config))
        row_ids, dropped = trainable_rows(rows)
        validation_ids = [i for i in range(rows.num_rows) if rows.is_validation[i]]
        require_both(row_ids, validation_ids)
        torch.manual_seed(config.train.seed)
        drafter_config = speculators_config(
            wiring,
            config.drafter,
            draft_vocab_size=len(vocab.d2t),
            verifier=stage.verifier,
            num_speculative_tokens=config.verify.num_speculative_tokens,
        )
        drafter = build(drafter_config, stage.verifier, vocab)
        start(drafter, config, stage.verifier)
        rope_width = 2 * len(drafter.rotary_emb.inv_freq)
        assert rope_width == config.drafter.head_dim, "RoPE is not built from head_dim"
        step = TTTStep(
            drafter,
            loss=config.train.loss,
            ttt_step_loss_decay=config.train.ttt_step_loss_decay,
        )
        log(
            "drafter",
            trainable=sum(p.numel() for p in drafter.parameters() if p.requires_grad),
            head_dim=config.drafter.head_dim,
            attention_width=config.drafter.num_attention_heads * config.drafter.head_dim,
            aux_layer_ids=list(wiring.aux_layer_ids),
            draft_vocab=len(vocab.d2t),
        )
        validation_plan = plan_epoch(validation_ids, rows.lengths, config.train.batch_tokens, 0)
        trainable = frozenset(row_ids)
        rounds = [[i for i in ids if i in trainable] for ids in rounds_of(rows, config)]
        trainer = Trainer(
            config.train, step, reader, rounds, validation_plan, stage.directory, ranks
        )
        log(
            "plan",
            rows=len(row_ids),
            validation_rows=len(validation_ids),
            steps=len(trainer.plan),
            tokens=trainer.tokens_before[-1],
            processes=ranks.count,
        )
        trainer.run()
        if not trainer.is_done:
            log("trained on the rounds that are on disk", done=trainer.checkpoints.trained_rounds())
            return ranks.on_main(stage.say_next)

        def publish() -> None:
            publish_best(stage, trainer, config, len(vocab.d2t))
            # For 05, which works the same out from the exported files.
            said = testify(drafter, config.train.loss, reader, config.train.ttt_steps)
            said.save(stage.directory / TESTIMONY)
            log("best checkpoint", **trainer.best)
            stage.commit(
                files=["best.safetensors", TESTIMONY, "metrics.jsonl", "curves.png"],
                counts={"in": rows.num_rows, "out": len(row_ids), "dropped": dropped},
                wiring=wiring,
                results={"best": trainer.best, "steps": trainer.done_steps},
            )

        ranks.on_main(publish)


def publish_best(stage: Stage, trainer: Trainer, config: Config, draft_vocab_size: int) -> None:
    """The best checkpoint's weights, checked against the table computed from the config alone.

    Raises:
        GateError: a tensor is missing, extra, of another shape, or not finite.
    """
    trainer.load_best()
    state = trained_state(trainer.accelerator.unwrap_model(trainer.step))
    table = tensor_table(
        config.drafter,
        num_aux=len(config.capture.aux_layer_ids),
        draft_vocab_size=draft_vocab_size,
        vocab_size=stage.verifier.vocab_size,
    )
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    expected = {name: shape for name, (shape, _) in table.items()}
    bad = [name for name, tensor in state.items() if not torch.isfinite(tensor.float()).all()]
    if found != expected or bad:
        raise GateError(
            "the trained weights are not the drafter the config describes",
            where=stage.directory / "checkpoints" / "best.pt",
            expected=sorted(set(expected.items()) - set(found.items())) or "finite weights",
            found=sorted(set(found.items()) - set(expected.items())) or f"not finite: {bad}",
            fix="train again (--redo); with weights not finite, lower train.learning_rate",
        )
    write_tensors(stage.directory / "best.safetensors", state)


if __name__ == "__main__":
    run_script(main, __doc__)
