"""Loss masks: what is supervised decodes to what the assistant said, and nothing else."""

from __future__ import annotations

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
# Texts that begin and end with a letter: a template may strip the rest.
TEXT = st.from_regex(r"[A-Za-zé你]([ -~\n]{0,30}[a-z.!])?", fullmatch=True).filter(
    lambda text: "<|" not in text
)


def open_verifier(directory) -> Verifier:
    return Verifier.open(
        VerifierSection(
            path=str(directory), revision=None, trust_remote_code=False, dtype="float32"
        )
    )


@pytest.fixture(scope="module")
def verifier(tiny_verifier_dir) -> Verifier:
    return open_verifier(tiny_verifier_dir)


@pytest.fixture(scope="module")
def chat(verifier) -> Chat:
    return Chat.open(verifier, {})


def with_template(chat: Chat, template: str, **template_kwargs) -> Chat:
    """The same tokenizer under another template (passed per call, so nothing shared changes)."""
    return Chat(
        chat.tokenizer, chat.end_of_turn_ids, {"chat_template": template, **template_kwargs}
    )


def conversation(*turns: str, system: str | None = None) -> Conversation:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return Conversation(tuple(messages))


def supervised_texts(chat: Chat, ids: np.ndarray, mask: np.ndarray) -> list[str]:
    """The text of each run of supervised tokens."""
    boundaries = np.flatnonzero(np.diff(mask)) + 1
    runs = zip(np.split(ids, boundaries), np.split(mask, boundaries), strict=True)
    return [chat.tokenizer.decode(run.tolist()) for run, trained in runs if trained[0]]


@given(
    pairs=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4),
    system=st.none() | TEXT,
    asks_again=st.booleans(),
)
def test_supervised_tokens_are_the_assistants_words_and_the_end_of_turn(
    chat, pairs, system, asks_again
):
    turns = [text for pair in pairs for text in pair] + ["and then?"] * asks_again
    [(ids, mask)] = chat.training_rows(conversation(*turns, system=system))
    assert ids.dtype == np.int32 and mask.dtype == bool and ids.shape == mask.shape
    assert supervised_texts(chat, ids, mask) == [answer + END for _, answer in pairs]
    assert mask[-1] and ids[-1] in chat.end_of_turn_ids  # nothing stands after it


@given(pairs=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3))
def test_a_row_begins_with_the_prompt_that_is_served(chat, pairs):
    whole = conversation(*[text for pair in pairs for text in pair])
    [(ids, mask)] = chat.training_rows(whole)
    prompt = chat.prompt_ids(whole.prompt())
    assert ids[: len(prompt)].tolist() == prompt.tolist()
    assert not mask[len(prompt) - 1] and mask[len(prompt) :].all()


def test_the_line_break_after_a_turn_is_not_supervised(chat):
    [(ids, mask)] = chat.training_rows(conversation("hi", "hello", "and?", "bye"))
    line_break = chat.tokenizer.encode("\n", add_special_tokens=False)[0]
    first_end = int(np.flatnonzero(mask & np.isin(ids, chat.end_of_turn_ids))[0])
    assert ids[first_end + 1] == line_break and not mask[first_end + 1]


def test_a_template_that_removes_earlier_reasoning_gives_a_row_a_turn(chat):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.reasoning and loop.last %}[{{ m.reasoning }}]{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    messages = list(conversation("hi", "hello", "and?", "bye").messages)
    messages[1] = {**messages[1], "reasoning": "greet back"}
    rewriting = with_template(chat, template)
    rows = rewriting.training_rows(Conversation(tuple(messages)))
    assert [supervised_texts(chat, *row) for row in rows] == [
        [f"[greet back]hello{END}"],
        [f"bye{END}"],
    ]
    assert "greet back" not in chat.tokenizer.decode(rows[1][0].tolist())


def test_a_template_without_thinking_leaves_it_out(chat):
    messages = list(conversation("hi", "hello", "and?", "bye").messages)
    messages[1] = {**messages[1], "reasoning": "greet back"}
    [(ids, mask)] = chat.training_rows(Conversation(tuple(messages)))
    assert supervised_texts(chat, ids, mask) == [f"hello{END}", f"bye{END}"]


def test_a_generation_prompt_the_answer_does_not_follow_is_seen(chat):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\nthink:{% endif %}"
    )
    with pytest.raises(Drop, match="answer_does_not_follow_prompt"):
        with_template(chat, template).training_rows(conversation("hi", "hello"))


def test_tools_and_template_kwargs_reach_the_template(chat):
    template = (
        "{% for tool in tools or [] %}{{ tool.name }}\n{% endfor %}{{ greeting }}"
        "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    asked = Conversation(conversation("hi").messages, ({"name": "search"},))
    ids = with_template(chat, template, greeting="dear ").prompt_ids(asked)
    assert chat.tokenizer.decode(ids.tolist()) == f"search\ndear hi{END}"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (conversation("hi", " \n").messages, "empty_assistant_turn"),
        (conversation("hi", "hello", "and?", "").messages, "empty_assistant_turn"),
        (conversation("hi").messages, "no_assistant_turn"),
        (conversation("hi", "hello").messages[1:], "assistant_speaks_first"),
    ],
)
def test_what_cannot_be_trained_on_is_dropped_by_reason(chat, messages, reason):
    with pytest.raises(Drop) as drop:
        chat.training_rows(Conversation(tuple(messages)))
    assert drop.value.reason == reason


def test_a_template_may_refuse_a_conversation(chat):
    refusing = with_template(chat, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(Drop, match="template_refuses"):
        refusing.prompt_ids(conversation("hi"))


def test_a_template_without_end_of_turn_stops_before_any_data_is_read(verifier):
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    with pytest.raises(ConfigError) as error:
        Chat.open(verifier, {"chat_template": template})
    assert error.value.found == "no_end_of_turn"


def test_a_tokenizer_without_a_chat_template_is_a_config_error(tiny_verifier_dir, tmp_path):
    for path in tiny_verifier_dir.iterdir():
        if path.name != "chat_template.jinja":
            (tmp_path / path.name).symlink_to(path)
    with pytest.raises(ConfigError, match="no chat template"):
        Chat.open(open_verifier(tmp_path), {})


def test_a_prompt_ends_with_the_last_user_turn():
    whole = conversation("hi", "hello", "and?", "bye", system="be kind")
    assert [m["content"] for m in whole.prompt().messages] == ["be kind", "hi", "hello", "and?"]
    with pytest.raises(Drop, match="no_user_turn"):
        Conversation(whole.messages[:1]).prompt()
