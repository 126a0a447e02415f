"""What a chat's template gets beyond the messages, against transformers: tools, documents, an answer that goes on."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from transformers import AutoTokenizer

from engine_core.types.errors import InvalidRequestError
from services.router.text.tokenizer import RouterTokenizer
from tests.support.models import tiny_model

BEGUN: list[dict[str, Any]] = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "so the "},
]
TRIMS = "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}<|im_end|>{% endfor %}"
SHOWS_ALL = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for d in documents or [] %}{{ d.text }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %} "
    "{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}\n{% endfor %}"
)
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "of a city", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"name": "weather", "arguments": {"city": "Köln"}}
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
    {"role": "tool", "content": "rain"},
]  # fmt: skip


@functools.cache
def both() -> tuple[RouterTokenizer, Any]:
    return RouterTokenizer.load(tiny_model()), AutoTokenizer.from_pretrained(tiny_model())


@pytest.mark.parametrize("template", [None, TRIMS])
@pytest.mark.parametrize("content", ["so the ", "  so", "hello", "so\n\n", "日本"])
def test_an_answer_goes_on_where_it_ends(template: str | None, content: str) -> None:
    ours, theirs = both()
    chat = [BEGUN[0], {"role": "assistant", "content": content}]
    text = ours.render_chat(chat, add_generation_prompt=False, continue_final_message=True, template=template)
    wanted = theirs.apply_chat_template(chat, continue_final_message=True, tokenize=False, chat_template=template)
    assert text == wanted
    assert text.rstrip().endswith(content.strip())


def test_an_answer_that_the_template_does_not_show_cannot_go_on() -> None:
    ours, _ = both()
    with pytest.raises(InvalidRequestError, match="does not show") as caught:
        ours.render_chat(BEGUN, continue_final_message=True, template="{{ messages[0].content }}")
    assert caught.value.field == "continue_final_message"
    same = [{"role": "user", "content": BEGUN[-1]["content"]}, BEGUN[-1]]
    shown = "{% for m in messages %}{{ m.content }}{{ '' if loop.last else ';' }}{% endfor %}"
    text = ours.render_chat(same, add_generation_prompt=False, continue_final_message=True, template=shown)
    assert text == f"{BEGUN[-1]['content']};{BEGUN[-1]['content']}"
    thoughtless = shown.replace("m.content", "m.content.split('the')[-1]")
    with pytest.raises(InvalidRequestError, match="does not show"):
        ours.render_chat(same, add_generation_prompt=False, continue_final_message=True, template=thoughtless)


def test_a_template_whose_filters_fail_refuses_the_chat() -> None:
    ours, _ = both()
    with pytest.raises(InvalidRequestError, match=r"refuses messages\[0\]: .*has no attribute 'items'") as caught:
        ours.render_chat(BEGUN[:1], template="{% for m in messages %}{{ m.content | dictsort }}{% endfor %}")
    assert caught.value.field == "messages[0]"


def test_tools_documents_and_calls_reach_the_template() -> None:
    ours, theirs = both()
    documents = [{"title": "a", "text": "one"}, {"title": "b", "text": "two"}]
    text = ours.render_chat(CALLED, tools=[TOOL], documents=documents, template=SHOWS_ALL)
    wanted = theirs.apply_chat_template(
        CALLED, tools=[TOOL], documents=documents, chat_template=SHOWS_ALL, tokenize=False
    )
    assert text == wanted and 'weather({"city": "Köln"})' in text and "two" in text


def test_a_clients_template_that_is_none_is_its_own_fault() -> None:
    ours, _ = both()
    with pytest.raises(InvalidRequestError, match="cannot be compiled") as caught:
        ours.render_chat(BEGUN, template="{% if %}")
    assert caught.value.field == "chat_template"
