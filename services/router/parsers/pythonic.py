"""Calls in Python's own form, as a list: Llama 3.2 and 4, ToolACE, LFM2 and who follows them.

    [get_weather(city="Oslo", days=[1, 2]), get_time()]

The list is the whole output, or stands behind <|python_start|>, with <|python_end|> behind it; LFM2's marks are
<|tool_call_start|> and <|tool_call_end|>. Values are literals:
strings in either quotes, one or three, with escapes; numbers; True, False, None and what JSON calls them; lists and
dicts with strings as keys. They go out as JSON.
"""

from __future__ import annotations

import json
import math
import re

from services.router.parsers.call_object import Tools, broken_arguments
from services.router.parsers.json_text import MAX_DEPTH
from services.router.parsers.reader import SteppedParser, Steps

START, END = "<|python_start|>", "<|python_end|>"
LFM2 = ("<|tool_call_start|>", "<|tool_call_end|>")
_STARTS, _ENDS = (START, LFM2[0]), (END, LFM2[1])
MARKS = (START, END)
SHOWN = "[func_name1("
"""How templates show the form."""
_NAME_CHAR = re.compile(r"[a-zA-Z0-9_.-]")
KEY_CHAR = re.compile(r"[\w.-]")
_NUMBER_CHAR = re.compile(r"[0-9a-zA-Z_.+-]")
_JSON_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_PLAIN = {quote: re.compile(rf"[^{quote}\\\n]+") for quote in "\"'"}
_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0",
    "\\": "\\", "'": "'", '"': '"', "/": "/", "\n": "",
}  # fmt: skip
_HEX = re.compile(r"[0-9a-fA-F]")
_DIGITS = {"x": 2, "u": 4, "U": 8}


class PythonicParser(SteppedParser):
    """Reads lists of calls."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        super().__init__()

    def read(self) -> Steps[None]:
        """See SteppedParser."""
        reader = self.reader
        reader.hold()
        yield from reader.space()
        if not (yield from self._list()):
            reader.rewind()
        while mark := (yield from reader.until(_STARTS, reader.content)):
            reader.hold()
            yield from reader.space()
            if not (yield from self._list()):
                reader.rewind()
                reader.content(mark)

    def _list(self) -> Steps[bool]:
        """A list of calls whose `[` is next."""
        reader = self.reader
        if not (yield from reader.literal("[")):
            return False
        yield from reader.space()
        if not (yield from self._call()):
            return False
        while True:
            reader.hold()
            yield from reader.space()
            if (yield from reader.literal("]")):
                reader.hold()
                yield from reader.space()
                if (yield from reader.one_of(_ENDS)):
                    reader.release()
                else:
                    reader.rewind()
                return True
            if (yield from reader.literal(",")):
                yield from reader.space()
                if (yield from self._call()):
                    continue
            reader.rewind()
            return True

    def _call(self) -> Steps[bool]:
        """One call from its name on. It is one once a first argument's name, or the end, follows."""
        reader = self.reader
        name = yield from reader.matching(_NAME_CHAR, 256)
        if not self._tools.has(name) or not (yield from reader.literal("(")):
            return False
        key = ""
        if (yield from reader.space()) != ")":
            key = yield from self._key()
            if not key:
                return False
        reader.begin(name)
        if not (yield from self._arguments(key)):
            yield from broken_arguments(reader, _ENDS)
        return True

    def _arguments(self, key: str) -> Steps[bool]:
        """Arguments from behind the first one's `=`, "" for none, to the bracket behind them. False where they break
        off."""
        reader, between = self.reader, "{"
        while key:
            reader.arguments(f"{between}{json.dumps(key, ensure_ascii=False)}: ")
            between, key = ", ", ""
            if not (yield from self._value(0)):
                return False
            if (yield from reader.space()) == ")":
                break
            if not (yield from reader.literal(",")):
                return False
            if (yield from reader.space()) != ")":
                reader.hold()
                key = yield from self._key()
                if not key:
                    reader.rewind()
                    reader.arguments(between)
                    return False
                reader.release()
        reader.at += 1
        reader.arguments("{}" if between == "{" else "}")
        return True

    def _key(self) -> Steps[str]:
        """An argument's name and its `=`; "" when there is none."""
        reader = self.reader
        key = yield from reader.matching(KEY_CHAR, 256)
        yield from reader.space()
        return key if (yield from reader.literal("=")) else ""

    def _value(self, depth: int) -> Steps[bool]:
        """Reads a literal and gives it out as JSON; False where it is none."""
        reader = self.reader
        char = yield from reader.space()
        if char in ("[", "{"):
            if depth == MAX_DEPTH:
                return False
            return (yield from self._several(char, depth))
        if char in ('"', "'"):
            return (yield from self._string(char))
        written = yield from reader.matching(_NUMBER_CHAR, 512)
        text = _WORDS.get(written) or _number(written)
        reader.arguments(text or written)
        return text is not None

    def _several(self, char: str, depth: int) -> Steps[bool]:
        reader, closing = self.reader, "]" if char == "[" else "}"
        reader.at += 1
        reader.arguments(char)
        between = ""
        while True:
            found = yield from reader.space()
            if found == closing:
                reader.at += 1
                reader.arguments(closing)
                return True
            reader.arguments(between)
            if char == "{":
                if found not in ('"', "'") or not (yield from self._string(found)):
                    return False
                yield from reader.space()
                if not (yield from reader.literal(":")):
                    return False
                reader.arguments(": ")
            if not (yield from self._value(depth + 1)):
                return False
            between = ", "
            if (yield from reader.space()) != closing and not (yield from reader.literal(",")):
                return False

    def _string(self, quote: str) -> Steps[bool]:
        reader = self.reader
        long = yield from reader.literal(quote * 3)
        if not long:
            reader.at += 1
        reader.arguments('"')
        while True:
            found = _PLAIN[quote].match(reader.text, reader.at)
            if found is not None:
                reader.at = found.end()
                reader.arguments(_escaped(found.group()))
            char = yield from reader.peek()
            if char == quote and (not long or (yield from reader.literal(quote * 3))):
                reader.at += 0 if long else 1
                reader.arguments('"')
                return True
            if char == "\\":
                reader.hold()
                if not (yield from self._escape()):
                    reader.rewind()
                    return False
                reader.release()
            elif char == "" or (char == "\n" and not long):
                return False
            else:
                reader.at += 1
                reader.arguments(_escaped(char))

    def _escape(self) -> Steps[bool]:
        """An escape, as Python or JSON has it; a backslash before anything else stands for itself."""
        reader = self.reader
        reader.at += 1
        char = yield from reader.peek()
        if char in _DIGITS:
            code = yield from self._code(char)
            if 0xD800 <= code < 0xDC00 and (yield from reader.literal("\\u")):
                reader.at -= 1
                low = yield from self._code("u")
                code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00) if 0xDC00 <= low < 0xE000 else -1
            if not 0 <= code <= 0x10FFFF or 0xD800 <= code < 0xE000:
                return False
            reader.arguments(_escaped(chr(code)))
            return True
        if not char:
            return False
        if char in _ESCAPES:
            reader.at += 1
        reader.arguments(_escaped(_ESCAPES.get(char, "\\")))
        return True

    def _code(self, kind: str) -> Steps[int]:
        """What the digits behind x, u or U say; -1 when some are missing."""
        reader = self.reader
        reader.at += 1
        digits = yield from reader.matching(_HEX, _DIGITS[kind])
        return int(digits, 16) if len(digits) == _DIGITS[kind] else -1


def _number(text: str) -> str | None:
    if _JSON_NUMBER.fullmatch(text):
        return text
    try:
        return str(int(text, 0))
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        return None
    return json.dumps(value) if math.isfinite(value) else None


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
