"""Replies against the openai SDK's own types, strictly, and field by field: nothing is missing that OpenAI's have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from engine_core.types.kv import fingerprint_of
from tests.support.asking import until_async
from tests.support.fake_decode import PARTS, FakeDecode, Harness, prefill_row, register, running_router, says
from tests.support.models import tiny_model

SAID = '<think>so</think>well<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHAT: dict[str, Any] = {
    "model": "default",
    "messages": [{"role": "user", "content": "hello"}],
    "max_completion_tokens": 200,
    "tools": [TOOL],
}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}

ELSEWHERE = {
    "CompletionTokensDetails.text_tokens", "PromptTokensDetails.cache_write_tokens", "PromptTokensDetails.image_tokens",
    "PromptTokensDetails.text_tokens", "ChatCompletion.metadata", "ChatCompletion.moderation",
    "ChatCompletionMessage.audio", "ChatCompletionMessage.function_call", "ChatCompletionChunk.moderation",
    "ChatCompletionChunk.obfuscation", "ChatCompletionChunk.usage", "ChoiceDelta.audio", "ChoiceDelta.function_call",
    "ChoiceDelta.content", "ChoiceDelta.refusal", "ChoiceDelta.role", "ChoiceDelta.tool_calls",
    "ChoiceDeltaToolCall.id", "ChoiceDeltaToolCall.type", "ChoiceDeltaToolCallFunction.name",
    "ChoiceDeltaToolCallFunction.arguments", "Model.shutdown_date",
}  # fmt: skip
"""Fields that OpenAI's replies to such requests may lack, too."""


def parts(value: Any) -> Iterator[BaseModel]:
    """A model, and all that it holds."""
    if isinstance(value, BaseModel):
        yield value
        for name in type(value).model_fields:
            yield from parts(getattr(value, name))
    elif isinstance(value, list):
        for one in value:
            yield from parts(one)


def left_out(value: BaseModel) -> set[str]:
    """Fields of the SDK's that did not come, in any part."""
    found = set()
    for part in parts(value):
        found |= {f"{type(part).__name__}.{name}" for name in type(part).model_fields.keys() - part.model_fields_set}
    return found


async def post(router: Harness, path: str, body: dict[str, Any]) -> httpx.Response:
    response = await router.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response


def data_of(response: httpx.Response) -> list[str]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return lines


async def test_replies_have_what_openai_has() -> None:
    fake = FakeDecode(says([]))
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "deepseek_r1"}
    fingerprint = f"fp_{fingerprint_of(PARTS)[:12]}"
    async with running_router(tiny_model(), fake, **parsers) as router:
        fake.script = says(router.ids(SAID))
        whole = ChatCompletion.model_validate_json((await post(router, "/v1/chat/completions", CHAT)).text, strict=True)
        message = whole.choices[0].message
        assert (message.content, message.refusal, message.annotations) == ("well", None, [])
        assert message.tool_calls is not None and whole.choices[0].finish_reason == "tool_calls"
        assert (whole.system_fingerprint, whole.service_tier) == (fingerprint, "default")
        assert left_out(whole) <= ELSEWHERE, left_out(whole) - ELSEWHERE

        lines = data_of(await post(router, "/v1/chat/completions", {**CHAT, **STREAM}))
        chunks = [ChatCompletionChunk.model_validate_json(line, strict=True) for line in lines]
        assert {(c.system_fingerprint, c.service_tier) for c in chunks} == {(fingerprint, "default")}
        assert json.loads(lines[0])["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
        assert [c.usage is None for c in chunks] == [True] * (len(chunks) - 1) + [False]
        for chunk in chunks:
            assert left_out(chunk) <= ELSEWHERE, left_out(chunk) - ELSEWHERE
        assert {"id", "type"} <= {name for chunk in chunks for part in parts(chunk) for name in part.model_fields_set}

        body = {"model": "default", "prompt": "hello", "max_tokens": 200}
        text = Completion.model_validate_json((await post(router, "/v1/completions", body)).text, strict=True)
        assert (text.choices[0].text, text.system_fingerprint) == (SAID, fingerprint)
        assert left_out(text) <= ELSEWHERE, left_out(text) - ELSEWHERE
        for line in data_of(await post(router, "/v1/completions", {**body, **STREAM})):
            whole_only = line.replace('"finish_reason":null', '"finish_reason":"stop"')  # the SDK has no type of chunks
            part = Completion.model_validate_json(whole_only, strict=True)
            assert part.system_fingerprint == fingerprint and left_out(part) <= ELSEWHERE

        (card,) = (await router.http.get("/v1/models")).json()["data"]
        assert left_out(Model.model_validate(card, strict=True)) <= ELSEWHERE


async def test_workers_that_differ_have_no_fingerprint_in_common() -> None:
    fake = FakeDecode(says([5]))
    body = {"model": "default", "prompt": "hello"}
    async with running_router(tiny_model(), fake) as router:
        assert (await post(router, "/v1/completions", body)).json()["system_fingerprint"] is not None
        other = prefill_row(name="prefill-1", parts={**PARTS, "dtype": "bfloat16"})
        await register(router.bootstrap, other, router.digest)

        async def seen() -> bool:
            return len((await router.http.get("/workers")).json()["workers"]) == 3

        await until_async(seen, 30.0)
        assert (await post(router, "/v1/completions", body)).json()["system_fingerprint"] is None
