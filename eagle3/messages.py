"""Conversations as data: their messages, and the form an engine hands to the chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
_REASONING_KEYS = ("reasoning", "reasoning_content")


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


def thinking(message: Message) -> str:
    """The thinking of an assistant's turn, under whichever name it came; "" without any."""
    return next((message[key] for key in _REASONING_KEYS if message.get(key)), "")


def is_empty(message: Message) -> bool:
    """Whether an assistant's turn says nothing: no text, no thinking, no tool call."""
    content = message.get("content")
    if isinstance(content, str):
        content = content.strip()
    return not any((content, message.get("tool_calls"), thinking(message)))


def as_served(messages: Sequence[Message], keeps_thinking: bool) -> list[Message]:
    """Messages as an engine hands them to the template (vLLM 0.32.0, ``renderers/chat_utils.py``):
    thinking under both its names, tool arguments parsed.

    Args:
        keeps_thinking: False removes all thinking.

    Raises:
        Drop: ``tool_arguments_are_no_json`` (vLLM would go on with empty ones).
    """
    served = []
    for message in messages:
        made = {key: value for key, value in message.items() if key not in _REASONING_KEYS}
        if keeps_thinking and thinking(message):
            made |= dict.fromkeys(_REASONING_KEYS, thinking(message))
        if message.get("tool_calls"):
            made["tool_calls"] = [_parsed(call) for call in message["tool_calls"]]
        served.append(made)
    return served


def _parsed(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments") or {}
    try:
        function["arguments"] = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError as error:
        raise Drop("tool_arguments_are_no_json") from error
    return {**call, "function": function}
