"""The serving benchmark's page: where drafting pays, what it accepts, how many tokens to draft."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from eagle3.gates import MAIN_SET
from eagle3.intervals import Counts, Interval, length_interval, resampled_rates
from eagle3.page import Page, Table
from eagle3.pictures import draw_serving

Row = dict[str, Any]
BY_DRAFTED = "heldout_as_06"  # 06's held-out prompts, with each number of drafted tokens
WITHOUT_SEED = 1  # two runs' stretches are drawn apart


def write_report(directory: Path, results: dict[str, Any]) -> list[str]:
    """Write the page and its picture; the sentences it begins with."""
    speeds = speed_rows(results["rows"])
    lengths = [row for row in results["rows"] if row["drafted_tokens"]]
    lines = [in_words(speeds)]
    picture = directory / "serving.png"
    by_drafted = [row for row in lengths if row["set"] == BY_DRAFTED]
    swept = fastest(speeds)
    draw_serving(picture, swept, by_drafted, results["predicted"])
    page = Page(
        title=f"{results['run']}: served greedily, answers of up to {results['max_new_tokens']} "
        "tokens; 95% intervals, bootstrap over prompts for lengths, over stretches of the run for "
        "speeds",
        verdict="Serving",
        is_good=True,
        lines=lines,
        pictures=[picture],
        tables=[
            _speeds(speeds),
            _predicted(by_drafted, results["predicted"]),
            _lengths(lengths),
        ],
    )
    page.write(directory, "report")
    return lines


def speed_rows(rows: list[Row]) -> list[Row]:
    """A row for each set and concurrency served both with the drafter and without."""
    without = {(row["set"], row["concurrency"]): row for row in rows if not row["drafted_tokens"]}
    found = []
    for row in rows:
        plain = without.get((row["set"], row["concurrency"]))
        if not row["drafted_tokens"] or plain is None:
            continue
        rates = resampled_rates(np.array(row["blocks"]))
        plain_rates = resampled_rates(np.array(plain["blocks"]), WITHOUT_SEED)
        step_s, plain_step_s = median(row["decode_step_s"]), median(plain["decode_step_s"])
        found.append(
            {
                "set": row["set"],
                "concurrency": row["concurrency"],
                "drafted_tokens": row["drafted_tokens"],
                "tokens_per_s_with": row["tokens_per_s"],
                "tokens_per_s_without": plain["tokens_per_s"],
                "times_faster": row["tokens_per_s"] / plain["tokens_per_s"],
                "times_faster_interval": list(Interval.of(rates / plain_rates)),
                "step_s_with": step_s,
                "step_s_without": plain_step_s,
                "break_even_length": step_s / plain_step_s,
                "acceptance_length": row["acceptance_length"],
            }
        )
    return found


def fastest(speeds: list[Row]) -> list[Row]:
    """For each concurrency, the held-out prompts' row of the best number of drafted tokens."""
    found: dict[int, Row] = {}
    for speed in sorted(speeds, key=lambda s: (s["concurrency"], s["times_faster"])):
        if speed["set"] == MAIN_SET:
            found[speed["concurrency"]] = speed
    return list(found.values())


def in_words(speeds: list[Row]) -> str:
    """Up to which concurrency drafting pays on held-out prompts, and what it would take beyond."""
    swept = fastest(speeds)
    paying = [s for s in swept if s["times_faster"] > 1]
    losing = [s for s in swept if s["times_faster"] <= 1]
    said = "; ".join(
        f"{s['times_faster']:.2f} times at concurrency {s['concurrency']} "
        f"({s['drafted_tokens']} drafted tokens)"
        for s in paying
    )
    said = f"drafting pays on {MAIN_SET} prompts: {said}" if paying else "drafting pays nowhere"
    if losing:
        first = losing[0]
        said += (
            f"; it stops paying at concurrency {first['concurrency']} "
            f"({first['times_faster']:.2f} times), where acceptance length "
            f"{first['break_even_length']:.2f} would break even and "
            f"{first['acceptance_length']:.2f} was served"
        )
    return said


def counts(row: Row) -> Counts:
    """Acceptance of a row, prompt by prompt."""
    return Counts(np.array(row["num_drafts"]), np.array(row["accepted"]))


def _speeds(speeds: list[Row]) -> Table:
    return Table(
        "Speed with the drafter and without",
        ["prompts", "concurrency", "drafted tokens", "tokens/s with", "without"]
        + ["times faster", "interval"]
        + ["step s with", "without", "breaks even at", "served length"],
        [
            [s["set"], str(s["concurrency"]), str(s["drafted_tokens"])]
            + [f"{s['tokens_per_s_with']:.1f}", f"{s['tokens_per_s_without']:.1f}"]
            + [f"{s['times_faster']:.2f}", _interval(s["times_faster_interval"], 2)]
            + [f"{s['step_s_with']:.4f}", f"{s['step_s_without']:.4f}"]
            + [f"{s['break_even_length']:.2f}", f"{s['acceptance_length']:.2f}"]
            for s in speeds
        ],
        "Tokens/s count the prefill too; a step is a median decoding step, all requests in it. "
        "Drafting breaks even at the acceptance length that is the ratio of the two steps.",
    )


def _predicted(by_drafted: list[Row], predicted: list[Row]) -> Table:
    rows = []
    for row, expected in zip(by_drafted, predicted, strict=False):  # none before 06
        served, replayed = length_interval(counts(row)), Interval(*expected["interval"])
        assert row["drafted_tokens"] == expected["drafted_tokens"]
        rows.append(
            [str(row["drafted_tokens"]), f"{row['acceptance_length']:.3f}", _interval(served, 3)]
            + [f"{expected['acceptance_length']:.3f}", _interval(replayed, 3)]
            + ["no" if served.distance(replayed) else "yes"]
        )
    return Table(
        "Predicted against served, by drafted tokens",
        ["drafted tokens", "served", "interval", "predicted by 06", "interval", "overlap"],
        rows,
        "06's replay of one run's answers against an engine run for each number of drafted tokens.",
    )


def _lengths(rows: list[Row]) -> Table:
    return Table(
        "Acceptance length",
        ["prompts", "answers", "concurrency", "drafted tokens", "length", "interval"]
        + ["share accepted at each draft position"],
        [
            [row["set"], str(row["num_answers"]), str(row["concurrency"])]
            + [str(row["drafted_tokens"]), f"{row['acceptance_length']:.3f}"]
            + [_interval(length_interval(counts(row)), 3)]
            + [", ".join(f"{share:.3f}" for share in row["acceptance_per_position"])]
            for row in rows
        ],
    )


def _interval(interval: Any, digits: int) -> str:
    low, high = interval
    return f"{low:.{digits}f} to {high:.{digits}f}"
