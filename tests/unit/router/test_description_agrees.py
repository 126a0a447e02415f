"""/openapi.json against the code: of every field of every request, both take the same values and refuse the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from engine_core.types.errors import InvalidRequestError
from services.router.chat.schema import ChatRequest
from services.router.edge.request_body import RequestBody, parse_request
from services.router.messages.schema import CountTokensRequest, MessagesRequest
from services.router.native.schema import DetokenizeRequest, GenerateRequest, TokenizeRequest
from services.router.openai.schema import CompletionRequest
from services.router.openapi import schemas
from services.router.responses.schema import ResponsesRequest

USER = [{"role": "user", "content": "hi"}]
NEEDED: dict[type[RequestBody], dict[str, Any]] = {
    CompletionRequest: {"model": "demo", "prompt": "a"},
    ChatRequest: {"model": "demo", "messages": USER},
    ResponsesRequest: {"model": "demo", "input": "a"},
    MessagesRequest: {"model": "demo", "messages": USER, "max_tokens": 5},
    CountTokensRequest: {"model": "demo", "messages": USER},
    GenerateRequest: {"text": "a"},
    TokenizeRequest: {"prompt": "a"},
    DetokenizeRequest: {"tokens": [1]},
}
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, -2, 2, 3, 5, 9, 10, 11, 16, 20, 21, 100, 128, 129, 0.5, -0.5, 1.5, 2.5, 1e-3, 86_400,
    86_401, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 1e308, "", "a", "5", "05", "auto", "none",
    "required", "low", "xhigh", "max", "default", "disabled", "x" * 256, "x" * 257, [], [1], [True], ["a"], [""],
    ["a", ""], [1, "a"], [-1], [1.5], ["5"], ["05"], [[1]], [[]], [[1], [2]], [["a"]], ["a"] * 16, ["a"] * 17,
    ["a", "b"], [None], [{}], {}, {"a": 1}, {"5": 1}, {"5": 101}, {"05": 1}, {"5": "x"}, {"type": "text"},
    {"type": "x"}, {"type": "json_object"}, {"type": "auto"}, {"type": "enabled"},
    {"type": "function", "function": {"name": "f"}}, {"effort": "low"}, {"effort": "huge"}, {"summary": "auto"},
    {"format": {"type": "text"}}, {"format": {"type": "x"}}, {"verbosity": "low"}, {"user_id": "u"}, {"user_id": 5},
    {"include_usage": True}, {"include_usage": 1}, {"regex": "a"}, {"regex": 5}, {"choice": ["a"]}, {"choice": []},
    {"type": "function", "name": "f"}, [{"type": "text", "text": "a"}],
    [{"type": "function", "function": {"name": "f"}}], [{"type": "function", "name": "f"}], [{"name": "f"}],
    [{"name": "a b"}], [{"name": "f", "input_schema": {"type": "array"}}], [{"type": "web_search"}],
    [{"role": "user", "content": "a"}], [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
    [{"role": "user", "content": [{"type": "image"}]}], [{"role": "wizard", "content": "a"}], [{"content": "a"}],
    [{"role": "user"}], [{"role": "assistant", "tool_calls": []}], [{"role": "assistant", "tool_calls": "x"}],
]  # fmt: skip

FUNCTION = {"name": "f"}
TOOLS: dict[type[RequestBody], list[Any]] = {
    ChatRequest: [{"type": "function", "function": FUNCTION}],
    ResponsesRequest: [{"type": "function", **FUNCTION}],
    MessagesRequest: [FUNCTION],
    CountTokensRequest: [FUNCTION],
}
BESIDE: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "max_tokens": {"prompt_logprobs": 0},
    "max_completion_tokens": {"prompt_logprobs": 0},
    "max_new_tokens": {"prompt_logprobs": 0},
    "continue_final_message": {"messages": [*USER, {"role": "assistant", "content": "a"}]},
}
"""What some fields need beside them."""


def takes(kind: type[RequestBody], field: str, value: Any) -> bool:
    """Whether the code finds no fault with the field."""
    beside = {name: given for name, given in BESIDE.get(field, {}).items() if name in kind.model_fields}
    body = {**NEEDED[kind], **beside}
    if field == "tool_choice":
        body["tools"] = TOOLS[kind]
    if kind is GenerateRequest and field in ("input_ids", "token_ids"):
        body.pop("text")
    try:
        asked: Any = parse_request(kind, json.dumps({**body, field: value}).encode())
        if not isinstance(asked, GenerateRequest | CompletionRequest | DetokenizeRequest):
            asked.chat()
    except InvalidRequestError as exc:
        return exc.field.partition(".")[0].partition("[")[0] != field
    return True


@pytest.mark.parametrize("kind", NEEDED)
def test_fields_take_what_is_told_and_nothing_else(kind: type[RequestBody]) -> None:
    told = schemas(2**31, ("demo",))
    fields = told[kind.__name__]["properties"]
    assert set(fields) == {info.alias or name for name, info in kind.model_fields.items()}
    for field, schema in fields.items():
        validator = jsonschema.Draft202012Validator({**schema, "components": {"schemas": told}})
        verdicts = [(value, validator.is_valid(value), takes(kind, field, value)) for value in VALUES]
        if field == "model":  # its names are looked up later: the answer is a 404
            known = {"default", ""} if kind.model_fields["model"].is_required() else {"default"}
            verdicts = [one for one in verdicts if not isinstance(one[0], str) or one[0] in known]
        assert [one for one in verdicts if one[1] is not one[2]] == [], field
        assert any(said for _, said, _ in verdicts) and not all(said for _, said, _ in verdicts), field


@pytest.mark.parametrize("kind", NEEDED)
def test_what_is_required_is_told(kind: type[RequestBody]) -> None:
    required = schemas(2**31, ("demo",))[kind.__name__].get("required", [])
    assert set(required) == {name for name, info in kind.model_fields.items() if info.is_required()}
    for name in required:
        with pytest.raises(InvalidRequestError) as caught:
            parse_request(kind, json.dumps({**NEEDED[kind], name: None}).encode())
        assert caught.value.field == name


SECTIONS = {
    CompletionRequest: "Completions",
    ChatRequest: "Chat completions",
    ResponsesRequest: "Responses",
    MessagesRequest: "Anthropic's messages",
    CountTokensRequest: "Anthropic's messages",
    GenerateRequest: "`/generate`, `/tokenize`, `/detokenize`",
    TokenizeRequest: "`/generate`, `/tokenize`, `/detokenize`",
    DetokenizeRequest: "`/generate`, `/tokenize`, `/detokenize`",
}
"""The part of docs/api.md that tells of each kind; what is common stands in another."""


@pytest.mark.parametrize("kind", SECTIONS)
def test_every_field_is_on_the_page(kind: type[RequestBody]) -> None:
    """In a row of the table for all requests, or by name in the part of its own API."""
    page = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
    parts = {part.partition("\n")[0]: part for part in page.split("\n## ")}
    rows = [line.split("|")[1] for line in parts["Fields of all requests"].splitlines() if line.startswith("| `")]
    common = set(re.findall(r"`([a-z_]+)`", " ".join(rows)))
    common |= {name for name in kind.model_fields if name.startswith("guided_")}
    own = set(re.findall(r"`([a-z_]+)[`.]", parts[SECTIONS[kind]]))
    assert {info.alias or name for name, info in kind.model_fields.items()} - own - common == set()
