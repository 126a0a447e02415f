"""Grammars as clients write them, and how they are put together. Nothing is compiled here: check.py does that.

JSON schemas     enforced whole; what can't be enforced is refused, unless the client asked for no strictness: then
                 keywords that llguidance does not know are left out
regex            the whole output matches it; as everywhere, but without look-around and back references
choice           one of several texts
context-free     GBNF, recognised by its `::=`, or llguidance's Lark
structural tags  free text, in which what begins with a trigger has to follow one of the structures
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from llguidance import StructTag, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from engine_core.grammar.compiler import ITEM_SEPARATOR, KEY_SEPARATOR
from engine_core.types.errors import InvalidRequestError
from engine_core.types.sampling import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from services.router.grammar.exact_schema import exact_schema

_OPTIONS = "x-guidance"
_MAX_GBNF_BYTES = 16 * 1024
"""Rewriting it takes some 5 microseconds a byte of the event loop's time."""
_UNICODE_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")


def json_object() -> Grammar:
    """Any JSON object."""
    return Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')


def json_schema(schema: Any, field: str, *, strict: bool = True) -> Grammar:
    """JSON by a schema: an object, a boolean, or the text of either. Raises InvalidRequestError."""
    if isinstance(schema, str):
        try:
            schema = orjson.loads(schema)
        except orjson.JSONDecodeError as exc:
            raise InvalidRequestError(f"{field}: is not JSON: {exc}", field=field) from None
    if schema is False:
        raise InvalidRequestError(f"{field}: nothing matches false", field=field)
    schema = {} if schema is True else schema
    if not isinstance(schema, Mapping):
        raise InvalidRequestError(f"{field}: a JSON schema must be an object", field=field)
    cleaned = {key: value for key, value in exact_schema(schema, field).items() if key != _OPTIONS}
    if not strict:
        cleaned[_OPTIONS] = {"lenient": True}
    return _grammar(GrammarKind.JSON_SCHEMA, json.dumps(cleaned, ensure_ascii=False), field)


def regex(pattern: str, field: str) -> Grammar:
    r"""Text that matches a pattern as a whole; \d means the ten digits of ASCII. Raises InvalidRequestError."""
    return _grammar(GrammarKind.REGEX, regex_to_lark(pattern, "d"), field)


def choice(texts: Sequence[str], field: str) -> Grammar:
    """One of several texts. Raises InvalidRequestError."""
    if not texts:
        raise InvalidRequestError(f"{field}: is empty; at least one text is needed", field=field)
    lark = "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    return _grammar(GrammarKind.LARK, lark, field)


def context_free(text: str, field: str) -> Grammar:
    """GBNF (EBNF with `::=`, from the rule root) or Lark (from the rule start). Raises InvalidRequestError."""
    if "::=" not in text:
        return _grammar(GrammarKind.LARK, text, field)
    if len(text.encode()) > _MAX_GBNF_BYTES:
        message = f"{field}: GBNF of more than {_MAX_GBNF_BYTES} bytes is not taken; write Lark"
        raise InvalidRequestError(message, field=field)
    try:
        lark = gbnf_to_lark(_UNICODE_ESCAPE.sub(_plain, text))
    except Exception as exc:  # the converter raises bare Exception
        raise InvalidRequestError(f"{field}: {str(exc) or 'is nested too deeply'}", field=field) from None
    return _grammar(GrammarKind.LARK, lark, field)


def structural_tag(wanted: Mapping[str, Any] | str, field: str) -> Grammar:
    """Free text with structures in it: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}, as vLLM and
    SGLang take it. Raises InvalidRequestError."""
    if isinstance(wanted, str):
        try:
            wanted = orjson.loads(wanted)
        except orjson.JSONDecodeError as exc:
            raise InvalidRequestError(f"{field}: is not JSON: {exc}", field=field) from None
    read = wanted if isinstance(wanted, Mapping) else {}
    structures, triggers = _list(read.get("structures"), dict), _list(read.get("triggers"), str)
    if not structures or not triggers:
        message = f"{field}: needs structures, a list of {{begin, schema, end}}, and triggers, a list of texts"
        raise InvalidRequestError(message, field=field)
    tags = [_tag(structure, triggers, f"{field}.structures[{i}]") for i, structure in enumerate(structures)]
    return _grammar(GrammarKind.LARK, StructTag.to_grammar(tags, assume_special=False), field)


def json_in_lark(schema: Mapping[str, Any], *, strict: bool = True) -> str:
    """A schema as a part of a Lark rule, with the same whitespace as everywhere. Unless it is `strict`, keywords that
    are not known are left out."""
    options = {
        "whitespace_flexible": False,
        "item_separator": ITEM_SEPARATOR,
        "key_separator": KEY_SEPARATOR,
        **({} if strict else {"lenient": True}),
    }
    return "%json " + json.dumps({**exact_schema(schema, "tools"), _OPTIONS: options}, ensure_ascii=False)


def _tag(structure: Mapping[str, Any], triggers: Sequence[str], field: str) -> StructTag:
    begin, end = structure.get("begin"), structure.get("end", "")
    schema = structure.get("schema", structure.get("structural_tag_schema", {}))
    if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, Mapping):
        raise InvalidRequestError(f"{field}: needs begin and end, texts, and schema, an object", field=field)
    trigger = next((t for t in triggers if t and begin.startswith(t)), None)
    if trigger is None:
        raise InvalidRequestError(f"{field}.begin: starts with none of the triggers", field=f"{field}.begin")
    grammar = json_schema(schema, field)
    return StructTag(
        trigger=trigger, begin=begin, grammar=json_in_lark(json.loads(grammar.text))[len("%json ") :], end=end
    )


def _list(values: Any, kind: type) -> list[Any]:
    """The list, empty when it is none of that kind."""
    return values if isinstance(values, list) and all(isinstance(value, kind) for value in values) else []


def _plain(match: re.Match[str]) -> str:
    char = chr(int(match[1], 16))
    return char if char.isprintable() and char not in '"\\[]^-/' else match[0]


def _grammar(kind: GrammarKind, text: str, field: str) -> Grammar:
    if not text:
        raise InvalidRequestError(f"{field}: is empty", field=field)
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_GRAMMAR_BYTES:
        message = f"{field}: has {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed"
        raise InvalidRequestError(message, field=field)
    return Grammar(kind, text)
