"""One call written as a JSON object: {"name": …, "arguments": {…}}, as several families do.

The arguments go out as they come once the name is known. Before that, whatever makes it no call puts the reader back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
import orjson

from services.router.parsers.json_text import string, text_of_value
from services.router.parsers.reader import Reader, Steps

_NAMES = ("name", "function")
_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset((*_NAMES, *_ARGUMENTS, "id", "type"))
_ID = re.compile(r'"([a-zA-Z0-9_-]{1,64})"')


class Tools(msgspec.Struct, frozen=True):
    """The functions that may be called; None takes any name."""

    names: Collection[str] | None = None
    schemas: Mapping[str, Mapping[str, Any]] = {}
    """JSON schemas of their arguments, as far as there are any: forms that write no types need them."""

    def has(self, name: str) -> bool:
        """True when `name` may be called."""
        return bool(name) and (self.names is None or name in self.names)


def call_object(reader: Reader, tools: Tools, *, marked: bool, ends: Sequence[str] = ()) -> Steps[bool]:
    """Reads a call whose `{` is next. False when it is none: then nothing has gone out, and the caller, who holds the
    place, goes back.

    `marked` calls stand behind a mark that says so: they may leave out their arguments and have more keys, and one that
    ends with the output behind its name is a call. Arguments
    that turn out to be no JSON go out as they are, up to one of `ends`: they have begun by then.
    """
    return (yield from _Object(reader, tools, marked=marked, ends=ends).read())


def stream_object(reader: Reader, ends: Sequence[str]) -> Steps[None]:
    """Gives the object that is next out as arguments. When it breaks off, all up to one of `ends` is part of them."""
    if (yield from text_of_value(reader, reader.arguments)) is None:
        yield from broken_arguments(reader, ends)


def broken_arguments(reader: Reader, ends: Sequence[str]) -> Steps[None]:
    """Arguments that are no JSON go out as the model wrote them, up to the mark that ends a call."""
    found = yield from reader.until(ends, reader.arguments)
    reader.at -= len(found)


class _Object:
    def __init__(self, reader: Reader, tools: Tools, *, marked: bool, ends: Sequence[str]) -> None:
        self._reader, self._tools, self._marked, self._ends = reader, tools, marked, ends
        self._name = ""
        self._id = ""
        self._arguments: str | None = None
        self._begun = False
        self._over = False
        """True when the arguments broke off: all is said."""
        self._hidden = False
        """True when arguments have begun that can't go out piece by piece."""

    def read(self) -> Steps[bool]:
        reader = self._reader
        if not (yield from reader.literal("{")):
            return False
        more = yield from self._member()
        while more and not self._over:
            if self._begun:  # the rest is for nobody, but no text gets lost
                reader.hold()
            char = yield from reader.space()
            reader.at += 1 if char else 0
            if char == "}":
                reader.release() if self._begun else self._begin()
                return self._begun
            more = char == "," and (yield from self._member())
        if self._begun and not self._over:
            reader.rewind()
        if self._begun or not self._marked or not self._name or self._hidden:
            return self._begun
        return reader.cut(self._name, self._id)

    def _member(self) -> Steps[bool]:
        reader = self._reader
        if (yield from reader.space()) != '"':
            return False
        key = yield from string(reader)
        if key is None or not (self._marked or key in _KEYS) or (yield from reader.space()) != ":":
            return False
        reader.at += 1
        return (yield from self._value_of(key, (yield from reader.space())))

    def _value_of(self, key: str, char: str) -> Steps[bool]:
        """Reads the value of one key. False when this is no call."""
        reader = self._reader
        if key in _NAMES and char == '"' and not self._name:
            name = (yield from string(reader)) or ""
            if not self._tools.has(name):
                return False
            self._name = name
            if self._arguments is not None:
                self._begin()
            return True
        if key in _ARGUMENTS and not self._begun and self._arguments is None:
            return (yield from self._arguments_of(char))
        text = yield from text_of_value(reader)
        if text is None:
            return False
        if key == "id" and (found := _ID.fullmatch(text)):
            self._id = found.group(1)
        return True

    def _arguments_of(self, char: str) -> Steps[bool]:
        reader = self._reader
        if char == "{" and self._name:
            self._begun = True
            reader.begin(self._name, self._id)
            if (yield from text_of_value(reader, reader.arguments)) is None:
                yield from broken_arguments(reader, self._ends)
                self._over = True
            return True
        self._hidden = char not in ("", "n")
        text = yield from text_of_value(reader)
        self._arguments = _as_object(text)
        if self._arguments is not None and self._name:
            self._begin()
        return self._arguments is not None

    def _begin(self) -> bool:
        """The call as it is known at its end."""
        if not self._name or self._begun or (self._arguments is None and not self._marked):
            return self._begun
        self._begun = True
        self._reader.begin(self._name, self._id)
        self._reader.arguments(self._arguments or "{}")
        return True


def _as_object(text: str | None) -> str | None:
    """The text of an object: as it is, inside a string, or null for an empty one."""
    if text is None:
        return None
    if text.startswith("{"):
        return text
    if text == "null":
        return "{}"
    if text.startswith('"'):
        try:
            inner = str(json.loads(text))
            return inner if isinstance(orjson.loads(inner), dict) else None
        except ValueError:
            return None
    return None
