"""Which parsers a model gets."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec
import pytest

from engine_core.types.errors import ConfigError
from services.router.parsers.choice import OutputFormat, choose_format


class Vocabulary(msgspec.Struct, frozen=True):
    special: Mapping[str, int] = {}
    plain: Collection[str] = ()

    def special_id(self, text: str) -> int | None:
        return self.special.get(text)

    def has_token(self, text: str) -> bool:
        return text in self.special or text in self.plain


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
HERMES = CHATML + "{% if tools %}<tools></tools><tool_call>{{ tools | tojson }}</tool_call>{% endif %}"
QWEN3 = HERMES + "{{ content.split('</think>')[-1] }}"
LLAMA = 'Environment: ipython {% if tools %}Respond with {"name": x, "parameters": y}, <|python_tag|>{% endif %}'
V3 = "<｜tool▁calls▁begin｜>{{ tool['type'] }}<｜tool▁sep｜>{{ '\\n```json\\n' }}"
V31 = "<｜tool▁calls▁begin｜>{{ name }}<｜tool▁sep｜>{{ arguments }} </think>"
CODER = CHATML + "{% if tools %}<tool_call>\n<function=f>\n<parameter=p>\n1\n</parameter>{% endif %}"
GLM45 = "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value> </think>"
GLM47 = "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value> </think>"
MINIMAX = "{%- set toolcall_begin_token = '<minimax:tool_call>' -%} <think>"
KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>{{ tool_call['id'] }}<|tool_call_argument_begin|>"
PYTHONIC = "Environment: ipython [func_name1(params_name1=params_value1, params_name2=params_value2...)]"
V32_VOCABULARY = Vocabulary({"｜DSML｜": 9}, ["<｜tool▁calls▁begin｜>", "</think>"])
MISTRAL_SPECIAL = {"[TOOL_CALLS]": 9, "[ARGS]": 32, "[THINK]": 34, "[/THINK]": 35}
HARMONY_SPECIAL = {"<|channel|>": 5, "<|message|>": 8, "<|start|>": 6, "<|end|>": 7, "<|call|>": 12}


@pytest.mark.parametrize(
    ("template", "vocabulary", "tools", "reasoning", "variant"),
    [
        ("", Vocabulary(), "json", "none", False),
        (CHATML, Vocabulary(), "json", "none", False),
        (HERMES, Vocabulary(plain=["<tool_call>"]), "hermes", "none", False),
        (QWEN3, Vocabulary(plain=["<think>", "</think>"]), "hermes", "deepseek_r1", False),
        (HERMES + "<function=", Vocabulary(), "json", "none", False),
        (LLAMA, Vocabulary({"<|python_tag|>": 3}), "llama3_json", "none", False),
        ("", Vocabulary({"[TOOL_CALLS]": 9}), "mistral", "none", False),
        ("[TOOL_CALLS]", Vocabulary(MISTRAL_SPECIAL), "mistral", "mistral", True),
        (V3, Vocabulary(), "deepseek_v3", "none", False),
        (V31, Vocabulary(), "deepseek_v3", "deepseek_r1", True),
        ("<|channel|>", Vocabulary(HARMONY_SPECIAL), "gpt_oss", "gpt_oss", False),
        (CODER, Vocabulary(plain=["<tool_call>"]), "qwen3_coder", "none", False),
        (CODER + "</think>", Vocabulary(), "qwen3_coder", "deepseek_r1", False),
        (GLM45, Vocabulary(), "glm45", "deepseek_r1", False),
        (GLM47, Vocabulary(), "glm45", "deepseek_r1", True),
        (MINIMAX, Vocabulary(plain=["</think>"]), "minimax_m2", "deepseek_r1", False),
        (KIMI, Vocabulary(), "kimi_k2", "none", False),
        (PYTHONIC, Vocabulary({"<|python_tag|>": 3}), "pythonic", "none", False),
        ("", V32_VOCABULARY, "deepseek_v32", "deepseek_r1", False),
        ("<｜DSML｜tool_calls>", V32_VOCABULARY, "deepseek_v32", "deepseek_r1", True),
        (V31, V32_VOCABULARY, "deepseek_v3", "deepseek_r1", True),
    ],
)
def test_auto_goes_by_template_and_vocabulary(
    template: str, vocabulary: Vocabulary, tools: str, reasoning: str, variant: bool
) -> None:
    shown = f"{template}{{{{ tools }}}}" if template else ""
    found = choose_format("auto", "auto", shown, vocabulary)
    assert (found.tools, found.reasoning, found.variant) == (tools, reasoning, variant)


def test_names_go_before_what_the_template_shows() -> None:
    found = choose_format("mistral", "none", QWEN3, Vocabulary())
    assert (found.tools, found.reasoning) == ("mistral", "none")
    same = choose_format("qwen", "qwen3", CHATML, Vocabulary())
    assert (same.tools, same.reasoning) == ("hermes", "deepseek_r1")
    newer = choose_format("deepseek_v31", "none", CHATML, Vocabulary())
    assert (newer.tools, newer.variant) == ("deepseek_v3", True)


@pytest.mark.parametrize(("tools", "reasoning"), [("gpt_oss", "auto"), ("auto", "gpt_oss")])
def test_gpt_oss_reads_both(tools: str, reasoning: str) -> None:
    found = choose_format(tools, reasoning, QWEN3, Vocabulary())
    assert (found.tools, found.reasoning) == ("gpt_oss", "gpt_oss")


@pytest.mark.parametrize(
    ("tools", "reasoning", "field", "message"),
    [
        (
            "hermez",
            "auto",
            "tool_call_parser",
            "tool_call_parser: 'hermez' is unknown; there is auto, none, deepseek_v3, deepseek_v31, "
            "deepseek_v32, glm45, gpt_oss, granite, hermes, hunyuan_a13b, json, kimi_k2, llama3_json, minimax_m2, "
            "mistral, nemotron_json, pythonic, qwen, qwen3_coder, qwen3_xml, xlam",
        ),
        (
            "auto",
            "r1",
            "reasoning_parser",
            "reasoning_parser: 'r1' is unknown; there is auto, none, deepseek_r1, gpt_oss, mistral, qwen3",
        ),
        (
            "hermes",
            "gpt_oss",
            "reasoning_parser",
            "gpt_oss reads calls and reasoning together: it cannot stand beside the tool call parser 'hermes' and the "
            "reasoning parser 'gpt_oss'",
        ),
    ],
)
def test_wrong_names_are_refused(tools: str, reasoning: str, field: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_format(tools, reasoning, "", Vocabulary())
    assert (caught.value.field, caught.value.message) == (field, message)


def test_marks_that_are_special_stay_where_a_parser_reads_them() -> None:
    written = choose_format("auto", "auto", "", Vocabulary(MISTRAL_SPECIAL))
    assert written.kept_ids(calls=True) == (9, 32, 34, 35)
    assert written.kept_ids(calls=False) == (34, 35)
    assert choose_format("json", "none", "", Vocabulary(MISTRAL_SPECIAL)).kept_ids(calls=True) == ()
    assert choose_format("auto", "auto", "", Vocabulary(HARMONY_SPECIAL)).kept_ids(calls=False) == (5, 6, 7, 8, 12)


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        ("…<|im_start|>assistant\n", None),
        ("…<think>\n", True),
        ("…<think>\n\n</think>\n\n", False),
        ("<think> x", None),
    ],
)
def test_the_prompt_shows_whether_a_thought_has_begun(prompt: str, inside: bool | None) -> None:
    assert OutputFormat("hermes", "deepseek_r1").inside(prompt) is inside
    assert OutputFormat("hermes").inside(prompt) is None


@pytest.mark.parametrize(
    ("begun", "inside"),
    [("<think>\nThe user", True), ("<think>a</think>so", None), ("<think>a</think>", False), ("so", None)],
)
def test_an_answer_that_goes_on_may_be_within_its_thought(begun: str, inside: bool | None) -> None:
    prompt = f"Say <think>.<|im_start|>assistant\n{begun}"
    assert OutputFormat("hermes", "deepseek_r1").inside(prompt, begun) is inside
    assert OutputFormat("gpt_oss", "gpt_oss").inside(prompt, begun) is None
