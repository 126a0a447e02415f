"""What a schema's pattern says is what its output can be, and bounds hold however large they are."""

from __future__ import annotations

import functools
import itertools
import json
import re
from typing import Any

import llguidance
import pytest

from engine_core.grammar.compiler import compile_grammar, load_vocabulary
from engine_core.types.errors import InvalidRequestError
from engine_core.types.sampling import Grammar, GrammarKind
from services.router.grammar.exact_schema import exact_pattern, exact_schema
from services.router.grammar.forms import json_in_lark, json_schema
from tests.support.models import tiny_model

PATTERNS = [
    *(r'[^"]', r"[^\\]", r'[^"\\]', r'[^"\\/]', r'[^a-z"]', r'[^!\x22#]', r"[^\x5c]", r'[^]"]', r'[^\]"]', r'[\s\S]'),
    *(r"[^ -~]", r'[^"]|x', r'\\[^"]?', r'[^a"\n]', r"[\x01-\x1f]", r"[^\s]", r"\S", r"\W", r"\D", "."),
    *(r'[^\w"]', r'["\\]'),
]  # fmt: skip
TEXTS = ["", "a", "é", '"', "\\", "/", "\n", "\t", "\x01", "\x1f", " ", "]", "x", "\\a", '\\"', '"a', "#", "!"]


@functools.cache
def vocabulary() -> llguidance.LLTokenizer:
    return load_vocabulary(tiny_model(), (0, 2))


@functools.cache
def compiled(grammar: Grammar) -> llguidance.LLMatcher:
    return compile_grammar(vocabulary(), grammar)


def matches(grammar: Grammar, text: str) -> bool:
    matcher = compiled(grammar).deep_copy()
    ids = vocabulary().tokenize_bytes(text.encode())
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_string_matches_its_pattern_and_may_be_what_does(pattern: str) -> None:
    schema = {"type": "string", "pattern": f"^({pattern})$"}
    alone = json_schema(schema, "guided_json")
    forced = Grammar(GrammarKind.LARK, "start: " + json_in_lark(schema))
    for text in TEXTS:
        right = re.fullmatch(pattern, text, re.ASCII) is not None
        written = json.dumps(text, ensure_ascii=False)
        assert matches(alone, written) == matches(forced, written) == right, (pattern, text)


@pytest.mark.parametrize(
    ("pattern", "written"),
    [
        ("^[a-z0-9_.-]+$", "^[a-z0-9_.-]+$"),
        (r"\[^a\]", r"\[^a\]"),
        ('[^"]*', r'[[^"]--\x00]*'),
        ('[^]"]a[^[:alpha:]]', r'[[^]"]--\x00]a[[^[:alpha:]]--\x00]'),
        (r"\p{Cc}\PL", r"[\p{Cc}--\x00][\PL--\x00]"),
        ("a[^b", "a[^b"),
        ("[^", "[^"),
        ("a\\", "a\\"),
    ],
)
def test_classes_lose_nul_and_nothing_else_changes(pattern: str, written: str) -> None:
    assert exact_pattern(pattern) == written
    assert exact_pattern(written) == written


def test_only_schemas_are_written_anew() -> None:
    strict = {"pattern": '[^"]'}
    anew = {"pattern": r'[[^"]--\x00]'}
    schema = {
        "const": strict, "enum": [strict], "default": strict, "examples": [strict], "description": '[^"]',
        "properties": {"pattern": strict, "const": strict, "minimum": {"minimum": 3}}, "allOf": [strict, True],
        "patternProperties": {'^[^"]$': strict}, "$defs": {"enum": strict}, "items": {"items": strict},
    }  # fmt: skip
    assert exact_schema(schema, "f") == {
        **schema, "properties": {"pattern": anew, "const": anew, "minimum": {"minimum": 3}}, "allOf": [anew, True],
        "patternProperties": {r'^[[^"]--\x00]$': anew}, "$defs": {"enum": anew}, "items": {"items": anew},
    }  # fmt: skip


@pytest.mark.parametrize("bound", [2**63, 10**20, 1e30])
@pytest.mark.parametrize("name", ["minimum", "exclusiveMinimum"])
def test_bounds_beyond_64_bits_are_refused(name: str, bound: float) -> None:
    other = name.replace("inimum", "aximum")
    for limit, schema in itertools.product([{name: bound}, {other: -2 * bound}], [{}, {"type": "integer"}]):
        with pytest.raises(InvalidRequestError, match="is beyond 64 bits") as caught:
            json_schema({"properties": {"a": [{**schema, **limit}]}}, "guided_json")
        assert caught.value.field == "guided_json"
    kept = {"type": "integer", "maximum": 2**64 - 1, "minimum": -5}
    assert matches(json_schema(kept, "guided_json"), "12")


def test_a_schema_that_is_nested_without_end_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(1000):
        schema = {"items": schema}
    with pytest.raises(InvalidRequestError, match="guided_json: is nested too deeply"):
        exact_schema(schema, "guided_json")
