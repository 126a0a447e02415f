"""Grammars of arguments that are written one by one: between marks, or as Python's keywords.

    a string         as it stands there: its schema's length, pattern, format and values as patterns of plain text
    any other value  JSON by its schema
    either           both, where the text is none that would be read as the other

Arguments come in the order of the schema's properties. Only those are written, unless the schema has none. What plain
text can't follow is refused where the function is strict, and left out where it is not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import orjson
from llguidance import regex_to_lark

from engine_core.types.errors import InvalidRequestError
from engine_core.types.sampling import MAX_GRAMMAR_BYTES
from services.router.parsers import pythonic
from services.router.parsers.schema_types import Known, referred, types_of
from services.router.parsers.tagged import KEY_CHAR, MAX_KEY, Tags

_ANY_TEXT = "/(?s:.*)/"
_FORMATS = {
    "date": r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])",
    "time": r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)",
    "uuid": r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
    "ipv4": r"((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)",
    "email": r"[a-zA-Z0-9_%+-]+(\.[a-zA-Z0-9_%+-]+)*@([a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?\.)+[a-zA-Z]{2,}",
}
_FORMATS["date-time"] = f"{_FORMATS['date']}T{_FORMATS['time']}"
_NO_JSON = r'[ \t\r\n]*([^ \t\r\n\[{"0-9-](?s:.*))?'
_WORDS = r"[ \t\r\n]*(true|false|null|True|False|None)[ \t\r\n]*"
"""Text is read as a string when it is the one, and not the other."""
_OF_OBJECTS = frozenset({
    "anyOf", "oneOf", "not", "if", "dependentRequired", "dependentSchemas", "dependencies", "minProperties",
    "maxProperties", "patternProperties", "propertyNames", "unevaluatedProperties",
})  # fmt: skip
_OF_TEXTS = frozenset({"not", "if"})
"""Keywords that bind objects, and texts, and that plain text can't follow."""
_ROOT = "the_whole"
_DEEPEST = 32
_STEP = 64
"""Bytes of grammar that a step through a schema counts for."""
_NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"})
_Schema = Mapping[str, Any]


class Rules(Protocol):
    """A grammar in the making."""

    rules: list[str]

    def marks(self, *texts: str) -> str:
        """Texts one after another, marks that are special tokens as such."""

    def cut(self, text: str) -> tuple[str, str]:
        """A text up to the first mark that is a special token, and from there on."""

    def arguments(self, schema: _Schema, *, strict: bool) -> str:
        """A rule of JSON by a schema."""


class _Parameter(msgspec.Struct, frozen=True):
    name: str
    schema: Any
    required: bool


class _Values(msgspec.Struct, frozen=True):
    """What a value may be: text by a schema, one of some words of JSON, JSON by a schema."""

    texts: tuple[_Schema, ...] = ()
    words: tuple[str, ...] = ()
    schemas: tuple[Any, ...] = ()


def tagged_arguments(rules: Rules, tags: Tags, line: str, schema: _Schema, *, strict: bool) -> str:
    """All arguments of a function between marks, `line` behind each. Raises InvalidRequestError."""
    form = _Form(rules, schema, strict=strict)
    parameters = form.parameters()
    if parameters is None:
        name = form.rule(f"/{KEY_CHAR.pattern}{{1,64}}/", "KEY")
        return f"({rules.marks(tags.key)} {name} {form.tagged(tags, line, {})} {rules.marks(line)})*"
    written = []
    for parameter in parameters:
        if not re.fullmatch(f"(?:{KEY_CHAR.pattern}){{1,{MAX_KEY}}}", parameter.name):
            raise _unwritable(parameter.name)
        value = form.tagged(tags, line, parameter.schema)
        one = f"{rules.marks(tags.key, parameter.name)} {value} {rules.marks(line)}"
        written.append(one if parameter.required else f"({one})?")
    return " ".join(written)


def python_arguments(rules: Rules, schema: _Schema, *, strict: bool) -> str:
    """All arguments of a function as keywords, with commas between them. Raises InvalidRequestError."""
    form = _Form(rules, schema, strict=strict)
    parameters = form.parameters()
    comma = rules.marks(", ")
    if parameters is None:
        name = form.rule("/[a-zA-Z_][a-zA-Z0-9_]{0,63}/", "KEY")
        one = f'{name} "=" {form.json({})}'
        return f"({one} ({comma} {one})*)?"
    first, further = '""', '""'  # what may follow: before any is written, and behind one
    for parameter in reversed(parameters):
        if not re.fullmatch(f"(?:{pythonic.KEY_CHAR.pattern}){{1,{MAX_KEY}}}", parameter.name):
            raise _unwritable(parameter.name)
        one = form.rule(f"{rules.marks(parameter.name + '=')} {form.python(parameter.schema)}", "argument")
        behind = form.rule(further, "arguments")
        first = f"{one} {behind}" if parameter.required else f"{one} {behind} | {form.rule(first, 'arguments')}"
        further = f"{comma} {one} {behind}" if parameter.required else f"({comma} {one})? {behind}"
    return form.rule(first, "arguments")


class _Form:
    """The form of one function's arguments."""

    def __init__(self, rules: Rules, schema: _Schema, *, strict: bool) -> None:
        self._rules, self._root, self._strict = rules, schema, strict
        self._types: Known = {}
        self._work = 0

    def rule(self, body: str, kind: str, how: str = "") -> str:
        """A rule of its own, or a terminal where `kind` is in capitals."""
        name = f"{kind}_{len(self._rules.rules)}"
        self._rules.rules.append(f"{name}{how}: {body}")
        self._spend(len(body))
        return name

    def parameters(self) -> list[_Parameter] | None:
        """What may be written, in order; None for anything."""
        top = self._resolved(self._root)
        self._check(top, _OF_OBJECTS)
        properties = top.get("properties")
        known = dict(properties) if isinstance(properties, Mapping) else {}
        more = top.get("additionalProperties", True)
        required = [name for name in top.get("required") or () if isinstance(name, str)]
        known |= {name: {} if more is True else more for name in required if name not in known}
        if not known and more is not False:
            return None
        return [_Parameter(name, schema, name in required) for name, schema in known.items() if schema is not False]

    def tagged(self, tags: Tags, line: str, schema: Any) -> str:
        """A value between marks, from the end of its name on."""
        rules, values = self._rules, self._values(schema)
        says = len(tags.key_ends) > 1
        line_in = "\n" if tags.lines else ""
        opening, closing = (line + tags.value if tags.value else "") + line_in, line_in + tags.value_end
        as_text, as_json = tags.key_ends[0] + opening, tags.key_ends[1 if says else 0] + opening
        lead, rest = rules.cut(closing)
        ending = json.dumps(lead, ensure_ascii=False) if lead else ""
        found = []
        for text in values.texts:
            mixed = not says and bool(values.words or values.schemas)
            value = self.rule(f"({self._text(text, tags, mixed=mixed)}) {ending}", "VALUE")
            if not rest:  # nothing ends it but its own last mark
                value = self.rule(value, "value", "[lazy]")
            found.append(f"{rules.marks(as_text)} {value} {rules.marks(rest)}")
        if values.words:
            words = " | ".join(map(json.dumps, values.words))
            found.append(f"{rules.marks(as_json)} {self.rule(f'({words}) {ending}', 'WORD')} {rules.marks(rest)}")
        if says and values.texts == ({},):  # of any type
            found.append(f"{rules.marks(as_json)} {self.json({})} {rules.marks(closing)}")
        found += [f"{rules.marks(as_json)} {self.json(part)} {rules.marks(closing)}" for part in values.schemas]
        return f"({' | '.join(found)})"

    def python(self, schema: Any) -> str:
        """A value as a literal."""
        resolved = self._resolved(schema)
        types = types_of(resolved, self._root, self._types)
        if types == frozenset({"boolean"}) and not {"enum", "const"} & set(resolved):
            return '("True" | "False")'
        return '"None"' if types == frozenset({"null"}) else self.json(schema)

    def json(self, schema: Any) -> str:
        """JSON by a part of the whole schema: what refers to the whole finds it."""
        if "$ref" in json.dumps(schema):
            schema = {**moved(schema, f"#/$defs/{_ROOT}"), "$defs": {_ROOT: moved(self._root, f"#/$defs/{_ROOT}")}}
        name = self._rules.arguments({} if schema is True else schema, strict=self._strict)
        self._spend(len(self._rules.rules[-1]))
        return name

    def _values(self, schema: Any, depth: int = 0) -> _Values:
        """What of a schema's values is written how."""
        if depth > _DEEPEST:
            raise InvalidRequestError("tools: is nested too deeply", field="tools")
        schema = self._resolved(schema)
        for several in ("anyOf", "oneOf"):
            if isinstance(schema.get(several), list):
                rest = {key: value for key, value in schema.items() if key != several}
                return _joined(self._values(self._merged(rest, part), depth + 1) for part in schema[several])
        types = types_of(schema, self._root, self._types)
        if types is None:
            return _Values(texts=(schema,))
        if "string" not in types:
            return _Values(schemas=(schema,))
        if "enum" in schema or "const" in schema:
            found = schema.get("enum", [schema.get("const")])
            words = tuple(json.dumps(value) for value in found if value is None or isinstance(value, bool))
            others = [v for v in found if not isinstance(v, str | bool | None)]
            texts = {**schema, "enum": [value for value in found if isinstance(value, str)]}
            return _Values((texts,), words, ({"enum": others},) if others else ())
        words = (*(("null",) if "null" in types else ()), *(("true", "false") if "boolean" in types else ()))
        rest_of = sorted(types - {"string", "null", "boolean"})
        return _Values((schema,), words, ({**schema, "type": rest_of},) if rest_of else ())

    def _text(self, schema: _Schema, tags: Tags, *, mixed: bool) -> str:
        """Plain text by a schema, as a pattern. With `mixed`, it is none that is read as another value."""
        self._check(schema, _OF_TEXTS)
        parts = [_ANY_TEXT]  # what is no pattern's match may be no text: special tokens are none
        if "enum" in schema:
            parts.append(self._one_of(schema["enum"], tags, mixed=mixed))
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        if least or most != "":
            parts.append(f"/(?s:.{{{least},{most}}})/")
        if isinstance(schema.get("pattern"), str):
            parts.append(f"({_searched(schema['pattern'])})")
        named = schema.get("format")
        if named in _FORMATS:
            parts.append(_in_lark(_FORMATS[named]))
        elif named is not None and self._strict:
            message = f"tools: strings of the format {named!r} are not written as plain text, as this model does"
            raise InvalidRequestError(message, field="tools")
        if "enum" not in schema:
            parts.append(f"~/(?s:.*{_escaped(tags.value_end)}.*)/")
            if mixed:
                parts += [f"/{_NO_JSON}/", f"~/{_WORDS}/"]
        return " & ".join(parts)

    def _one_of(self, values: Sequence[str], tags: Tags, *, mixed: bool) -> str:
        ends = re.compile(f"{re.escape(tags.value_end)}\\s*({'|'.join(map(re.escape, tags.behind_value))})")
        kept = [value for value in values if not ends.search(value)]
        if mixed:
            kept = [v for v in kept if re.fullmatch(_NO_JSON, v) and not re.fullmatch(_WORDS, v)]
        if not kept:
            message = "tools: a parameter has no value that this model's form of calls can write"
            raise InvalidRequestError(message, field="tools")
        return f"({' | '.join(json.dumps(value, ensure_ascii=False) for value in kept)})"

    def _resolved(self, schema: Any) -> dict[str, Any]:
        """The schema with what it refers to, and all that must hold together, in one."""
        for _ in range(_DEEPEST):
            self._spend(_STEP)
            if schema is True or not isinstance(schema, Mapping):
                return {}
            if "$ref" in schema:
                target = referred(schema["$ref"], self._root)
                if target is None:
                    message = f"tools: the reference {schema['$ref']!r} leads nowhere"
                    raise InvalidRequestError(message, field="tools")
                schema = self._merged({key: value for key, value in schema.items() if key != "$ref"}, target)
            elif isinstance(schema.get("allOf"), list):
                rest: Any = {key: value for key, value in schema.items() if key != "allOf"}
                for part in schema["allOf"]:
                    rest = self._merged(rest, part)
                schema = rest
            else:
                return dict(schema)
        raise InvalidRequestError("tools: is nested too deeply", field="tools")

    def _merged(self, one: _Schema, other: Any) -> dict[str, Any]:
        """Both at once; of a keyword that both have, only the other's can be kept, unless both say the same."""
        if not isinstance(other, Mapping):
            return dict(one)
        different = {key for key in one if key in other and key not in _NOTES and one[key] != other[key]}
        if different and self._strict:
            message = f"tools: a parameter has {sorted(different)[0]!r} twice, which plain text can't follow"
            raise InvalidRequestError(message, field="tools")
        return {**one, **other}

    def _spend(self, work: int) -> None:
        """Holds what is written, and the ways through a schema that refers to itself, to what can be compiled."""
        self._work += work
        if self._work > MAX_GRAMMAR_BYTES:
            message = f"tools: the form of a function's arguments has more than {MAX_GRAMMAR_BYTES} bytes"
            raise InvalidRequestError(message, field="tools")

    def _check(self, schema: _Schema, refused: frozenset[str]) -> None:
        if self._strict and (found := sorted(refused & set(schema))):
            message = f"tools: {found[0]!r} can't be followed in this model's form of calls; leave out strict"
            raise InvalidRequestError(message, field="tools")


def moved(schema: Any, root: str) -> Any:
    """The schema where its root is found at `root` now: what refers to it follows."""
    if isinstance(schema, Mapping):
        return {
            k: root + v[1:] if k == "$ref" and isinstance(v, str) and v.startswith("#") else moved(v, root)
            for k, v in schema.items()
        }
    return [moved(v, root) for v in schema] if isinstance(schema, list) else schema


def _joined(parts: Iterable[_Values]) -> _Values:
    found = list(parts)
    words = dict.fromkeys(word for part in found for word in part.words)
    schemas = [schema for part in found for schema in part.schemas]
    texts = tuple(text for part in found for text in part.texts)
    if texts:  # words can't be told from text as it begins
        plain = []
        for schema in schemas:
            types = types_of(schema, schema) or frozenset()
            if types <= {"null", "boolean"} and types and "$ref" not in schema:
                allowed = [v for kind, v in (("null", None), ("boolean", True), ("boolean", False)) if kind in types]
                words |= dict.fromkeys(json.dumps(v) for v in schema.get("enum", allowed) if v in allowed)
            else:
                plain.append(schema)
        schemas = plain
    return _Values(texts, tuple(words), tuple(schemas))


def _searched(pattern: str) -> str:
    """Text in which a pattern is found, as JSON schemas mean it."""
    found = []
    for part in _alternatives(pattern):
        before = "" if part.startswith("^") else "(?s:.*)"
        closed = part.endswith("$") and (len(part) - len(part[:-1].rstrip("\\"))) % 2 == 1
        behind = "" if closed else "(?s:.*)"
        inner = part.removeprefix("^")
        found.append(f"{before}({inner[:-1] if closed else inner}){behind}")
    return " | ".join(map(_in_lark, found))


def _alternatives(pattern: str) -> list[str]:
    """What stands between the `|` that no bracket holds."""
    parts, depth, listed, at = [""], 0, False, 0
    while at < len(pattern):
        char = pattern[at : at + 2] if pattern[at] == "\\" else pattern[at]
        if char == "|" and not depth and not listed:
            parts.append("")
        else:
            listed = char == "[" if not listed else char != "]"
            depth += 0 if listed else (char == "(") - (char == ")")
            parts[-1] += char
        at += len(char)
    return parts


def _in_lark(pattern: str) -> str:
    return f"/{re.sub(_UNSAFE, _safe, regex_to_lark(pattern, 'd'))}/"


_UNSAFE = re.compile(r"\\.|[/\n]", re.DOTALL)


def _safe(match: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n"}.get(match.group(), match.group())


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _unwritable(name: str) -> InvalidRequestError:
    shown = orjson.dumps(name).decode()
    return InvalidRequestError(f"tools: the parameter {shown} can't be written in this model's form", field="tools")
