"""The rows in numbers, and a few of them for a human to read."""

from __future__ import annotations

from typing import Any

import numpy as np

from .rows import TokenRows

_ROWS_A_SIDE = 3


def tally(rows: TokenRows, side: np.ndarray) -> dict[str, dict[str, int]]:
    """Rows, tokens and supervised tokens of each source.

    Args:
        side: bool ``[num_rows]``, the rows to count.
    """
    supervised = np.add.reduceat(rows.loss_mask.astype(np.int64), rows.row_offsets[:-1])
    counts = {}
    for source_id, name in enumerate(rows.sources):
        here = side & (rows.source_ids == source_id)
        counts[name] = {
            "rows": int(here.sum()),
            "tokens": int(rows.lengths[here].sum()),
            "supervised_tokens": int(supervised[here].sum()),
        }
    return counts


def preview(rows: TokenRows, tokenizer: Any) -> str:
    """Markdown with the first rows of each side, token by token."""
    parts = [
        "# What is trained\n\n"
        "Tokens are decoded one by one and separated by `·`; `⏎` is a line break. "
        "The loss counts on lines that say TRAINED and nowhere else.\n"
    ]
    for title, side in (("training", ~rows.is_validation), ("validation", rows.is_validation)):
        for index in np.flatnonzero(side)[:_ROWS_A_SIDE]:
            ids, mask = rows.row(index)
            source = rows.sources[rows.source_ids[index]]
            parts.append(
                f"## Row {index}: {title}, {source}, {mask.sum()} of {len(ids)} tokens trained\n\n"
                f"````text\n{marked(ids, mask, tokenizer)}\n````\n"
            )
    return "\n".join(parts)


def marked(ids: np.ndarray, mask: np.ndarray, tokenizer: Any) -> str:
    """One line a run of tokens with the same mask."""
    boundaries = np.flatnonzero(np.diff(mask)) + 1
    lines = []
    for run, trained in zip(np.split(ids, boundaries), np.split(mask, boundaries), strict=True):
        label = "TRAINED" if trained[0] else "context"
        tokens = (tokenizer.decode([int(i)]).replace("\n", "⏎") for i in run)
        lines.append(f"{label}  {'·'.join(tokens)}")
    return "\n".join(lines)
