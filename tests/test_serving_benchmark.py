"""The serving benchmark's figures from runs whose times and drafts are known."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare import compare
from benchmarks.serving_report import BY_DRAFTED, in_words, speed_rows, write_report

ROOT = Path(__file__).resolve().parent.parent


def row(
    concurrency: int, drafted: int, step_s: float, accepted: int = 0, **changes: Any
) -> dict[str, Any]:
    """Ten prompts, twenty even stretches of ten decoding steps."""
    length = 1 + accepted / 10
    tokens = 10 * concurrency * length
    value = {
        "set": "heldout",
        "concurrency": concurrency,
        "drafted_tokens": drafted,
        "prompts": "digest",
        "num_answers": 10,
        "num_tokens": 200 * concurrency,
        "tokens_per_s": tokens / (10 * step_s),
        "decode_step_s": [step_s] * 9,
        "blocks": [[tokens, 10 * step_s]] * 20,
    }
    if drafted:
        value |= {
            "acceptance_length": length,
            "acceptance_per_position": [accepted / 10] + [0.0] * (drafted - 1),
            "num_drafts": [10.0] * 10,
            "accepted": [[float(accepted)] + [0.0] * (drafted - 1)] * 10,
        }
    return value | changes


ROWS = [row(1, 0, 0.06), row(8, 0, 0.10), row(1, 3, 0.08, 8), row(8, 3, 0.30, 8), row(8, 1, 0.2, 7)]


def test_drafting_pays_while_the_length_is_above_the_ratio_of_steps():
    one, eight, short = speed_rows(ROWS)
    assert one["break_even_length"] == pytest.approx(0.08 / 0.06)
    assert one["times_faster"] == pytest.approx(1.8 * 0.06 / 0.08)
    assert one["times_faster_interval"] == pytest.approx([one["times_faster"]] * 2)
    assert eight["times_faster"] == pytest.approx(0.6) and short["drafted_tokens"] == 1
    said = in_words([one, eight])
    assert "pays on heldout prompts: 1.35 times at concurrency 1 (3 drafted tokens);" in said
    assert "stops paying at concurrency 8 (0.60 times), where acceptance length 3.00" in said
    assert "1.80 was served" in said
    assert "nowhere" in in_words([eight])
    assert "stops" not in in_words([one])


def test_speed_varies_with_the_stretches():
    noisy = [[10.0, 1.0 + 0.5 * (i % 2)] for i in range(20)]
    low, high = speed_rows([ROWS[0], row(1, 3, 0.08, 8, blocks=noisy)])[0]["times_faster_interval"]
    assert low < 10 / 1.25 / (1 / 0.06) < high


def test_report(tmp_path):
    rows = [*ROWS, row(8, 1, 0.2, 7, set=BY_DRAFTED), row(8, 2, 0.2, 9, set=BY_DRAFTED)]
    predicted = [
        {"drafted_tokens": 1, "acceptance_length": 1.7, "interval": [1.6, 1.8]},
        {"drafted_tokens": 2, "acceptance_length": 2.5, "interval": [2.4, 2.6]},
    ]
    results = {"run": "test", "max_new_tokens": 20, "predicted": predicted, "rows": rows}
    lines = write_report(tmp_path, results)
    text = (tmp_path / "report.md").read_text()
    assert lines[0] in text
    assert (
        "| heldout | 1 | 3 | 22.5 | 16.7 | 1.35 | 1.35 to 1.35 | 0.0800 | 0.0600 | 1.33 | 1.80 |"
        in text
    )
    assert "| heldout | 10 | 8 | 1 | 1.700 | 1.700 to 1.700 | 0.700 |" in text
    assert "| 1 | 1.700 | 1.700 to 1.700 | 1.700 | 1.600 to 1.800 | yes |" in text
    assert "| 2 | 1.900 | 1.900 to 1.900 | 2.500 | 2.400 to 2.600 | no |" in text
    write_report(tmp_path, results | {"predicted": []})  # before 06
    assert (tmp_path / "serving.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "report.html").is_file()


def test_two_results_side_by_side(tmp_path):
    faster = [row(1, 3, 0.06, 9), row(8, 0, 0.10), row(8, 1, 0.2, 7, prompts="others")]
    table = {tuple(r[:4]): r[4:] for r in compare({"rows": ROWS}, {"rows": faster})}
    assert len(table) == 5  # three rows are in both, two of them with a drafter
    length = table["heldout", "1", "3", "acceptance length"]
    assert length == ["1.800", "1.900", "**+0.100 (+0.100 to +0.100)**"]
    assert table["heldout", "1", "3", "tokens/s"][2].startswith("**1.407 times")
    assert table["heldout", "8", "0", "tokens/s"][2] == "1.000 times (1.000 to 1.000)"
    assert table["heldout", "8", "1", "acceptance length"][2].endswith("other prompts")
    paths = []
    for name, rows in (("a", ROWS), ("b", faster)):
        paths.append(str(tmp_path / f"{name}.json"))
        Path(paths[-1]).write_text(json.dumps({"rows": rows}))
    command = [sys.executable, "-m", "benchmarks.compare", *paths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "| heldout | 1 | 3 | acceptance length | 1.800 | 1.900 |" in done.stdout


def test_what_lies_within_noise_is_not_marked():
    """Prompts that differ more than the two drafters do: paired, a small difference still shows."""
    lengths = [[float(i)] for i in range(10)]
    a = row(1, 1, 0.1) | {"accepted": lengths}
    b = row(1, 1, 0.1) | {"accepted": [[each[0] + 0.5] for each in lengths]}
    paired = compare({"rows": [a]}, {"rows": [b]})[0][-1]
    unpaired = compare({"rows": [a]}, {"rows": [b | {"prompts": "others"}]})[0][-1]
    assert paired.startswith("**") and not unpaired.startswith("**")
