"""Ask three independent witnesses whether the drafter works: the files, a replay, and vLLM itself.

reads   05_export/drafter/            the exported drafter
        02_hidden/shard-*.safetensors states of the validation rows
        01_data/prompts.json          prompt sets, {"heldout": [[id, ...], ...], ...}
writes  06_verify/report.json         verdict, gates, every number
        06_verify/report.md           the same to read, with pictures
        06_verify/served_*.json       answers, seconds and counters of each set with the drafter
        06_verify/baseline_*.json     the same without
        06_verify/states_*.safetensors  the verifier's states of the rows served

    python 06_verify.py configs/smollm2_cpu.yaml

Each prompt set is served greedily with the drafter and then without; replay predicts the
acceptance on the very tokens served. Two engine starts and the answers: minutes. A gate of
verify.gates that fails ends with exit code 4, the report written and the measurements kept. If it
stops, run the same command again: finished measurements are not repeated.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from eagle3.capture import VerifierHead
from eagle3.engine import Engine
from eagle3.export import DRAFTER
from eagle3.exported import check_export
from eagle3.predict import num_validation_answers, predict, served_answers, validation_answers
from eagle3.replay import Replay
from eagle3.report import Measured, build, check_gates, require_pass, write
from eagle3.preflight import check
from eagle3.rows import TokenRows
from eagle3.script import Invocation, log, run_script, stop_flag
from eagle3.serve import Lossless, ServedRun, capture_served, compare, missing, serve_sets
from eagle3.shard_plan import open_shards, plan_shards
from eagle3.shards import Shard
from eagle3.stage import Stage


def main(invocation: Invocation) -> None:
    config = invocation.load_config()
    if invocation.check:
        return check(config, "06_verify", invocation)
    with Stage(config, "06_verify", invocation) as stage:
        if stage.done:
            return
        verifier, directory = stage.verifier, stage.directory
        data, hidden, export = stage.inputs.values()
        prompts = json.loads(data.path("prompts.json").read_text(encoding="utf-8"))
        check_gates(config.verify.gates, prompts)

        # First witness: the exported files, before anything is started on them.
        drafter = export.directory / DRAFTER
        check_export(export.directory, config, export.wiring, verifier)
        log("files", drafter=drafter, note="every tensor and key is what the config says")
        # Second witness: vLLM, on the same prompts with the drafter and without.
        num_drafted = config.verify.num_speculative_tokens
        concurrency = config.verify.concurrency
        max_new_tokens = config.evaluation.max_new_tokens
        served_paths, baseline_paths, state_paths = (
            {name: directory / f"{kind}_{name}.json" for name in prompts}
            for kind in ("served", "baseline", "states")
        )
        if missing(served_paths):
            engine = Engine(
                config,
                verifier,
                drafter=drafter,
                num_speculative_tokens=num_drafted,
                max_num_seqs=concurrency,
            )
            serve_sets(engine, prompts, served_paths, max_new_tokens, num_drafted)
            engine.close()
        served = {name: ServedRun.load(path) for name, path in served_paths.items()}
        head = VerifierHead(verifier, config.verifier.dtype)
        shard_paths = {name: path.with_suffix(".safetensors") for name, path in state_paths.items()}
        if missing(baseline_paths) or missing(state_paths):
            engine = Engine(config, verifier, max_num_seqs=concurrency)
            serve_sets(engine, prompts, baseline_paths, max_new_tokens, 0)
            for name in missing(state_paths):
                stop_flag.raise_if_set()
                rows = prompts[name], served[name].answers
                capture_served(engine, export.wiring, head, *rows, shard_paths[name], num_drafted)
            engine.close()
        baseline = {name: ServedRun.load(path) for name, path in baseline_paths.items()}

        # Third witness: the replay, of 02's validation rows and of the very tokens served.
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = getattr(torch, config.verifier.dtype)
        replay = Replay(drafter, verifier.embed_tokens(), dtype, device)
        rows = TokenRows.load(data.path("rows.safetensors"))
        plan = [s for s in plan_shards(rows, config, hidden.wiring) if s.round_index is None]
        answers = validation_answers(open_shards(hidden, plan), rows)
        total = num_validation_answers(rows)
        validation = predict("validation", replay, answers, total, num_drafted)
        lossless, sets = Lossless(), {}
        for name, ids in prompts.items():
            states = Shard.open(shard_paths[name])
            answers = served_answers(states, ids, served[name].answers)
            predicted = predict(name, replay, answers, len(ids), num_drafted)
            sets[name] = Measured(served[name], baseline[name], predicted)
            lossless += compare(name, ids, served[name], baseline[name], states, head)

        # The verdict. The report stands whatever it says; only a pass is committed.
        report = build(config.verify.gates, sets, validation, lossless)
        metrics = config.run_dir / "04_train" / "metrics.jsonl"
        files = write(directory, report, sets, metrics, verifier.tokenizer.decode)
        show(report, directory)
        require_pass(report, directory / "report.md")
        kinds = (served_paths, baseline_paths, state_paths, shard_paths)
        measured = [path.name for kind in kinds for path in kind.values()]
        stage.commit(
            files=[*files, *measured],
            counts={"answers": {name: len(ids) for name, ids in prompts.items()}},
            wiring=export.wiring,
            results={"verdict": report["verdict"], "gates": report["gates"]},
        )


def show(report: dict[str, Any], directory: Path) -> None:
    """What an operator should look at."""
    for name, served in report["served"].items():
        log(
            name,
            served=served["acceptance_length"],
            predicted=report["predicted"][name]["acceptance_length"],
            tokens_per_s=served["tokens_per_s"],
            without=report["baseline"][name]["tokens_per_s"],
        )
    lossless = {key: value for key, value in report["lossless"].items() if key != "examples"}
    log("greedy answers with and without the drafter", **lossless)
    for gate in report["gates"]:
        log(gate["name"], **{key: gate[key] for key in ("value", "limit", "ok")})
    log("report", path=directory / "report.md")


if __name__ == "__main__":
    run_script(main, __doc__)
