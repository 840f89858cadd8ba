"""Write the trained drafter as a directory vLLM loads, and prove that it says what was trained.

reads   03_vocab/vocab_map.safetensors    d2t, t2d
        04_train/best.safetensors         float32 weights, names of speculators' Eagle3DraftModel
writes  05_export/drafter/model.safetensors   bfloat16 weights, d2t int64, t2d bool
        05_export/drafter/config.json         speculators' format, every key written out

    python 05_export.py configs/smollm2_cpu.yaml

Every tensor's name, shape and dtype is compared with a table computed from the config alone, and
speculators' loader and vLLM's config code open the result. Takes a minute (imports, mostly); disk
is the drafter's, 2 bytes a parameter. If it stops, run the same command again.
"""

from __future__ import annotations

import torch

from eagle3.contract import Wiring
from eagle3.drafter import num_parameters, tensor_table
from eagle3.export import (
    CONFIG,
    WEIGHTS,
    publishing_directory,
    served_config,
    serving_tensors,
    write_directory,
)
from eagle3.exported import check_directory, check_head, check_loaders
from eagle3.preflight import check, show_table
from eagle3.script import Invocation, log, run_script
from eagle3.stage import Stage
from eagle3.vocab import VocabMap

DRAFTER = "drafter"


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
        train.verify_checksums()
        tensors = serving_tensors(train.path("best.safetensors"), table)
        # Drafted tokens by default: as many as training unrolled.
        served = {**sizes, "num_speculative_tokens": config.train.ttt_steps}
        directory = stage.directory / DRAFTER
        if not directory.exists():  # else renamed by a run that stopped before its manifest
            with publishing_directory(directory) as partial:
                config_json = served_config(drafter, wiring, **served)
                write_directory(partial, tensors, config_json, wiring, verifier)
                check_directory(partial, drafter, wiring, **served)

        # Read back as the next stage will, then as the two libraries do.
        found = check_directory(directory, drafter, wiring, **served)
        for name, tensor in tensors.items():
            assert torch.equal(found[name], tensor), name
        check_head(
            directory / WEIGHTS,
            found["lm_head.weight"],
            verifier.lm_head()[vocab_map.target_ids],
        )
        check_loaders(directory, drafter, wiring, found, verifier)

        show_table(table)
        log("wiring", aux_layer_ids=list(wiring.aux_layer_ids), vocab_map=wiring.vocab_map[:12])
        log("vLLM's config code and speculators' loader read the same", tensors=len(found))
        stage.commit(
            files=[f"{DRAFTER}/{WEIGHTS}", f"{DRAFTER}/{CONFIG}"],
            counts={"tensors": len(table), "parameters": num_parameters(table)},
            wiring=wiring,
        )


if __name__ == "__main__":
    run_script(main, __doc__)
