"""Ask three independent witnesses whether the drafter works: the files, vLLM, and a replay.

reads   05_export/drafter/              the exported drafter
        02_hidden/shard-*.safetensors   states of the validation rows
        01_data/prompts.json            prompt sets, {"heldout": [[id, ...], ...], ...}
writes  06_verify/report.html, .md      verdict, pictures, tables; the HTML is one file
        06_verify/report.json           every number
        06_verify/served_*.json         answers, steps and counters of each set with the drafter
        06_verify/drafts_*.safetensors  what vLLM's drafter drafted on the way
        06_verify/baseline_*.json       answers and steps without the drafter
        06_verify/states_*.safetensors  the verifier's states of the rows served

    python 06_verify.py configs/smollm2_cpu.yaml
    python 06_verify.py configs/smollm2_cpu.yaml --drafter DIR    any EAGLE-3 drafter, beside it

Each prompt set is served greedily with the drafter and then without, the held-out one at
temperature 1 besides; replay drafts for the very tokens served, and predicts what was accepted.
Two engine starts and the answers: minutes. A gate that fails ends with exit code 4, the report
written and the measurements kept. If it stops, run the same command again: finished measurements
are not repeated.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from eagle3.breakdown import token_classes
from eagle3.capture import VerifierHead
from eagle3.config import Config
from eagle3.engine import Sampling
from eagle3.export import DRAFTER
from eagle3.exported import check_export
from eagle3.gates import MAIN_SET, check_gates, require_pass
from eagle3.guest import Guest
from eagle3.lossless import Lossless, compare
from eagle3.measured import put_together
from eagle3.predict import num_validation_answers, predict, validation_answers
from eagle3.preflight import check
from eagle3.published import Published
from eagle3.replay import Replay
from eagle3.report import build
from eagle3.report_page import show, write
from eagle3.rows import TokenRows
from eagle3.script import Invocation, log, run_script
from eagle3.serve import PromptSet, serve_with, serve_without
from eagle3.shard_plan import open_states
from eagle3.stage import Stage
from eagle3.vocab import forced_ids

PAGE = "report.html"
LONGEST_CHAIN = 7


def main(invocation: Invocation) -> None:
    config = invocation.load_config()
    if invocation.check:
        return check(config, "06_verify", invocation)
    if invocation.drafter:
        with Guest(config, invocation, invocation.drafter) as guest:
            report, _ = verify(config, guest.published(), guest, metrics=None)
            return require_pass(report, guest.directory / PAGE, guest.findings)
    with Stage(config, "06_verify", invocation) as stage:
        if stage.done:
            return
        # First witness: the exported files, before anything is started on them.
        export = stage.inputs["05_export"]
        drafter = export.directory / DRAFTER
        check_export(export.directory, config, export.wiring, stage.verifier)
        log("files", drafter=drafter, note="every tensor and key is what the config says")
        published = Published.open(drafter, stage.verifier)
        metrics = config.run_dir / "04_train" / "metrics.jsonl"
        report, files = verify(config, published, stage, metrics)
        require_pass(report, stage.directory / PAGE)
        stage.commit(
            files=files,
            counts={"answers": {name: s["num_answers"] for name, s in report["served"].items()}},
            wiring=export.wiring,
            results={"verdict": report["verdict"], "gates": report["gates"]},
        )


def verify(
    config: Config, published: Published, stage: Stage | Guest, metrics: Path | None
) -> tuple[dict[str, Any], list[str]]:
    """The second and the third witness; the report is written whatever it says.

    Returns:
        The report, and the names of all files.
    """
    verifier, directory = stage.verifier, stage.directory
    data, hidden = stage.inputs["01_data"], stage.inputs["02_hidden"]
    prompts = json.loads(data.path("prompts.json").read_text(encoding="utf-8"))
    prompts = {name: ids[: config.verify.prompts_per_set] for name, ids in prompts.items()}
    check_gates(config.verify.gates, prompts)
    greedy, drawn = (Sampling(t, config.evaluation.max_new_tokens) for t in (0.0, 1.0))
    sets = [PromptSet(name, ids, greedy, directory) for name, ids in prompts.items()]
    sampled = PromptSet(f"{MAIN_SET}_sampled", prompts[MAIN_SET], drawn, directory)
    every = [*sets, sampled]

    # Second witness: vLLM, on the same prompts with the drafter and without.
    head = VerifierHead(verifier, config.verifier.dtype)
    serve_with(config, verifier, published.directory, every)
    serve_without(config, verifier, head, published.aux_layer_ids, every)

    # Third witness: the replay, of the very tokens served and of 02's validation rows.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, config.verifier.dtype)
    replay = Replay(published, verifier.embed_tokens(), dtype, device)
    num_drafted = config.verify.num_speculative_tokens
    measured, lossless = {}, Lossless()
    for each in every:
        # Acceptance is predicted for more drafted tokens than were served, where it costs little.
        is_main = each.prompts is prompts[MAIN_SET]
        length = max(num_drafted, LONGEST_CHAIN) if is_main else num_drafted
        found = put_together(each, replay, head, num_drafted, length)
        measured[each.name] = found
        if each.is_greedy:
            lossless += compare(each, found.served, found.baseline, head)
    validation = None
    if hidden.wiring.aux_layer_ids == published.aux_layer_ids:
        rows = TokenRows.load(data.path("rows.safetensors"))
        shards = open_states(hidden, rows, config, only_validation=True)
        answers, total = validation_answers(shards, rows), num_validation_answers(rows)
        validation = predict("validation", replay, answers, total, num_drafted)
    else:
        log("validation rows are not replayed: 02 captured other layers than this drafter reads")

    forced = forced_ids(verifier, config.vocab.forced_tokens)
    drafted = replay.target_ids.tolist()
    classes = token_classes(verifier.vocab_size, drafted, forced, verifier.end_of_turn_ids)
    decode = verifier.tokenizer.decode
    gates = config.verify.gates
    report = build(gates, measured, validation, lossless, classes, decode)
    title = f"{published.directory}, drafting for {verifier.directory}"
    files = write(directory, title, report, metrics, decode)
    show(report, directory / PAGE)
    return report, [*files, *(path.name for each in every for path in each.paths)]


if __name__ == "__main__":
    run_script(main, __doc__, takes_drafter=True)
