"""Choose the draft vocabulary from what the drafter is trained to say.

reads   01_data/token_counts.safetensors   counts int64 [num_sources, vocab_size]
writes  03_vocab/vocab_map.safetensors     d2t int64 [draft_vocab_size], offsets from draft id to
                                           target id; t2d bool [vocab_size]
        03_vocab/coverage.png              coverage against draft vocabulary size, a line a source

    python 03_build_vocab_map.py configs/smollm2_cpu.yaml

Takes seconds and a megabyte. If it stops, run the same command again.
"""

from __future__ import annotations

from pathlib import Path

import torch

from eagle3.files import publishing
from eagle3.preflight import check
from eagle3.script import Invocation, log, run_script
from eagle3.stage import Stage
from eagle3.vocab import TokenCounts, VocabMap, choose, coverage, forced_ids, ranking
from eagle3.warm_start import map_of


def main(invocation: Invocation) -> None:
    config = invocation.load_config()
    if invocation.check:
        return check(config, "03_vocab", invocation)
    with Stage(config, "03_vocab", invocation) as stage:
        if stage.done:
            return
        verifier = stage.verifier
        forced = forced_ids(verifier, config.vocab.forced_tokens)
        token_counts = TokenCounts.load(stage.inputs["01_data"].path("token_counts.safetensors"))
        totals = token_counts.counts.sum(dim=0)
        num_filled, started_from = 0, {}
        if config.vocab.warm_start_from:
            vocab_map, started_from = map_of(config, verifier)
        else:
            vocab_map, num_filled = choose(totals, config.vocab.draft_vocab_size, forced)
        vocab_map.save(stage.directory / "vocab_map.safetensors")
        order = ranking(totals, forced)
        plot(stage.directory / "coverage.png", token_counts, order, len(vocab_map.d2t))

        shares = {
            name: coverage(counts, vocab_map)
            for name, counts in zip(token_counts.sources, token_counts.counts, strict=True)
        }
        overall = coverage(totals, vocab_map)
        reopened = VocabMap.load(stage.directory / "vocab_map.safetensors")
        assert reopened.digest == vocab_map.digest

        log(
            "draft vocabulary",
            size=len(vocab_map.d2t),
            of=verifier.vocab_size,
            forced=len(forced),
            filled=num_filled,
        )
        if num_filled:
            log("filled with tokens never seen: more data would put better ones there")
        for name, share in shares.items():
            log("coverage", source=name, share="nothing supervised" if share is None else share)
        lost = 1 - overall
        log("what it costs", note=f"{lost:.2%} of the trained tokens can never be drafted")
        rarest = [int(i) for i in order[len(vocab_map.d2t) - 5 : len(vocab_map.d2t)]]
        log("last tokens in", tokens=[verifier.tokenizer.decode([i]) for i in rarest])

        stage.commit(
            files=["vocab_map.safetensors", "coverage.png"],
            counts={
                "supervised_tokens": int(totals.sum()),
                "distinct_tokens": int((totals > 0).sum()),
                "num_forced": len(forced),
                "num_filled": num_filled,
            },
            results={
                "vocab_map": vocab_map.digest,
                "coverage": {"overall": overall, "sources": shares},
                "warm_start_from": started_from,
            },
        )


def plot(path: Path, token_counts: TokenCounts, order: torch.Tensor, chosen: int) -> None:
    """Coverage if the first n tokens of ``order`` were the draft vocabulary."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    sizes = range(1, len(order) + 1)
    for name, counts in zip(token_counts.sources, token_counts.counts, strict=True):
        if total := int(counts.sum()):
            axes.plot(sizes, torch.cumsum(counts[order], dim=0) / total, label=name)
    axes.axvline(chosen, color="black", linestyle=":", label=f"chosen: {chosen}")
    axes.set(
        xscale="log",
        xlabel="draft vocabulary size, tokens",
        ylabel="share of trained tokens inside",
        ylim=(0, 1.01),
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    with publishing(path) as partial:
        # No version string inside: the same counts make the same file.
        figure.savefig(partial, format="png", metadata={"Software": None})
    pyplot.close(figure)


if __name__ == "__main__":
    run_script(main, __doc__)
