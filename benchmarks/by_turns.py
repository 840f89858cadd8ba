"""Served with the drafter and without it by turns: a speed that a noisy machine cannot fake.

    python -m benchmarks.by_turns configs/smollm2_cpu.yaml

The held-out prompts at concurrency 1, greedy, answers as long as in 06, with 2 drafted tokens;
three times each, in turn, each in an engine of its own. ``benchmarks.serving`` measures both once,
minutes apart. About five minutes on two cores; prints each turn and the ratio of the whole.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from eagle3.artifact import open_artifact
from eagle3.engine import Engine, Sampling
from eagle3.export import DRAFTER
from eagle3.fingerprint import open_verifier
from eagle3.gates import MAIN_SET
from eagle3.script import Invocation, log, run_script
from eagle3.serve import PromptSet, serve

NUM_TURNS = 3
NUM_PROMPTS = 24
NUM_DRAFTED = 2  # what pays most on two cores (docs/serving.md)


def main(invocation: Invocation) -> None:
    config = invocation.load_config()
    log.stage = "by_turns"
    verifier = open_verifier(config.verifier)
    drafter = open_artifact(config, "05_export", invocation).directory / DRAFTER
    prompts = open_artifact(config, "01_data", invocation).path("prompts.json")
    held_out = json.loads(prompts.read_text(encoding="utf-8"))[MAIN_SET][:NUM_PROMPTS]
    sampling = Sampling(0, config.evaluation.max_new_tokens)
    total_s = {True: 0.0, False: 0.0}
    for turn in range(NUM_TURNS):
        for with_drafter in (False, True):
            engine = Engine(
                config,
                verifier,
                drafter=drafter if with_drafter else None,
                num_speculative_tokens=NUM_DRAFTED if with_drafter else 0,
                max_num_seqs=1,
            )
            with tempfile.TemporaryDirectory() as scratch:
                prompt_set = PromptSet(MAIN_SET, held_out, sampling, Path(scratch))
                run = serve(engine, prompt_set, 1, 0)  # drafts not recorded: that costs time
            engine.close()
            seconds = sum(step.seconds for step in run.steps)
            total_s[with_drafter] += seconds
            log("turn", turn=turn, with_drafter=with_drafter, seconds=round(seconds, 1))
    log("times faster", ratio=round(total_s[False] / total_s[True], 3))


if __name__ == "__main__":
    run_script(main, __doc__)
