"""Rows of a Kimi-like template: what the verifier is asked and emits in each of its modes.

The template rewrites history: thinking is kept only after the last final answer, and a finished
final answer has lost its own. The expected texts are written out by hand.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.chat import Chat
from eagle3.config import VerifierSection
from eagle3.errors import ConfigError
from eagle3.messages import Conversation, Drop
from eagle3.verifier import Verifier

END = "<|im_end|>"
ASKS = "<|im_assistant|>assistant<|im_middle|><think>"
# Any text but special tokens typed out: those end a turn wherever they stand.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=30)
SAID = TEXT.filter(str.strip)

TOOLS = ({"type": "function", "function": {"name": "weather", "parameters": {}}},)
CALL = {
    "id": "functions.weather:0",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
}
CALL_TEXT = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    '<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>'
)


def open_verifier(directory, trust_remote_code: bool = True) -> Verifier:
    return Verifier.open(
        VerifierSection(
            path=str(directory),
            revision=None,
            trust_remote_code=trust_remote_code,
            dtype="bfloat16",
        )
    )


@pytest.fixture(scope="module")
def verifier(tiny_kimi_dir) -> Verifier:
    return open_verifier(tiny_kimi_dir)


@pytest.fixture(scope="module")
def thinking(verifier) -> Chat:
    return Chat.open(verifier, {"thinking": True})


@pytest.fixture(scope="module")
def instant(verifier) -> Chat:
    return Chat.open(verifier, {"thinking": False})


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str, thought: str = "", **keys) -> dict:
    thoughts = {"reasoning_content": thought} if thought else {}
    return {"role": "assistant", "content": text, **thoughts, **keys}


def said(text: str) -> str:
    """A user's turn as rendered."""
    return f"<|im_user|>user<|im_middle|>{text}{END}"


def rows_of(chat: Chat, *messages: dict, tools=None) -> list[list[tuple[str, bool]]]:
    """Each row as runs of (text, supervised)."""
    rows = []
    for ids, mask in chat.training_rows(Conversation(messages, tools)):
        assert ids.dtype == np.int32 and mask.dtype == bool and ids.shape == mask.shape
        cuts = np.flatnonzero(np.diff(mask)) + 1
        runs = zip(np.split(ids, cuts), np.split(mask, cuts), strict=True)
        rows.append([(chat.tokenizer.decode(run.tolist()), bool(m[0])) for run, m in runs])
    return rows


def test_thinking(thinking):
    assert rows_of(thinking, user("hi"), assistant("hello", "greet")) == [
        [(said("hi") + ASKS, False), (f"greet</think>hello{END}", True)]
    ]


def test_thinking_under_the_other_key(thinking):
    message = {"role": "assistant", "content": "hello", "reasoning": "greet"}
    assert rows_of(thinking, user("hi"), message) == rows_of(
        thinking, user("hi"), assistant("hello", "greet")
    )


def test_thinking_mode_without_thoughts(thinking):
    """The verifier closes what the prompt opened; history stays, so the row is one."""
    assert rows_of(thinking, user("hi"), assistant("hello"), user("and?"), assistant("bye")) == [
        [
            (said("hi") + ASKS, False),
            (f"</think>hello{END}", True),
            (said("and?") + ASKS, False),
            (f"</think>bye{END}", True),
        ]
    ]


def test_instant(instant):
    """The prompt closes the thinking itself; history stays, so the row is one."""
    messages = user("hi"), assistant("hello"), user("and?"), assistant("bye")
    expected = [
        [
            (f"{said('hi')}{ASKS}</think>", False),
            (f"hello{END}", True),
            (f"{said('and?')}{ASKS}</think>", False),
            (f"bye{END}", True),
        ]
    ]
    assert rows_of(instant, *messages) == expected
    # A verifier that cannot think emitted no thoughts, whatever the data says.
    messages = user("hi"), assistant("hello", "greet"), user("and?"), assistant("bye", "leave")
    assert rows_of(instant, *messages) == expected


def test_several_turns_with_thinking(thinking):
    """A row a turn: the second is asked without the first one's thinking."""
    messages = user("hi"), assistant("hello", "greet"), user("and?"), assistant("bye", "leave")
    history = f"{said('hi')}{ASKS}</think>hello{END}{said('and?')}"
    assert rows_of(thinking, *messages) == [
        [(said("hi") + ASKS, False), (f"greet</think>hello{END}", True)],
        [(history + ASKS, False), (f"leave</think>bye{END}", True)],
    ]


def test_tools(thinking):
    """Until the final answer thinking stays in history: call and answer share a row."""
    messages = (
        user("rain?"),
        assistant("", "look it up", tool_calls=[CALL]),
        {"role": "tool", "tool_call_id": CALL["id"], "content": "sunny"},
        assistant("no rain", "it is sunny"),
        user("thanks"),
        assistant("welcome", "be kind"),
    )
    declared = json.dumps(list(TOOLS))
    start = f"<|im_system|>tool_declare<|im_middle|>{declared}{END}{said('rain?')}"
    result = f"<|im_system|>tool<|im_middle|>## Return of {CALL['id']}\nsunny{END}"
    past = f"{start}{ASKS}</think>{CALL_TEXT}{END}{result}{ASKS}</think>no rain{END}"
    assert rows_of(thinking, *messages, tools=TOOLS) == [
        [
            (start + ASKS, False),
            (f"look it up</think>{CALL_TEXT}{END}", True),
            (result + ASKS, False),
            (f"it is sunny</think>no rain{END}", True),
        ],
        [(f"{past}{said('thanks')}{ASKS}", False), (f"be kind</think>welcome{END}", True)],
    ]


def test_tools_instant(instant):
    messages = user("rain?"), assistant("I look.", "look it up", tool_calls=[CALL])
    [row] = rows_of(instant, *messages)
    assert row[1] == (f"I look.{CALL_TEXT}{END}", True) and row[0][0].endswith("<think></think>")


def test_tool_arguments_that_are_no_json(thinking):
    call = {**CALL, "function": {"name": "weather", "arguments": "{city"}}
    with pytest.raises(Drop, match="tool_arguments_are_no_json"):
        thinking.training_rows(Conversation((user("hi"), assistant("", tool_calls=[call]))))


@given(turns=st.lists(st.tuples(TEXT, TEXT, SAID), min_size=1, max_size=4))
def test_supervised_tokens_are_what_the_assistant_emits(thinking, instant, turns):
    messages = [
        message
        for asked, thought, words in turns
        for message in (user(asked), assistant(words, thought))
    ]
    emitted = [f"{thought}</think>{words}{END}" for _, thought, words in turns]
    rows = rows_of(thinking, *messages)
    assert [text for row in rows for text, trained in row if trained] == emitted
    # A new row begins exactly after a turn with thoughts: history no longer has them.
    assert len(rows) == 1 + sum(bool(thought) for _, thought, _ in turns[:-1])
    [row] = rows_of(instant, *messages)
    assert [text for text, trained in row if trained] == [f"{words}{END}" for _, _, words in turns]


@given(turns=st.lists(st.tuples(TEXT, TEXT, SAID), min_size=1, max_size=3), asked=TEXT)
def test_every_turn_is_asked_what_serving_asks(thinking, verifier, turns, asked):
    """Also what regenerate asks: history without its thinking, then the generation prompt."""
    messages = [
        message
        for asked_before, thought, words in turns
        for message in (user(asked_before), assistant(words, thought))
    ]
    whole = Conversation((*messages, user(asked), assistant("bye", "leave")))
    served = verifier.tokenizer.apply_chat_template(
        list(whole.prompt().messages), add_generation_prompt=True, return_dict=False
    )
    assert thinking.prompt_ids(whole.prompt()).tolist() == served
    history = "".join(f"{said(q)}{ASKS}</think>{words}{END}" for q, _, words in turns)
    assert verifier.tokenizer.decode(served) == f"{history}{said(asked)}{ASKS}"
    ids, mask = thinking.training_rows(whole)[-1]
    assert ids[: len(served)].tolist() == served and mask[len(served) :].all()


def test_the_tokenizers_special_tokens_are_single_ids(verifier):
    for token in ("<think>", "</think>", "<|tool_calls_section_begin|>", END):
        ids = verifier.tokenizer.encode(token, add_special_tokens=False)
        assert len(ids) == 1 and verifier.tokenizer.decode(ids) == token
    assert verifier.end_of_turn_ids == tuple(
        verifier.tokenizer.encode(END, add_special_tokens=False)
    )


def test_code_that_is_not_trusted_is_a_config_error(tiny_kimi_dir):
    with pytest.raises(ConfigError) as error:
        _ = open_verifier(tiny_kimi_dir, trust_remote_code=False).tokenizer
    assert error.value.where == "verifier.trust_remote_code"
    assert "verifier.trust_remote_code: true" in error.value.fix
