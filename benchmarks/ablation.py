"""What each choice of the recipe is worth, by served acceptance length at equal training tokens.

    python -m benchmarks.ablation configs/smollm2_cpu.yaml            # every row, one by one
    python -m benchmarks.ablation configs/smollm2_cpu.yaml ROW SEED   # one row
    python -m benchmarks.ablation configs/smollm2_cpu.yaml table      # what has been measured

Needs the run's 01 to 03. A row trains a fresh drafter, exports it and serves the held-out and the
MT-Bench prompts greedily, as 06 does (``benchmarks/recipes.py``). Both sides go over the same
learning rates; the best of each, by the mean of its seeds, has three. ``speculators_same_time``
trains as many tokens as speculators' step gets through while ours trains ``TRAIN_TOKENS``, by the
seconds of these rows; ``speculators_our_optimizer`` is its step at its best rate with 04's
optimizers and warm-up.
Results are lines of ``runs/<name>/ablation.jsonl``; a row measured before is not measured again.
Draws ``docs/acceptance_by_tokens.png`` and ends with the table.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.recipes import Recipe, capture_layers, measure
from benchmarks.train_scaling import two_panels
from eagle3.config_file import load_config
from eagle3.script import log

TRAIN_TOKENS = 32_000
SEEDS = (0, 1, 2)
RATES = ("2.0e-3", "4.0e-3", "8.0e-3", "1.6e-2")
# Its defaults (``speculators/train/config/schema.py``).
SPECULATORS = (
    "drafter.norm_before_residual=true",
    "drafter.norm_before_fc=true",
    "drafter.fc_norm=false",
    "drafter.norm_output=true",
)
# What starts at random, as in speculators; ours: the last aux state, and each query as its key.
RANDOM = {"random_fc": "fc", "random_queries": "queries"}
SIDES: dict[str, tuple[str, ...]] = {"ours": (), "speculators": SPECULATORS}
CHOICES: dict[str, tuple[str, ...]] = {
    "adamw": ("train.optimizer=adamw", "train.learning_rate=7.0e-4"),
    **dict.fromkeys(RANDOM, ()),
    "norms_of_speculators": SPECULATORS,
    "no_norms": ("drafter.fc_norm=false", "drafter.norm_output=false"),
    "lk_hybrid": ("train.loss=lk_hybrid",),
    "nla": ("train.loss=nla",),
    "no_decay": ("train.ttt_step_loss_decay=1.0",),
    "ttt_1": ("train.ttt_steps=1",),
    "ttt_2": ("train.ttt_steps=2",),
    "ttt_5": ("train.ttt_steps=5",),
    "layers_7_15_22": ("capture.aux_layer_ids=[7, 15, 22]",),
    "layers_15_22_27": ("capture.aux_layer_ids=[15, 22, 27]",),
    "layers_15_27": ("capture.aux_layer_ids=[15, 27]",),
    "int8": ("capture.state_dtype=int8",),
    "batch_256": ("train.batch_tokens=256",),
    "batch_1024": ("train.batch_tokens=1024", "train.learning_rate=5.0e-3"),
}
CURVE_TOKENS = (8_000, 16_000, 64_000, 128_000)
SAME_TIME = "speculators_same_time"
OUR_OPTIMIZER = "speculators_our_optimizer"
PICTURE = Path(__file__).resolve().parent.parent / "docs" / "acceptance_by_tokens.png"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("row", nargs="?")
    parser.add_argument("seed", nargs="?", type=int, default=0)
    arguments = parser.parse_args()
    results = load_config(arguments.config).run_dir / "ablation.jsonl"
    if arguments.row != "table":
        captured = capture_layers(arguments.config)
        todo = [(arguments.row, arguments.seed)] if arguments.row else everything(results)
        for row, seed in todo:
            if any((line["row"], line["seed"]) == (row, seed) for line in read(results)):
                continue
            recipe = recipe_of(row, read(results))
            found = measure(arguments.config, captured, recipe, seed)
            line = {"row": row, "seed": seed, "overrides": recipe.overrides, **found}
            with open(results, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            log(row, seed=seed, **found)
    lines = read(results)
    print("\n".join(table(lines)))
    if {f"{side}_rate_{rate}" for side in SIDES for rate in RATES} <= {x["row"] for x in lines}:
        print("\n".join(verdict(lines)))
        draw(lines)


def everything(results: Path) -> Iterator[tuple[str, int]]:
    """Every row; those that follow from what has been measured come when it has been."""
    for side in SIDES:
        yield from ((f"{side}_rate_{rate}", 0) for rate in RATES)
    for side in SIDES:
        while seeds := missing_seeds(best(side, read(results)), read(results)):
            yield best(side, read(results)), seeds[0]
    yield from ((SAME_TIME, seed) for seed in SEEDS)
    yield OUR_OPTIMIZER, 0
    yield from ((row, 0) for row in CHOICES)
    for side in SIDES:
        yield from ((f"{side}_tokens_{num_tokens}", 0) for num_tokens in CURVE_TOKENS)


def recipe_of(row: str, lines: list[dict[str, Any]]) -> Recipe:
    """A row's recipe; some rows go on from the best learning rate found before."""
    if row in CHOICES:
        return Recipe("ours", CHOICES[row], TRAIN_TOKENS, random=RANDOM.get(row, ""))
    side, _, rest = row.partition("_")
    kind, _, value = rest.partition("_")
    if kind == "rate":
        return Recipe(side, (*SIDES[side], f"train.learning_rate={value}"), TRAIN_TOKENS)
    overrides = tuple(of(best(side, lines), lines)[0]["overrides"])
    if row == SAME_TIME:
        theirs, ours = (seconds(at_rates(s, lines)) for s in ("speculators", "ours"))
        return Recipe(side, overrides, round(TRAIN_TOKENS * ours / theirs))
    if row == OUR_OPTIMIZER:
        return Recipe(side, overrides, TRAIN_TOKENS, our_optimizer=True)
    return Recipe(side, overrides, int(value))


def best(side: str, lines: list[dict[str, Any]]) -> str:
    """The row of the learning rate that served most on the held-out prompts, mean of its seeds."""
    rows = {line["row"] for line in at_rates(side, lines)}
    assert rows, f"{side} has no row of a learning rate yet"
    return max(sorted(rows), key=lambda row: served(of(row, lines)))


def at_rates(side: str, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["row"].startswith(f"{side}_rate_")]


def missing_seeds(row: str, lines: list[dict[str, Any]]) -> list[int]:
    return [seed for seed in SEEDS if seed not in {line["seed"] for line in of(row, lines)}]


def of(row: str, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["row"] == row]


def served(lines: list[dict[str, Any]], name: str = "heldout") -> float:
    """Mean over seeds."""
    return statistics.mean(line["served"][name] for line in lines)


def seconds(lines: list[dict[str, Any]]) -> float:
    return statistics.mean(line["train_seconds"] for line in lines)


def read(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines]


def table(lines: list[dict[str, Any]]) -> list[str]:
    """Markdown: a row's mean over its seeds, and the overrides that make it."""
    shown = [
        "| row | overrides | tokens | seeds | held-out | MT-Bench | simulated | training s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in dict.fromkeys(line["row"] for line in lines):
        found = of(row, lines)
        each = ", ".join(f"{line['served']['heldout']:.3f}" for line in found)
        simulated = statistics.mean(line["simulated"] for line in found)
        shown.append(
            f"| {row} | {' '.join(f'`{o}`' for o in found[0]['overrides'])} "
            f"| {found[0]['tokens']:,} | {len(found)} "
            f"| {served(found):.3f}{f' ({each})' if len(found) > 1 else ''} "
            f"| {served(found, 'mt_bench'):.3f} | {simulated:.3f} | {seconds(found):.0f} |"
        )
    return shown


def verdict(lines: list[dict[str, Any]]) -> list[str]:
    """Ours against speculators, each at its best learning rate: equal tokens, equal time."""
    found = []
    ours = of(best("ours", lines), lines)
    for what, row in (("tokens", best("speculators", lines)), ("time", SAME_TIME)):
        if theirs := of(row, lines):
            gains = [
                f"{served(ours, s) / served(theirs, s) - 1:+.1%} {s}"
                for s in ("heldout", "mt_bench")
            ]
            found.append(
                f"equal {what}: {' '.join(gains)} ({len(ours)} and {len(theirs)} seeds, "
                f"{seconds(ours):.0f} and {seconds(theirs):.0f} s of training)"
            )
    pairs = [(line["simulated"], line["served"]["heldout"]) for line in lines]
    correlation = statistics.correlation(*zip(*pairs, strict=True))
    return [*found, f"simulated against served: correlation {correlation:.3f}, {len(pairs)} rows"]


def draw(lines: list[dict[str, Any]]) -> None:
    """Served acceptance length by trained tokens, held-out and MT-Bench prompts, both sides."""
    with two_panels(PICTURE) as axes:
        for ax, name in zip(axes, ("heldout", "mt_bench"), strict=True):
            for side in SIDES:
                rows = {f"{side}_tokens_{n}" for n in CURVE_TOKENS} | {best(side, lines)}
                points = sorted(
                    (of(row, lines)[0]["tokens"], served(of(row, lines), name))
                    for row in rows
                    if of(row, lines)
                )
                ax.plot(*zip(*points, strict=True), marker="o", label=side)
            ax.set(title=name, xlabel="trained tokens", ylabel="served acceptance length")


if __name__ == "__main__":
    main()
