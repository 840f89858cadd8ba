"""What 06 measured, as ``report.json``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np

from .breakdown import by_context, by_source, by_token_class, disagreements
from .config import GatesSection
from .gates import MAIN_SET, gate_rows
from .intervals import Counts, difference_interval, length_interval
from .lossless import Lossless
from .measured import Measured
from .predict import Prediction
from .serve import ServedRun
from .step_times import break_even

_MISSES_PER_POSITION = 8
_ANSWERS_SHOWN = 5


def build(
    gates: GatesSection,
    sets: dict[str, Measured],
    validation: Prediction | None,
    lossless: Lossless,
    classes: np.ndarray,
    decode: Callable[[list[int]], str],
) -> dict[str, Any]:
    """``report.json``.

    Args:
        sets: by name; ``heldout`` is among them.
        validation: replay of 02's validation rows, if they were captured for this drafter.
        classes: the kind of every token, from ``breakdown.token_classes``.
        decode: token ids -> text.
    """
    rows = gate_rows(gates, sets, lossless)
    greedy = {name: measured for name, measured in sets.items() if measured.baseline}
    sampled = {name: measured for name, measured in sets.items() if not measured.baseline}
    predictions = {name: m.predicted.first(m.num_drafted) for name, m in greedy.items()}
    if validation is not None:
        predictions = {"validation": validation, **predictions}
    heldout = sets[MAIN_SET]
    return {
        "verdict": "pass" if all(row["ok"] for row in rows) else "fail",
        "gates": rows,
        "predicted": {
            "acceptance_length": heldout.matched.acceptance_length,
            **{name: _acceptance(measured.matched) for name, measured in greedy.items()},
            **({"validation": _acceptance(validation.counts)} if validation is not None else {}),
        },
        "served": {name: _speed(measured.served, measured) for name, measured in greedy.items()},
        "baseline": {name: _speed(measured.baseline) for name, measured in greedy.items()},
        "sampled": {
            name: {
                "served": _speed(measured.served, measured),
                "predicted": _acceptance(measured.expected),
                "matched": _acceptance(measured.matched),
            }
            for name, measured in sampled.items()
        },
        "apart": {name: _apart(measured) for name, measured in sets.items()},
        "acceptance_length_by_drafted_tokens": {
            name: _by_drafted_tokens(measured) for name, measured in sets.items()
        },
        "steps": {
            name: break_even(
                measured.served.steps,
                measured.baseline.steps,
                measured.served.acceptance.acceptance_length,
            )
            for name, measured in greedy.items()
        },
        "breakdown": {
            name: {
                "source": by_source(prediction),
                "context": by_context(prediction),
                "token_class": by_token_class(prediction, classes),
                "disagreements": disagreements(prediction, _MISSES_PER_POSITION, decode),
            }
            for name, prediction in predictions.items()
        },
        "lossless": asdict(lossless),
    }


def _acceptance(counts: Counts) -> dict[str, Any]:
    return {
        "acceptance_length": counts.acceptance_length,
        "interval": list(length_interval(counts)),
        "acceptance_per_position": counts.per_position,
        "num_drafts": int(counts.num_drafts.sum()),
    }


def _speed(run: ServedRun, measured: Measured | None = None) -> dict[str, Any]:
    speed = {
        "tokens_per_s": run.tokens_per_s,
        "num_answers": len(run.answers),
        "num_tokens": run.num_tokens,
        "seconds": run.seconds,
    }
    if measured is not None:
        speed |= {
            "acceptance_length": run.acceptance.acceptance_length,
            "interval": list(length_interval(measured.recorded)),
            "acceptance_per_position": run.acceptance.per_position,
            "num_drafts": run.acceptance.num_drafts,
        }
    return speed


def _by_drafted_tokens(measured: Measured) -> list[dict[str, Any]]:
    """Acceptance length predicted for every number of drafted tokens up to the chain replayed."""
    rows = []
    for num_drafted in range(1, measured.predicted.drafts.shape[1] + 1):
        prediction = measured.predicted.first(num_drafted)
        counts = prediction.counts if prediction.probabilities is None else prediction.expected
        row = {"drafted_tokens": num_drafted, "acceptance_length": counts.acceptance_length}
        rows.append({**row, "interval": list(length_interval(counts))})
    return rows


def _apart(measured: Measured) -> dict[str, Any]:
    """Where served and replayed part: at which position, in which answers, at which draft."""
    matched, recorded, agreement = measured.matched, measured.recorded, measured.agreement
    shares = zip(matched.per_position, recorded.per_position, strict=True)
    differences = [round(p - s, 4) for p, s in shares]
    by_answer = (matched.accepted - recorded.accepted).sum(1)
    worst = np.argsort(-np.abs(by_answer), kind="stable")[:_ANSWERS_SHOWN]
    return {
        "predicted_minus_served": matched.acceptance_length - recorded.acceptance_length,
        "interval": list(difference_interval(matched, recorded)),
        "per_position": differences,
        "largest_at_draft_position": int(np.argmax(np.abs(differences))),
        "answers": [
            {"prompt": int(i), "accepted_predicted_minus_served": int(by_answer[i])}
            for i in worst
            if by_answer[i]
        ],
        "drafts": {
            "compared": agreement.compared.tolist(),
            "equal": agreement.equal.tolist(),
            "near_ties": agreement.near_ties.tolist(),
            "answers": dict(list(agreement.differing_answers.items())[:_ANSWERS_SHOWN]),
            "first": agreement.first,
        },
    }
