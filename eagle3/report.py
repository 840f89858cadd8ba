"""What 06 measured, as report.json, report.md and pictures; and whether it passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .config import GatesSection
from .errors import ConfigError, GateError
from .files import write_json, write_text
from .pictures import draw_acceptance, draw_speed, draw_training
from .predict import Prediction
from .serve import Lossless, ServedRun

MAIN_SET = "heldout"
_MISSES_PER_POSITION = 8


@dataclass(frozen=True)
class Measured:
    """One prompt set: served with the drafter and without, and predicted on the tokens served."""

    served: ServedRun
    baseline: ServedRun
    predicted: Prediction


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


def build(
    gates: GatesSection,
    sets: dict[str, Measured],
    validation: Prediction,
    lossless: Lossless,
) -> dict[str, Any]:
    """``report.json``.

    Args:
        sets: by name; ``heldout`` is among them.
        validation: replay of 02's validation rows.
    """
    heldout = sets[MAIN_SET]
    served = heldout.served.acceptance
    predicted = heldout.predicted.acceptance
    differences = [
        round(p - s, 4) for p, s in zip(predicted.per_position, served.per_position, strict=True)
    ]
    lengths = {
        name: measured.served.acceptance.acceptance_length for name, measured in sets.items()
    }
    gap = abs(predicted.acceptance_length - lengths[MAIN_SET]) / lengths[MAIN_SET]
    rows = [
        _at_least(f"acceptance_length.{name}", limit, lengths[name])
        for name, limit in gates.min_acceptance_length.items()
    ]
    rows += [
        _at_most("predicted_served_gap", gates.max_predicted_served_gap, gap),
        _at_most(
            "unexplained_differences", gates.max_unexplained_differences, lossless.unexplained
        ),
    ]
    worst = max(range(len(differences)), key=lambda k: abs(differences[k]))
    return {
        "verdict": "pass" if all(row["ok"] for row in rows) else "fail",
        "gates": rows,
        "predicted": {
            "acceptance_length": predicted.acceptance_length,
            "validation": _acceptance(validation),
            **{name: _acceptance(measured.predicted) for name, measured in sets.items()},
        },
        "served": {name: _speed(measured.served) for name, measured in sets.items()},
        "baseline": {name: _speed(measured.baseline) for name, measured in sets.items()},
        "predicted_minus_served_per_position": differences,
        "largest_difference_at_draft_position": worst,
        "lossless": asdict(lossless),
    }


def _acceptance(prediction: Prediction) -> dict[str, Any]:
    return {
        "acceptance_length": prediction.acceptance.acceptance_length,
        "acceptance_per_position": prediction.acceptance.per_position,
        "num_drafts": prediction.acceptance.num_drafts,
    }


def _speed(run: ServedRun) -> dict[str, Any]:
    speed = {
        "tokens_per_s": run.tokens_per_s,
        "num_answers": len(run.answers),
        "num_tokens": run.num_tokens,
        "seconds": run.seconds,
    }
    if run.acceptance is not None:
        speed |= {
            "acceptance_length": run.acceptance.acceptance_length,
            "acceptance_per_position": run.acceptance.per_position,
            "num_drafts": run.acceptance.num_drafts,
        }
    return speed


def _at_least(name: str, limit: float, value: float) -> dict[str, Any]:
    return {"name": f"min_{name}", "limit": limit, "value": value, "ok": value >= limit}


def _at_most(name: str, limit: float, value: float) -> dict[str, Any]:
    return {"name": f"max_{name}", "limit": limit, "value": value, "ok": value <= limit}


def require_pass(report: dict[str, Any], where: Path) -> None:
    """The verdict as an exit code.

    Raises:
        GateError: naming every gate that failed.
    """
    failed = [gate for gate in report["gates"] if not gate["ok"]]
    if failed:
        raise GateError(
            f"the drafter is not good enough: {', '.join(gate['name'] for gate in failed)}",
            where=where,
            expected="; ".join(f"{gate['name']} {gate['limit']:g}" for gate in failed),
            found="; ".join(f"{gate['value']:.4g}" for gate in failed),
            fix="read the report; train better, or change verify.gates and redo 06",
        )


def write(
    directory: Path,
    report: dict[str, Any],
    sets: dict[str, Measured],
    metrics: Path,
    decode: Callable[[list[int]], str],
) -> list[str]:
    """Write the report and its pictures.

    Args:
        metrics: 04's ``metrics.jsonl``; without it there are no training curves.
        decode: token ids -> text.

    Returns:
        The files' names.
    """
    pictures = ["acceptance.png", "speed.png"]
    draw_acceptance(directory / "acceptance.png", report)
    draw_speed(directory / "speed.png", report)
    if metrics.is_file():
        draw_training(directory / "training.png", metrics)
        pictures.append("training.png")
    write_json(directory / "report.json", report)
    write_text(directory / "report.md", _markdown(report, sets, pictures, decode))
    return ["report.json", "report.md", *pictures]


def _markdown(
    report: dict[str, Any],
    sets: dict[str, Measured],
    pictures: list[str],
    decode: Callable[[list[int]], str],
) -> str:
    gates = [
        [row["name"], f"{row['limit']:g}", f"{row['value']:.4g}", "ok" if row["ok"] else "FAILED"]
        for row in report["gates"]
    ]
    rows = []
    for name in sets:
        served, predicted = report["served"][name], report["predicted"][name]
        speed = served["tokens_per_s"], report["baseline"][name]["tokens_per_s"]
        rows.append([name, *(_length(side) for side in (served, predicted)), *_speeds(*speed)])
    validation = _length(report["predicted"]["validation"])
    lossless = report["lossless"]
    differences = report["predicted_minus_served_per_position"]
    lines = [
        f"# {report['verdict'].upper()}",
        "",
        *_table(["gate", "limit", "value", ""], gates),
        "",
        "## Acceptance length (share accepted at each draft position) and tokens/s",
        "",
        *_table(["prompts", "served", "predicted", "drafter", "none", "times"], rows),
        "",
        f"Predicted is an engine-free replay of the very tokens served. On 01's validation rows "
        f"it gives {validation}.",
        "",
        f"Predicted minus served on {MAIN_SET}, by draft position: {differences}; the largest "
        f"difference is at draft position {report['largest_difference_at_draft_position']}.",
        "",
        "## Greedy answers with the drafter and without",
        "",
        f"{lossless['compared']} compared: {lossless['equal']} equal, {lossless['near_ties']} "
        f"part at a near tie of the verifier's logits, {lossless['unexplained']} unexplained.",
        *(f"- {example}" for example in lossless["examples"]),
        "",
        "## Where drafts go wrong most often",
    ]
    for name, measured in sets.items():
        for k in range(len(differences)):
            worst = [
                [repr(decode([drafted])), repr(decode([actual])), str(times)]
                for (at, drafted, actual), times in measured.predicted.misses.most_common()
                if at == k
            ]
            if not worst:
                continue
            title = f"{name}, draft position {k}"
            lines += ["", *_table([title, "the verifier's", "times"], worst[:_MISSES_PER_POSITION])]
    lines += ["", *(f"![{picture}]({picture})" for picture in pictures)]
    return "\n".join(lines) + "\n"


def _length(side: dict[str, Any]) -> str:
    shares = ", ".join(f"{share:.3f}" for share in side["acceptance_per_position"])
    return f"{side['acceptance_length']:.3f} ({shares})"


def _speeds(drafter: float, none: float) -> list[str]:
    return [f"{drafter:.1f}", f"{none:.1f}", f"{drafter / none:.2f}"]


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    cells = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in cells]
