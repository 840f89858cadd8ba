"""Conversations to token ids and loss masks, through the verifier's own chat template.

A row is what the verifier sees and emits when served. For each assistant turn the template renders
the messages before it with the generation prompt (what it is asked), and those up to it (what it
has answered); what the second adds to the first is what the assistant emitted, never a pattern's
find. On ``[user, assistant]``, with ChatML:

    messages[:1], generation prompt   <|im_start|> user hi <|im_end|> \\n <|im_start|> assistant \\n
    messages[:2]                      the same, then: hello <|im_end|> \\n
    supervised                                        hello <|im_end|>

The end-of-turn token is supervised, or the drafter never learns to stop. What the template puts
after it is not: the verifier never emits it.

While what is asked next begins with the row so far, turns share one row: each token once. A
template that rewrites history (Kimi removes earlier thinking) starts a new row where it does:

    asked     <|im_user|>user<|im_middle|>hi<|im_end|><|im_assistant|>assistant<|im_middle|><think>
    emitted   greet</think>hello<|im_end|>
    asked     ...assistant<|im_middle|><think></think>hello<|im_end|><|im_user|>user<|im_middle|>...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jinja2
import numpy as np

from .errors import ConfigError
from .messages import Conversation, Drop, Message, as_served, is_empty, thinking
from .verifier import Verifier

Row = tuple[np.ndarray, np.ndarray]
_QUESTION = {"role": "user", "content": "hi"}
_ANSWER = {"role": "assistant", "content": "hello"}
_THOUGHT = "because"
_FUNCTION = {"name": "look", "arguments": {}}
_CALLS = {"tool_calls": [{"id": "functions.look:0", "type": "function", "function": _FUNCTION}]}


@dataclass(frozen=True)
class Chat:
    """The verifier's chat template.

    Attributes:
        template_kwargs: ``data.chat_template_kwargs``, the same in training and in serving.
    """

    tokenizer: Any
    end_of_turn_ids: tuple[int, ...]
    template_kwargs: dict[str, Any]

    @classmethod
    def open(cls, verifier: Verifier, template_kwargs: dict[str, Any]) -> Chat:
        """The template, tried on one exchange before any data is read.

        Raises:
            ConfigError: no template, keyword arguments it does not take, token ids the verifier
                does not have, or turns that do not end with a token generation stops on.
        """
        chat = cls(verifier.tokenizer, verifier.end_of_turn_ids, template_kwargs)
        try:
            [(ids, _)] = chat.training_rows(Conversation((_QUESTION, _ANSWER)))
        except (Drop, TypeError) as error:
            raise _unusable(verifier, "one supervised assistant turn", error) from error
        if max(ids) >= verifier.vocab_size:
            raise _unusable(verifier, f"token ids below {verifier.vocab_size}", max(ids))
        return chat

    def prompt_ids(self, conversation: Conversation) -> np.ndarray:
        """Token ids, int32 ``[num_tokens]``, up to where the assistant begins to speak.

        Raises:
            Drop: ``template_refuses``.
        """
        asked = self._render(self._as_served(conversation), conversation.tools, asks=True)
        return np.array(self._encode(asked), np.int32)

    def training_rows(self, conversation: Conversation) -> list[Row]:
        """Token ids and loss masks of a whole conversation, each cut after a supervised token.

        Returns:
            int32 ``[num_tokens]`` and bool ``[num_tokens]`` a row, one where the template keeps
            history as it was; every assistant turn is supervised in exactly one.

        Raises:
            Drop: ``empty_assistant_turn``, ``no_assistant_turn``, ``assistant_speaks_first``,
                ``template_refuses``, ``answer_does_not_follow_prompt``, ``no_end_of_turn``,
                ``tool_arguments_are_no_json``.
        """
        roles = [message["role"] for message in conversation.messages]
        if "assistant" not in roles:
            raise Drop("no_assistant_turn")
        if roles[0] == "assistant":
            raise Drop("assistant_speaks_first")
        if any(is_empty(m) for m in conversation.messages if m["role"] == "assistant"):
            raise Drop("empty_assistant_turn")
        rows: list[tuple[list[int], list[bool]]] = []
        for asked, emitted in self._turns(conversation):
            ids, mask = rows.pop() if rows else ([], [])
            if asked[: len(ids)] != ids:
                rows.append((ids, mask))
                mask = []
            mask = mask + [False] * (len(asked) - len(mask)) + [True] * len(emitted)
            rows.append((asked + emitted, mask))
        return [(np.array(ids, np.int32), np.array(mask, bool)) for ids, mask in rows]

    def _turns(self, conversation: Conversation) -> Iterator[tuple[list[int], list[int]]]:
        """What the verifier is asked and what it emits, as token ids, for each assistant turn."""
        messages = self._as_served(conversation)
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            asked, emitted = self._turn(messages[: turn + 1], conversation.tools)
            # Kimi's template leaves the thinking of a finished turn out.
            closing = self._hidden_thinking_closes if thinking(message) else None
            if closing and emitted.startswith(closing):
                emitted = thinking(message) + emitted
            asked_ids, ids = self._encode(asked), self._encode(asked + emitted)
            begin = len(asked_ids)
            if ids[:begin] != asked_ids:
                raise Drop("answer_does_not_follow_prompt")
            # The first one: the verifier stops there, whatever the text goes on to say.
            ends = (i for i in range(begin, len(ids)) if ids[i] in self.end_of_turn_ids)
            end = next(ends, None)
            if end is None:
                raise Drop("no_end_of_turn")
            yield asked_ids, ids[begin : end + 1]

    def _turn(
        self, messages: Sequence[Message], tools: tuple[dict[str, Any], ...] | None
    ) -> tuple[str, str]:
        """The text asked before the last message, and what that message adds to it.

        Answering may rewrite what was asked: Kimi's final answer removes the thinking before the
        tool calls that led to it. What a turn adds is then seen on a history without thinking.
        """
        *before, last = messages
        asked = prompt = self._render(before, tools, asks=True)
        answered = self._render(messages, tools, asks=False)
        if not answered.startswith(prompt):
            bare = as_served(before, keeps_thinking=False)
            prompt = self._render(bare, tools, asks=True)
            answered = self._render([*bare, last], tools, asks=False)
        if not answered.startswith(prompt):
            raise Drop("answer_does_not_follow_prompt")
        return asked, answered.removeprefix(prompt)

    @cached_property
    def _hidden_thinking_closes(self) -> str | None:
        """What stands between thinking and words (Kimi: ``</think>``), where the template leaves
        the thinking of a finished turn out and the verifier emitted it all the same.

        "" where the template renders it; None where a turn has no room for any: the generation
        prompt has closed it already (Kimi under thinking=false), or the template knows none.
        """
        words = _ANSWER["content"]
        finished, calling = as_served(
            ({**_ANSWER, "reasoning": _THOUGHT}, {**_ANSWER, "reasoning": _THOUGHT, **_CALLS}),
            keeps_thinking=True,
        )
        try:
            _, emitted = self._turn((_QUESTION, finished), None)
            if _THOUGHT in emitted:
                return ""
            # Thinking is kept while a turn goes on, with tool calls: that shows what closes it.
            _, kept = self._turn((_QUESTION, calling), None)
        except Drop:
            return None
        closing = emitted.partition(words)[0]
        return closing if closing and kept.startswith(_THOUGHT + closing + words) else None

    def _as_served(self, conversation: Conversation) -> list[Message]:
        """The messages for the template. Where a turn has no room for thinking the verifier has
        emitted none, so history has none."""
        has_thinking = any(map(thinking, conversation.messages))
        keeps_thinking = has_thinking and self._hidden_thinking_closes is not None
        return as_served(conversation.messages, keeps_thinking)

    def _render(
        self,
        messages: Sequence[Message],
        tools: tuple[dict[str, Any], ...] | None,
        *,
        asks: bool,
    ) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=asks,
                tokenize=False,
                **self.template_kwargs,
            )
        except jinja2.TemplateError as error:  # "roles must alternate", a missing key
            raise Drop("template_refuses") from error

    def _encode(self, text: str) -> list[int]:
        """As an engine does: the template has written every special token itself."""
        return self.tokenizer.encode(text, add_special_tokens=False)


def _unusable(verifier: Verifier, expected: str, found: Any) -> ConfigError:
    cause = found.__cause__ if isinstance(found, Drop) else None
    return ConfigError(
        "the chat template does not render one plain exchange",
        where=f"{verifier.directory}: chat template, data.chat_template_kwargs",
        expected=expected,
        found=f"{found}: {cause}" if cause else found,
        fix="correct data.chat_template_kwargs, or the template beside the tokenizer",
    )
