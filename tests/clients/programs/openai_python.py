"""openai's SDK, sync and async. Arguments: the URL of an open router, of one with keys and one place, the key."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from enum import Enum
from typing import Any

import openai
from cases import FORCED, QUESTION, WEATHER, WEATHER_QUESTION, run
from pydantic import BaseModel

URL, NARROW_URL, KEY = sys.argv[1:4]
client = openai.OpenAI(base_url=URL, api_key="none", timeout=90.0, max_retries=0)
ENDLESS: dict[str, Any] = {"model": "default", "prompt": "One, two,", "max_tokens": 4000, "temperature": 0}


class Role(Enum):
    COOK = "cook"
    GUARD = "guard"


class Person(BaseModel):
    name: str
    age: int
    role: Role


def chat(**more: Any) -> Any:
    options = {"model": "default", "messages": QUESTION, "max_tokens": 16, "temperature": 0, **more}
    return client.chat.completions.create(**options)


def plain() -> Any:
    reply = chat()
    usage = reply.usage
    return [
        reply.choices[0].message.content, reply.choices[0].finish_reason, reply.object, reply.id, reply._request_id,
        usage.prompt_tokens + usage.completion_tokens == usage.total_tokens, usage.prompt_tokens_details.cached_tokens,
    ]  # fmt: skip


def stream() -> Any:
    parts, usage, roles = [], None, []
    for chunk in chat(stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        roles += [c.delta.role for c in chunk.choices if c.delta.role]
        parts += [c.delta.content for c in chunk.choices if c.delta.content]
    return ["".join(parts), len(parts), roles, usage.completion_tokens]


def calls(message: Any) -> Any:
    return [[c.type, bool(c.id), c.function.name, json.loads(c.function.arguments)] for c in message.tool_calls]


def forced_tool() -> Any:
    choice = chat(messages=WEATHER_QUESTION, tools=[WEATHER], tool_choice=FORCED, max_tokens=60).choices[0]
    return [calls(choice.message), choice.message.content, choice.finish_reason]


def streamed_tool() -> Any:
    deltas = 0
    options = {"model": "default", "temperature": 0, "max_tokens": 60, "tools": [WEATHER], "tool_choice": FORCED}
    with client.chat.completions.stream(messages=WEATHER_QUESTION, **options) as events:
        for event in events:
            deltas += event.type == "tool_calls.function.arguments.delta"
        choice = events.get_final_completion().choices[0]
    return [calls(choice.message), deltas, choice.finish_reason]


def tool_round() -> Any:
    """The result goes back, and the model answers."""
    message = chat(messages=WEATHER_QUESTION, tools=[WEATHER], tool_choice=FORCED, max_tokens=60).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    history = [*WEATHER_QUESTION, message.model_dump(exclude_none=True), result]
    choice = chat(messages=history, tools=[WEATHER], tool_choice="none").choices[0]
    return [bool(choice.message.content), choice.message.tool_calls]


def schema() -> Any:
    properties = {
        "city": {"type": "string", "maxLength": 20},
        "people": {"type": "integer", "minimum": 0, "maximum": 99},
    }
    body = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": body}}
    return json.loads(chat(response_format=form, max_tokens=80).choices[0].message.content)


def json_object() -> Any:
    messages = [{"role": "user", "content": 'Answer with JSON: {"capital": ...}. What is the capital of France?'}]
    text = chat(messages=messages, response_format={"type": "json_object"}, max_tokens=100).choices[0]
    return [type(json.loads(text.message.content)).__name__, text.finish_reason]


def parsed() -> Any:
    reply = client.chat.completions.parse(
        model="default", messages=[{"role": "user", "content": "Make up a person."}], response_format=Person,
        max_tokens=100, temperature=0,
    )  # fmt: skip
    person = reply.choices[0].message.parsed
    assert isinstance(person, Person)
    return person.model_dump(mode="json")


def parsed_tool() -> Any:
    tool = openai.pydantic_function_tool(Person, name="add_person")
    reply = client.chat.completions.parse(
        model="default", messages=[{"role": "user", "content": "Add a person."}], tools=[tool],
        tool_choice="required", parallel_tool_calls=False, max_tokens=100, temperature=0,
    )  # fmt: skip
    (call,) = reply.choices[0].message.tool_calls or ()
    person = call.function.parsed_arguments
    assert isinstance(person, Person)
    return person.model_dump(mode="json")


def logprobs() -> Any:
    reply = chat(logprobs=True, top_logprobs=2, max_tokens=4)
    content = reply.choices[0].logprobs.content
    text = b"".join(bytes(t.bytes) for t in content).decode()
    return [
        text == reply.choices[0].message.content,
        [[t.logprob, [x.logprob for x in t.top_logprobs]] for t in content],
    ]


def completion() -> Any:
    options = {"model": "default", "prompt": "The capital of France is", "max_tokens": 3, "temperature": 0}
    reply = client.completions.create(**options, echo=True, logprobs=2)
    lists = reply.choices[0].logprobs
    plain = client.completions.create(**options).choices[0].text
    streamed = "".join(c.choices[0].text for c in client.completions.create(**options, stream=True))
    return {
        "text": reply.choices[0].text, "tokens": lists.tokens, "offsets": lists.text_offset,
        "logprobs": lists.token_logprobs, "tops": [len(t) if t else 0 for t in lists.top_logprobs],
        "plain": plain, "streamed": streamed,
    }  # fmt: skip


def samples() -> Any:
    reply = chat(n=3, temperature=1.2, seed=5)
    return [[c.index for c in reply.choices], len({c.message.content for c in reply.choices})]


def error(make: Callable[[], Any]) -> Any:
    try:
        make()
    except openai.APIStatusError as exc:
        return [type(exc).__name__, exc.status_code, exc.type, exc.code, exc.param, bool(exc.request_id)]
    except openai.APIError as exc:
        return [type(exc).__name__, exc.code, exc.type]
    return "no error"


def errors() -> Any:
    keyless = openai.OpenAI(base_url=NARROW_URL, api_key="wrong", max_retries=0, timeout=60.0)
    unknown = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "tree"}}}
    late = {"x-request-timeout": "0.001"}
    return {
        "400": error(lambda: chat(temperature=3)),
        "400 schema": error(lambda: chat(response_format=unknown)),
        "401": error(lambda: keyless.models.list()),
        "404": error(lambda: chat(model="nobody")),
        "404 path": error(lambda: client.embeddings.create(model="default", input="x")),
        "408": error(lambda: chat(extra_headers=late, max_tokens=1000)),
        "413": error(lambda: chat(messages=[{"role": "user", "content": "x" * 9_000_000}])),
    }


def full_queue() -> Any:
    """A router that serves one request and lets none wait."""
    narrow = openai.OpenAI(base_url=NARROW_URL, api_key=KEY, max_retries=0, timeout=90.0)
    with narrow.completions.create(**ENDLESS, stream=True) as running:
        next(iter(running))
        refused = error(lambda: narrow.completions.create(**{**ENDLESS, "max_tokens": 1}))
    # The place is free soon after the client has gone; until then the SDK tries again.
    patient = narrow.with_options(max_retries=10)
    return [refused, patient.completions.create(**{**ENDLESS, "max_tokens": 1}).usage.completion_tokens]


def broken_stream() -> Any:
    """The client's own time ends amid the stream: an error event, which the SDK raises."""
    seconds, got = 2.0, 0
    while not got:
        try:
            for chunk in client.completions.create(**ENDLESS, stream=True, extra_body={"timeout": seconds}):
                got += len(chunk.choices)
        except openai.APIError as exc:
            found = [type(exc).__name__, exc.code, exc.type]
        seconds *= 2
    return found


def timeout() -> Any:
    started = time.monotonic()
    try:
        client.with_options(timeout=1.0).completions.create(**ENDLESS, extra_headers={"x-request-id": "python-late"})
    except openai.APITimeoutError as exc:
        return [type(exc).__name__, time.monotonic() - started < 60]
    return "no timeout"


async def _several() -> Any:
    async with openai.AsyncOpenAI(base_url=URL, api_key="none", timeout=90.0, max_retries=0) as several:
        options: dict[str, Any] = {"model": "default", "max_tokens": 16, "temperature": 0, "messages": QUESTION}
        replies = await asyncio.gather(*(several.chat.completions.create(**options) for _ in range(4)))
        streamed = ""
        async for chunk in await several.chat.completions.create(**options, stream=True):
            streamed += chunk.choices[0].delta.content or ""
        models = [m.id async for m in several.models.list()]
        left = await several.completions.create(**ENDLESS, stream=True, extra_headers={"x-request-id": "python-left"})
        async for _ in left:
            break
        await left.close()
    return [[r.choices[0].message.content for r in replies], streamed, models]


def retries() -> Any:
    """Run alone, while no worker serves: 503 at first; then tried again until somebody has started one."""
    body = {**ENDLESS, "max_tokens": 1}
    refused = error(lambda: client.completions.create(**body))
    return [refused, client.with_options(max_retries=60).completions.create(**body).usage.completion_tokens]


CASES: dict[str, Callable[[], Any]] = {
    "models": lambda: [[m.id for m in client.models.list()], client.models.retrieve("default").object],
    "plain": plain,
    "stream": stream,
    "forced_tool": forced_tool,
    "streamed_tool": streamed_tool,
    "tool_round": tool_round,
    "schema": schema,
    "json_object": json_object,
    "parsed": parsed,
    "parsed_tool": parsed_tool,
    "logprobs": logprobs,
    "completion": completion,
    "samples": samples,
    "errors": errors,
    "full_queue": full_queue,
    "broken_stream": broken_stream,
    "timeout": timeout,
    "several": lambda: asyncio.run(_several()),
}

if __name__ == "__main__":
    run({"retries": retries} if "retries" in sys.argv else CASES)
