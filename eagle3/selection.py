"""Which conversations are learnt from, kept for validation, or measured on.

Every conversation that is not used is counted under one reason.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .chat import Chat, Row
from .config import Config, DataSection
from .corpus import opening, read_source, text_key, user_keys
from .engine import max_model_len
from .errors import ConfigError
from .messages import Conversation, Drop
from .verifier import Verifier


def check_config(config: Config, verifier: Verifier) -> None:
    """Names and lengths that cannot work, before any data is read.

    Raises:
        ConfigError: naming the key.
    """
    data, evaluation = config.data, config.evaluation
    for key, taken, sources in (
        ("data.sources", [], data.sources),
        ("evaluation.prompt_sets", ["heldout"], evaluation.prompt_sets),
    ):
        names = [*taken, *(source.name for source in sources)]
        if len(set(names)) < len(names):
            raise _bad(key, "names that differ (heldout is the validation prompts)", names)
    context = verifier.text_config["max_position_embeddings"]
    if max_model_len(config) > context:
        most = context - max_model_len(config) + data.max_length_tokens
        found = data.max_length_tokens
        raise _bad("data.max_length_tokens", f"at most {most}, the verifier's context", found)
    lengths = {
        "data.min_supervised_tokens": data.min_supervised_tokens,
        "evaluation.max_new_tokens": evaluation.max_new_tokens,
    }
    if data.regenerate:
        lengths["data.regenerate.max_new_tokens"] = data.regenerate.max_new_tokens
        if data.regenerate.max_new_tokens < data.min_supervised_tokens:
            expected = f"at least data.min_supervised_tokens, {data.min_supervised_tokens}"
            found = data.regenerate.max_new_tokens
            raise _bad("data.regenerate.max_new_tokens", expected, found)
    for key, length in lengths.items():
        if length >= data.max_length_tokens:
            expected = f"less than data.max_length_tokens, {data.max_length_tokens}"
            raise _bad(key, expected, length)


@dataclass(frozen=True)
class Candidate:
    """A conversation that passed.

    Attributes:
        source_id: index into ``data.sources``.
        opening: its first user turn, folded; conversations sharing it stay on one side.
        prompt_ids: int32 ``[num_tokens]``, up to where the assistant's last answer begins.
        other_prompt_ids: the same prompt in each of ``regenerate.other_modes``.
        rows: token ids and loss masks, several where the template rewrites history; None where
            the verifier is still to answer.
        dropped_rows: other rows of the same conversation, by the reason they cannot be used.
    """

    source_id: int
    opening: str
    prompt_ids: np.ndarray
    other_prompt_ids: tuple[np.ndarray, ...]
    rows: tuple[Row, ...] | None
    dropped_rows: Counter[str]


def select(
    corpus: Sequence[Sequence[Conversation]],
    chat: Chat,
    data: DataSection,
    evaluation_keys: frozenset[str],
    other_chats: Sequence[Chat] = (),
) -> tuple[list[Candidate], Counter[str]]:
    """Pass or drop every conversation of every source, in order.

    Args:
        corpus: conversations of each of ``data.sources``.
        evaluation_keys: folded user turns of the evaluation prompts.
        other_chats: the template in each of ``regenerate.other_modes``.

    Returns:
        The candidates, and how many were dropped by reason.
    """
    seen: set[str] = set()
    candidates, dropped = [], Counter()
    for source_id, conversations in enumerate(corpus):
        for conversation in conversations:
            try:
                candidates.append(
                    _candidate(
                        conversation, source_id, chat, data, evaluation_keys, other_chats, seen
                    )
                )
            except Drop as drop:
                dropped[drop.reason] += 1
    return candidates, dropped


def _candidate(
    conversation: Conversation,
    source_id: int,
    chat: Chat,
    data: DataSection,
    evaluation_keys: frozenset[str],
    other_chats: Sequence[Chat],
    seen: set[str],
) -> Candidate:
    # Where the verifier answers, the old answer is nothing and the prompt is everything.
    used = conversation.prompt() if data.regenerate else conversation
    key = text_key(used)
    if key in seen:
        raise Drop("duplicate")
    seen.add(key)
    user_turns = user_keys(used)
    if not user_turns:
        raise Drop("no_user_turn")
    if not evaluation_keys.isdisjoint(user_turns):
        raise Drop("evaluation_overlap")
    if data.regenerate:
        prompts = [mode.prompt_ids(used) for mode in (chat, *other_chats)]
        if max(map(len, prompts)) + data.min_supervised_tokens > data.max_length_tokens:
            raise Drop("too_long")
        return Candidate(source_id, user_turns[0], prompts[0], tuple(prompts[1:]), None, Counter())
    rows, dropped_rows = [], Counter()
    for ids, mask in chat.training_rows(used):
        if len(ids) > data.max_length_tokens:  # never cut: a cut row has lost its end of turn
            dropped_rows["too_long"] += 1
        elif mask.sum() < data.min_supervised_tokens:
            dropped_rows["too_few_supervised"] += 1
        else:
            rows.append((ids, mask))
    if not rows:
        raise Drop(dropped_rows.most_common(1)[0][0])
    ids, mask = rows[-1]
    last_answer = int(np.flatnonzero(~mask)[-1]) + 1
    return Candidate(source_id, user_turns[0], ids[:last_answer], (), tuple(rows), dropped_rows)


def split(candidates: Sequence[Candidate], data: DataSection) -> list[bool]:
    """Whether each candidate is validation: ``num_validation_prompts`` openings, shuffled.

    Raises:
        ConfigError: nothing would be left to train on.
    """
    openings = list(dict.fromkeys(candidate.opening for candidate in candidates))
    if len(openings) <= data.num_validation_prompts:
        raise ConfigError(
            "too few distinct prompts passed to keep validation prompts aside",
            where="data.num_validation_prompts",
            expected=f"fewer than the {len(openings)} distinct prompts that passed",
            found=data.num_validation_prompts,
            fix="lower data.num_validation_prompts, or add sources",
        )
    random.Random(data.seed).shuffle(openings)
    validation = frozenset(openings[: data.num_validation_prompts])
    return [candidate.opening in validation for candidate in candidates]


def evaluation_prompts(
    config: Config, chat: Chat
) -> tuple[dict[str, list[np.ndarray]], frozenset[str]]:
    """The prompts of each of ``evaluation.prompt_sets``, and their folded user turns.

    Returns:
        Prompt ids by set name, and the keys no training conversation may share.
    """
    prompts, keys = {}, set()
    for source in config.evaluation.prompt_sets:
        asked = [opening(conversation) for conversation in read_source(source)]
        prompts[source.name] = [chat.prompt_ids(conversation) for conversation in asked]
        keys.update(key for conversation in asked for key in user_keys(conversation))
    return prompts, frozenset(keys)


def fitting(
    name: str, prompts: Sequence[np.ndarray], config: Config
) -> tuple[list[list[int]], dict[str, Any]]:
    """The distinct prompts of a set that leave room for ``evaluation.max_new_tokens``.

    Returns:
        Prompt ids as lists, and the counts ``in``, ``out``, ``dropped``.

    Raises:
        ConfigError: none does.
    """
    longest = config.data.max_length_tokens - config.evaluation.max_new_tokens
    distinct = dict.fromkeys(tuple(ids.tolist()) for ids in prompts)
    kept = [list(ids) for ids in distinct if len(ids) <= longest]
    if not kept:
        raise ConfigError(
            "no prompt of a set leaves room for an answer",
            where=f"evaluation prompts: {name}",
            expected=f"prompts of at most {longest} tokens "
            "(data.max_length_tokens - evaluation.max_new_tokens)",
            found=f"{len(distinct)} prompts, the shortest of "
            f"{min(map(len, distinct), default=0)} tokens",
            fix="raise data.max_length_tokens, or lower evaluation.max_new_tokens",
        )
    dropped = {"duplicate": len(prompts) - len(distinct), "too_long": len(distinct) - len(kept)}
    return kept, {"in": len(prompts), "out": len(kept), "dropped": dropped}


def _bad(key: str, expected: Any, found: Any) -> ConfigError:
    what = "a config value does not fit"
    return ConfigError(what, where=key, expected=expected, found=found, fix=f"correct {key}")
