"""Renders chats as transformers does, without importing it (that would import torch); where a template refuses, finds
the message that it refuses.

What a template may do, and for how long, template_sandbox.py says.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import msgspec

from engine_core.types.errors import InvalidRequestError
from services.router.text.plain_tools import in_words
from services.router.text.template_sandbox import Budget, BudgetError, Environment, render, to_json

RENDER_SECONDS = 5.0
"""For one chat; more than any template needs."""

_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


_REFUSALS = (jinja2.exceptions.TemplateError, TypeError, ValueError, ArithmeticError, LookupError)
"""What a template raises that does not fit a chat."""


class TemplateTimeError(InvalidRequestError):
    """The chat template took too long."""


class _Extra(msgspec.Struct, frozen=True):
    """What a template gets beside the messages."""

    add_generation_prompt: bool
    kwargs: dict[str, Any]
    tools: tuple[Mapping[str, Any], ...]
    documents: tuple[Mapping[str, Any], ...]


class ChatTemplate:
    """One compiled template with the tokenizer's special tokens as variables."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._template = Environment().from_string(source)
        self._special_tokens = dict(special_tokens)
        self.source = source
        self._knows_developer = "developer" in source
        self._knows_tools = re.search(r"\btools\b", source) is not None
        self._short_ids = "strings with length 9" in source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        documents: Sequence[Mapping[str, Any]] = (),
        continue_final_message: bool = False,
        seconds: float = RENDER_SECONDS,
    ) -> str:
        """Returns the chat as text; with `continue_final_message` it ends with the last message's text. Keys with None
        are dropped, as transformers does.

        The role developer becomes system where the template does not know it. Raises InvalidRequestError when the
        template refuses the chat: its field is messages[i] where message i is what it refuses, else messages.
        TemplateTimeError when it takes longer than `seconds`.
        """
        budget = Budget(seconds)
        extra = _Extra(add_generation_prompt, dict(template_kwargs or {}), tuple(tools), tuple(documents))
        try:
            return self._once(messages, extra, budget, goes_on=continue_final_message)
        except BudgetError as exc:
            kind = TemplateTimeError if exc.time else InvalidRequestError
            raise kind(f"these messages are too much for the chat template: {exc}", field="messages") from exc
        except _REFUSALS as exc:
            at = self._blamed(messages, extra, budget, str(exc))
            field = "messages" if at is None else f"messages[{at}]"
            what = "these messages" if at is None else field
            raise InvalidRequestError(f"the chat template refuses {what}: {exc}", field=field) from exc
        except (RecursionError, MemoryError) as exc:
            raise InvalidRequestError("these messages are too much for the chat template", field="messages") from exc

    def _once(
        self, messages: Sequence[Mapping[str, Any]], extra: _Extra, budget: Budget, *, goes_on: bool = False
    ) -> str:
        chat, tools = [self._message(message) for message in messages], extra.tools
        if not self._knows_tools:
            chat, tools = in_words(chat, tools), ()
        last = str(chat[-1].get("content", "")) if goes_on else ""
        if goes_on:
            chat[-1]["content"] = last + _END_MARK
        variables = {**self._special_tokens, **extra.kwargs}
        variables.update(messages=chat, tools=list(tools) or None, documents=list(extra.documents) or None)
        variables["add_generation_prompt"] = extra.add_generation_prompt
        text = self._rendered(variables, budget)
        return _cut_behind(text, last) if goes_on else text

    def _blamed(self, messages: Sequence[Mapping[str, Any]], extra: _Extra, budget: Budget, said: str) -> int | None:
        """The message without which, and those after it, the template would not have said this. None when it says so
        whatever the messages, or there is no time left to find out."""

        def refused(count: int) -> bool:
            try:
                self._once(messages[:count], extra, budget)
            except BudgetError:
                raise
            except _REFUSALS as exc:
                return str(exc) == said
            return False

        low, high = 0, len(messages)  # those refused begin somewhere in (low, high]
        try:
            if refused(0):
                return None
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if refused(middle) else (middle, high)
            return high - 1
        except (BudgetError, RecursionError, MemoryError):
            return None

    def _rendered(self, variables: dict[str, Any], budget: Budget) -> str:
        """Templates that dump arguments need objects, those that append them (DeepSeek's) need text."""
        try:
            return render(self._template, variables, budget)
        except TypeError:
            if not any(message.get("tool_calls") for message in variables["messages"]):
                raise
            texts = list(map(_with_text, variables["messages"]))
            return render(self._template, {**variables, "messages": texts}, budget)

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        out = {key: value for key, value in message.items() if value is not None}
        reasoning = next((out[key] for key in _REASONING_FIELDS if key in out), None)
        if reasoning is not None:
            out = {"thinking": reasoning, **out, "reasoning_content": reasoning}
        if out.get("role") == "developer" and not self._knows_developer:
            out["role"] = "system"
        if self._short_ids:
            out = _with_short_ids(out)
        return out


def _with_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with its calls' arguments as JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": to_json(call["function"].get("arguments"))}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Mistral's templates take ids of nine letters and digits alone: others become such, each always the same."""
    if isinstance(found := message.get("tool_call_id"), str):
        message["tool_call_id"] = _short_id(found)
    if isinstance(calls := message.get("tool_calls"), list):
        message["tool_calls"] = [{**call, "id": _short_id(str(call.get("id")))} for call in calls]
    return message


def _short_id(call_id: str) -> str:
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _cut_behind(text: str, message: str) -> str:
    """The rendered text up to the mark behind its last message, as transformers cuts it."""
    at = text.rfind(_END_MARK.strip())
    if at < 0 or message.strip() not in text:
        raise InvalidRequestError(
            "continue_final_message: the chat template does not show the last message as it is",
            field="continue_final_message",
        )
    # A template that trims has taken the mark's own space, and would have taken the message's.
    return text[:at] if text.startswith(_END_MARK, at) else text[:at].rstrip()
