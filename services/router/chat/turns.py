"""Builds a chat's messages from APIs that tell a conversation in smaller pieces: thoughts, texts, calls and results.

What the assistant says in a row becomes one message, as chats have it: thoughts, then text, then calls.
"""

from __future__ import annotations

from typing import Any

from engine_core.types.errors import InvalidRequestError
from services.router.chat.schema import ChatMessage


class Turns:
    """The conversation so far."""

    def __init__(self) -> None:
        self.place = ""
        """Where the client says what comes next."""
        self._messages: list[dict[str, Any]] = []
        self._places: list[str] = []
        self._open: dict[str, Any] | None = None
        """The assistant's message that may go on."""
        self._calls: set[str] = set()

    def messages(self) -> list[ChatMessage]:
        """All messages."""
        return [ChatMessage.model_validate(message) for message in self._messages]

    def names(self) -> dict[str, str]:
        """Where the client has what became each message, by its field in a chat."""
        return {f"messages[{i}]": place for i, place in enumerate(self._places)}

    def message(self, role: str, content: str) -> None:
        """A whole message of somebody else than the assistant."""
        self._add({"role": role, "content": content})

    def end(self) -> None:
        """What the assistant says next is a new message."""
        self._open = None

    def think(self, text: str) -> None:
        """The assistant thinks."""
        mine = self._assistant(after={"reasoning_content"})
        mine["reasoning_content"] = mine.get("reasoning_content", "") + text

    def say(self, text: str) -> None:
        """The assistant says something."""
        self._assistant(after={"reasoning_content"})["content"] = text

    def call(self, call_id: str, name: str, arguments: Any) -> None:
        """The assistant calls a function; `arguments` as ChatMessage takes them."""
        mine = self._assistant(after={"reasoning_content", "content", "tool_calls"})
        function = {"name": name, "arguments": arguments}
        mine.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
        self._calls.add(call_id)

    def result(self, call_id: str, content: str, key: str) -> None:
        """What a call gave. Raises InvalidRequestError when there was no such call; `key` holds its id."""
        if call_id not in self._calls:
            field = f"{self.place}.{key}"
            raise InvalidRequestError(f"{field}: there is no call {call_id!r} before its result", field=field)
        self._add({"role": "tool", "tool_call_id": call_id, "content": content})

    def _assistant(self, *, after: set[str]) -> dict[str, Any]:
        """The open message, where it holds nothing but what may come before; else a new one."""
        if self._open is None or set(self._open) - {"role"} - after:
            message: dict[str, Any] = {"role": "assistant"}
            self._add(message)
            self._open = message
        return self._open

    def _add(self, message: dict[str, Any]) -> None:
        self._messages.append(message)
        self._places.append(self.place)
        self._open = None
