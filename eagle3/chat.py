"""Conversations to token ids and loss masks, through the verifier's own chat template.

Masks come from prefix rendering, never from a pattern: what the template adds when the assistant's
turn is added is the assistant's. On ``[user, assistant]``, with ChatML:

    messages[:1], generation prompt   <|im_start|> user hi <|im_end|> \\n <|im_start|> assistant \\n
    messages[:2]                      the same, then: hello <|im_end|> \\n
    supervised                                        hello <|im_end|>

The end-of-turn token is supervised, or the drafter never learns to stop. What the template puts
after it is not: the verifier never emits it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import numpy as np

from .errors import ConfigError
from .verifier import Verifier

Message = dict[str, Any]


class Drop(Exception):
    """A conversation that cannot be used; the caller counts it under ``reason``."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Conversation:
    """Messages as the template takes them (``role``, ``content``, reasoning and tool keys)."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None = None

    def prompt(self) -> Conversation:
        """Everything up to the last user turn.

        Raises:
            Drop: ``no_user_turn``.
        """
        roles = [message["role"] for message in self.messages]
        if "user" not in roles:
            raise Drop("no_user_turn")
        last = len(roles) - roles[::-1].index("user")
        return Conversation(self.messages[:last], self.tools)


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
        probe = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"})
        try:
            ids, _ = chat.training_row(Conversation(probe))
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
        return np.array(self._render(conversation, len(conversation.messages), True), np.int32)

    def training_row(self, conversation: Conversation) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and loss mask of a whole conversation, cut after the last supervised token.

        Returns:
            int32 ``[num_tokens]`` and bool ``[num_tokens]``.

        Raises:
            Drop: ``empty_assistant_turn``, ``no_assistant_turn``, ``assistant_speaks_first``,
                ``template_refuses``, ``template_rewrites_history``, ``no_end_of_turn``.
        """
        messages = conversation.messages
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise Drop("no_assistant_turn")
        if turns[0] == 0:
            raise Drop("assistant_speaks_first")
        if any(_is_empty(messages[i]) for i in turns):
            raise Drop("empty_assistant_turn")
        whole = self._render(conversation, turns[-1] + 1, False)
        mask = np.zeros(len(whole), dtype=bool)
        for i in turns:
            begin, end = self._supervised_span(conversation, i, whole)
            mask[begin:end] = True
        return np.array(whole[:end], np.int32), mask[:end]

    def _supervised_span(
        self, conversation: Conversation, turn: int, whole: Sequence[int]
    ) -> tuple[int, int]:
        """Where an assistant turn stands in ``whole``, its end-of-turn token included."""
        asked = self._render(conversation, turn, True)
        answered = self._render(conversation, turn + 1, False)
        begin = len(asked)
        if answered[:begin] != asked:
            raise Drop("template_rewrites_history")
        # The first one: the verifier stops there, whatever the text goes on to say.
        ends = (i for i in range(begin, len(answered)) if answered[i] in self.end_of_turn_ids)
        end = next(ends, None)
        if end is None:
            raise Drop("no_end_of_turn")
        # A later turn may have changed this one (reasoning removed, say).
        if whole[: end + 1] != answered[: end + 1]:
            raise Drop("template_rewrites_history")
        return begin, end + 1

    def _render(
        self, conversation: Conversation, num_messages: int, generation_prompt: bool
    ) -> list[int]:
        try:
            return self.tokenizer.apply_chat_template(
                list(conversation.messages[:num_messages]),
                tools=list(conversation.tools) if conversation.tools else None,
                add_generation_prompt=generation_prompt,
                tokenize=True,
                return_dict=False,
                **self.template_kwargs,
            )
        except jinja2.TemplateError as error:  # "roles must alternate", a missing key
            raise Drop("template_refuses") from error


def _is_empty(message: Message) -> bool:
    """Whether an assistant turn says nothing: no text, no reasoning, no tool call."""
    content = message.get("content")
    if isinstance(content, str):
        content = content.strip()
    spoken = (content, message.get("tool_calls"))
    return not any((*spoken, message.get("reasoning"), message.get("reasoning_content")))


def _unusable(verifier: Verifier, expected: str, found: Any) -> ConfigError:
    cause = found.__cause__ if isinstance(found, Drop) else None
    return ConfigError(
        "the chat template does not render one plain exchange",
        where=f"{verifier.directory}: chat template, data.chat_template_kwargs",
        expected=expected,
        found=f"{found}: {cause}" if cause else found,
        fix="correct data.chat_template_kwargs, or the template beside the tokenizer",
    )
