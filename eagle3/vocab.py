"""The draft vocabulary: the verifier's tokens a drafter can name, and the map between the two.

``d2t`` holds offsets, as vLLM, SGLang and speculators read it:

    target id = draft id + d2t[draft id]

Target ids are sorted, so offsets never decrease; read as absolute ids every token would be wrong
and nothing would fail, which is why loading checks it. The map belongs to the weights trained with
it, and ``digest`` binds them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from .errors import ConfigError, StaleInputError
from .files import write_tensors
from .rows import TokenRows
from .verifier import Verifier


@dataclass(frozen=True)
class TokenCounts:
    """How often each token is supervised in training.

    Attributes:
        counts: int64 ``[num_sources, vocab_size]``; training rows only.
        sources: names of the data sources.
    """

    counts: torch.Tensor
    sources: tuple[str, ...]

    @classmethod
    def of(cls, rows: TokenRows, vocab_size: int) -> TokenCounts:
        per_token = np.repeat(np.arange(rows.num_rows), rows.lengths)
        counts = torch.zeros((len(rows.sources), vocab_size), dtype=torch.int64)
        for source_id in range(len(rows.sources)):
            of_source = (rows.source_ids == source_id) & ~rows.is_validation
            ids = rows.input_ids[rows.loss_mask & of_source[per_token]]
            counts[source_id] = torch.from_numpy(np.bincount(ids, minlength=vocab_size))
        return cls(counts, rows.sources)

    def save(self, path: Path) -> None:
        write_tensors(path, {"counts": self.counts}, metadata={"sources": json.dumps(self.sources)})

    @classmethod
    def load(cls, path: Path) -> TokenCounts:
        with safe_open(path, framework="pt") as file:
            sources = tuple(json.loads(file.metadata()["sources"]))
            return cls(file.get_tensor("counts"), sources)


@dataclass(frozen=True)
class VocabMap:
    """The map.

    Attributes:
        d2t: int64 ``[draft_vocab_size]``, offset from a draft id to its target id.
        t2d: bool ``[vocab_size]``, True where a target token is in the draft vocabulary.
    """

    d2t: torch.Tensor
    t2d: torch.Tensor

    @classmethod
    def from_target_ids(cls, target_ids: Sequence[int], vocab_size: int) -> VocabMap:
        """From distinct target ids, in any order."""
        ids = torch.tensor(sorted(target_ids), dtype=torch.int64)
        t2d = torch.zeros(vocab_size, dtype=torch.bool)
        t2d[ids] = True
        return cls(ids - torch.arange(len(ids)), t2d)

    @property
    def target_ids(self) -> torch.Tensor:
        """int64 ``[draft_vocab_size]``, ascending: the target id of each draft id."""
        return torch.arange(len(self.d2t)) + self.d2t

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 of the target ids (int64, little endian, ascending)."""
        return hashlib.sha256(self.target_ids.numpy().astype("<i8").tobytes()).hexdigest()

    def draft_ids(self, target_ids: torch.Tensor) -> torch.Tensor:
        """Draft id of each target id, -1 where the draft vocabulary lacks it; int64, same shape."""
        draft_ids = torch.cumsum(self.t2d, dim=0) - 1  # a bool sums to int64
        draft_ids[~self.t2d] = -1
        return draft_ids[target_ids]

    def save(self, path: Path) -> None:
        write_tensors(
            path, {"d2t": self.d2t, "t2d": self.t2d}, validate=lambda partial: _check(partial)
        )

    @classmethod
    def load(cls, path: Path) -> VocabMap:
        """Read and check.

        Raises:
            StaleInputError: another dtype or shape, offsets that decrease or are negative, ids
                out of range, or a t2d that is not d2t's.
        """
        return _check(path)


def _check(path: Path) -> VocabMap:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    kinds = {name: (tensor.dtype, tensor.dim()) for name, tensor in tensors.items()}
    if kinds != {"d2t": (torch.int64, 1), "t2d": (torch.bool, 1)}:
        raise _damaged(path, "d2t int64 [draft_vocab_size] and t2d bool [vocab_size]", kinds)
    vocab_map = VocabMap(**tensors)
    d2t, t2d = vocab_map.d2t, vocab_map.t2d
    if len(d2t) == 0 or d2t[0] < 0 or bool((d2t.diff() < 0).any()):
        raise _damaged(path, "d2t as offsets, 0 or more, never decreasing", d2t[:8].tolist())
    found = t2d.nonzero().flatten()
    if not torch.equal(found, vocab_map.target_ids):
        expected = "t2d true exactly at the ids d2t names"
        raise _damaged(path, expected, f"{len(found)} true ids, {len(d2t)} offsets")
    return vocab_map


def forced_ids(verifier: Verifier, forced_tokens: Sequence[str]) -> list[int]:
    """Ids that are always in: what ends a turn, and ``vocab.forced_tokens``.

    Raises:
        ConfigError: a string that is not exactly one token.
    """
    ids = list(verifier.end_of_turn_ids)
    tokenizer = verifier.tokenizer
    for text in forced_tokens:
        found = tokenizer.encode(text, add_special_tokens=False)
        unknown = found == [tokenizer.unk_token_id] and text != tokenizer.unk_token
        if len(found) != 1 or unknown:
            raise ConfigError(
                "a forced token is not one token of the verifier's",
                where=f"vocab.forced_tokens: {text!r}",
                expected="a string the tokenizer makes exactly one id of",
                found="the unknown token" if unknown else f"ids {found}",
                fix="correct or remove it",
            )
        ids += found
    return list(dict.fromkeys(ids))


def ranking(counts: torch.Tensor, forced: Sequence[int]) -> torch.Tensor:
    """Every target id in the order it would be taken in: forced, then by count, then by id.

    Args:
        counts: int64 ``[vocab_size]``.

    Returns:
        int64 ``[vocab_size]``. Tokens never seen come last, lowest id first.
    """
    by_count = torch.sort(counts, descending=True, stable=True).indices
    first = torch.tensor(list(forced), dtype=torch.int64)
    return torch.cat([first, by_count[~torch.isin(by_count, first)]])


def choose(
    counts: torch.Tensor, draft_vocab_size: int, forced: Sequence[int]
) -> tuple[VocabMap, int]:
    """The draft vocabulary, and how many of its tokens were never seen nor forced.

    Raises:
        ConfigError: ``draft_vocab_size`` is above the verifier's, or below the forced tokens.
    """
    vocab_size = len(counts)
    if not len(forced) <= draft_vocab_size <= vocab_size:
        raise ConfigError(
            "the draft vocabulary has an impossible size",
            where="vocab.draft_vocab_size",
            expected=f"from {len(forced)} (the forced tokens) to {vocab_size} (the verifier's)",
            found=draft_vocab_size,
            fix="correct vocab.draft_vocab_size",
        )
    taken = ranking(counts, forced)[:draft_vocab_size]
    num_filled = int((counts[taken[len(forced) :]] == 0).sum())
    return VocabMap.from_target_ids(taken.tolist(), vocab_size), num_filled


def coverage(counts: torch.Tensor, vocab_map: VocabMap) -> float | None:
    """Share of counted tokens inside the draft vocabulary; None if nothing was counted."""
    total = int(counts.sum())
    return int(counts[vocab_map.t2d].sum()) / total if total else None


def _damaged(path: Path, expected: Any, found: Any) -> StaleInputError:
    return StaleInputError(
        "the vocabulary map is not one",
        where=path,
        expected=expected,
        found=found,
        fix="run 03_build_vocab_map.py with --redo",
    )
