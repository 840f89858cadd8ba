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
    _picture(path, len(report["served"]), lambda axes: _plot_acceptance(axes, report))


def draw_speed(path: Path, report: dict[str, Any]) -> None:
    """Emitted tokens/s with the drafter and without."""
    _picture(path, 1, lambda axes: _plot_speed(axes[0], report))


def draw_training(path: Path, metrics: Path) -> None:
    """Loss and validation acceptance length over training, from 04's ``metrics.jsonl``."""
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    _picture(path, 2, lambda axes: _plot_training(axes, lines))


def _plot_acceptance(axes: Any, report: dict[str, Any]) -> None:
    for ax, (name, served) in zip(axes, report["served"].items(), strict=True):
        sides = {"served": served, "predicted": report["predicted"][name]}
        for offset, (label, side) in zip((-0.2, 0.2), sides.items(), strict=True):
            shares = side["acceptance_per_position"]
            places = [k + offset for k in range(len(shares))]
            ax.bar(places, shares, 0.4, label=f"{label}, length {side['acceptance_length']:.3f}")
        ax.set(title=name, xlabel="draft position", ylabel="share of drafts accepted", ylim=(0, 1))
        ax.set_xticks(range(len(served["acceptance_per_position"])))
        ax.legend()


def _plot_speed(ax: Any, report: dict[str, Any]) -> None:
    names = list(report["served"])
    for offset, label, side in ((-0.2, "drafter", "served"), (0.2, "no drafter", "baseline")):
        speeds = [report[side][name]["tokens_per_s"] for name in names]
        ax.bar([i + offset for i in range(len(names))], speeds, 0.4, label=label)
    ax.set(ylabel="emitted tokens/s")
    ax.set_xticks(range(len(names)), names)
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
