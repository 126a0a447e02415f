"""Grammars as clients write them: what they become, and what is refused before anything is compiled."""

from __future__ import annotations

import functools
import json
from typing import Any

import llguidance
import pytest

from engine_core.grammar.compiler import compile_grammar, load_vocabulary
from engine_core.types.errors import InvalidRequestError
from engine_core.types.sampling import Grammar, GrammarKind
from services.router.grammar.forced import grammar_of
from services.router.grammar.forms import json_in_lark
from services.router.openai.schema import CompletionRequest
from tests.support.models import tiny_model

INTEGER = {"type": "integer"}
CALLS = {
    "structures": [{"begin": "<f=add>", "schema": INTEGER, "end": "</f>"}, {"begin": "<f=no>", "end": "</f>"}],
    "triggers": ["<f="],
}


@functools.cache
def vocabulary() -> llguidance.LLTokenizer:
    return load_vocabulary(tiny_model(), (0, 2))


def asked(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": "default", "prompt": "x", **fields})


def grammar(**fields: Any) -> Grammar:
    found = grammar_of(asked(**fields))
    assert found is not None
    return found


def matches(wanted: Grammar, text: str) -> bool:
    matcher = compile_grammar(vocabulary(), wanted)
    ids = vocabulary().tokenize_str(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": INTEGER, "strict": True}}
GBNF = 'root ::= item ("," item)*\nitem ::= [a-c]+ | "\\u00e9/"\n'


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": [1,{}]}', "[1]"),
        ({"response_format": FORMAT}, "-12", '"a"'),
        ({"guided_json": INTEGER}, "7", "x"),
        ({"guided_json": '{"type": "integer"}'}, "7", "x"),
        ({"structured_outputs": {"json": INTEGER}}, "7", "x"),
        ({"structured_outputs": {"json": "true"}}, '[null,"x"]', "x"),
        ({"structured_outputs": {"json_object": True}}, "{}", "[]"),
        ({"guided_regex": r"a/\d+"}, "a/12", "a/٣"),
        ({"structured_outputs": {"regex": "^[ab]{2}$"}}, "ab", "abb"),
        ({"guided_choice": ['say "é"', "a\\b\n", "😀"]}, 'say "é"', "say"),
        ({"guided_choice": ['say "é"', "a\\b\n", "😀"]}, "a\\b\n", "\\b"),
        ({"structured_outputs": {"choice": ["a", "ab", "😀"]}}, "😀", "b"),
        ({"guided_grammar": GBNF}, "ab,é/", "ab,"),
        ({"guided_grammar": 'start: "x" | "y"'}, "y", "xy"),
        ({"structured_outputs": {"grammar": '?start: "(" start ")" | "x"'}}, "((x))", "((x)"),
        ({"structured_outputs": {"structural_tag": CALLS}}, "so <f=add>3</f> and <f=no>{}</f>.", "so <f=add>x</f>"),
        ({"structured_outputs": {"structural_tag": json.dumps(CALLS)}}, "no call", "<f=other>"),
    ],
)
def test_what_clients_write_is_enforced(fields: dict[str, Any], good: str, bad: str) -> None:
    wanted = grammar(**fields)
    assert matches(wanted, good)
    assert not matches(wanted, bad)


@pytest.mark.parametrize(
    "fields",
    [{}, {"response_format": None}, {"response_format": {"type": "text"}}, {"structured_outputs": {}},
     {"guided_json": None, "structured_outputs": {"json_object": False}}],
)  # fmt: skip
def test_what_asks_for_nothing_leaves_the_output_free(fields: dict[str, Any]) -> None:
    assert grammar_of(asked(**fields)) is None
    assert grammar_of(asked(ignore_eos=True, **fields)) is None


@pytest.mark.parametrize(
    ("fields", "field", "reason"),
    [
        ({"guided_json": INTEGER, "guided_regex": "a"}, "guided_regex", "not together with guided_json"),
        ({"response_format": FORMAT, "guided_json": INTEGER}, "response_format", "not together with guided_json"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs.choice",
            "not together with structured_outputs.regex",
        ),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "not together with guided_regex"),
        ({"guided_json": "{"}, "guided_json", "is not JSON"),
        ({"guided_json": "3"}, "guided_json", "must be an object"),
        ({"guided_json": "false"}, "guided_json", "nothing matches false"),
        ({"guided_regex": ""}, "guided_regex", "is empty"),
        ({"guided_regex": "a" * 300_000}, "guided_regex", "at most 262144 are allowed"),
        ({"guided_grammar": "root ::= ("}, "guided_grammar", "Expected"),
        ({"guided_grammar": "a ::= b"}, "guided_grammar", "Rule 'b' not found"),
        ({"guided_grammar": "root ::= " + "(" * 3000}, "guided_grammar", "recursion"),
        ({"guided_grammar": 'root ::= "' + "a" * 20_000 + '"'}, "guided_grammar", "write Lark"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "is not JSON"),
        ({"structured_outputs": {"structural_tag": {"format": {}}}}, "structured_outputs.structural_tag", "triggers"),
        (
            {"structured_outputs": {"structural_tag": {**CALLS, "triggers": ["<g="]}}},
            "structured_outputs.structural_tag.structures[0].begin",
            "starts with none of the triggers",
        ),
    ],
)
def test_what_contradicts_itself_is_refused_by_field(fields: dict[str, Any], field: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        grammar_of(asked(**fields))
    assert refused.value.field == field
    assert refused.value.message.startswith(f"{field}: ") and reason in refused.value.message


def test_keywords_that_nobody_enforces_are_left_out_unless_strictness_is_asked_for() -> None:
    schema = {"type": "array", "items": INTEGER, "uniqueItems": True}
    named = {"name": "n", "schema": schema}
    for strict, lenient in ((None, True), (False, True), (True, False)):
        wanted = grammar(response_format={"type": "json_schema", "json_schema": {**named, "strict": strict}})
        if lenient:
            assert matches(wanted, "[1,1]") and not matches(wanted, '["a"]')
            continue
        with pytest.raises(InvalidRequestError, match="uniqueItems"):
            compile_grammar(vocabulary(), wanted)
    with pytest.raises(InvalidRequestError, match="uniqueItems"):
        compile_grammar(vocabulary(), grammar(guided_json=schema))


def test_clients_do_not_reach_the_compilers_own_options() -> None:
    wanted = grammar(guided_json={**INTEGER, "uniqueItems": True, "x-guidance": {"lenient": True}})
    assert json.loads(wanted.text) == {**INTEGER, "uniqueItems": True}


def test_schemas_within_lark_have_the_same_whitespace() -> None:
    schema = {"type": "array", "items": INTEGER, "x-guidance": {"whitespace_flexible": True}, "uniqueItems": True}
    wanted = Grammar(GrammarKind.LARK, f'start: "<" list ">"\nlist: {json_in_lark(schema, strict=False)}')
    assert matches(wanted, "<[1, 2,3]>")
    assert not matches(wanted, "<[1,  2]>") and not matches(wanted, "<[ 1]>")
