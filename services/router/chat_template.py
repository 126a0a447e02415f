"""Renders chat templates as transformers does, without importing it (that would import torch).

The environment is the same: jinja's immutable sandbox with trimmed blocks, loop controls, the `generation`
tag, and the helpers raise_exception, strftime_now, tojson, dict and namespace.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine_core.types.errors import InvalidRequestError
from services.router.plain_tools import in_words

_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class _GenerationTag(jinja2.ext.Extension):
    """Accepts {% generation %}…{% endgeneration %}, which marks text for training, as plain text."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own convention)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_as_text"), [], [], body).set_lineno(line)

    def _as_text(self, caller: Callable[[], str]) -> str:
        return caller()


class _TemplateDict:
    """`dict` for templates: a constructor, not the class with all that hangs on it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _TemplateNamespace(jinja2.utils.Namespace):
    """A namespace that keeps no underscore-prefixed attribute."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        attrs = dict(*rest, **kwargs)
        for name in attrs:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(self, attrs)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not store {name!r} on a namespace")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(fmt: str) -> str:
    return datetime.datetime.now().strftime(fmt)


def _tojson(  # templates pass these by position too, as transformers lets them
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """One compiled template with the tokenizer's special tokens as variables."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        env.filters["tojson"] = _tojson
        env.globals.update(
            raise_exception=_raise_exception,
            strftime_now=_strftime_now,
            dict=_TemplateDict(),
            namespace=_TemplateNamespace,
        )
        self._template = env.from_string(source)
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
    ) -> str:
        """Returns the chat as text; with `continue_final_message` it ends with the last message's text. Keys with None
        are dropped, as transformers does.

        The role developer becomes system where the template does not know it. Raises
        InvalidRequestError (field messages) when the template refuses the chat.
        """
        chat = [self._message(message) for message in messages]
        if not self._knows_tools:
            chat, tools = in_words(chat, tools), ()
        last = str(chat[-1].get("content", "")) if continue_final_message else ""
        if continue_final_message:
            chat[-1]["content"] = last + _END_MARK
        variables = {**self._special_tokens, **(template_kwargs or {})}
        variables.update(messages=chat, tools=list(tools) or None, documents=list(documents) or None)
        variables["add_generation_prompt"] = add_generation_prompt
        try:
            text = self._rendered(variables)
        except (jinja2.exceptions.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as exc:
            raise InvalidRequestError(f"the chat template refuses these messages: {exc}", field="messages") from exc
        except (RecursionError, MemoryError) as exc:
            raise InvalidRequestError("these messages are too much for the chat template", field="messages") from exc
        return _cut_behind(text, last) if continue_final_message else text

    def _rendered(self, variables: dict[str, Any]) -> str:
        """Templates that dump arguments need objects, those that append them (DeepSeek's) need text."""
        try:
            return self._template.render(variables)
        except TypeError:
            if not any(message.get("tool_calls") for message in variables["messages"]):
                raise
            return self._template.render({**variables, "messages": list(map(_with_text, variables["messages"]))})

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
        {**call, "function": {**call["function"], "arguments": _tojson(call["function"].get("arguments"))}}
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
