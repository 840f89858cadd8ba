"""Gates decide as they say, and the report holds every number."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from predictions import made_up, random_matches

from eagle3.acceptance import Acceptance
from eagle3.agreement import Agreement
from eagle3.breakdown import token_classes
from eagle3.config import GatesSection
from eagle3.engine import Step
from eagle3.errors import ConfigError, GateError
from eagle3.gates import check_gates, require_pass
from eagle3.intervals import Counts
from eagle3.lossless import Lossless
from eagle3.measured import Measured
from eagle3.report import build
from eagle3.report_page import write
from eagle3.serve import ServedRun

NUM_DRAFTED, NUM_REPLAYED = 2, 4
FIRST = {
    "set": "heldout",
    "prompt": 7,
    "token_position": 12,
    "draft_position": 1,
    "is_near_tie": False,
    "context": [5, 6],
    "drafted_before": [3],
    "drafted": [8, 9],
    "vllm": [[8, 2.5], [9, 2.0]],
    "replay": [[9, 2.25], [8, 1.0]],
}


def gates(length: float = 1.2, gap: float = 0.03, unexplained: int = 0) -> GatesSection:
    return GatesSection(
        min_acceptance_length={"heldout": length, "mt_bench": 1.2},
        max_predicted_served_gap=gap,
        max_unexplained_differences=unexplained,
    )


def measured(seed: int, served: Counts | None = None, first: Any = None) -> Measured:
    """Answers as replayed; served with the same acceptance, or with another."""
    predicted = made_up(random_matches(seed, 30, NUM_REPLAYED))
    served = served or predicted.first(NUM_DRAFTED).counts
    counted = Acceptance(
        int(served.num_drafts.sum()), tuple(int(n) for n in served.accepted.sum(0))
    )
    answers = tuple(tuple(row[2:].tolist()) for row in predicted.tokens)
    steps = tuple(Step(4, False, 4, 0.03) for _ in range(9))
    none = np.zeros(NUM_DRAFTED, dtype=int)
    return Measured(
        served=ServedRun(answers, 2.0, counted, steps),
        recorded=served,
        baseline=ServedRun(answers, 4.0, None, tuple(replace(s, seconds=0.02) for s in steps)),
        predicted=predicted,
        agreement=Agreement(none + 50, none + 44, none + 6, {7: 4} if first else {}, first),
    )


def halved(counts: Counts) -> Counts:
    return Counts(counts.num_drafts, np.floor(counts.accepted / 2))


def sampled(seed: int) -> Measured:
    greedy = measured(seed)
    matches = greedy.predicted.matches
    chances = np.where(matches, 0.8, 0.3).astype(np.float32)
    return replace(
        greedy, baseline=None, predicted=replace(greedy.predicted, probabilities=chances)
    )


VALIDATION = made_up(random_matches(9, 10, NUM_DRAFTED))
SETS = {"heldout": measured(1), "mt_bench": measured(2), "heldout_sampled": sampled(3)}
PARTED = {
    "set": "heldout",
    "prompt": 3,
    "answer_position": 5,
    "tokens": [7, 8],
    "below_top_logit": [0.0, 0.0312],
    "top_logit": 14.25,
    "is_near_tie": True,
}
LOSSLESS = Lossless(compared=4, equal=3, near_ties=1, differences=(PARTED,))
CLASSES = token_classes(200, range(120), forced_ids=[], end_of_turn_ids=[103])


def decode(ids: list[int]) -> str:
    return " ".join(f"<{i}>|" for i in ids)


def report_of(limits: GatesSection, sets=SETS, lossless=LOSSLESS, validation=VALIDATION):
    return build(limits, sets, validation, lossless, CLASSES, decode)


def test_report_holds_every_number():
    report = report_of(gates())
    assert report["verdict"] == "pass"
    heldout = SETS["heldout"].recorded
    served, predicted = report["served"]["heldout"], report["predicted"]["heldout"]
    assert served["acceptance_length"] == pytest.approx(heldout.acceptance_length)
    assert served["acceptance_per_position"] == pytest.approx(heldout.per_position)
    assert predicted["acceptance_length"] == report["predicted"]["acceptance_length"]
    assert predicted["acceptance_length"] == served["acceptance_length"]
    for side in (served, predicted):
        assert side["interval"][0] < side["acceptance_length"] < side["interval"][1]
    validation = report["predicted"]["validation"]
    assert validation["acceptance_length"] == pytest.approx(VALIDATION.counts.acceptance_length)
    num_tokens = SETS["heldout"].served.num_tokens
    assert served["tokens_per_s"] == num_tokens / 2
    assert report["baseline"]["heldout"]["tokens_per_s"] == num_tokens / 4
    assert list(report["served"]) == list(report["baseline"]) == ["heldout", "mt_bench"]
    drawn = report["sampled"]["heldout_sampled"]
    assert drawn["matched"]["acceptance_length"] == drawn["served"]["acceptance_length"]
    assert drawn["predicted"]["acceptance_length"] != drawn["served"]["acceptance_length"]
    lengths = report["acceptance_length_by_drafted_tokens"]["heldout"]
    assert [row["drafted_tokens"] for row in lengths] == [1, 2, 3, 4]
    assert lengths[1]["acceptance_length"] == served["acceptance_length"]
    values = [row["acceptance_length"] for row in lengths]
    assert values == sorted(values)
    (step,) = report["steps"]["heldout"]
    assert step["concurrency"] == 4 and step["break_even_length"] == pytest.approx(1.5)
    assert set(report["breakdown"]) == {"validation", "heldout", "mt_bench"}
    assert report["lossless"]["differences"] == (PARTED,)
    assert json.loads(json.dumps(report))  # nothing of numpy's in it


def test_a_drafter_of_other_layers_has_no_validation_rows():
    report = report_of(gates(), validation=None)
    assert "validation" not in report["predicted"] and "validation" not in report["breakdown"]


FAR = "max_distance_of_intervals.heldout"
LENGTH = SETS["heldout"].recorded.acceptance_length


@pytest.mark.parametrize(
    ("limits", "lossless", "failing"),
    [
        (gates(length=LENGTH), LOSSLESS, []),  # a limit met exactly is met
        (gates(length=LENGTH + 0.001), LOSSLESS, ["min_acceptance_length.heldout"]),
        (gates(gap=0), LOSSLESS, []),
        (gates(), Lossless(4, 3, 0, 1), ["max_unexplained_differences"]),
        (gates(unexplained=1), Lossless(4, 3, 0, 1), []),
        (
            gates(length=9.0),
            Lossless(4, 3, 0, 1),
            ["min_acceptance_length.heldout", "max_unexplained_differences"],
        ),
    ],
)
def test_gates(tmp_path, limits, lossless, failing):
    report = report_of(limits, lossless=lossless)
    assert [gate["name"] for gate in report["gates"] if not gate["ok"]] == failing
    assert report["verdict"] == ("fail" if failing else "pass")
    if not failing:
        require_pass(report, tmp_path)
        return
    with pytest.raises(GateError) as failed:
        require_pass(report, tmp_path)
    assert failed.value.exit_code == 4
    assert all(name in failed.value.what for name in failing)


def test_served_otherwise_than_predicted_fails_and_says_where(tmp_path):
    other = halved(SETS["heldout"].recorded)
    sets = {**SETS, "heldout": measured(1, other, FIRST)}
    report = report_of(gates(length=1.0), sets)
    failing = [gate["name"] for gate in report["gates"] if not gate["ok"]]
    assert failing == ["max_predicted_served_gap", FAR]
    apart = report["apart"]["heldout"]
    assert apart["largest_at_draft_position"] == int(np.argmax(apart["per_position"]))
    assert apart["interval"][0] > 0
    by_prompt = SETS["heldout"].recorded.accepted.sum(1) - other.accepted.sum(1)
    assert [a["accepted_predicted_minus_served"] for a in apart["answers"]] == sorted(
        by_prompt.astype(int), reverse=True
    )[:5]
    with pytest.raises(GateError) as failed:
        require_pass(report, tmp_path)
    place = "prompt 7 at token 12, draft position 1: vLLM drafted 8, the replay 9"
    assert place in failed.value.found
    assert f"draft position {apart['largest_at_draft_position']}" in failed.value.found


def test_gap_counts_in_both_directions():
    """A drafter served better than predicted is as wrong: the two are not the same drafter."""
    counts = SETS["heldout"].recorded
    better = Counts(
        counts.num_drafts, np.minimum(counts.accepted * 1.5, counts.num_drafts[:, None])
    )
    report = report_of(gates(), {**SETS, "heldout": measured(1, better)})
    failing = [gate["name"] for gate in report["gates"] if not gate["ok"]]
    assert "max_predicted_served_gap" in failing
    assert report["apart"]["heldout"]["predicted_minus_served"] < 0


def test_sampled_answers_are_gated_by_what_was_expected_of_them():
    """The very tokens served were accepted as they were drawn: only the verifier's probabilities
    show that too many were."""
    lucky = SETS["heldout_sampled"]
    none = np.zeros(lucky.predicted.drafts.shape, dtype=np.float32)
    lucky = replace(lucky, predicted=replace(lucky.predicted, probabilities=none))
    report = report_of(gates(), {**SETS, "heldout_sampled": lucky})
    failing = [gate["name"] for gate in report["gates"] if not gate["ok"]]
    assert failing == ["max_distance_of_intervals.heldout_sampled"]


def test_drafts_that_were_not_recorded_fail(tmp_path):
    heldout = SETS["heldout"]
    counted = heldout.served.acceptance
    more = replace(counted, num_drafts=counted.num_drafts + 1)
    sets = {**SETS, "heldout": replace(heldout, served=replace(heldout.served, acceptance=more))}
    report = report_of(gates(), sets)
    assert [g["name"] for g in report["gates"] if not g["ok"]] == ["max_unrecorded_drafts"]


def test_gate_on_a_set_nobody_measures_is_refused():
    check_gates(gates(), {"heldout": [], "mt_bench": []})
    with pytest.raises(ConfigError, match="mt_bench"):
        check_gates(gates(), {"heldout": []})


def test_files(tmp_path):
    sets = {**SETS, "heldout": measured(1, None, FIRST)}
    report = report_of(gates(length=9.0), sets)
    metrics = tmp_path / "metrics.jsonl"
    without = write(tmp_path, "a title", report, metrics, decode)
    lines = [
        {
            "kind": "train",
            "step": step,
            "tokens": 100 * step,
            "loss": 2.0,
            "loss_per_ttt_step": [1.0, 1.0],
            "learning_rate": 1e-3,
        }
        for step in (1, 2)
    ]
    lines.append(
        {
            "kind": "validation",
            "step": 2,
            "tokens": 200,
            "acceptance_length": 1.4,
            "accuracy_per_position": [0.3, 0.1],
        }
    )
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    names = write(tmp_path, "a title", report, metrics, decode)
    assert set(names) - set(without) == {"training.png"}
    assert set(write(tmp_path, "a title", report, None, decode)) == set(without)
    for name in names:
        assert (tmp_path / name).stat().st_size > 0
        if name.endswith(".png"):
            assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# FAIL\n")
    value = f"{LENGTH:.4g}"
    assert f"| min_acceptance_length.heldout | 9 | {value} | FAILED |" in text
    assert "| heldout | 3 | 5 | 0, 0.0312 | 14.25 | near tie |" in text
    assert "'<1>\\|'" in text  # a pipe in a token does not break the table
    assert "| '<5>\\| <6>\\| <3>\\|' | vllm | '<8>\\|' 2.5, '<9>\\|' 2 |" in text
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == "fail"
