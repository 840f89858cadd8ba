"""Turn conversations into the token rows the drafter learns from.

reads   data.sources, evaluation.prompt_sets, the verifier
writes  01_data/rows.safetensors          input_ids int32 [num_tokens], loss_mask bool [num_tokens],
                                          row_offsets int64 [num_rows + 1], and two values a row
        01_data/token_counts.safetensors  counts int64 [num_sources, vocab_size], training rows only
        01_data/prompts.json              prompts 06 measures on: {"heldout": [[id, ...], ...], ...}
        01_data/preview.md                a few rows, what is trained marked
        01_data/answers/                  the verifier's answers, a line each

    python 01_prepare_data.py configs/smollm2_cpu.yaml

With data.regenerate the verifier answers every prompt, and a row is the prompt's ids and the ids it
emitted, never rendered again. Time is that of the answers (200 to 350 tokens/s on two cores), disk
5 bytes a token. If it stops, run the same command again: answers already there are kept.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from eagle3.answers import AnswerBook, answer_all, answered_row, questions
from eagle3.chat import Chat
from eagle3.corpus import read_source
from eagle3.errors import ConfigError
from eagle3.files import write_json, write_text
from eagle3.preflight import check
from eagle3.rows import TokenRows
from eagle3.script import Invocation, log, run_script
from eagle3.selection import check_config, evaluation_prompts, fitting, select, split
from eagle3.stage import Stage
from eagle3.summary import marked, preview, tally
from eagle3.verifier import Verifier
from eagle3.vocab import TokenCounts


def main(invocation: Invocation) -> None:
    config = invocation.load_config()
    if invocation.check:
        return check(config, "01_data", invocation)
    with Stage(config, "01_data", invocation) as stage:
        if stage.done:
            return
        data, verifier, directory = config.data, stage.verifier, stage.directory

        # Preflight: lengths, template and every source, before the engine starts.
        check_config(config, verifier)
        chat = Chat.open(verifier, data.chat_template_kwargs)
        modes = data.regenerate.other_modes if data.regenerate else ()
        other_chats = [Chat.open(verifier, mode.chat_template_kwargs) for mode in modes]
        corpus = [read_source(source) for source in data.sources]
        evaluation, evaluation_keys = evaluation_prompts(config, chat)
        sets = {name: fitting(name, prompts, config) for name, prompts in evaluation.items()}
        candidates, dropped = select(corpus, chat, data, evaluation_keys, other_chats)
        log("selected", passed=len(candidates), **dropped)
        is_validation = split(candidates, data)

        # The verifier answers. Without regenerate a candidate brings its rows and nothing is asked.
        asked = [
            questions(candidate, data.regenerate, validation) if data.regenerate else []
            for candidate, validation in zip(candidates, is_validation, strict=True)
        ]
        book = AnswerBook(directory / "answers")
        answer_all(config, verifier, book, [question for group in asked for question in group])

        # One row an answer; those too short to teach anything are dropped.
        rows, owners = [], []
        for owner, group in enumerate(asked):
            made = [answered_row(q, book[q], data.max_length_tokens) for q in group]
            made = made or list(candidates[owner].rows)
            enough = [row for row in made if row[1].sum() >= data.min_supervised_tokens]
            rows += enough
            owners += [owner] * len(enough)
            dropped["too_few_supervised"] += not enough
        token_rows = TokenRows.from_lists(
            rows,
            source_ids=[candidates[owner].source_id for owner in owners],
            is_validation=[is_validation[owner] for owner in owners],
            sources=[source.name for source in data.sources],
        )
        require_both_sides(token_rows, dropped)
        owners = list(dict.fromkeys(owners))
        heldout = [candidates[owner].prompt_ids for owner in owners if is_validation[owner]]
        sets = {"heldout": fitting("heldout", heldout, config), **sets}

        token_rows.save(directory / "rows.safetensors")
        token_counts = TokenCounts.of(token_rows, verifier.vocab_size)
        token_counts.save(directory / "token_counts.safetensors")
        write_json(directory / "prompts.json", {name: ids for name, (ids, _) in sets.items()})
        write_text(directory / "preview.md", preview(token_rows, verifier.tokenizer))

        answers = [book[question] for group in asked for question in group]
        training = ~token_rows.is_validation
        counts = {
            "in": sum(map(len, corpus)),
            "out": len(owners),
            "dropped": {reason: count for reason, count in sorted(dropped.items()) if count},
            "dropped_rows": dict(sum((c.dropped_rows for c in candidates), Counter())),
            "answers": {
                "asked": len(answers),
                "ended_their_turn": sum(answer.finished_by_stop for answer in answers),
                "too_few_supervised": len(answers) - len(rows) if answers else 0,
            },
            "training": tally(token_rows, training),
            "validation": tally(token_rows, ~training),
            "evaluation": {name: count for name, (_, count) in sets.items()},
        }
        show(token_rows, counts, verifier)
        files = ["rows.safetensors", "token_counts.safetensors", "prompts.json", "preview.md"]
        stage.commit(files=files, counts=counts)


def require_both_sides(rows: TokenRows, dropped: Counter[str]) -> None:
    """Refuse to publish nothing to train on, or nothing to validate with."""
    num_validation = int(rows.is_validation.sum())
    if not 0 < num_validation < rows.num_rows:
        raise ConfigError(
            "too few rows are left after dropping",
            where="data",
            expected="training rows and validation rows",
            found=f"{rows.num_rows - num_validation} and {num_validation}; dropped {dict(dropped)}",
            fix="add sources, or loosen what drops them (data.min_supervised_tokens)",
        )


def show(rows: TokenRows, counts: dict, verifier: Verifier) -> None:
    """What an operator should look at before going on."""
    for side in ("training", "validation"):
        for source, tallied in counts[side].items():
            log(side, source=source, **tallied)
    log("conversations", given=counts["in"], used=counts["out"], **counts["dropped"])
    if counts["dropped_rows"]:
        log("other turns of used conversations, dropped", **counts["dropped_rows"])
    if counts["answers"]["asked"]:
        log("answers", **counts["answers"])
    shortest = int(np.argsort(rows.lengths, kind="stable")[0])
    log(f"sample, row {shortest}:\n{marked(*rows.row(shortest), verifier.tokenizer)}")


if __name__ == "__main__":
    run_script(main, __doc__)
