"""Outputs of models of each family, as they come, with what a parser makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from services.router.parsers.base import (
    Content,
    OutputParser,
    Part,
    Reasoning,
    ToolCallArguments,
    ToolCallBegin,
)
from services.router.parsers.choice import OutputFormat
from services.router.parsers.reader import joined

NAMES = frozenset({"get_weather", "get_time", "function"})
OSLO = '{"city": "Oslo", "days": [1, 2.5e3, -0], "note": "a \\"b\\" } ] </tool_call> \\u00e9 é", "deep": {"x": null}}'
TIME = "{}"
SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"$ref": "#/$defs/days"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "deep": {"type": "object"},
            "now": {"type": "boolean"},
        },
        "$defs": {"days": {"type": ["integer", "array"]}},
    }
}
"""Schemas of arguments, for forms that write no types."""


def call(index: int, name: str, arguments: str, call_id: str = "") -> list[Part]:
    """A whole call."""
    return [ToolCallBegin(index, name, call_id), ToolCallArguments(index, arguments)]


class Output(msgspec.Struct, frozen=True):
    """One output of a family, and its parts."""

    name: str
    written: OutputFormat
    text: str
    parts: Sequence[Part]
    inside: bool | None = None

    def parser(self) -> OutputParser:
        """A new parser for it."""
        parser = self.written.parser(NAMES, schemas=SCHEMAS, inside=self.inside)
        assert parser is not None
        return parser


def read(parser: OutputParser, pieces: Sequence[str]) -> list[Part]:
    """All parts of an output that comes in these pieces, neighbours joined."""
    parts: list[Part] = []
    for piece in pieces:
        parts += parser.push(piece)
    return joined([*parts, *parser.finish()])


HERMES = OutputFormat("hermes")
LLAMA = OutputFormat("llama3_json")
JSON = OutputFormat("json")
MISTRAL = OutputFormat("mistral")
DEEPSEEK = OutputFormat("deepseek_v3")
GPT_OSS = OutputFormat("gpt_oss", "gpt_oss")
QWEN3 = OutputFormat("hermes", "deepseek_r1")
MAGISTRAL = OutputFormat("mistral", "mistral")
R1 = OutputFormat("deepseek_v3", "deepseek_r1")
QWEN_CODER = OutputFormat("qwen3_coder")
QWEN35 = OutputFormat("qwen3_coder", "deepseek_r1")
GLM = OutputFormat("glm45")
MINIMAX = OutputFormat("minimax_m2")
DSML = OutputFormat("deepseek_v32")
KIMI = OutputFormat("kimi_k2")
PYTHONIC = OutputFormat("pythonic")
FORMATS = (
    HERMES, LLAMA, JSON, MISTRAL, DEEPSEEK, GPT_OSS, QWEN3, MAGISTRAL, R1,
    QWEN_CODER, QWEN35, GLM, MINIMAX, DSML, KIMI, PYTHONIC,
)  # fmt: skip

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
BOTH = [*call(0, "get_weather", OSLO), *call(1, "get_time", TIME)]

RECORDED = [
    Output("hermes text", HERMES, "No <tool> is needed: 2 < 3.", [Content("No <tool> is needed: 2 < 3.")]),
    Output(
        "hermes",
        HERMES,
        f'<tool_call>\n{{"name": "get_weather", "arguments": {OSLO}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "get_time", "arguments": {TIME}}}\n</tool_call>',
        BOTH,
    ),
    Output(
        "hermes, text before and behind",
        HERMES,
        f'Let me look. <tool_call>{{"arguments": {OSLO}, "name": "get_weather"}}</tool_call>\nDone.',
        [Content("Let me look. "), *call(0, "get_weather", OSLO), Content("\nDone.")],
    ),
    Output(
        "hermes, nothing to say",
        HERMES,
        '\n\n<tool_call>\n{"name": "get_time"}\n</tool_call>\n',
        call(0, "get_time", "{}"),
    ),
    Output(
        "hermes, arguments as text",
        HERMES,
        '<tool_call>\n{"name": "get_time", "arguments": "{\\"zone\\": \\"CET\\"}"}\n</tool_call>',
        call(0, "get_time", '{"zone": "CET"}'),
    ),
    Output(
        "hermes, one brace short",
        HERMES,
        '<tool_call>\n{"name": "get_time", "arguments": {"zone": 1}\n</tool_call>',
        call(0, "get_time", '{"zone": 1}'),
    ),
    Output(
        "qwen 3",
        QWEN3,
        f"<think>\nThe user wants\n\na <tool_call>.\n</think>\n\n"
        f'<tool_call>\n{{"name": "get_weather", "arguments": {OSLO}}}\n</tool_call>',
        [Reasoning("The user wants\n\na <tool_call>."), *call(0, "get_weather", OSLO)],
    ),
    Output("qwen 3, an empty thought", QWEN3, "<think>\n\n</think>\n\nHello", [Content("Hello")]),
    Output("qwen 3, no thought", QWEN3, " Hello </think>", [Content(" Hello </think>")]),
    Output(
        "qwen 3, begun in the prompt",
        QWEN3,
        "\nHm,\n 1 < 2 </thin>\n</think>\n\nHello",
        [Reasoning("Hm,\n 1 < 2 </thin>"), Content("Hello")],
        inside=True,
    ),
    Output("qwen 3, cut off in a thought", QWEN3, "Hm\n\n", [Reasoning("Hm\n\n")], inside=True),
    Output("qwen 3, not to think", QWEN3, "<think>no</think>", [Content("<think>no</think>")], inside=False),
    Output(
        "llama 3",
        LLAMA,
        f'{{"name": "get_weather", "parameters": {OSLO}}}; {{"name": "get_time", "parameters": {TIME}}}',
        BOTH,
    ),
    Output(
        "llama 3 with its tag",
        LLAMA,
        f'Looking: <|python_tag|>{{"type": "function", "name": "get_weather", "parameters": {OSLO}}}',
        [Content("Looking: "), *call(0, "get_weather", OSLO)],
    ),
    Output("llama 3, code", LLAMA, "<|python_tag|>print(1)", [Content("<|python_tag|>print(1)")]),
    Output(
        "llama 3, an answer in JSON",
        LLAMA,
        '{"name": "Ada", "parameters": {"born": 1815}}',
        [Content('{"name": "Ada", "parameters": {"born": 1815}}')],
    ),
    Output(
        "json",
        JSON,
        f'{{"name": "get_weather", "arguments": {OSLO}}}\n{{"name": "get_time", "arguments": {TIME}}}\n',
        BOTH,
    ),
    Output(
        "json, an answer with the same keys",
        JSON,
        '{"name": "get_time", "age": 3}',
        [Content('{"name": "get_time", "age": 3}')],
    ),
    Output(
        "mistral, a list",
        MISTRAL,
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {OSLO}}}, '
        f'{{"id": "a1B2c3D4e", "name": "get_time", "arguments": {TIME}}}]',
        [*call(0, "get_weather", OSLO), *call(1, "get_time", TIME, "a1B2c3D4e")],
    ),
    Output(
        "mistral, names and arguments",
        MISTRAL,
        f"I look.[TOOL_CALLS]get_weather[ARGS]{OSLO}[TOOL_CALLS]get_time[CALL_ID]a1B2c3D4e[ARGS]{TIME}",
        [Content("I look."), *call(0, "get_weather", OSLO), *call(1, "get_time", TIME, "a1B2c3D4e")],
    ),
    Output("mistral, bare", MISTRAL, f"[TOOL_CALLS]get_weather{OSLO}", call(0, "get_weather", OSLO)),
    Output(
        "magistral",
        MAGISTRAL,
        f"[THINK]Hm [TOOL[/THINK]Now:[TOOL_CALLS]get_time[ARGS]{TIME}",
        [Reasoning("Hm [TOOL"), Content("Now:"), *call(0, "get_time", TIME)],
    ),
    Output(
        "deepseek v3",
        DEEPSEEK,
        f"{CALLS}{CALL}function{SEP}get_weather\n```json\n{OSLO}\n```{CALL_END}\n"
        f"{CALL}function{SEP}get_time\n```json\n{TIME}\n```{CALL_END}{CALLS_END}",
        BOTH,
    ),
    Output(
        "deepseek v3.1",
        DEEPSEEK,
        f"Sure.{CALLS}{CALL}get_weather{SEP}{OSLO}{CALL_END}{CALL}function{SEP}{TIME}{CALL_END}{CALLS_END}",
        [Content("Sure."), *call(0, "get_weather", OSLO), *call(1, "function", TIME)],
    ),
    Output(
        "deepseek, no outer mark",
        DEEPSEEK,
        f"{CALL}get_time{SEP}{TIME}{CALL_END}",
        call(0, "get_time", TIME),
    ),
    Output(
        "deepseek r1",
        R1,
        f"I think.\n</think>\n\n{CALLS}{CALL}get_time{SEP}{TIME}{CALL_END}{CALLS_END}",
        [Reasoning("I think."), *call(0, "get_time", TIME)],
        inside=True,
    ),
    Output(
        "gpt-oss",
        GPT_OSS,
        "<|channel|>analysis<|message|>We need <weather>.<|end|><|start|>assistant"
        f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{OSLO}<|call|>",
        [Reasoning("We need <weather>."), *call(0, "get_weather", OSLO)],
    ),
    Output(
        "gpt-oss, the call's end is the end",
        GPT_OSS,
        f"<|channel|>commentary to=functions.get_weather<|constrain|>json<|message|>{OSLO}",
        call(0, "get_weather", OSLO),
    ),
    Output(
        "gpt-oss, a preamble, a call by the role, an answer",
        GPT_OSS,
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.get_time"
        f"<|channel|>commentary json<|message|>{TIME}<|call|><|start|>assistant"
        "<|channel|>final<|message|>It is\n\nnoon.<|return|>",
        [Content("I look."), *call(0, "get_time", TIME), Content("It is\n\nnoon.")],
    ),
    Output(
        "gpt-oss, the prompt's role goes on",
        GPT_OSS,
        f" to=functions.get_time<|channel|>commentary json<|message|>{TIME}",
        call(0, "get_time", TIME),
    ),
    Output(
        "gpt-oss, channels without ends",
        GPT_OSS,
        "<|channel|>analysis<|message|>Hm<|channel|>final<|message|>Yes",
        [Reasoning("Hm"), Content("Yes")],
    ),
    Output(
        "qwen 3 coder",
        QWEN_CODER,
        "I look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n"
        '<parameter=days>\n[1, "</parameter>\\n</function>"]\n</parameter>\n'
        '<parameter=note>\n\n  a "b"\n\\n </parameter> é🌞\n\n</parameter>\n<parameter=now>\nTrue\n</parameter>\n'
        "</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
        [
            Content("I look.\n\n"),
            *call(
                0,
                "get_weather",
                '{"city": "Oslo", "days": [1, "</parameter>\\n</function>"], '
                '"note": "\\n  a \\"b\\"\\n\\\\n </parameter> é🌞\\n", "now": true}',
            ),
            *call(1, "get_time", "{}"),
        ],
    ),
    Output(
        "qwen 3 coder, by the schema's types",
        QWEN_CODER,
        "<tool_call><function=get_weather><parameter=city>5</parameter><parameter=days>5</parameter>"
        "<parameter=note>null</parameter><parameter=deep>{'a': 1}</parameter><parameter=more>5</parameter>"
        "<parameter=now></parameter></function></tool_call>",
        call(
            0,
            "get_weather",
            '{"city": "5", "days": 5, "note": null, "deep": "{\'a\': 1}", "more": "5", "now": ""}',
        ),
    ),
    Output(
        "qwen 3 coder, marks left out",
        QWEN_CODER,
        "<function=get_weather>\n<parameter=note>\nnull\n5\n</parameter>\n</tool_call> Done.",
        [*call(0, "get_weather", '{"note": "null\\n5"}'), Content(" Done.")],
    ),
    Output(
        "qwen 3.5",
        QWEN35,
        "Hm.\n</think>\n\n<tool_call>\n<function=get_time>\n<parameter=zone>\nCET\n</parameter>\n</function>\n</tool_call>",
        [Reasoning("Hm."), *call(0, "get_time", '{"zone": "CET"}')],
        inside=True,
    ),
    Output(
        "glm 4.5",
        GLM,
        "Well.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value> 12</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>[1,2]</arg_value>\n</tool_call>\n<tool_call>get_time\n"
        "<arg_key>zone</arg_key>\n<arg_value>12</arg_value>\n<arg_key>of</arg_key>\n<arg_value>x <b></arg_value>\n"
        "</tool_call>",
        [
            Content("Well.\n"),
            *call(0, "get_weather", '{"city": " 12", "days": [1,2]}'),
            *call(1, "get_time", '{"zone": 12, "of": "x <b>"}'),
        ],
    ),
    Output(
        "glm 4.7",
        GLM,
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>"
        "<tool_call>get_time</tool_call>",
        [*call(0, "get_weather", '{"city": "Oslo"}'), *call(1, "get_time", "{}")],
    ),
    Output(
        "minimax m2",
        MINIMAX,
        'So.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Oslo\n</parameter>\n'
        '<parameter name="deep">{"a": [null]}</parameter>\n</invoke>\n<invoke name="get_time">\n</invoke>\n'
        "</minimax:tool_call>",
        [
            Content("So.\n"),
            *call(0, "get_weather", '{"city": "Oslo\\n", "deep": {"a": [null]}}'),
            *call(1, "get_time", "{}"),
        ],
    ),
    Output(
        "deepseek v3.2",
        DSML,
        'Ja.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">5 </｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="more" string="false">{"a": 5}</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="odd" string="false">five</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="get_time">\n\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        [
            Content("Ja.\n\n"),
            *call(0, "get_weather", '{"city": "5 ", "more": {"a": 5}, "odd": "five"}'),
            *call(1, "get_time", "{}"),
        ],
    ),
    Output(
        "deepseek v4",
        DSML,
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_time">\n<｜DSML｜parameter name="zone">5</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        call(0, "get_time", '{"zone": "5"}'),
    ),
    Output(
        "kimi k2",
        KIMI,
        f"Let me see.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{OSLO}<|tool_call_end|><|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>{TIME}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        [
            Content("Let me see."),
            *call(0, "get_weather", OSLO, "functions.get_weather:0"),
            *call(1, "get_time", TIME, "functions.get_time:1"),
        ],
    ),
    Output(
        "kimi k2, ids that are none",
        KIMI,
        f"<|tool_call_begin|>get_time<|tool_call_argument_begin|>{TIME}<|tool_call_end|>"
        f"<|tool_call_begin|>get_time:3<|tool_call_argument_begin|>{TIME}<|tool_call_end|>"
        f"<|tool_call_begin|>get_time:3<|tool_call_argument_begin|>{TIME}<|tool_call_end|>",
        [*call(0, "get_time", TIME), *call(1, "get_time", TIME, "get_time:3"), *call(2, "get_time", TIME)],
    ),
    Output(
        "pythonic",
        PYTHONIC,
        '[get_weather(city="O\'slo", days=[1, -2.5e3, .5], note=\'a "b" \\n\\u00e9\\ud83c\\udf1e\\q\', '
        "deep={'x': None, \"y\": [True, false,], }, ), get_time()]",
        [
            *call(
                0,
                "get_weather",
                '{"city": "O\'slo", "days": [1, -2.5e3, 0.5], "note": "a \\"b\\" \\né🌞\\\\q", '
                '"deep": {"x": null, "y": [true, false]}}',
            ),
            *call(1, "get_time", "{}"),
        ],
    ),
    Output(
        "pythonic, behind marks",
        PYTHONIC,
        'See: <|python_start|>[get_time(zone="""a\n"b" """)]<|python_end|> Yes.',
        [Content("See: "), *call(0, "get_time", '{"zone": "a\\n\\"b\\" "}'), Content(" Yes.")],
    ),
    Output(
        "pythonic, a call of nobody's",
        PYTHONIC,
        "[get_time(), get_lost(a=1)]",
        [*call(0, "get_time", "{}"), Content(", get_lost(a=1)]")],
    ),
]

NO_CALLS = [
    (HERMES, '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>'),
    (HERMES, "<tool_call>\nget_time()\n</tool_call>"),
    (HERMES, '<tool_call>{"name": "get_time", "arguments": [1]}</tool_call> <tool_call>'),
    (HERMES, '<tool_call>{"name": "get_time", "arguments": "not JSON"}</tool_call>'),
    (HERMES, '<tool_call>{"name": "get_time", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>'),
    (HERMES, '<tool_call>{"name": "get_ti'),
    (HERMES, '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"arguments": {}}</tool_call>'),
    (HERMES, '<tool_call><tool_call>{"name"</tool_call>'),
    (HERMES, "</tool_call>"),
    (LLAMA, '{"name": "get_time"}'),
    (LLAMA, '{"name": "get_time", "parameters": {}, "more": 1'[:24]),
    (LLAMA, 'x {"name": "get_time", "parameters": {}}'),
    (LLAMA, "{'name': 'get_time', 'parameters': {}}"),
    (LLAMA, '<|python_tag|>{"name": "unknown", "parameters": {}}'),
    (JSON, '[{"name": "get_time", "arguments": {}}]'),
    (JSON, '```json\n{"name": "get_time", "arguments": {}}\n```'),
    (JSON, "  \n "),
    (MISTRAL, "[TOOL_CALLS] []"),
    (MISTRAL, '[TOOL_CALLS] [{"name": "unknown", "arguments": {}}]'),
    (MISTRAL, "[TOOL_CALLS]get_time[ARGS]3"),
    (MISTRAL, "[TOOL_CALLS]get_time"),
    (MISTRAL, "[TOOL_CALLS]unknown[ARGS]{}"),
    (MISTRAL, "[ARGS]{}[TOOL_CALLS"),
    (DEEPSEEK, f"{CALLS}{CALLS_END}"),
    (DEEPSEEK, f"{CALLS}{CALL}function{SEP}unknown\n```json\n{{}}\n```{CALL_END}{CALLS_END}"),
    (DEEPSEEK, f"{CALLS}{CALL}get_time{CALL_END}"),
    (DEEPSEEK, f"{CALLS}{CALL}get_time{SEP}none{CALL_END}{CALLS_END}"),
    (DEEPSEEK, CALLS[:7]),
    (GPT_OSS, "Hello <|channel|>"),
    (GPT_OSS, "<|channel|>final\n<|message|>x"),
    (GPT_OSS, "<|channel|>other<|message|>x<|end|>"),
    (GPT_OSS, "<|channel|>commentary to=functions.unknown<|message|>{}<|call|>"),
    (GPT_OSS, "<|channel|>commentary to=functions.get_time<|message|>noon<|call|>"),
    (GPT_OSS, "<|start|>assistant"),
    (GPT_OSS, " to=functions.get_time"),
    (GPT_OSS, "<|channel|>" + "x" * 600),
    (QWEN_CODER, "<tool_call>\n<function=unknown>\n</function>\n</tool_call>"),
    (QWEN_CODER, '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'),
    (QWEN_CODER, "<tool_call>\n<function=get_time>\nNo</function>"),
    (QWEN_CODER, "<tool_call>\n<function=get_time"),
    (QWEN_CODER, "Write <function=get_time> and <parameter=x>"),
    (GLM, "<tool_call>get_time\nNo</tool_call>"),
    (GLM, "<tool_call>unknown\n</tool_call>"),
    (MINIMAX, '<minimax:tool_call>\n<invoke name="unknown">\n</invoke>\n</minimax:tool_call>'),
    (MINIMAX, '<minimax:tool_call>\n<invoke name="get_time'),
    (DSML, '<｜DSML｜function_calls>\n<｜DSML｜invoke name="unknown">\n</｜DSML｜invoke>'),
    (DSML, "<｜DSML｜function_calls>\n</｜DSML｜function_calls>"),
    (KIMI, "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
    (KIMI, "<|tool_calls_section_begin|><|tool_call_begin|>functions.unknown:0<|tool_call_argument_begin|>{}"),
    (KIMI, "<|tool_call_begin|>functions.get_time:0<|tool_call_argument_begin|>none<|tool_call_end|>"),
    (PYTHONIC, "[1, 2]"),
    (PYTHONIC, "[unknown(a=1)]"),
    (PYTHONIC, '[get_time("CET")]'),
    (PYTHONIC, "[get_time("),
    (PYTHONIC, "So: [get_time()]"),
    (PYTHONIC, "<|python_start|>print(1)<|python_end|>"),
]
"""Outputs that hold no call: all of each is content."""

BROKEN = [
    (HERMES, '<tool_call>{"name": "get_time", "arguments": {"a": tru}}\n</tool_call>', '{"a": tru}}\n', ""),
    (HERMES, '<tool_call>{"name": "get_time", "arguments": {"a": "b', '{"a": "b', ""),
    (HERMES, '<tool_call>{"name": "get_time", "arguments": {"a": 1}} oh</tool_call>', '{"a": 1}', " oh</tool_call>"),
    (LLAMA, '{"name": "get_time", "parameters": {a: 1}} more', "{a: 1}} more", ""),
    (MISTRAL, '[TOOL_CALLS]get_time[ARGS]{"a"; 1}[TOOL_CALLS]', '{"a"; 1}', "[TOOL_CALLS]"),
    (DEEPSEEK, f"{CALLS}{CALL}get_time{SEP}{{,}}{CALL_END}{CALLS_END}!", "{,}", "!"),
    (GPT_OSS, "<|channel|>commentary to=functions.get_time<|message|>{]<|call|>", "{]", ""),
    (GPT_OSS, "<|channel|>commentary to=functions.get_time<|message|>{} x<|call|>", "{}", " x"),
    (QWEN_CODER, "<function=get_time>\n<parameter=a>\n1\n</paramet", '{"a": "1\\n</paramet', ""),
    (QWEN_CODER, "<function=get_time>\n<parameter=a\n</function>!", "{<parameter=a\n", "!"),
    (QWEN_CODER, "<function=get_time>\n<parameter=a>\n1\n</parameter>\n", '{"a": "1"', ""),
    (
        QWEN_CODER,
        "<function=get_time><parameter=a>1</parameter> x </function>",
        '{"a": "1</parameter> x </function>',
        "",
    ),
    (GLM, "<tool_call>get_time\n<arg_key>a</arg_key>\n1</tool_call>", "{<arg_key>a</arg_key>\n1", ""),
    (GLM, "<tool_call>get_time\n<arg_key>a</arg_key>\n<arg_value>1", '{"a": "1', ""),
    (KIMI, "<|tool_call_begin|>get_time<|tool_call_argument_begin|>{,}<|tool_call_end|>!", "{,}", "!"),
    (PYTHONIC, "[get_time(a=b)] more", '{"a": b)] more', ""),
    (PYTHONIC, '[get_time(a="\\ud83c', '{"a": "\\ud83c', ""),
    (PYTHONIC, "[get_time(a=1, 2)]", '{"a": 1, 2)]', ""),
    (PYTHONIC, "[get_time(a={1: 2})]", '{"a": {1: 2})]', ""),
    (PYTHONIC, "[get_time(a=inf)]", '{"a": inf)]', ""),
]
"""Calls that go wrong once they have begun: the format, the output, its arguments, its content."""
