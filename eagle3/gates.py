"""The gates of 06: what they demand, what was found, and where served and predicted part."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .config import GatesSection
from .errors import ConfigError, GateError
from .intervals import length_interval
from .lossless import Lossless
from .measured import Measured

MAIN_SET = "heldout"
# Share of vLLM's drafts that may differ from the replay's by more than rounding explains. A good
# drafter's do so hardly ever (docs/serving.md); served with a norm left out, 3% do, with another
# RoPE theta 8%, while the acceptance length is the same.
_MAX_DIFFERING_DRAFTS = 0.02
# Gates that fail where vLLM serves another drafter than the replay reads.
_OF_TWO_DRAFTERS = ("predicted", "interval", "differing")
_SERVED_AS_IT_IS = (
    "vLLM's drafts are the replay's, so these files are served as they are: the drafter is poor, "
    "or was trained on something else than is served (layers, alignment, vocabulary, template, "
    "verifier)"
)


def check_gates(gates: GatesSection, set_names: Iterable[str]) -> None:
    """Refuse a gate on a prompt set that is not measured: it could never fail.

    Raises:
        ConfigError: naming the set.
    """
    for name in gates.min_acceptance_length:
        if name not in set_names:
            raise ConfigError(
                "a gate is set on prompts that are not measured",
                where=f"verify.gates.min_acceptance_length.{name}",
                expected=f"one of {', '.join(set_names)}",
                found=name,
                fix="correct the name, or add the set to evaluation.prompt_sets and redo 01",
            )


def gate_rows(
    gates: GatesSection,
    sets: dict[str, Measured],
    lossless: Lossless,
) -> list[dict[str, Any]]:
    """Every gate with its limit, its value, and whether it is met."""
    served = {name: m.served.acceptance.acceptance_length for name, m in sets.items()}
    heldout = sets[MAIN_SET]
    gap = abs(heldout.matched.acceptance_length - served[MAIN_SET]) / served[MAIN_SET]
    rows = [
        _at_least(f"acceptance_length.{name}", limit, served[name])
        for name, limit in gates.min_acceptance_length.items()
    ]
    rows.append(_at_most("predicted_served_gap", gates.max_predicted_served_gap, gap))
    for name, measured in sets.items():
        intervals = length_interval(measured.expected), length_interval(measured.recorded)
        distance = intervals[0].distance(intervals[1])
        rows.append(_at_most(f"distance_of_intervals.{name}", 0, distance))
    compared = sum(int(m.agreement.compared.sum()) for m in sets.values())
    agreed = sum(int(m.agreement.equal.sum() + m.agreement.near_ties.sum()) for m in sets.values())
    differing = 1 - agreed / max(compared, 1)
    rows.append(_at_most("differing_drafts", _MAX_DIFFERING_DRAFTS, differing))
    # The recorder sees every draft vLLM counts, or what it says of single prompts is not the run.
    unrecorded = sum(
        abs(m.served.acceptance.num_drafts - m.recorded.num_drafts.sum())
        + abs(sum(m.served.acceptance.accepted_per_position) - m.recorded.accepted.sum())
        for m in sets.values()
    )
    rows.append(_at_most("unrecorded_drafts", 0, float(unrecorded)))
    limit = gates.max_unexplained_differences
    rows.append(_at_most("unexplained_differences", limit, lossless.unexplained))
    return rows


def _at_least(name: str, limit: float, value: float) -> dict[str, Any]:
    return {"name": f"min_{name}", "limit": limit, "value": value, "ok": value >= limit}


def _at_most(name: str, limit: float, value: float) -> dict[str, Any]:
    return {"name": f"max_{name}", "limit": limit, "value": value, "ok": value <= limit}


def where_they_part(name: str, apart: dict[str, Any]) -> str:
    """One sentence: the position of the chain, the answers, and the first draft that differs."""
    largest = apart["largest_at_draft_position"]
    said = (
        f"{name}: predicted minus served {apart['predicted_minus_served']:+.3f}, most of it at "
        f"draft position {largest} ({apart['per_position'][largest]:+.3f})"
    )
    answers = [str(answer["prompt"]) for answer in apart["answers"]]
    if answers:
        said += f", in the answers to prompts {', '.join(answers)}"
    drafts = apart["drafts"]
    first = drafts["first"]
    if first is None:
        return f"{said}; no draft of vLLM's differs from the replay's"
    counts = zip(drafts["compared"], drafts["equal"], strict=True)
    shares = ", ".join(f"{compared - equal} of {compared}" for compared, equal in counts)
    said += f"; by draft position {shares} drafts differ from the replay's"
    kind = "the first draft, within rounding," if first["is_near_tie"] else "the first draft"
    return (
        f"{said}; {kind} that differs is of prompt {first['prompt']} at token "
        f"{first['token_position']}, draft position {first['draft_position']}: vLLM drafted "
        f"{first['drafted'][0]}, the replay {first['drafted'][1]}"
    )


def require_pass(report: dict[str, Any], where: Path, findings: Iterable[Any] = ()) -> None:
    """The verdict as an exit code.

    Args:
        findings: what was odd about the drafter's files (``Guest.findings``).

    Raises:
        GateError: naming every gate that failed, and where served and predicted part.
    """
    failed = [gate for gate in report["gates"] if not gate["ok"]]
    if not failed:
        return
    said = ["; ".join(f"{gate['value']:.4g}" for gate in failed)]
    if any(word in gate["name"] for gate in failed for word in _OF_TWO_DRAFTERS):
        said.append(where_they_part(MAIN_SET, report["apart"][MAIN_SET]))
    elif any("acceptance_length" in gate["name"] for gate in failed):
        said.append(_SERVED_AS_IT_IS)
    said += [f"of its files: {finding}" for finding in findings]
    raise GateError(
        f"the drafter is not good enough: {', '.join(gate['name'] for gate in failed)}",
        where=where,
        expected="; ".join(f"{gate['name']} {gate['limit']:g}" for gate in failed),
        found=". ".join(said),
        fix="read the report; train better, or change verify.gates and redo 06",
    )
