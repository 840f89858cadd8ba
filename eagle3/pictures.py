"""The report's pictures, drawn without a display."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .files import publishing


def _picture(path: Path, num_axes: int, draw: Callable[[Any], None]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    width = max(5, 4.5 * num_axes)
    figure, axes = pyplot.subplots(
        1, num_axes, figsize=(width, 4), layout="constrained", squeeze=False
    )
    draw(axes[0])
    with publishing(path) as partial:
        figure.savefig(partial, format="png", metadata={"Software": None})
    pyplot.close(figure)


def draw_acceptance(path: Path, report: dict[str, Any]) -> None:
    """Share accepted at each draft position, served beside predicted, a panel a prompt set."""
    sides = {
        name: {"served": served, "predicted": report["predicted"][name]}
        for name, served in report["served"].items()
    }
    for name, sampled in report["sampled"].items():
        sides[f"{name}, temperature 1"] = {key: sampled[key] for key in ("served", "predicted")}
    _picture(path, len(sides), lambda axes: _plot_acceptance(axes, sides))


def draw_drafts(path: Path, report: dict[str, Any]) -> None:
    """Predicted acceptance length by drafted tokens, and by context length."""
    _picture(path, 2, lambda axes: _plot_drafts(axes, report))


def draw_speed(path: Path, report: dict[str, Any]) -> None:
    """Emitted tokens/s with the drafter and without, and where drafting breaks even."""
    _picture(path, 2, lambda axes: _plot_speed(axes, report))


def draw_serving(
    path: Path, by_concurrency: list[Any], by_drafted: list[Any], predicted: list[Any]
) -> None:
    """Of ``benchmarks.serving``: when drafting pays, and acceptance length by drafted tokens."""
    _picture(path, 3, lambda axes: _plot_serving(axes, by_concurrency, by_drafted, predicted))


def draw_training(path: Path, metrics: Path) -> None:
    """Loss and validation acceptance length over training, from 04's ``metrics.jsonl``."""
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    _picture(path, 2, lambda axes: _plot_training(axes, lines))


def _plot_acceptance(axes: Any, sides: dict[str, dict[str, Any]]) -> None:
    for ax, (name, pair) in zip(axes, sides.items(), strict=True):
        for offset, (label, side) in zip((-0.2, 0.2), pair.items(), strict=True):
            shares = side["acceptance_per_position"]
            places = [k + offset for k in range(len(shares))]
            low, high = side["interval"]
            length = f"{label} {side['acceptance_length']:.3f} ({low:.3f} to {high:.3f})"
            ax.bar(places, shares, 0.4, label=length)
        ax.set(title=name, xlabel="draft position", ylabel="share of drafts accepted", ylim=(0, 1))
        ax.set_xticks(range(len(shares)))
        ax.legend()


def _plot_drafts(axes: Any, report: dict[str, Any]) -> None:
    for name, rows in report["acceptance_length_by_drafted_tokens"].items():
        drafted = [row["drafted_tokens"] for row in rows]
        lengths = [row["acceptance_length"] for row in rows]
        axes[0].plot(drafted, lengths, marker="o", label=name)
        low, high = zip(*(row["interval"] for row in rows), strict=True)
        axes[0].fill_between(drafted, low, high, alpha=0.15)
    axes[0].set(xlabel="drafted tokens", ylabel="predicted acceptance length")
    for name, breakdown in report["breakdown"].items():
        contexts = [row["most_tokens"] for row in breakdown["context"]]
        lengths = [row["acceptance_length"] for row in breakdown["context"]]
        axes[1].plot(contexts, lengths, marker="o", label=name)
    axes[1].set_xscale("log", base=2)
    axes[1].set(xlabel="tokens known, at most", ylabel="predicted acceptance length")
    for ax in axes:
        ax.grid(alpha=0.3)
        ax.legend()


def _plot_speed(axes: Any, report: dict[str, Any]) -> None:
    names = list(report["served"])
    for offset, label, side in ((-0.2, "drafter", "served"), (0.2, "no drafter", "baseline")):
        speeds = [report[side][name]["tokens_per_s"] for name in names]
        axes[0].bar([i + offset for i in range(len(names))], speeds, 0.4, label=label)
    axes[0].set(ylabel="emitted tokens/s")
    axes[0].set_xticks(range(len(names)), names)
    for name, rows in report["steps"].items():
        concurrency = [row["concurrency"] for row in rows]
        lengths = [row["break_even_length"] for row in rows]
        (line,) = axes[1].plot(concurrency, lengths, marker="o", label=f"{name} breaks even at")
        served = report["served"][name]["acceptance_length"]
        axes[1].axhline(served, color=line.get_color(), linestyle="--", label=f"{name} served")
    axes[1].set(xlabel="requests in a step", ylabel="acceptance length")
    for ax in axes:
        ax.legend()


def _plot_serving(
    axes: Any, by_concurrency: list[Any], by_drafted: list[Any], predicted: list[Any]
) -> None:
    concurrency = [row["concurrency"] for row in by_concurrency]
    for key, label in (("tokens_per_s_with", "drafter"), ("tokens_per_s_without", "no drafter")):
        speeds = [row[key] for row in by_concurrency]
        axes[0].plot(concurrency, speeds, marker="o", label=label)
    axes[0].set(xlabel="concurrency", ylabel="emitted tokens/s")
    for key, label in (("break_even_length", "breaks even at"), ("acceptance_length", "served")):
        axes[1].plot(concurrency, [row[key] for row in by_concurrency], marker="o", label=label)
    axes[1].set(xlabel="concurrency", ylabel="acceptance length")
    for rows, label in ((by_drafted, "served"), (predicted, "predicted by 06")):
        drafted = [row["drafted_tokens"] for row in rows]
        axes[2].plot(drafted, [row["acceptance_length"] for row in rows], marker="o", label=label)
    axes[2].set(xlabel="drafted tokens", ylabel="acceptance length")
    for ax in axes:
        ax.grid(alpha=0.3)
        ax.legend()


def _plot_training(axes: Any, lines: list[dict[str, Any]]) -> None:
    from matplotlib.ticker import EngFormatter

    train = [line for line in lines if line["kind"] == "train"]
    validation = [line for line in lines if line["kind"] == "validation"]
    tokens = [line["tokens"] for line in train]
    axes[0].plot(tokens, [line["loss"] for line in train], color="black", label="loss")
    for k in range(len(train[0]["loss_per_ttt_step"]) if train else 0):
        losses = [line["loss_per_ttt_step"][k] for line in train]
        axes[0].plot(tokens, losses, alpha=0.6, label=f"TTT step {k}")
    axes[0].set(xlabel="trained tokens", ylabel="training loss")
    seen = [line["tokens"] for line in validation]
    lengths = [line["acceptance_length"] for line in validation]
    axes[1].plot(seen, lengths, marker="o", color="black", label="acceptance length")
    axes[1].set(xlabel="trained tokens", ylabel="acceptance length on validation rows")
    for ax in axes:
        ax.xaxis.set_major_formatter(EngFormatter())  # 200k, not 200000 over 250000
        ax.grid(alpha=0.3)
        ax.legend()
