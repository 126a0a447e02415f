"""Arguments that stand one by one between marks, or as keywords: what templates write is read as what it was, and what
grammars force is read as a call that fits its schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.types.errors import InvalidRequestError
from services.router.chat.schema import ChatMessage
from services.router.parsers import kimi_k2, tagged
from services.router.parsers.base import Content, Part, ToolCallArguments, ToolCallBegin
from services.router.parsers.choice import OutputFormat, choose_format
from services.router.parsers.forcing import Function, forced_calls, free_calls
from services.router.parsers.schema_types import types_of_parameter
from services.router.text.chat_template import ChatTemplate
from tests.support.byte_vocabulary import allows, byte_tokenizer, drawn
from tests.support.outputs import read

SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": -3, "maximum": 40},
        "when": {"anyOf": [{"type": "string", "pattern": "^[a-z]{2}|[0-9]$", "maxLength": 3}, {"type": "null"}]},
        "sure": {"type": "boolean"},
        "unit": {"enum": ["C", "F", "a </parameter> b", 'q"', 3, True]},
        "at": {"$ref": "#/$defs/point"},
        "on": {"type": "string", "format": "date"},
        "deep": {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False},
        "size": {"type": ["number", "string"], "maxLength": 4},
    },
    "required": ["city", "days", "sure", "at"],
    "additionalProperties": False,
    "$defs": {"point": {"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 1, "maxItems": 2}},
}
F = Function("get_weather", SCHEMA, strict=True)
G = Function("get_time")


def _tagged(tags: tagged.Tags, line: str = "\n", block: int = 0) -> Callable[[Mapping[str, Any]], str]:
    """One call of get_weather, as the templates write it."""

    def write(arguments: Mapping[str, Any]) -> str:
        opening, closing = tags.blocks[block]
        text = opening + (line + tags.head if tags.head else "") + "get_weather" + tags.head_end + line
        for key, value in arguments.items():
            whole = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            text += tags.key + key + tags.key_ends[not isinstance(value, str) and len(tags.key_ends) > 1]
            text += line + tags.value if tags.value else ""
            text += f"\n{whole}\n" if tags.lines else whole
            text += tags.value_end + line
        return text + tags.end + (line + closing if tags.head else "")

    return write


def _python(arguments: Mapping[str, Any]) -> str:
    return f"[get_weather({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]"


def _python_as_forced(arguments: Mapping[str, Any]) -> str:
    """Strings in JSON's quotes, which Python reads alike."""
    values = {k: str(v) if isinstance(v, bool) else json.dumps(v, ensure_ascii=False) for k, v in arguments.items()}
    return f"[get_weather({', '.join(f'{key}={value}' for key, value in values.items())})]"


def _kimi(arguments: Mapping[str, Any]) -> str:
    head = f"{kimi_k2.CALLS}{kimi_k2.CALL}functions.get_weather:0{kimi_k2.ARGUMENTS}"
    return f"{head}{json.dumps(arguments)}{kimi_k2.CALL_END}{kimi_k2.CALLS_END}"


class Form(msgspec.Struct, frozen=True):
    """A family's form, and which of its marks are special tokens."""

    name: str
    tools: str
    special: tuple[str, ...]
    write: Callable[[Mapping[str, Any]], str]
    template: str = ""

    def written(self) -> OutputFormat:
        """The format."""
        return choose_format(self.tools, "none", self.template, byte_tokenizer(self.special))

    def read(self, text: str, schema: Mapping[str, Any] = SCHEMA) -> list[Part]:
        """The parts of an output."""
        parser = self.written().parser({"get_weather", "get_time"}, schemas={"get_weather": schema})
        assert parser is not None
        return read(parser, list(text))


FORMS = [
    Form("qwen3 coder", "qwen3_coder", (), _tagged(tagged.QWEN3_CODER)),
    Form("qwen3 coder, special", "qwen3_coder", tagged.QWEN3_CODER.special, _tagged(tagged.QWEN3_CODER)),
    Form("glm 4.5", "glm45", tagged.GLM45.special, _tagged(tagged.GLM45)),
    Form("glm 4.7", "glm45", (), _tagged(tagged.GLM45, ""), "<arg_key></arg_key><arg_value>"),
    Form("minimax m2", "minimax_m2", (), _tagged(tagged.MINIMAX_M2)),
    Form("deepseek v3.2", "deepseek_v32", (tagged.DSML,), _tagged(tagged.DEEPSEEK_V32)),
    Form("deepseek v4", "deepseek_v32", (), _tagged(tagged.DEEPSEEK_V32, block=1), "<｜DSML｜tool_calls>"),
    Form("pythonic", "pythonic", ("<|python_start|>", "<|python_end|>"), _python),
    Form("kimi k2", "kimi_k2", kimi_k2.MARKS, _kimi),
]
by_form = pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name)
LOOSE: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "value": {"type": ["array", "object", "number", "boolean", "null"]},
        "either": {"type": ["string", "null"]},
    },
}
ODD = [
    "</parameter>",
    "</parameter",
    "</｜DSML｜parameter>\n",
    "</arg_value> ",
    "null ",
    '"',
    "\\",
    "\n",
    "'''",
    "[",
    "<a>",
]
texts = st.lists(st.one_of(st.sampled_from(ODD), st.text(max_size=4)), max_size=4).map("".join)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)


@settings(max_examples=16)
@given(
    text=texts,
    value=values.filter(lambda v: not isinstance(v, str)),
    either=st.one_of(st.none(), texts.filter(lambda t: t.strip() not in ("null", "None"))),
)
@by_form
def test_what_templates_write_is_read_as_it_was(form: Form, text: str, value: Any, either: str | None) -> None:
    arguments = {"text": text, "value": value, "either": either}
    found = form.read(f"So.{form.write(arguments)}" if form.tools != "pythonic" else form.write(arguments), LOOSE)
    *before, begin, written = found
    assert before == ([] if form.tools == "pythonic" else [Content("So.")])
    assert isinstance(begin, ToolCallBegin) and begin.name == "get_weather"
    assert isinstance(written, ToolCallArguments) and json.loads(written.text) == arguments


@by_form
def test_what_is_forced_is_read_as_a_call_that_fits(form: Form) -> None:
    grammar = forced_calls(form.written(), [F, G], most=1)
    random, called = Random(form.name), 0
    for _ in range(10):
        text = drawn(form.special, grammar, random, most=600)
        if text is None:
            continue
        parts = form.read(text)
        assert isinstance(parts[0], ToolCallBegin) and len(parts) == 2, (text, parts)
        assert isinstance(parts[1], ToolCallArguments)
        jsonschema.validate(
            json.loads(parts[1].text), SCHEMA if parts[0].name == "get_weather" else {"maxProperties": 0}
        )
        called += parts[0].name == "get_weather"
    assert called >= 2


GOOD: Mapping[str, Any] = {"city": "a\n\"b'", "days": 4, "sure": False, "at": ["</x"], "on": "2024-02-29", "size": 2.5}

BAD: Sequence[Mapping[str, Any]] = [{"city": "far too long"}, {"days": 41}, {"sure": None}, {"at": []}, {"more": 1}]


@by_form
def test_forced_arguments_follow_their_schema(form: Form) -> None:
    write = _python_as_forced if form.tools == "pythonic" else form.write
    text = write(GOOD)
    found = [json.loads(part.text) for part in form.read(text) if isinstance(part, ToolCallArguments)]
    assert found == [GOOD]
    written = form.written()
    for most in (1, 16):
        grammar = forced_calls(written, [F, G], most=most)
        assert allows(form.special, grammar, text), (text, grammar.text)
        for bad in BAD:
            assert not allows(form.special, grammar, write({**GOOD, **bad})), bad
        assert not allows(form.special, grammar, write({"city": "x"}))
        assert not allows(form.special, grammar, text + " and more")


@by_form
def test_further_forced_calls(form: Form) -> None:
    written, random = form.written(), Random(7)
    assert forced_calls(written, [G], most=99) == forced_calls(written, [G])
    grammar, found = forced_calls(written, [G], most=3), set[int]()
    for _ in range(24):
        text = drawn(form.special, grammar, random, most=600)
        assert text is not None
        parts = form.read(text)
        names = [part.name for part in parts if isinstance(part, ToolCallBegin)]
        assert names == ["get_time"] * len(names)
        assert [p.text for p in parts if not isinstance(p, ToolCallBegin)] == ["{}"] * len(names)
        found.add(len(names))
    assert found == {1, 2, 3}


@by_form
def test_free_calls_keep_the_schemas_of_strict_functions(form: Form) -> None:
    grammar = free_calls(form.written(), [F, G])
    assert allows(form.special, grammar, "So it is <b>.")
    before = "" if form.tools == "pythonic" else "So. "
    assert allows(form.special, grammar, before + form.write({"city": "x", "days": 1, "sure": True, "at": []})) is False
    loose = free_calls(form.written(), [msgspec.structs.replace(F, strict=False), G])
    write = _python_as_forced if form.tools == "pythonic" else form.write
    assert allows(form.special, loose, before + write({"city": 5, "odd": "x"}))


@by_form
def test_a_call_without_its_outer_mark_is_no_free_text(form: Form) -> None:
    tags = tagged.FAMILIES.get(form.tools)
    bare = form.write({"city": "x"})
    for opening in (kimi_k2.CALLS, *(tags.opens if tags is not None else ())):
        bare = bare.removeprefix(opening).lstrip("\n")
    if form.tools in ("glm45", "pythonic"):  # nothing else says that it is one
        return
    assert isinstance(form.read(bare)[0], ToolCallBegin)
    grammar = free_calls(form.written(), [F, G])
    assert not allows(form.special, grammar, bare) and not allows(form.special, grammar, f"So. {bare}")


def test_a_value_in_doubt_is_no_text() -> None:
    written = FORMS[0].written()
    function = Function("get_weather", {"properties": {"a": {"type": ["string", "integer", "null"]}}}, strict=True)
    grammar = forced_calls(written, [function], most=1)
    head, tail = "<tool_call>\n<function=get_weather>\n<parameter=a>\n", "\n</parameter>\n</function>\n</tool_call>"
    for value, allowed in (
        ("5", True),
        ("null", True),
        ("nullable", True),
        ("5 men", False),
        ("None", False),
        ("", True),
    ):
        assert allows((), grammar, head + value + tail) is allowed, value
    assert not allows((), grammar, f"{head}x</parameter>y{tail}")


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("^a|b$", ["ax", "xb", "a\nb"], ["xa", "bx"]),
        ("b", ["abc", "b"], ["ac", ""]),
        (r"^\d+\$$", ["12$"], ["12", "x12$"]),
        ("^(a|b)[|)]$", ["a|", "b)"], ["a", "ab|"]),
        ("/", ["a/b"], ["ab"]),
    ],
)
def test_patterns_of_text_are_found_as_schemas_mean_it(pattern: str, good: Sequence[str], bad: Sequence[str]) -> None:
    function = Function("get_weather", {"properties": {"a": {"type": "string", "pattern": pattern}}}, strict=True)
    grammar = forced_calls(FORMS[4].written(), [function], most=1)
    for value in (*good, *bad):
        assert allows((), grammar, FORMS[4].write({"a": value})) is (value in good), value


DOUBLING: dict[str, Any] = {
    str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}, {"$ref": f"#/$defs/{i + 1}"}]} for i in range(30)
}
DOUBLING["30"] = {"type": ["string", "null"]}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"a": {"type": "string", "format": "iri"}}}, "strings of the format 'iri'"),
        ({"properties": {"a": {"type": "string", "not": {"const": "x"}}}}, "'not' can't be followed"),
        ({"anyOf": [{"required": ["a"]}], "properties": {"a": {}}}, "'anyOf' can't be followed"),
        ({"properties": {"a>b": {"type": "string"}}}, 'the parameter "a>b" can\'t be written'),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "the reference '#/\\$defs/b' leads nowhere"),
        ({"properties": {"a": {"enum": ["</parameter></function>"]}}}, "has no value"),
        ({"properties": {"a": {"$ref": "#/$defs/0"}}, "$defs": DOUBLING}, "more than 262144 bytes"),
        ({"properties": {"a": {"$ref": "#/properties/a"}}}, "nested too deeply"),
    ],
)
def test_what_text_cannot_follow_is_refused_by_name(schema: Mapping[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        forced_calls(FORMS[0].written(), [Function("get_weather", schema, strict=True)], most=1)


def test_types_of_schemas_that_refer_to_themselves_are_soon_found() -> None:
    many: dict[str, Any] = {str(i): {"allOf": [{"$ref": f"#/$defs/{i + 1}"}] * 10} for i in range(12)}
    many["12"] = {"allOf": [{"$ref": "#/$defs/0"}, {"type": "integer"}]}
    schema = {"properties": {"a": {"$ref": "#/$defs/0"}}, "$defs": many}
    assert types_of_parameter(schema, "a") == frozenset({"integer"})
    assert types_of_parameter({"$ref": "#"}, "a") is None


def test_keywords_are_left_out_where_a_function_is_not_strict() -> None:
    schema = {"anyOf": [{}], "properties": {"a": {"type": "string", "format": "iri", "not": {}}}}
    grammar = forced_calls(FORMS[0].written(), [Function("get_weather", schema)], most=1)
    assert allows((), grammar, FORMS[0].write({"a": "anything"}))


CODER = (
    "{% if tools %}<tool_call> <function= <parameter={% endif %}"
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{{ '<tool_call>\\n<function=' + c.function.name + '>\\n' }}{% for k, v in c.function.arguments | items %}"
    "{{ '<parameter=' + k + '>\\n' }}"
    "{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}"
    "{{ '\\n</parameter>\\n' }}{% endfor %}{{ '</function>\\n</tool_call>' }}{% endfor %}{% endfor %}"
)


def test_past_calls_are_rendered_as_they_are_read() -> None:
    arguments = {"text": 'Os\nlo </parameter> "x"', "value": [1, {"a": None}], "either": None}
    function = {"name": "get_weather", "arguments": json.dumps(arguments)}
    message = ChatMessage.model_validate({"role": "assistant", "tool_calls": [{"id": "call_1", "function": function}]})
    text = ChatTemplate(CODER, {}).render([message.for_template()], add_generation_prompt=False)
    assert "<parameter=either>\nNone\n</parameter>" in text
    parser = choose_format("auto", "auto", CODER, byte_tokenizer(())).parser(
        {"get_weather"}, schemas={"get_weather": LOOSE}
    )
    assert parser is not None
    begin, written = read(parser, [text])
    assert begin == ToolCallBegin(0, "get_weather")
    assert isinstance(written, ToolCallArguments) and json.loads(written.text) == arguments
