"""/v1/responses and /v1/messages through a mesh: the SDK reads them, and they say what a chat says."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import openai
import pytest
import pytest_asyncio
from pydantic import BaseModel, Field

from tests.mesh.conftest import Served
from tests.support.item_streams import MessageStream, ResponseStream, events_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Málaga 🌞"]}, "days": {"type": "integer", "minimum": 1, "maximum": 31}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}
ENDS: dict[str, Any] = {"logit_bias": {"2": 60}}
"""Makes a model of random weights end as soon as the grammar lets it."""


class Trip(BaseModel):
    """What the SDK asks for as a schema, and reads."""

    city: str = Field(max_length=4)
    days: list[bool] = Field(max_length=3)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client(llama: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=llama.mesh.base_url, api_key="none", max_retries=0, timeout=60.0) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def http(llama: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=llama.mesh.url, timeout=60.0, trust_env=False) as http:
        yield http


async def test_all_three_apis_say_the_same(client: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    """With one seed, whole and streamed; and count the same tokens."""
    drawn: dict[str, Any] = {"temperature": 1.0, "extra_body": {"seed": 11}}
    said: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one two three"}]
    chat = await client.chat.completions.create(model="default", messages=said, max_completion_tokens=12, **drawn)
    asked: dict[str, Any] = {"model": "default", "instructions": "be brief", "input": "one two three", **drawn}
    asked |= {"max_output_tokens": 12, "top_logprobs": 1, "include": ["message.output_text.logprobs"]}
    whole = await client.responses.create(**asked)
    assert whole.output_text == chat.choices[0].message.content
    assert whole.status == "incomplete" and whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage is not None and chat.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (chat.usage.prompt_tokens, 12)
    content = whole.output[0].content[0]
    assert content.type == "output_text" and len(content.logprobs or ()) == 12

    async with client.responses.stream(**asked) as stream:
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        with pytest.raises(RuntimeError, match="response.completed"):  # as the SDK has it for what is incomplete
            await stream.get_final_response()
    assert "".join(deltas) == whole.output_text

    body = {"model": "default", "system": "be brief", "max_tokens": 12, "temperature": 1.0, "seed": 11}
    body["messages"] = said[1:]
    message = (await http.post("/v1/messages", json=body)).json()
    assert [block["text"] for block in message["content"]] == [whole.output_text]
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat.usage.prompt_tokens
    assert (usage["output_tokens"], message["stop_reason"]) == (12, "max_tokens")
    data = (await http.post("/v1/messages", json={**body, "stream": True})).content
    read = MessageStream().read(events_of(data)).message
    assert read["content"] == message["content"] and read["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}], ids=["any", "named"])
async def test_forced_calls(client: openai.AsyncOpenAI, http: httpx.AsyncClient, choice: Any) -> None:
    asked: dict[str, Any] = {
        "model": "default", "input": "How is the weather?", "tools": [TOOL], "tool_choice": choice,
        "parallel_tool_calls": False, "temperature": 1.5, "extra_body": {"seed": 3, **ENDS},
    }  # fmt: skip
    whole = await client.responses.create(**asked)
    assert whole.status == "completed" and [item.type for item in whole.output] == ["function_call"]
    call: Any = whole.output[0]
    jsonschema.validate(json.loads(call.arguments), PARAMETERS)
    async with client.responses.stream(**asked) as stream:
        pieces = [event.delta async for event in stream if event.type == "response.function_call_arguments.delta"]
        final = await stream.get_final_response()
    streamed: Any = final.output[0]
    assert "".join(pieces) == streamed.arguments == call.arguments and streamed.name == call.name == "get_weather"

    output = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
    asked |= {"input": [{"role": "user", "content": "How is the weather?"}, call.model_dump(), output]}
    asked |= {"tool_choice": "none", "max_output_tokens": 8, "extra_body": {"seed": 3}}
    after = await client.responses.create(**asked)
    function = {"name": "get_weather", "arguments": call.arguments}
    said: list[Any] = [
        {"role": "user", "content": "How is the weather?"},
        {"role": "assistant", "tool_calls": [{"id": call.call_id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "7"},
    ]
    chat = await client.chat.completions.create(model="default", messages=said, temperature=1.5, seed=3, max_tokens=8)
    assert after.usage is not None and chat.usage is not None
    assert after.usage.input_tokens == chat.usage.prompt_tokens
    assert after.output_text == chat.choices[0].message.content

    tool = {"name": "get_weather", "input_schema": PARAMETERS}
    kind = {"type": "any"} if choice == "required" else {"type": "tool", "name": "get_weather"}
    body = {"model": "default", "max_tokens": 200, "messages": [{"role": "user", "content": "How is the weather?"}]}
    body |= {"tools": [tool], "tool_choice": {**kind, "disable_parallel_tool_use": True}, "seed": 3, **ENDS}
    message = (await http.post("/v1/messages", json={**body, "temperature": 1.5})).json()
    assert message["stop_reason"] == "tool_use", message
    assert [block["input"] for block in message["content"]] == [json.loads(call.arguments)]
    data = (await http.post("/v1/messages", json={**body, "temperature": 1.5, "stream": True})).content
    read = MessageStream().read(events_of(data)).message
    assert read["content"][0]["input"] == message["content"][0]["input"]


async def test_a_schema_for_the_text(client: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    parsed = await client.responses.parse(
        model="default", input="Where to?", text_format=Trip, temperature=1.5, extra_body={"seed": 5, **ENDS}
    )
    trip = parsed.output_parsed
    assert trip is not None and len(trip.city) <= 4 and len(trip.days) <= 3
    body = {"model": "default", "input": "Where to?", "stream": True, "seed": 5, "temperature": 1.5, **ENDS}
    body["text"] = {"format": {"type": "json_schema", "name": "Trip", "schema": Trip.model_json_schema()}}
    read = ResponseStream().read(events_of((await http.post("/v1/responses", json=body)).content))
    Trip.model_validate_json(read.items[0]["content"][0]["text"])
    broken = {**body["text"]["format"], "schema": {"type": "string", "pattern": "(?=x)"}}
    reply = await http.post("/v1/responses", json={**body, "stream": False, "text": {"format": broken}})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "text.format"


async def test_the_sdk_raises_what_is_refused(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="not stored") as refused:
        await client.responses.create(model="default", input="x", previous_response_id="resp_1")
    assert refused.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError, match="not stored"):
        await client.responses.retrieve("resp_1")
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await client.responses.create(model="default", input="hello " * 5000)
