"""What requests to /v1/responses and /v1/messages become: chats, or refusals that name the client's own field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine_core.types.errors import InvalidRequestError
from services.router.chat.schema import ChatRequest
from services.router.edge.request_body import parse_request
from services.router.grammar.forced import grammar_of
from services.router.messages.schema import MessagesRequest
from services.router.responses.schema import ResponsesRequest
from tests.support.fake_decode import FakeDecode, error_of, running_router, says
from tests.support.models import tiny_model

TOOL = {"type": "function", "name": "f", "description": "does", "parameters": {"type": "object"}, "strict": True}
OTHER = {"type": "function", "name": "g"}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "7"}
USER = [{"role": "user", "content": "hi"}]


def response(**fields: Any) -> ChatRequest:
    body = json.dumps({"model": "m", "input": "hi", **fields}).encode()
    return parse_request(ResponsesRequest, body).chat()[0]


def message(**fields: Any) -> ChatRequest:
    body = json.dumps({"model": "m", "max_tokens": 9, "messages": USER, **fields}).encode()
    return parse_request(MessagesRequest, body).chat()[0]


def told(asked: ChatRequest) -> list[dict[str, Any]]:
    """The messages, each with what it says."""
    return [{k: v for k, v in m.for_template().items() if v or k == "content"} for m in asked.messages]


# ---- responses ------------------------------------------------------------------------------------------------


def test_text_and_instructions_are_two_messages() -> None:
    assert told(response(instructions="be brief")) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]
    assert told(response(instructions=None)) == [{"role": "user", "content": "hi"}]


def test_items_of_one_turn_are_one_message() -> None:
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"},
                                                        {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}],
         "encrypted_content": None, "status": None},
        {"type": "message", "id": "msg", "role": "assistant", "status": "completed", "phase": "commentary",
         "content": [{"type": "output_text", "text": "so", "annotations": [], "logprobs": []}]},
        CALL,
        {**CALL, "call_id": "c2", "name": "g", "arguments": ""},
        RESULT,
        {**RESULT, "call_id": "c2", "output": [{"type": "input_text", "text": "8"}]},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}]},
        CALL,
    ]  # fmt: skip
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert told(response(input=items)) == [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant", "content": "so", "reasoning_content": "hm",
            "tool_calls": [call, {"id": "c2", "type": "function", "function": {"name": "g", "arguments": {}}}],
        },
        {"role": "tool", "content": "7", "tool_call_id": "c1"},
        {"role": "tool", "content": "8", "tool_call_id": "c2"},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "assistant", "content": "", "reasoning_content": "short", "tool_calls": [call]},
    ]  # fmt: skip


def test_fields_of_responses_are_those_of_chats() -> None:
    asked = response(
        max_output_tokens=5, temperature=0.5, top_p=0.25, top_k=3, seed=4, stop=["x"], logit_bias={"7": 1.5},
        include=["message.output_text.logprobs"], top_logprobs=2, stream=True, user="u", safety_identifier="s",
        parallel_tool_calls=False, tools=[TOOL, OTHER], tool_choice={"type": "function", "name": "g"}, max_tool_calls=3,
        reasoning={"effort": "low", "summary": None}, chat_template_kwargs={"k": 1}, cache_salt="c", timeout=5,
    )  # fmt: skip
    assert asked.token_limit() == 5 and asked.best_tokens() == 2 and asked.choice == "function:g"
    assert (asked.temperature, asked.top_p, asked.top_k, asked.seed, asked.stop) == (0.5, 0.25, 3, 4, ("x",))
    assert (asked.logit_bias, asked.stream, asked.user, asked.cache_salt) == (((7, 1.5),), True, "s", "c")
    assert asked.timeout == 5.0 and asked.parallel_tool_calls is False and asked.max_tool_calls == 3
    chat = asked.chat()
    function = {name: TOOL[name] for name in ("name", "description", "parameters", "strict")}
    assert chat.tools == ({"type": "function", "function": function}, {"type": "function", "function": {"name": "g"}})
    assert chat.kwargs == {"reasoning_effort": "low", "k": 1} and chat.add_generation_prompt


def test_log_probabilities_are_given_where_they_are_included() -> None:
    assert response(top_logprobs=3).best_tokens() is None
    assert response(include=["message.output_text.logprobs"]).best_tokens() == 0
    assert response(include=["reasoning.encrypted_content"]).best_tokens() is None


@pytest.mark.parametrize(("mode", "choice"), [("auto", "auto"), ("required", "required")])
def test_allowed_tools_are_the_only_ones(mode: str, choice: str) -> None:
    allowed = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "g"}]}
    asked = response(tools=[TOOL, OTHER], tool_choice=allowed)
    assert asked.choice == choice and [tool.function.name for tool in asked.tools or ()] == ["g"]


def test_text_formats() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    found = grammar_of(response(text={"format": form}))
    assert found is not None and json.loads(found.text) == schema
    found = grammar_of(response(text={"format": {"type": "json_object"}}))
    assert found is not None and json.loads(found.text) == {"type": "object"}
    for text in (None, {}, {"format": None}, {"format": {"type": "text"}, "verbosity": "low"}):
        assert grammar_of(response(text=text)) is None


REFUSED = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "not stored"),
    ({"conversation": {"id": "conv"}}, "conversation", "not stored"),
    ({"prompt": {"id": "p"}}, "prompt", "instructions and input"),
    ({"background": True}, "background", "not stored"),
    ({"n": 2}, "n", "one sample"),
    ({"max_tokens": 5}, "max_tokens", "use max_output_tokens"),
    ({"response_format": {"type": "text"}}, "response_format", "use text.format"),
    ({"messages": []}, "messages", "use input"),
    ({"suffix": "x"}, "suffix", "the middle"),
    ({"input": None}, "input", "required"),
    ({"input": []}, "input", "not empty"),
    ({"input": ""}, "input", "not empty"),
    ({"input": 5}, "input", "text or a list of items"),
    ({"model": None}, "model", "required"),
    ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
    ({"tools": [{"type": "web_search"}]}, "tools", "'web_search': there are functions only"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "pattern"),
    ({"tools": [TOOL, TOOL]}, "tools", "'f' is there twice"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tool_choice": {"type": "function", "name": "x"}, "tools": [TOOL]}, "tool_choice", "no function 'x'"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice", "must be none, auto"),
    (
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [OTHER]}, "tools": [TOOL]},
        "tool_choice",
        "no function 'g'",
    ),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", "required"),
    ({"input": ["x"]}, "input[0]", "not an item"),
    ({"input": [{"role": "critic", "content": "x"}]}, "input[0].role", "must be one of user"),
    ({"input": [{"role": "user"}]}, "input[0].content", "must be text"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]",
     '"input_image" is not supported: this model reads text only'),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "send the item itself"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type", '"computer_call" is not supported'),
    ({"input": [{**CALL, "arguments": {}}]}, "input[0].arguments", "must be text"),
    ({"input": [*USER, RESULT]}, "input[1].call_id", "no call 'c1' before its result"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input", "holds no message"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "field", "why"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_refused_responses(fields: dict[str, Any], field: str, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=r".") as caught:
        response(**fields)
    assert caught.value.field == field and why in caught.value.message


# ---- messages -------------------------------------------------------------------------------------------------


def test_blocks_of_messages() -> None:
    text = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [text, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "so"}, {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "7"}], "is_error": False},
            {"type": "text", "text": "go on"},
        ]},
        {"role": "system", "content": "now"},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c2", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c2"}]},
    ]  # fmt: skip
    asked = message(messages=messages, system=[{"type": "text", "text": "s"}, {"type": "text", "text": "t"}])
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    empty = {"id": "c2", "type": "function", "function": {"name": "f", "arguments": {}}}
    assert told(asked) == [
        {"role": "system", "content": "s\nt"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "c1"},
        {"role": "user", "content": "go on"},
        {"role": "system", "content": "now"},
        {"role": "assistant", "content": "one", "tool_calls": [empty]},
        {"role": "tool", "content": "", "tool_call_id": "c2"},
    ]
    assert asked.chat().add_generation_prompt


def test_messages_of_one_role_in_a_row_are_one_turn() -> None:
    """As if their blocks stood in one message: what the client splits, the model does not see."""
    use = [{"type": "tool_use", "id": f"c{i}", "name": "f", "input": {}} for i in range(2)]
    results = [{"type": "tool_result", "tool_use_id": f"c{i}", "content": str(i)} for i in range(2)]
    apart: list[dict[str, Any]] = [
        {"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}]},
        {"role": "assistant", "content": "so"}, {"role": "assistant", "content": use[:1]},
        {"role": "assistant", "content": use[1:]},
        {"role": "user", "content": results[:1]}, {"role": "user", "content": results[1:]},
        {"role": "user", "content": "go"}, {"role": "user", "content": "on"},
        {"role": "system", "content": "be"}, {"role": "system", "content": "brief"},
        {"role": "assistant", "content": "The"}, {"role": "assistant", "content": "sea"},
    ]  # fmt: skip
    together: list[dict[str, Any]] = []
    for one in apart:
        blocks = one["content"] if isinstance(one["content"], list) else [{"type": "text", "text": one["content"]}]
        if together and together[-1]["role"] == one["role"] != "system":
            together[-1]["content"] += blocks
        else:
            together.append({"role": one["role"], "content": [*blocks]})
    assert [one["role"] for one in together] == ["user", "assistant", "user", "system", "system", "assistant"]
    found = message(messages=apart)
    calls = [{"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": {}}} for i in range(2)]
    assert told(found) == told(message(messages=together)) == [
        {"role": "user", "content": "a\nb\nc"},
        {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "content": "0", "tool_call_id": "c0"},
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
        {"role": "user", "content": "go\non"},
        {"role": "system", "content": "be"},
        {"role": "system", "content": "brief"},
        {"role": "assistant", "content": "The\nsea"},
    ]  # fmt: skip
    assert found.chat().continue_final_message


def test_a_fault_in_a_joined_turn_names_the_clients_place() -> None:
    for wrong, field in (
        ([{"role": "user", "content": [{"type": "image"}]}], "messages[2].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[2].content[0].text"),
        ([{"role": "assistant", "content": "x"}, {"role": "assistant", "content": [{"type": "image"}]}],
         "messages[3].content[0]"),
    ):  # fmt: skip
        with pytest.raises(InvalidRequestError) as caught:
            message(messages=[*USER, {"role": "user", "content": "more"}, *wrong])
        assert caught.value.field == field


def test_a_last_message_of_the_assistants_goes_on() -> None:
    chat = message(messages=[*USER, {"role": "assistant", "content": "The"}]).chat()
    assert chat.continue_final_message and not chat.add_generation_prompt


def test_fields_of_messages_are_those_of_chats() -> None:
    tool = {"name": "f", "description": "does", "input_schema": {"type": "object"}, "cache_control": None}
    schema = {"type": "object", "properties": {}}
    asked = message(
        max_tokens=5, temperature=0.5, top_p=0.25, top_k=3, stop_sequences=["x"], stream=True, seed=4,
        metadata={"user_id": "u"}, tools=[tool], tool_choice={"type": "any", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 1024}, service_tier="auto",
        output_config={"effort": "max", "format": {"type": "json_schema", "schema": schema}},
    )  # fmt: skip
    assert asked.token_limit() == 5 and asked.choice == "required" and asked.parallel_tool_calls is False
    assert (asked.temperature, asked.top_p, asked.top_k, asked.seed, asked.stop) == (0.5, 0.25, 3, 4, ("x",))
    assert asked.stream and asked.user == "u"
    chat = asked.chat()
    function = {"name": "f", "description": "does", "parameters": {"type": "object"}}
    assert chat.tools == ({"type": "function", "function": function},)
    assert chat.kwargs == {"reasoning_effort": "xhigh", "enable_thinking": True, "thinking": True}
    found = grammar_of(asked)
    assert found is not None and json.loads(found.text) == schema


@pytest.mark.parametrize(
    ("choice", "expected"),
    [(None, "auto"), ({"type": "auto"}, "auto"), ({"type": "none"}, "none"),
     ({"type": "tool", "name": "f"}, "function:f")],
)  # fmt: skip
def test_tool_choices_of_messages(choice: Any, expected: str) -> None:
    asked = message(tools=[{"name": "f", "input_schema": {"type": "object"}}], tool_choice=choice)
    assert asked.choice == expected and asked.parallel_tool_calls is True
    assert message(thinking={"type": "disabled"}).chat().kwargs == {"enable_thinking": False, "thinking": False}


REFUSED_BY_MESSAGES = [
    ({"max_tokens": None}, "max_tokens", "required"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"model": None}, "model", "required"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "'user', 'assistant' or 'system'"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "not empty"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]",
     '"image" is not supported'),
    ({"messages": [*USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f"}]}]},
     "messages[1].content[0].input", "must be an object"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]}]},
     "messages[0].content[0].tool_use_id", "no call 'c'"),
    ({"system": [{"type": "image"}]}, "system", "text blocks"),
    ({"stop": ["x"]}, "stop", "use stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences", "cannot stop"),
    ({"mcp_servers": [{}]}, "mcp_servers", "calls no tools"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools", "'bash_20250124': there are custom tools only"),
    ({"tool_choice": {"type": "any"}}, "tool_choice", "needs tools"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice", "needs a name"),
    ({"thinking": {"type": "often"}}, "thinking.type", "'enabled', 'disabled' or 'adaptive'"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "field", "why"), REFUSED_BY_MESSAGES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_refused_messages(fields: dict[str, Any], field: str, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=r".") as caught:
        message(**fields)
    assert caught.value.field == field and why in caught.value.message


# ---- over HTTP ------------------------------------------------------------------------------------------------


async def test_errors_have_the_form_of_their_api_and_the_clients_names() -> None:
    fake = FakeDecode(says([5]), max_model_len=64)
    async with running_router(tiny_model(), fake, api_key=("k",), strict_max_tokens=True) as router:
        key = {"x-api-key": "k"}
        call = {"type": "allowed_tools", "mode": "auto", "tools": []}
        long: dict[str, Any] = {"model": "default", "input": "hi", "max_output_tokens": 500}
        for body, field in (
            ({**long, "max_output_tokens": 5, "tool_choice": call}, "tool_choice"),
            (long, "max_output_tokens"),
            ({**long, "input": "hello " * 500}, "input"),
            ({**long, "model": "other"}, "model"),
        ):
            reply = await router.http.post("/v1/responses", json=body, headers=key)
            assert reply.status_code == (404 if field == "model" else 400)
            error = error_of(reply)
            assert error["param"] == field and error["type"] == "invalid_request_error"
        base: dict[str, Any] = {"model": "default", "max_tokens": 500, "messages": USER}
        for headers, body, status, kind in (
            (key, base, 400, "invalid_request_error"),
            (key, {**base, "max_tokens": 5, "model": "other"}, 404, "not_found_error"),
            ({}, base, 401, "authentication_error"),
            (key, {**base, "messages": [*USER, {"role": "assistant", "content": " "}]}, 400, "invalid_request_error"),
        ):
            reply = await router.http.post("/v1/messages", json=body, headers={**headers, "x-request-id": "r7"})
            error = {"type": kind, "message": reply.json()["error"]["message"]}
            assert reply.status_code == status
            assert reply.json() == {"type": "error", "error": error, "request_id": "r7"}
            assert reply.headers["request-id"] == reply.headers["x-request-id"] == "r7"
        assert error["message"].startswith("messages: the last message")
        count = await router.http.post("/v1/messages/count_tokens", json={"model": "default", "messages": USER},
                                       headers=key)  # fmt: skip
        whole = await router.http.post("/v1/messages", json={**base, "max_tokens": 5}, headers=key)
        usage = whole.json()["usage"]
        assert count.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
        for method, path in (("GET", "/v1/responses/resp_1"), ("DELETE", "/v1/responses/resp_1"),
                             ("GET", "/v1/responses/resp_1/input_items"), ("POST", "/v1/responses/resp_1/cancel"),
                             ("POST", "/v1/responses/compact")):  # fmt: skip
            reply = await router.http.request(method, path, headers=key)
            assert reply.status_code == 404 and "not" in error_of(reply)["message"]
        reply = await router.http.get("/v1/messages", headers=key)
        assert reply.status_code == 405 and reply.json()["error"]["type"] == "invalid_request_error"


async def test_a_worker_that_is_not_there_is_told_in_the_form_of_the_api() -> None:
    fake = FakeDecode(says([5]))
    async with running_router(tiny_model(), fake, max_attempts=1) as router:
        await fake.stop()
        body = {"model": "default", "max_tokens": 5, "messages": USER}
        reply = await router.http.post("/v1/messages", json=body)
        assert reply.status_code == 529 and reply.json()["error"]["type"] == "overloaded_error"
        assert int(reply.headers["retry-after"]) >= 1
        reply = await router.http.post("/v1/responses", json={"model": "default", "input": "hi"})
        assert reply.status_code == 503 and error_of(reply)["type"] == "server_error"
