"""Renders chats as transformers does, without importing it (that would import torch); where a template refuses, finds
the message that it refuses.

What a template may do, and for how long, template_sandbox.py says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
import msgspec

from engine_core.types.errors import InvalidRequestError
from services.router.text.chat_habits import Habits, filled, with_text_arguments
from services.router.text.plain_tools import form_of, in_words, with_calls_in_words
from services.router.text.template_sandbox import Budget, BudgetError, Environment, render

RENDER_SECONDS = 5.0
"""For one chat; more than any template needs."""

_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


_Tools = Sequence[Mapping[str, Any]]
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
        self._habits = Habits.of(source)
        self._form = form_of(source)

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
        chat = list(map(_message, messages))
        last = str(chat[-1].get("content", "")) if goes_on else ""
        if goes_on:
            chat[-1]["content"] = last + _END_MARK
        chat = self._habits.fitted(chat)
        variables = {**self._special_tokens, **extra.kwargs, "documents": list(extra.documents) or None}
        variables["add_generation_prompt"] = extra.add_generation_prompt
        text = self._rendered(chat, extra.tools, variables, budget)
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

    def _rendered(self, chat: list[dict[str, Any]], tools: _Tools, variables: dict[str, Any], budget: Budget) -> str:
        """The first form of the chat that the template takes. Raises what it says to the plain one."""
        refusal: Exception | None = None
        for messages, shown in self._forms(chat, tools):
            try:
                return render(self._template, {**variables, "messages": messages, "tools": list(shown) or None}, budget)
            except BudgetError:
                raise
            except _REFUSALS as exc:
                refusal = refusal or exc
        assert refusal is not None  # there is a first form
        raise refusal

    def _forms(self, chat: list[dict[str, Any]], tools: _Tools) -> Iterator[tuple[Sequence[Mapping[str, Any]], _Tools]]:
        """The chat as transformers gives it, then what may help where the template refuses that: arguments as text, for
        those that append them; tools with all that a tool may have; tools in words in the user's message (Gemma's)."""
        if not self._habits.tools:
            yield in_words(chat, tools, self._form), ()
            if tools:
                yield in_words(chat, tools, self._form, system=False), ()
            return
        if not self._habits.calls:
            chat = [with_calls_in_words(m, self._form) if m.get("tool_calls") else m for m in chat]
        called = any(message.get("tool_calls") for message in chat)
        whole = filled(tools)
        yield chat, tools
        if called:
            yield with_text_arguments(chat), tools
        if whole != list(tools):
            yield chat, whole
            if called:
                yield with_text_arguments(chat), whole


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without keys that hold None, and with thoughts under all their names, as transformers does it."""
    out = {key: value for key, value in message.items() if value is not None}
    reasoning = next((out[key] for key in _REASONING_FIELDS if key in out), None)
    return out if reasoning is None else {"thinking": reasoning, **out, "reasoning_content": reasoning}


def _cut_behind(text: str, message: str) -> str:
    """The rendered text up to the mark behind its last message, as transformers cuts it."""
    at = text.rfind(_END_MARK.strip())
    if at < 0 or not text[:at].rstrip().endswith(message.strip()):
        raise InvalidRequestError(
            "continue_final_message: the chat template does not show the last message as it is",
            field="continue_final_message",
        )
    # A template that trims has taken the mark's own space, and would have taken the message's.
    return text[:at] if text.startswith(_END_MARK, at) else text[:at].rstrip()
