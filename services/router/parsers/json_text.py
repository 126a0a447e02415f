"""JSON as it comes: how far a value goes and whether it can still be one (RFC 8259).

`Infinity`, `NaN` and single quotes are no JSON. What a client reads later is what was read here: nothing is changed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from services.router.parsers.reader import Reader, Steps

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER_CHARS = frozenset("+-.eE0123456789")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_HEX = frozenset("0123456789abcdefABCDEF")
_SHORT = frozenset('"\\/bfnrt')
MAX_DEPTH = 200
"""Deeper values count as no JSON: clients' parsers have limits too."""

Out = Callable[[str], None]


def _nowhere(text: str) -> None:
    """For text that nobody waits for."""


def text_of_value(reader: Reader, out: Out = _nowhere) -> Steps[str | None]:
    """Reads one value at the reader's place and returns its text; None when it is none or never ends, and then the
    reader stands where it went wrong. `out` gets the text piece by piece, as far as it can be part of a value."""
    pieces: list[str] = []

    def both(text: str) -> None:
        pieces.append(text)
        out(text)

    whole = yield from _value(reader, both)
    return "".join(pieces) if whole else None


def string(reader: Reader) -> Steps[str | None]:
    """Reads a string and returns what it stands for; None when there is none."""
    pieces: list[str] = []
    if (yield from reader.peek()) != '"' or not (yield from _string(reader, pieces.append)):
        return None
    return str(json.loads("".join(pieces)))


def _value(reader: Reader, out: Out) -> Steps[bool]:
    """A value of any depth: `closers` are the brackets that are open."""
    closers: list[str] = []
    while True:
        char = yield from _space(reader, out) if closers else reader.peek()
        if char in ("{", "["):
            if len(closers) == MAX_DEPTH:
                return False
            _take(reader, 1, out)
            closers.append("}" if char == "{" else "]")
            inner = yield from _space(reader, out)
            if inner == closers[-1]:
                _take(reader, 1, out)
                closers.pop()
            elif char == "[" or (yield from _key(reader, out)):
                continue
            else:
                return False
        elif not (yield from _scalar(reader, char, out)):
            return False
        while closers:  # behind a value: what closes, or another one
            char = yield from _space(reader, out)
            if char == closers[-1]:
                _take(reader, 1, out)
                closers.pop()
                continue
            if char != ",":
                return False
            _take(reader, 1, out)
            if closers[-1] == "}":
                yield from _space(reader, out)
                if not (yield from _key(reader, out)):
                    return False
            break
        if not closers:
            return True


def _key(reader: Reader, out: Out) -> Steps[bool]:
    if (yield from reader.peek()) != '"' or not (yield from _string(reader, out)):
        return False
    if (yield from _space(reader, out)) != ":":
        return False
    _take(reader, 1, out)
    return True


def _scalar(reader: Reader, char: str, out: Out) -> Steps[bool]:
    if char == '"':
        return (yield from _string(reader, out))
    if char in _LITERALS:
        whole = yield from reader.literal(_LITERALS[char])
        if whole:
            out(_LITERALS[char])
        elif reader.ended and _LITERALS[char].startswith(rest := reader.text[reader.at :]):
            _take(reader, len(rest), out)  # cut
        return whole
    if char and char in "-0123456789":
        text = ""
        while (yield from reader.peek()) in _NUMBER_CHARS:
            text += reader.text[reader.at]
            _take(reader, 1, out)
        return _NUMBER.fullmatch(text) is not None
    return False


def _string(reader: Reader, out: Out) -> Steps[bool]:
    _take(reader, 1, out)
    while True:
        found = _PLAIN.match(reader.text, reader.at)
        assert found is not None
        _take(reader, found.end() - found.start(), out)
        char = yield from reader.peek()
        if char == '"':
            _take(reader, 1, out)
            return True
        if char == "\\":
            if not (yield from _escape(reader, out)):
                return False
        elif not char or char < " ":
            return False


def _escape(reader: Reader, out: Out) -> Steps[bool]:
    _take(reader, 1, out)
    char = yield from reader.peek()
    if char in _SHORT:
        _take(reader, 1, out)
        return True
    if char != "u":
        return False
    _take(reader, 1, out)
    for _ in range(4):
        if (yield from reader.peek()) not in _HEX:
            return False
        _take(reader, 1, out)
    return True


def _space(reader: Reader, out: Out) -> Steps[str]:
    while True:
        char = yield from reader.peek()
        if not char or char not in " \t\r\n":
            return char
        _take(reader, 1, out)


def _take(reader: Reader, length: int, out: Out) -> None:
    if length:
        out(reader.text[reader.at : reader.at + length])
        reader.at += length
