"""Write the trained drafter as vLLM and SGLang load it, and prove that both say what was trained.

reads   03_vocab/vocab_map.safetensors    d2t, t2d
        04_train/best.safetensors         float32 weights, names of speculators' Eagle3DraftModel
        04_train/testimony.safetensors    what training did on a few validation rows
        01_data, 02_hidden                those rows, and their states
writes  05_export/drafter/    for vLLM: speculators' format
        05_export/sglang/     for SGLang, and vLLM loads it too: a flat Llama config
            model.safetensors     bfloat16 weights, d2t int64, t2d bool
            config.json           every key that an engine reads, written out

    python 05_export.py configs/smollm2_cpu.yaml

Every tensor's name, shape and dtype is compared with a table computed from the config alone, its
values with 04's, and speculators' loader and vLLM's config code open the result. A replay of the
result then drafts on a few validation rows what training said it drafts there. Where SGLang cannot
be told which layers this drafter reads, its directory is left out and the log says why.
A minute, imports mostly; at Kimi's size some minutes and 25 GB of memory, the replay being float32
on the CPU. Disk is 2 bytes a parameter for each directory. If it stops, run the same command again.
"""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from eagle3.capture import VerifierHead
from eagle3.config import Config
from eagle3.contract import Wiring
from eagle3.drafter import num_parameters, tensor_table
from eagle3.export import (
    CONFIG,
    DRAFTER,
    WEIGHTS,
    publishing_directory,
    serving_tensors,
    write_directory,
)
from eagle3.exported import check_loaders, check_written
from eagle3.flat import servable_forms
from eagle3.preflight import check, show_table
from eagle3.published import Published
from eagle3.replay import Replay
from eagle3.rows import TokenRows
from eagle3.script import Invocation, log, run_script
from eagle3.shard_plan import open_states
from eagle3.stage import Stage
from eagle3.testimony import TESTIMONY, Testimony, require_same
from eagle3.vocab import VocabMap


def main(invocation: Invocation) -> None:
    config = invocation.load_config()
    if invocation.check:
        return check(config, "05_export", invocation)
    with Stage(config, "05_export", invocation) as stage:
        if stage.done:
            return
        verifier, drafter = stage.verifier, config.drafter
        train = stage.inputs["04_train"]
        vocab_map = VocabMap.load(stage.inputs["03_vocab"].path("vocab_map.safetensors"))

        # What was trained must be what the config and 03 say now, field by field.
        wiring = Wiring.at_capture(config, verifier).bind(
            vocab_map=vocab_map.digest, drafter=drafter
        )
        wiring.require_equal(train.wiring, where=train.directory, fix="run 04_train.py with --redo")
        sizes = {"draft_vocab_size": len(vocab_map.d2t), "vocab_size": verifier.vocab_size}
        table = tensor_table(drafter, num_aux=len(wiring.aux_layer_ids), **sizes)
        trained = train.path("best.safetensors")
        tensors = serving_tensors(trained, table)
        # Drafted tokens by default: as many as training unrolled.
        sizes["num_speculative_tokens"] = config.train.ttt_steps

        forms = servable_forms(drafter, wiring, verifier, **sizes)
        for form in forms:
            directory = stage.directory / form.directory
            meant = (form, table, wiring, load_file(trained), verifier)
            with publishing_directory(directory) as partial:
                write_directory(partial, tensors, form, wiring, verifier)
                check_written(partial, *meant)
            found = check_written(directory, *meant)  # as the next stage will read it
        check_loaders(stage.directory / DRAFTER, drafter, wiring, found, verifier)
        num_drafts = check_training(config, stage)

        show_table(table)
        log("wiring", aux_layer_ids=list(wiring.aux_layer_ids), vocab_map=wiring.vocab_map[:12])
        log("vLLM's config code and speculators' loader read the same", tensors=len(found))
        log("the exported drafter drafts what training drafted", drafts=num_drafts)
        stage.commit(
            files=[f"{form.directory}/{name}" for form in forms for name in (WEIGHTS, CONFIG)],
            counts={"tensors": len(table), "parameters": num_parameters(table)},
            wiring=wiring,
            results={"directories": [form.directory for form in forms]},
        )


def check_training(config: Config, stage: Stage) -> int:
    """What training said on a few rows against the contract, the verifier and the exported files.

    Returns:
        Drafts compared.

    Raises:
        GateError: naming the row, the position and the TTT step where they part.
    """
    verifier, hidden = stage.verifier, stage.inputs["02_hidden"]
    rows = TokenRows.load(stage.inputs["01_data"].path("rows.safetensors"))
    shards = open_states(hidden, rows, config, only_validation=True)
    path = stage.inputs["04_train"].path(TESTIMONY)
    published = Published.open(stage.directory / DRAFTER, verifier)
    replay = Replay(published, verifier.embed_tokens(), torch.float32)
    head = VerifierHead(verifier, "float32")
    return require_same(Testimony.load(path), path, rows, shards, head, replay)


if __name__ == "__main__":
    run_script(main, __doc__)
