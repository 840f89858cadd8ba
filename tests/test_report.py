"""Gates decide as they say, and the report holds every number."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from eagle3.acceptance import Acceptance
from eagle3.config import GatesSection
from eagle3.errors import ConfigError, GateError
from eagle3.predict import Prediction
from eagle3.report import Measured, build, check_gates, require_pass, write
from eagle3.serve import Lossless, ServedRun


def gates(length: float = 1.5, gap: float = 0.03, unexplained: int = 0) -> GatesSection:
    return GatesSection(
        min_acceptance_length={"heldout": length, "mt_bench": 1.2},
        max_predicted_served_gap=gap,
        max_unexplained_differences=unexplained,
    )


def measured(served: Acceptance, predicted: Acceptance) -> Measured:
    answers = ((1, 2, 3), (4, 5))
    misses = Counter({(0, 7, 8): 3, (1, 9, 8): 1})
    return Measured(
        ServedRun(answers, 2.0, served),
        ServedRun(answers, 4.0, None),
        Prediction(predicted, misses),
    )


VALIDATION = Prediction(Acceptance(10, (5, 1)))
SETS = {
    "heldout": measured(Acceptance(100, (40, 20)), Acceptance(100, (40, 22))),  # 1.60, 1.62
    "mt_bench": measured(Acceptance(100, (20, 5)), Acceptance(100, (20, 5))),  # 1.25
}
LOSSLESS = Lossless(compared=4, equal=3, near_ties=1)


def test_report_holds_every_number():
    report = build(gates(), SETS, VALIDATION, LOSSLESS)
    assert report["verdict"] == "pass"
    assert report["predicted"]["acceptance_length"] == pytest.approx(1.62)
    assert report["predicted"]["validation"]["acceptance_length"] == pytest.approx(1.6)
    assert report["predicted"]["mt_bench"]["acceptance_per_position"] == [0.2, 0.05]
    assert report["served"]["heldout"]["acceptance_length"] == pytest.approx(1.6)
    assert report["served"]["heldout"]["acceptance_per_position"] == [0.4, 0.2]
    assert report["served"]["heldout"]["tokens_per_s"] == 2.5
    assert report["baseline"]["heldout"]["tokens_per_s"] == 1.25
    assert report["predicted_minus_served_per_position"] == [0.0, 0.02]
    assert report["largest_difference_at_draft_position"] == 1
    assert {key: value for key, value in report["lossless"].items() if key != "examples"} == {
        "compared": 4,
        "equal": 3,
        "near_ties": 1,
        "unexplained": 0,
    }


@pytest.mark.parametrize(
    ("limits", "lossless", "failing"),
    [
        (gates(length=1.6), LOSSLESS, []),  # a limit met exactly is met
        (gates(length=1.601), LOSSLESS, ["min_acceptance_length.heldout"]),
        (gates(gap=0.0126), LOSSLESS, []),
        (gates(gap=0.0124), LOSSLESS, ["max_predicted_served_gap"]),
        (gates(), Lossless(4, 3, 0, 1), ["max_unexplained_differences"]),
        (gates(unexplained=1), Lossless(4, 3, 0, 1), []),
        (
            gates(length=2.0, gap=0.0),
            LOSSLESS,
            ["min_acceptance_length.heldout", "max_predicted_served_gap"],
        ),
    ],
)
def test_gates(tmp_path, limits, lossless, failing):
    report = build(limits, SETS, VALIDATION, lossless)
    assert [gate["name"] for gate in report["gates"] if not gate["ok"]] == failing
    assert report["verdict"] == ("fail" if failing else "pass")
    if not failing:
        require_pass(report, tmp_path)
        return
    with pytest.raises(GateError) as failed:
        require_pass(report, tmp_path)
    assert failed.value.exit_code == 4
    assert all(name in failed.value.what for name in failing)


def test_gap_counts_in_both_directions():
    """A drafter served better than predicted is as wrong: the two are not the same drafter."""
    sets = {
        **SETS,
        "heldout": measured(Acceptance(100, (40, 20)), Acceptance(100, (30, 20))),
    }
    report = build(gates(), sets, VALIDATION, LOSSLESS)
    assert [g["name"] for g in report["gates"] if not g["ok"]] == ["max_predicted_served_gap"]
    assert report["largest_difference_at_draft_position"] == 0


def test_gate_on_a_set_nobody_measures_is_refused():
    check_gates(gates(), {"heldout": [], "mt_bench": []})
    with pytest.raises(ConfigError, match="mt_bench"):
        check_gates(gates(), {"heldout": []})


def test_files(tmp_path):
    report = build(gates(length=9.0), SETS, VALIDATION, LOSSLESS)
    metrics = tmp_path / "metrics.jsonl"
    without = write(tmp_path, report, SETS, metrics, lambda ids: f"<{ids[0]}>|")
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
    names = write(tmp_path, report, SETS, metrics, lambda ids: f"<{ids[0]}>|")
    assert set(names) - set(without) == {"training.png"}
    for name in names:
        assert (tmp_path / name).stat().st_size > 0
        if name.endswith(".png"):
            assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# FAIL\n")
    assert "| min_acceptance_length.heldout | 9 | 1.6 | FAILED |" in text
    assert "| heldout | 1.600 (0.400, 0.200) | 1.620 (0.400, 0.220) | 2.5 | 1.2 | 2.00 |" in text
    assert "| '<7>\\|' | '<8>\\|' | 3 |" in text  # a pipe in a token does not break the table
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == "fail"
