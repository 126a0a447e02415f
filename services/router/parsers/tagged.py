"""Calls whose arguments stand between marks, each on its own. Families differ in the marks:

    qwen3_coder   <tool_call>
                  <function=get_weather>
                  <parameter=city>
                  Oslo
                  </parameter>
                  </function>
                  </tool_call>
    glm45         <tool_call>get_weather
                  <arg_key>city</arg_key>
                  <arg_value>Oslo</arg_value>
                  </tool_call>
    minimax_m2    <minimax:tool_call>
                  <invoke name="get_weather">
                  <parameter name="city">Oslo</parameter>
                  </invoke>
                  </minimax:tool_call>
    deepseek_v32  <｜DSML｜function_calls>
                  <｜DSML｜invoke name="get_weather">
                  <｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>
                  </｜DSML｜invoke>
                  </｜DSML｜function_calls>

Strings stand there as they are, without quotes; other values are JSON. Which of the two a value is, the function's
schema says (deepseek_v32 says it itself), and what should be JSON and is none is a string. A value ends where its last
mark is followed by another argument's first one or by the end of the call: it may hold its own mark.
"""

from __future__ import annotations

import json
import re

import msgspec

from services.router.parsers.call_object import Tools, broken_arguments
from services.router.parsers.json_text import text_of_value
from services.router.parsers.reader import SteppedParser, Steps
from services.router.parsers.schema_types import STRING, Types, type_of_text, types_of_parameter

_NAME_CHAR = re.compile(r"[a-zA-Z0-9_.-]")
KEY_CHAR = re.compile(r'[^<>"\r\n]')
MAX_KEY = 256
_WORDS = {"True": "true", "False": "false", "None": "null"}
"""Python's words, which the templates of some models write."""
_BEGINS = {
    "object": "{",
    "array": "[",
    "number": "-0123456789",
    "integer": "-0123456789",
    "boolean": "tfTF",
    "null": "nN",
}


class Tags(msgspec.Struct, frozen=True):
    """A family's marks."""

    blocks: tuple[tuple[str, str], ...]
    """What stands around calls; templates write the first."""
    head: str
    """Before a function's name; a call is understood without a block then."""
    head_end: str
    end: str
    """Behind the arguments."""
    key: str
    key_ends: tuple[str, ...]
    """Behind an argument's name. Where there are several, the first says that the value is a string, the second that it
    is JSON."""
    value_end: str
    value: str = ""
    """Before the value, where that is not the end of the name."""
    lines: bool = False
    """True when values stand on lines of their own: a line break at either side is not theirs."""
    untyped_json: bool = False
    """True when values of which the schema says nothing are JSON where they can be."""
    one_per_block: bool = False
    """True when each call has a block of its own."""
    special: tuple[str, ...] = ()
    """Marks, or parts of them, that may be special tokens."""

    @property
    def opens(self) -> tuple[str, ...]:
        """What begins calls."""
        return tuple(opening for opening, _ in self.blocks)

    @property
    def closes(self) -> tuple[str, ...]:
        """What ends them."""
        return tuple(closing for _, closing in self.blocks)

    @property
    def behind_value(self) -> tuple[str, ...]:
        """What may follow an argument: another one, or an end of the call."""
        return tuple(dict.fromkeys((self.key, self.end, *self.closes)))


QWEN3_CODER = Tags(
    blocks=(("<tool_call>", "</tool_call>"),),
    head="<function=",
    head_end=">",
    end="</function>",
    key="<parameter=",
    key_ends=(">",),
    value_end="</parameter>",
    lines=True,
    one_per_block=True,
    special=("<tool_call>", "</tool_call>"),
)
GLM45 = Tags(
    blocks=(("<tool_call>", "</tool_call>"),),
    head="",
    head_end="",
    end="</tool_call>",
    key="<arg_key>",
    key_ends=("</arg_key>",),
    value="<arg_value>",
    value_end="</arg_value>",
    untyped_json=True,
    one_per_block=True,
    special=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
MINIMAX_M2 = Tags(
    blocks=(("<minimax:tool_call>", "</minimax:tool_call>"),),
    head='<invoke name="',
    head_end='">',
    end="</invoke>",
    key='<parameter name="',
    key_ends=('">',),
    value_end="</parameter>",
    special=("<minimax:tool_call>", "</minimax:tool_call>"),
)
GLM_UNBROKEN = ("}<arg_key>", "</arg_key><arg_value>", "'<arg_key>'")
"""What templates of GLM hold from 4.7 on, which writes no line breaks between marks."""
DSML = "｜DSML｜"
DEEPSEEK_V32 = Tags(
    blocks=(
        ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
        ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),  # V4
    ),
    head='<｜DSML｜invoke name="',
    head_end='">',
    end="</｜DSML｜invoke>",
    key='<｜DSML｜parameter name="',
    key_ends=('" string="true">', '" string="false">', '">'),
    value_end="</｜DSML｜parameter>",
    special=(DSML,),
)
FAMILIES = {"qwen3_coder": QWEN3_CODER, "glm45": GLM45, "minimax_m2": MINIMAX_M2, "deepseek_v32": DEEPSEEK_V32}


class TaggedParser(SteppedParser):
    """Reads one family's marks."""

    def __init__(self, tools: Tools, tags: Tags) -> None:
        self._tools, self._tags = tools, tags
        self._break = ""
        """A line break that may turn out to be the form's."""
        super().__init__()

    def read(self) -> Steps[None]:
        """See SteppedParser."""
        reader, tags = self.reader, self._tags
        begins = (*tags.opens, tags.head) if tags.head else tags.opens
        while mark := (yield from reader.until(begins, reader.content)):
            reader.hold()
            headed = True
            if mark in tags.opens:
                yield from reader.space()
                headed = not tags.head or (yield from reader.literal(tags.head))
            if not headed or not (yield from self._call()):
                reader.rewind()
                reader.content(mark)
                continue
            yield from self._more()

    def _more(self) -> Steps[None]:
        """Further calls of a block, and its end."""
        reader, tags = self.reader, self._tags
        while tags.head:
            reader.hold()
            yield from reader.space()
            if not (yield from reader.literal(tags.head)) or not (yield from self._call()):
                reader.rewind()
                break
        reader.hold()
        yield from reader.space()
        if (yield from reader.one_of(tags.closes)):
            reader.release()
        else:
            reader.rewind()

    def _call(self) -> Steps[bool]:
        """One call from its name on. It is one once an argument, or its end, follows the name."""
        reader, tags = self.reader, self._tags
        name = yield from reader.matching(_NAME_CHAR, MAX_KEY)
        if not self._tools.has(name) or not (yield from reader.peek()):
            return False
        if tags.head_end and not (yield from reader.literal(tags.head_end)):
            return reader.cut(name, marks=(tags.head_end,))
        yield from reader.space()
        found = yield from reader.one_of(tags.behind_value)
        if not found:
            return reader.cut(name, marks=tags.behind_value)
        reader.begin(name)
        between = "{"
        while found == tags.key:
            found = yield from self._argument(name, between)
            between = ", "
        if not found:
            yield from reader.literal(tags.end)
            return True
        reader.arguments("{}" if between == "{" else "}")
        if found in tags.closes:  # which is read where blocks end
            reader.at -= len(found)
        return True

    def _argument(self, function: str, between: str) -> Steps[str]:
        """One argument behind its first mark. Returns the mark that follows it, "" when it broke off."""
        reader, tags = self.reader, self._tags
        reader.hold(len(tags.key))
        key = yield from reader.matching(KEY_CHAR, MAX_KEY)
        ending = (yield from reader.one_of(tags.key_ends)) if key else ""
        if ending and tags.value:
            yield from reader.space()
            ending = ending if (yield from reader.literal(tags.value)) else ""
        if not ending:
            reader.rewind()
            reader.arguments(between)
            yield from broken_arguments(reader, (tags.end, *tags.closes))
            return ""
        reader.release()
        reader.arguments(f"{between}{json.dumps(key, ensure_ascii=False)}: ")
        types = self._types(function, key, ending)
        if types != STRING:
            reader.hold()
            found = yield from self._as_json(types)
            if found is not None:
                return found
            reader.rewind()
        return (yield from self._as_text())

    def _types(self, function: str, key: str, ending: str) -> Types | None:
        """The types that a value may have; None for JSON of any."""
        tags = self._tags
        if len(tags.key_ends) > 1 and ending in tags.key_ends[:2]:
            return STRING if ending == tags.key_ends[0] else None
        types = types_of_parameter(self._tools.schemas.get(function), key)
        return STRING if types is None and not tags.untyped_json else types

    def _as_json(self, types: Types | None) -> Steps[str | None]:
        """Reads a value that is no string: whole or not at all. Returns the mark that follows it, "" for the end of the
        output, None when it is no such value."""
        reader, tags = self.reader, self._tags
        char = yield from reader.space()
        others = None if types is None or "string" not in types else types - STRING
        if others is not None and not any(char and char in _BEGINS[kind] for kind in others):
            return None
        word = yield from reader.one_of(tuple(_WORDS))
        text = _WORDS[word] if word else (yield from text_of_value(reader))
        if text is None or not _is_one_of(text, others):
            return None
        yield from reader.space()
        if not (yield from reader.literal(tags.value_end)):
            return None
        char = yield from reader.space()
        found = yield from reader.one_of(tags.behind_value)
        if char and not found:
            return None
        reader.release()
        reader.arguments(text)
        return found

    def _as_text(self) -> Steps[str]:
        """Reads a value as a string, as it comes. Returns the mark that follows it, "" for the end of the output."""
        reader, tags = self.reader, self._tags
        reader.arguments('"')
        if tags.lines and (yield from reader.peek()) == "\n":
            reader.at += 1
        while (yield from reader.until((tags.value_end,), self._text)):
            reader.hold(len(tags.value_end))
            char = yield from reader.space()
            found = yield from reader.one_of(tags.behind_value)
            if found or not char:
                reader.release()
                self._break = ""
                reader.arguments('"')
                return found
            reader.rewind()
            reader.at += len(tags.value_end)
            self._text(tags.value_end)
        reader.arguments(_escaped(self._break))
        return ""

    def _text(self, text: str) -> None:
        text, self._break = self._break + text, ""
        if self._tags.lines and text.endswith("\n"):
            text, self._break = text[:-1], "\n"
        self.reader.arguments(_escaped(text))


def _is_one_of(text: str, types: Types | None) -> bool:
    kind = type_of_text(text)
    return types is None or kind in types or (kind == "number" and "integer" in types)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
