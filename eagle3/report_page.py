"""06's report for a reader: the page made of ``report.json``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .files import write_json
from .gates import MAIN_SET, where_they_part
from .page import Page, Table
from .pictures import draw_acceptance, draw_drafts, draw_speed, draw_training
from .script import log

_DIFFERENCES_SHOWN = 20


def write(
    directory: Path,
    title: str,
    report: dict[str, Any],
    metrics: Path | None,
    decode: Callable[[list[int]], str],
) -> list[str]:
    """Write ``report.json``, the page and its pictures.

    Args:
        title: what was verified.
        metrics: 04's ``metrics.jsonl``, for the training curves.
        decode: token ids -> text.

    Returns:
        The files' names.
    """
    pictures = [directory / f"{name}.png" for name in ("acceptance", "drafts", "speed")]
    for path, draw in zip(pictures, (draw_acceptance, draw_drafts, draw_speed), strict=True):
        draw(path, report)
    if metrics is not None and metrics.is_file():
        pictures.append(directory / "training.png")
        draw_training(pictures[-1], metrics)
    write_json(directory / "report.json", report)
    page = Page(
        title=title,
        verdict=report["verdict"].upper(),
        is_good=report["verdict"] == "pass",
        lines=_lines(report),
        pictures=pictures,
        tables=[
            *(table(report) for table in (_gates, _lengths, _lossless, _steps, _by_drafted_tokens)),
            *_breakdown(report),
            *_drafts(report, decode),
        ],
    )
    return ["report.json", *page.write(directory, "report"), *(path.name for path in pictures)]


def show(report: dict[str, Any], page: Path) -> None:
    """What an operator should look at."""
    for name, served in report["served"].items():
        log(
            name,
            served=served["acceptance_length"],
            predicted=report["predicted"][name]["acceptance_length"],
            tokens_per_s=served["tokens_per_s"],
            without=report["baseline"][name]["tokens_per_s"],
        )
    for name, sides in report["sampled"].items():
        lengths = {key: side["acceptance_length"] for key, side in sides.items()}
        log(f"{name}, temperature 1", **lengths)
    lossless = {key: value for key, value in report["lossless"].items() if key != "differences"}
    log("greedy answers with and without the drafter", **lossless)
    for gate in report["gates"]:
        log(gate["name"], **{key: gate[key] for key in ("value", "limit", "ok")})
    log("report", path=page)


def _lines(report: dict[str, Any]) -> list[str]:
    served, plain = report["served"][MAIN_SET], report["baseline"][MAIN_SET]
    lines = [
        f"served acceptance length on {MAIN_SET}: {_length(served)}",
        f"{served['tokens_per_s']:.1f} tokens/s with the drafter, {plain['tokens_per_s']:.1f} "
        "without",
        *(
            f"a decoding step of {row['concurrency']} requests breaks even at acceptance length "
            f"{row['break_even_length']:.2f}"
            for row in report["steps"][MAIN_SET][-1:]
        ),
        where_they_part(MAIN_SET, report["apart"][MAIN_SET]),
    ]
    failed = [gate["name"] for gate in report["gates"] if not gate["ok"]]
    return [f"failed: {', '.join(failed)}", *lines] if failed else lines


def _gates(report: dict[str, Any]) -> Table:
    rows = [
        [row["name"], f"{row['limit']:g}", f"{row['value']:.4g}", "ok" if row["ok"] else "FAILED"]
        for row in report["gates"]
    ]
    return Table("Gates", ["gate", "limit", "value", ""], rows)


def _lengths(report: dict[str, Any]) -> Table:
    rows = []
    for name, served in report["served"].items():
        speeds = served["tokens_per_s"], report["baseline"][name]["tokens_per_s"]
        sides = _length(served), _length(report["predicted"][name])
        rows.append([name, "greedy", *sides, *_speeds(*speeds)])
    for name, drawn in report["sampled"].items():
        sides = _length(drawn["served"]), _length(drawn["predicted"])
        speed = f"{drawn['served']['tokens_per_s']:.1f}"
        rows.append([name, "temperature 1", *sides, speed, "", ""])
    if "validation" in report["predicted"]:
        validation = _length(report["predicted"]["validation"])
        rows.append(["validation", "01's answers", "", validation, "", "", ""])
    return Table(
        "Acceptance length, 95% interval (share accepted at each draft position), tokens/s",
        ["prompts", "answers", "served", "predicted", "drafter", "none", "times"],
        rows,
        "Predicted is an engine-free replay of the very tokens served; at temperature 1 each draft "
        "counts with the probability the verifier gives it. Intervals: bootstrap over prompts.",
    )


def _lossless(report: dict[str, Any]) -> Table:
    lossless = report["lossless"]
    rows = [
        [d["set"], str(d["prompt"]), str(d["answer_position"])]
        + [", ".join(f"{value:g}" for value in d["below_top_logit"])]
        + [f"{d['top_logit']:g}", "near tie" if d["is_near_tie"] else "UNEXPLAINED"]
        for d in lossless["differences"][:_DIFFERENCES_SHOWN]
    ]
    return Table(
        "Greedy answers with the drafter and without",
        ["prompts", "prompt", "answer token", "each below the top logit", "top logit", ""],
        rows,
        f"{lossless['compared']} compared: {lossless['equal']} equal, {lossless['near_ties']} part "
        f"at a near tie of the verifier's logits, {lossless['unexplained']} unexplained. Of those "
        f"that part, the first {_DIFFERENCES_SHOWN} at most:",
    )


def _steps(report: dict[str, Any]) -> Table:
    return Table(
        "What a decoding step takes, and the acceptance length at which drafting breaks even",
        ["prompts", "requests in it", "s with", "s without", "breaks even at", "times faster"],
        [
            [name, str(row["concurrency"])]
            + [f"{row['step_s_with']:.4f}", f"{row['step_s_without']:.4f}"]
            + [f"{row['break_even_length']:.2f}", f"{row['times_faster']:.2f}"]
            for name, steps in report["steps"].items()
            for row in steps
        ],
        "Medians; fewer requests than were served together are left when a set runs out.",
    )


def _by_drafted_tokens(report: dict[str, Any]) -> Table:
    lengths = report["acceptance_length_by_drafted_tokens"]
    most = max(map(len, lengths.values()))
    rows = [
        [name, *(f"{row['acceptance_length']:.3f}" for row in rows), *[""] * (most - len(rows))]
        for name, rows in lengths.items()
    ]
    header = ["prompts", *(str(k + 1) for k in range(most))]
    return Table("Predicted acceptance length by drafted tokens", header, rows)


def _breakdown(report: dict[str, Any]) -> list[Table]:
    parts = report["breakdown"].items()
    tables = [
        Table(
            title,
            ["prompts", label, "drafts", "acceptance length (share at each draft position)"],
            [
                [name, str(row[key]), str(row["num_drafts"])]
                + [f"{row['acceptance_length']:.3f} ({_shares(row['acceptance_per_position'])})"]
                for name, breakdown in parts
                for row in breakdown[part]
            ],
        )
        for part, key, title, label in (
            ("source", "source", "Predicted acceptance by source", "source"),
            ("context", "context_tokens", "Predicted acceptance by context", "tokens known"),
        )
    ]
    classes = [
        [name, row["token_class"], str(row["num_tokens"]), _shares(row["right_per_position"])]
        for name, breakdown in parts
        for row in breakdown["token_class"]
    ]
    tables.append(
        Table(
            "Drafts right by kind of token",
            ["prompts", "the verifier's token", "tokens", "share right at each draft position"],
            classes,
            "Every position of every answer; a later draft counts where those before it are right.",
        )
    )
    misses = [
        [name, str(row["draft_position"]), repr(row["drafted"]), repr(row["verifier"])]
        + [str(row["times"]), repr(row["after"])]
        for name, breakdown in parts
        for row in breakdown["disagreements"]
    ]
    header = ["prompts", "draft position", "drafted", "the verifier's", "times", "after, say"]
    return [*tables, Table("Where drafts go wrong most often", header, misses)]


def _drafts(report: dict[str, Any], decode: Callable[[list[int]], str]) -> list[Table]:
    rows = []
    for name, apart in report["apart"].items():
        drafts = apart["drafts"]
        counts = zip(drafts["compared"], drafts["equal"], drafts["near_ties"], strict=True)
        for k, (compared, equal, near) in enumerate(counts):
            shown = [str(n) for n in (compared, equal, near, compared - equal - near)]
            rows.append([name, str(k), f"{apart['per_position'][k]:+.4f}", *shown])
    tops = []
    for apart in report["apart"].values():
        first = apart["drafts"]["first"]
        if first is None:
            continue
        place = f"{first['set']}, prompt {first['prompt']}, token {first['token_position']}"
        after = decode([*first["context"], *first["drafted_before"]])
        tops += [
            [place, str(first["draft_position"]), repr(after), side]
            + [", ".join(f"{decode([token])!r} {logit:g}" for token, logit in first[side])]
            for side in ("vllm", "replay")
        ]
    return [
        Table(
            "vLLM's drafts against the replay's, on the same tokens",
            ["prompts", "draft position", "share predicted minus served", "compared", "equal"]
            + ["within rounding", "apart"],
            rows,
            "A later draft is compared where the earlier ones are equal.",
        ),
        Table(
            "The first draft that differs, both top five",
            ["where", "draft position", "after", "", "tokens and logits"],
            tops,
        ),
    ]


def _length(side: dict[str, Any]) -> str:
    low, high = side["interval"]
    shares = _shares(side["acceptance_per_position"])
    return f"{side['acceptance_length']:.3f}, {low:.3f} to {high:.3f} ({shares})"


def _shares(shares: list[float | None]) -> str:
    return ", ".join("-" if share is None else f"{share:.3f}" for share in shares)


def _speeds(drafter: float, none: float) -> list[str]:
    return [f"{drafter:.1f}", f"{none:.1f}", f"{drafter / none:.2f}"]
