"""Grammars that make a model call tools in its own format, in llguidance's Lark.

    whole output = thoughts, where the model thinks; then calls

A call's arguments follow the schema of its function. What a grammar allows, the format's parser reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import orjson

from engine_core.types.sampling import Grammar, GrammarKind
from services.router.grammar.forms import json_in_lark
from services.router.parsers import (
    bare_json,
    deepseek_v3,
    harmony,
    hermes,
    json_lists,
    kimi_k2,
    mistral,
    pythonic,
    tagged,
)
from services.router.parsers.argument_forms import moved, python_arguments, tagged_arguments
from services.router.parsers.choice import GPT_OSS, OutputFormat
from services.router.parsers.tagged import Tags

MAX_CALLS = 16
"""Most calls of one reply that a grammar allows: a small model may repeat one call for as long as it is let."""

_ANYTHING: Mapping[str, Any] = {"type": "object"}
_NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_BARE = {"json": "arguments", "llama3_json": "parameters"}
"""Formats without marks, with what they call the arguments."""
_CALL_MARKS = {"deepseek_v3": deepseek_v3.CALL, "kimi_k2": kimi_k2.CALL}
"""What stands before each call, where something else stands before them all."""
_BEGINS = {"pythonic": r"\[", "xlam": r"\[{"}
"""What calls without a mark begin with, where that is no object."""
_INNER_MARKS = {"llama3_json": (bare_json.PYTHON_TAG,), "pythonic": (pythonic.START, pythonic.LFM2[0])}
"""What calls may stand behind in the middle of a text, where they need no mark at its beginning."""
_UNSAFE = re.compile(r"\\.|[/\n]", re.DOTALL)
"""What ends a pattern in Lark, and what may stand before it."""
_BREAKS = r"\n{0,2}"
"""What may stand at either side of thoughts, and before calls."""
_Marks = tuple[str, ...]


class Function(msgspec.Struct, frozen=True):
    """A function that may be called. `parameters` is the JSON schema of its arguments, None for none."""

    name: str
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    @property
    def schema(self) -> Mapping[str, Any]:
        """The schema of its arguments; they are an object whatever it says."""
        return _NOTHING if self.parameters is None else {**self.parameters, "type": "object"}


def forced_calls(
    written: OutputFormat,
    functions: Sequence[Function],
    *,
    most: int = MAX_CALLS,
    inside: bool | None = None,
) -> Grammar:
    """One call, or up to `most` and MAX_CALLS where the format has several. `inside` as OutputFormat.inside."""
    lark = _Lark(written, most)
    return lark.grammar(f"{lark.thoughts(inside)} {lark.calls(functions)}")


def free_calls(
    written: OutputFormat,
    functions: Sequence[Function],
    *,
    most: int = MAX_CALLS,
    inside: bool | None = None,
    answer: Grammar | None = None,
) -> Grammar:
    """Text, or calls, as many as forced_calls allows: arguments of strict functions follow their schemas, those of
    others are any object. Text is free unless `answer` says what it has to be."""
    lark = _Lark(written, most)
    tools = [f if f.strict else Function(f.name, _ANYTHING) for f in functions]
    if answer is not None:
        lark.calls_are_json = answer.kind is GrammarKind.JSON_SCHEMA
        return lark.grammar(f"{lark.thoughts(inside)} ({lark.answer(answer)} | {lark.calls(tools)})")
    return lark.grammar(f"{lark.thoughts(inside)} ({lark.free(tools)})")


def after_thoughts(written: OutputFormat, grammar: Grammar, *, inside: bool | None = None) -> Grammar:
    """The same form for the answer, with thoughts before it where the model thinks."""
    if not written.thinks or inside is False:
        return grammar
    lark = _Lark(written)
    return lark.grammar(f"{lark.thoughts(inside)} {lark.answer(grammar)}")


class _Lark:
    """Rules, as they are needed."""

    def __init__(self, written: OutputFormat, most_calls: int = 1) -> None:
        self._written, self._most = written, min(most_calls, MAX_CALLS)
        self.calls_are_json = False
        """Write calls that no mark begins as schemas: only those can stand beside a schema that begins alike."""
        self.rules: list[str] = ["TEXT: /(?s:.*)/"]

    def grammar(self, start: str) -> Grammar:
        return Grammar(GrammarKind.LARK, "\n".join([f"start: {start.strip()}", *self.rules]) + "\n")

    def marks(self, *texts: str) -> str:
        """Texts one after another: marks that are special tokens, and those inside texts, as such."""
        special = self._written.special
        parts = [part for text in texts for part in self._parts(text)]
        return " ".join(f"<[{special[t]}]>" if t in special else json.dumps(t, ensure_ascii=False) for t in parts)

    def _has(self, mark: str) -> bool:
        return mark in self._written.special

    def cut(self, text: str) -> tuple[str, str]:
        """A text up to the first mark that is a special token, and from there on."""
        parts = self._parts(text)
        lead = parts[0] if parts and parts[0] not in self._written.special else ""
        return lead, text[len(lead) :]

    def _parts(self, text: str) -> list[str]:
        marks = sorted(self._written.special, key=len, reverse=True)
        found = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
        return [part for part in found if part]

    def answer(self, grammar: Grammar) -> str:
        """The answer has to be this."""
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                schema = orjson.loads(grammar.text)
                body = json_in_lark(schema, strict=not schema.get("x-guidance", {}).get("lenient", False))
            case GrammarKind.REGEX:
                body = f"/{_UNSAFE.sub(_safe, grammar.text)}/"
            case GrammarKind.LARK:
                body = "%lark {\n" + grammar.text + "\n}"
        self.rules.append(f"answer: {body}")
        if GPT_OSS in (self._written.reasoning, self._written.tools):
            return f"{self.marks(harmony.CHANNEL, 'final', harmony.MESSAGE)} answer"
        return "answer"

    def without(self, *marks: str, text: str = "TEXT") -> str:
        """Text that holds none of the marks, not even spelt with ordinary tokens where they are special ones: parsers
        can't tell the two apart."""
        name = f"WITHOUT_{len(self.rules)}"
        any_of = "|".join(re.escape(mark).replace("/", r"\/") for mark in marks)
        self.rules.append(f"{name}: {text} & ~/(?s:.*({any_of}).*)/")
        return name

    def until(self, mark: str, text: str = "TEXT") -> str:
        """Any text up to a mark, and the mark."""
        lead, rest = self.cut(mark)
        if not lead:
            return f"{text} {self.marks(mark)}"
        if rest:
            self.rules.append(f"UNTIL_{len(self.rules)}: {text} {self.marks(lead)}")
            return f"UNTIL_{len(self.rules) - 1} {self.marks(rest)}"
        name = f"until_{len(self.rules)}"
        self.rules.append(f"{name}[lazy]: {text} {self.marks(mark)}")
        return name

    def arguments(self, schema: Mapping[str, Any], *, strict: bool) -> str:
        name = f"arguments_{len(self.rules)}"
        self.rules.append(f"{name}: {json_in_lark(schema, strict=strict)}")
        return name

    def thoughts(self, inside: bool | None) -> str:  # noqa: FBT001
        """What may stand before the calls: nothing where the prompt has ended the thoughts already."""
        written = self._written
        if not written.thinks or inside is False:
            return ""
        if written.reasoning == GPT_OSS:
            return f"({self.channel('analysis')})?"
        opening, closing = written.marks
        rest = f"{self.until(closing, self.without(closing))} /{_BREAKS}/"
        return rest if inside else f"(/{_BREAKS}/ {self.marks(opening)} {rest})?"

    def channel(self, name: str) -> str:
        """A whole message of a channel, and the head of the next one."""
        opened = self.marks(harmony.CHANNEL, name, harmony.MESSAGE)
        text = self.without(*harmony.ENDS)
        return f"{opened} {self.until(harmony.END, text)} {self.marks(harmony.START, 'assistant')}"

    def calls(self, tools: Sequence[Function]) -> str:
        """One call or more; templates break lines before the mark, and so may the model."""
        opening = self._form()[0]
        return f"{f'/{_BREAKS}/ {self.marks(opening)}' if opening else ''} {self._behind_opening(tools)}"

    def free(self, tools: Sequence[Function]) -> str:
        """Text, which calls may follow; what begins a call can't be text."""
        opening, behind = self._form()[0], self._behind_opening(tools)
        if self._written.tools == GPT_OSS:
            final = f"{self.marks(harmony.CHANNEL, 'final', harmony.MESSAGE)} {self.without(*harmony.ENDS)}"
            return f"{final} | ({self.channel('commentary')})? {behind}"
        if opening:
            text = self._plain()
            return f"{text} | {self.until(opening, text)} {behind}"
        return f"{self._not_first(_BEGINS.get(self._written.tools, '{'))}? | {behind}"

    def _plain(self) -> str:
        """Text without what is read as a call: the marks before calls, and Python's list at the beginning."""
        if self._written.tools == "pythonic":
            return f"{self._not_first(_BEGINS['pythonic'])}?"
        tags = tagged.FAMILIES.get(self._written.tools)
        own = tags.head if tags is not None else _CALL_MARKS.get(self._written.tools, "")
        opens = tags.opens if tags is not None else (self._form()[0],)
        return self.without(*opens, *filter(None, (own,)))

    def _not_first(self, chars: str) -> str:
        """Text that does not begin with one of `chars`, or with white space, and holds no mark before calls."""
        self.rules.append(rf"ANSWER: /[^{chars}\s](?s:.*)/")
        marks = _INNER_MARKS.get(self._written.tools, ())
        return self.without(*marks, text="ANSWER") if marks else "ANSWER"

    def _behind_opening(self, tools: Sequence[Function]) -> str:
        _, behind, separator, tail = self._form()
        self.rules.append(f"call: {' | '.join(map(self._call, tools))}")
        further = self._most - 1
        more = f" ({self.marks(*separator)} call){{0,{further}}}" if further and separator is not None else ""
        return f"{self.marks(*behind)} call{more} {self.marks(*tail)}"

    def _form(self) -> tuple[str, _Marks, _Marks | None, _Marks]:
        """The mark before all calls, what follows it, what stands between two calls (None: there is no second one), and
        what stands behind all."""
        if (tags := tagged.FAMILIES.get(self._written.tools)) is not None:
            return self._tagged_form(tags)
        if (marks := json_lists.FAMILIES.get(self._written.tools)) is not None:
            return marks.opening, ("[",), (", ",), ("]", marks.closing)
        match self._written.tools:
            case "hermes":
                return hermes.OPEN, ("\n",), ("\n", hermes.OPEN, "\n"), ()
            case "mistral" if self._written.variant:
                return mistral.CALLS, (), (mistral.CALLS,), ()
            case "mistral":
                return mistral.CALLS, (" [",), (", ",), ("]",)
            case "deepseek_v3":
                between = () if self._written.variant else ("\n",)
                return deepseek_v3.CALLS, (), between, (deepseek_v3.CALLS_END,)
            case "kimi_k2":
                return kimi_k2.CALLS, (), (), (kimi_k2.CALLS_END,)
            case "pythonic" if self._written.variant:
                return pythonic.LFM2[0], ("[",), (", ",), ("]", pythonic.LFM2[1])
            case "pythonic":
                return "", ("[",), (", ",), ("]",)
            case "llama3_json":
                return "", (), ("; ",), ()
            case "gpt_oss":
                return "", (), None, ()
        return "", (), ("\n",), ()

    def _tagged_form(self, tags: Tags) -> tuple[str, _Marks, _Marks | None, _Marks]:
        opening, closing = tags.blocks[self._written.variant and len(tags.blocks) > 1]
        line = self._line
        if not tags.head:
            return opening, (), (line, opening), ()
        between = (line, closing, line, opening, line) if tags.one_per_block else (line,)
        return opening, (line,), between, (line, closing)

    @property
    def _line(self) -> str:
        """What stands between marks: GLM's newer models break no lines."""
        return "" if self._written.tools == "glm45" and self._written.variant else "\n"

    def _call(self, function: Function) -> str:
        name = function.name
        if self.calls_are_json and self._written.tools in _BARE:
            whole = _call_schema(name, _BARE[self._written.tools], function.schema)
            return self.arguments(whole, strict=function.strict)
        if (tags := tagged.FAMILIES.get(self._written.tools)) is not None:
            written = tagged_arguments(self, tags, self._line, function.schema, strict=function.strict)
            return f"{self.marks(tags.head, name, tags.head_end, self._line)} {written} {self.marks(tags.end)}"
        if self._written.tools == "pythonic":
            written = python_arguments(self, function.schema, strict=function.strict)
            return f"{self.marks(name + '(')} {written} {self.marks(')')}"
        arguments = self.arguments(function.schema, strict=function.strict)
        match self._written.tools:
            case "hermes":
                written = f'{{"name": "{name}", "arguments": '
                return f"{self.marks(written)} {arguments} {self.marks('}' + chr(10), hermes.CLOSE)}"
            case "mistral" if self._written.variant:
                call_id = f"({self.marks(mistral.CALL_ID)} /[a-zA-Z0-9]{{9}}/)?" if self._has(mistral.CALL_ID) else ""
                return f"{self.marks(name)} {call_id} {self.marks(mistral.ARGS)} {arguments}"
            case "deepseek_v3" if self._written.variant:
                head = self.marks(deepseek_v3.CALL, name, deepseek_v3.SEP)
                return f"{head} {arguments} {self.marks(deepseek_v3.CALL_END)}"
            case "deepseek_v3":
                head = self.marks(deepseek_v3.CALL, "function", deepseek_v3.SEP, f"{name}\n```json\n")
                return f"{head} {arguments} {self.marks(chr(10) + '```', deepseek_v3.CALL_END)}"
            case "kimi_k2":
                head = f"{self.marks(kimi_k2.CALL, kimi_k2.PREFIX + name + ':')} /[0-9]{{1,2}}/"
                return f"{head} {self.marks(kimi_k2.ARGUMENTS)} {arguments} {self.marks(kimi_k2.CALL_END)}"
            case "gpt_oss":
                to = self.marks(harmony.CHANNEL, f"commentary to=functions.{name} ", harmony.CONSTRAIN, "json")
                return f"{to} {self.marks(harmony.MESSAGE)} {arguments}"
        written = f'{{"name": "{name}", "{_BARE.get(self._written.tools, "arguments")}": '
        return f'{self.marks(written)} {arguments} "}}"'


def _safe(match: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n"}.get(match.group(), match.group())


def _call_schema(name: str, key: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a whole call; what refers to the root of `schema` finds it where it is now."""
    return {
        "type": "object",
        "properties": {"name": {"const": name}, key: moved(schema, f"#/properties/{key}")},
        "required": ["name", key],
        "additionalProperties": False,
    }
