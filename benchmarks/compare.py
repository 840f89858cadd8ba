"""Two results of the serving benchmark side by side, with intervals.

    python -m benchmarks.compare runs/a/bench/results.json runs/b/bench/results.json

Prints a Markdown table: for everything served in both, acceptance length and tokens/s, B against A.
Where the prompts are the same, lengths are compared prompt by prompt (the interval then leaves out
what the prompts themselves vary by). A difference is marked where its interval leaves out none.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from eagle3.intervals import Interval, resampled_rates
from eagle3.page import Table, markdown_table

from .serving_report import counts

HEADER = ["prompts", "concurrency", "drafted tokens", "measured", "A", "B", "B against A"]
B_SEED = 1  # what has nothing to do with A's prompts or stretches is drawn apart


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("a", type=Path)
    parser.add_argument("b", type=Path)
    args = parser.parse_args()
    a, b = (json.loads(path.read_text(encoding="utf-8")) for path in (args.a, args.b))
    rows = compare(a, b)
    print("\n".join(markdown_table(Table("", HEADER, rows))))
    if not rows:
        print("nothing was served in both")


def compare(a: dict[str, Any], b: dict[str, Any]) -> list[list[str]]:
    """A row a figure that both results have."""
    theirs = {_key(row): row for row in b["rows"]}
    rows = []
    for ours in a["rows"]:
        other = theirs.get(_key(ours))
        if other is None:
            continue
        key = [str(part) for part in _key(ours)]
        if ours["drafted_tokens"]:
            rows.append([*key, "acceptance length", *_lengths(ours, other)])
        rows.append([*key, "tokens/s", *_rates(ours, other)])
    return rows


def _key(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["set"], row["concurrency"], row["drafted_tokens"]


def _lengths(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    is_paired = a["prompts"] == b["prompts"]
    drawn_apart = {} if is_paired else {"seed": B_SEED}
    interval = Interval.of(
        counts(b).resampled_lengths(**drawn_apart) - counts(a).resampled_lengths()
    )
    lengths = a["acceptance_length"], b["acceptance_length"]
    shown = f"{lengths[1] - lengths[0]:+.3f} ({interval.low:+.3f} to {interval.high:+.3f})"
    if not is_paired:
        shown += ", other prompts"
    return [*(f"{length:.3f}" for length in lengths), _marked(shown, interval, 0)]


def _rates(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    rates = resampled_rates(np.array(a["blocks"])), resampled_rates(np.array(b["blocks"]), B_SEED)
    interval = Interval.of(rates[1] / rates[0])
    speeds = a["tokens_per_s"], b["tokens_per_s"]
    shown = f"{speeds[1] / speeds[0]:.3f} times ({interval.low:.3f} to {interval.high:.3f})"
    return [*(f"{speed:.1f}" for speed in speeds), _marked(shown, interval, 1)]


def _marked(shown: str, interval: Interval, nothing: float) -> str:
    return shown if interval.low <= nothing <= interval.high else f"**{shown}**"


if __name__ == "__main__":
    main()
