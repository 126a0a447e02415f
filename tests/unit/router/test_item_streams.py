"""Responses and messages: whatever the deltas, their events come in order and make what comes whole."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from openai.types.responses import Response as TypedResponse
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from engine_core.types.errors import PdmeshError, QueueFullError, UnavailableError
from engine_core.types.sampling import TokenLogprobs
from services.router.chat.schema import ChatRequest
from services.router.front import Submission
from services.router.item_reply import ItemReply
from services.router.journey import Delta, SampleResult
from services.router.messages.models import MessageObject
from services.router.messages.reply import MessageReply
from services.router.messages.schema import MessagesRequest
from services.router.options import SamplingDefaults, options_of
from services.router.parsers.base import OutputParser
from services.router.parsers.choice import OutputFormat
from services.router.prepare import PreparedChat
from services.router.reply_spec import ReplySpec
from services.router.responses.models import ResponseObject
from services.router.responses.reply import ResponseReply
from services.router.responses.schema import ResponsesRequest
from services.router.text.tokenizer import RouterTokenizer
from tests.support.item_streams import MessageStream, ResponseStream, events_of
from tests.support.models import tiny_model

EOS = 2
FORMAT = OutputFormat("hermes", "deepseek_r1")
CALL = '<tool_call>{"name": "f", "arguments": {"a": "🦜"}}</tool_call>'
OUTPUTS = {
    "text": "one 🦜",
    "nothing": "",
    "thoughts": "<think>why 🦜</think>so",
    "thoughts alone": "<think>why",
    "calls": f"{CALL}{CALL}",
    "all": f"<think>why</think>so{CALL}then{CALL}",
    "broken arguments": '<tool_call>{"name": "f", "arguments": {"a": ',
}
CASES = [*((name, "stop") for name in OUTPUTS), ("text", "length"), ("thoughts alone", "length"), ("calls", "length")]
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@functools.cache
def tokenizer() -> RouterTokenizer:
    return RouterTokenizer.load(tiny_model())


def parser() -> OutputParser:
    found = FORMAT.parser({"f"})
    assert found is not None
    return found


def prepared(path: str, *, logprobs: int | None = None) -> PreparedChat:
    options = options_of(ChatRequest.model_construct(messages=[]), SamplingDefaults(), None)
    submission = Submission("r1", path, ((5, 6, 7),), options, 0.0)
    return PreparedChat(submission, ReplySpec("r1", "m", ((5, 6, 7),), tokenizer(), logprobs=logprobs), parser)


def response(*, logprobs: int | None = None, **more: Any) -> ResponseReply:
    asked = ResponsesRequest.model_validate({"model": "m", "input": "hi", **more})
    return ResponseReply(prepared("/v1/responses", logprobs=logprobs), asked)


def message(**more: Any) -> MessageReply:
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 99, **more}
    return MessageReply(prepared("/v1/messages"), MessagesRequest.model_validate(asked))


def deltas(text: str, ends: Sequence[int], reason: str = "stop", stop: str | None = None) -> list[Delta]:
    """The output in messages that end at these tokens; the last one says how it ended."""
    ids = [*tokenizer().encode(text, add_special_tokens=False), *([EOS] if reason == "stop" and not stop else [])]
    state, out = tokenizer().detokenizer(), []
    for start, end in itertools.pairwise([0, *ends, len(ids)]):
        some = ids[start:end]
        out.append(Delta(state.add(some), some, None, [TokenLogprobs(i, -0.5, 1, ((i, -0.5),)) for i in some]))
    out[-1].text += state.flush()
    out[-1].result = SampleResult(1, 1, ids, reason, stop, 2, {})
    return out


def count(text: str) -> int:
    return len(tokenizer().encode(text, add_special_tokens=False))


def splits(tokens: int) -> list[tuple[int, ...]]:
    """In two at every token, and one by one."""
    return [*((cut,) for cut in range(tokens + 1)), tuple(range(1, tokens))]


def streamed(reply: ItemReply, output: Sequence[Delta]) -> list[dict[str, Any]]:
    data = b"".join(reply.take(0, delta) for delta in output)
    result = output[-1].result
    assert result is not None
    return events_of(data + reply.end([result]))


def whole(reply: ItemReply, output: Sequence[Delta]) -> dict[str, Any]:
    for delta in output:
        reply.collect(0, delta)
    result = output[-1].result
    assert result is not None
    found: dict[str, Any] = json.loads(json.dumps(reply.complete([result])))
    return found


def nameless(value: Any) -> Any:
    """Without what is minted anew for every reply."""
    if isinstance(value, list):
        return [nameless(v) for v in value]
    if isinstance(value, dict):
        minted = ("id", "call_id", "created_at", "completed_at")
        return {k: nameless(v) for k, v in value.items() if k not in minted}
    return value


@pytest.mark.parametrize(("name", "reason"), CASES)
def test_a_response_streams_what_comes_whole_however_it_is_cut(name: str, reason: str) -> None:
    text = OUTPUTS[name]
    expected = whole(response(logprobs=1), deltas(text, (), reason))
    typed = TypedResponse.model_validate(expected, strict=True)
    ResponseObject.model_validate_json(json.dumps(expected), strict=True)
    tokens = count(text)
    for ends in splits(tokens):
        events = streamed(response(logprobs=1), deltas(text, ends, reason))
        if len(ends) > 1:
            for event in events:
                EVENT.validate_python(event)
        read = ResponseStream().read(events)
        assert nameless(read.last) == nameless(expected)
        assert read.last["id"] == "resp_r1" and len({item["id"] for item in read.items}) == len(read.items)
    assert typed.status == ("completed" if reason == "stop" else "incomplete")
    assert typed.usage is not None and typed.usage.output_tokens == tokens + (reason == "stop")


def test_what_a_response_says() -> None:
    text = OUTPUTS["all"]
    found = whole(response(logprobs=0), deltas(text, ()))
    output = found["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "message", "function_call"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "why"}] and output[0]["summary"] == []
    assert [item["content"][0]["text"] for item in output if item["type"] == "message"] == ["so", "then"]
    assert json.loads(output[2]["arguments"]) == {"a": "🦜"} and output[2]["name"] == "f"
    assert output[2]["call_id"] != output[4]["call_id"]
    tokens = [[t["token"] for t in item["content"][0]["logprobs"]] for item in output if item["type"] == "message"]
    assert ["".join(t) for t in tokens] == ["so", "then"]
    usage = found["usage"]
    assert usage["output_tokens_details"]["reasoning_tokens"] == count("why")
    assert usage["input_tokens"] == 3 and usage["input_tokens_details"]["cached_tokens"] == 2
    assert usage["total_tokens"] == 3 + usage["output_tokens"]


def test_a_response_repeats_what_was_asked() -> None:
    schema = {"type": "object"}
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    asked: dict[str, Any] = {
        "instructions": "be brief", "metadata": {"k": "v"}, "max_output_tokens": 9, "temperature": 0.5, "top_p": 0.25,
        "tools": [tool], "tool_choice": {"type": "function", "name": "f"}, "parallel_tool_calls": False,
        "reasoning": {"effort": "low"}, "store": True, "user": "u", "safety_identifier": "s",
        "text": {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}, "verbosity": "low"},
    }  # fmt: skip
    found = whole(response(**asked), deltas("so", ()))
    TypedResponse.model_validate(found, strict=True)
    same = ("instructions", "metadata", "max_output_tokens", "tool_choice", "parallel_tool_calls", "user",
            "safety_identifier", "top_p")  # fmt: skip
    assert {name: found[name] for name in same} == {name: asked[name] for name in same}
    assert found["text"] == {
        "format": {"type": "json_schema", "name": "n", "description": None, "schema": schema, "strict": True},
        "verbosity": "low",
    }
    assert found["tools"] == [{**tool, "description": None}]
    assert found["reasoning"] == {"effort": "low", "summary": None}
    assert (found["store"], found["previous_response_id"], found["truncation"]) == (False, None, "disabled")


FAILURES = [
    (UnavailableError("no worker"), "server_error", "api_error"),
    (QueueFullError("full"), "rate_limit_exceeded", "rate_limit_error"),
]


@pytest.mark.parametrize("seen", range(5))
@pytest.mark.parametrize(("exc", "code", "kind"), FAILURES)
def test_a_failure_is_told_after_any_event(seen: int, exc: PdmeshError, code: str, kind: str) -> None:
    cut = deltas(OUTPUTS["all"], (1, 3, 9, 14))[:seen]
    reply: ItemReply = response()
    data = b"".join(reply.take(0, delta) for delta in cut)
    read = ResponseStream().read(events_of(data + reply.fail(exc)))
    assert read.last["error"] == {"code": code, "message": exc.message}
    assert read.error is not None and read.error["code"] == exc.reason.lower()
    reply = message()
    data = b"".join(reply.take(0, delta) for delta in cut)
    found = MessageStream().read(events_of(data + reply.fail(exc))).error
    assert found == {"type": "overloaded_error" if kind == "api_error" else kind, "message": exc.message}


@pytest.mark.parametrize(("name", "reason"), CASES)
def test_a_message_streams_what_comes_whole_however_it_is_cut(name: str, reason: str) -> None:
    text = OUTPUTS[name]
    expected = whole(message(), deltas(text, (), reason))
    MessageObject.model_validate_json(json.dumps(expected), strict=True)
    tokens = count(text)
    for ends in splits(tokens):
        read = MessageStream().read(streamed(message(), deltas(text, ends, reason)))
        assert nameless(read.message) == nameless(expected)
    called = any(block["type"] == "tool_use" for block in expected["content"])
    ended = "tool_use" if called else "end_turn"
    assert expected["stop_reason"] == (ended if reason == "stop" else "max_tokens")
    assert expected["usage"]["output_tokens"] == tokens + (reason == "stop")


def test_what_a_message_says() -> None:
    found = whole(message(), deltas(OUTPUTS["all"], ()))
    content = found["content"]
    assert [block["type"] for block in content] == ["thinking", "text", "tool_use", "text", "tool_use"]
    assert content[0] == {"type": "thinking", "thinking": "why", "signature": ""}
    assert [block["text"] for block in content if block["type"] == "text"] == ["so", "then"]
    assert (content[2]["name"], content[2]["input"]) == ("f", {"a": "🦜"})
    assert found["usage"]["output_tokens_details"] == {"thinking_tokens": count("why")}
    usage = found["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (1, 2)


def test_arguments_that_are_no_object_are_shown_as_they_are() -> None:
    found = whole(message(), deltas(OUTPUTS["broken arguments"], (), "length"))
    assert [block["input"] for block in found["content"]] == [{"INVALID_JSON": '{"a": '}]


def test_a_stop_sequence_is_named() -> None:
    output = deltas("so", (), "stop", "END")
    read = MessageStream().read(streamed(message(), output)).message
    for found in (read, whole(message(), output)):
        assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "END")


def test_thoughts_may_be_left_out() -> None:
    asked = {"thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}}
    output = deltas(OUTPUTS["thoughts"], (2, 4))
    read = MessageStream().read(streamed(message(**asked), output)).message
    expected = whole(message(**asked), output)
    assert nameless(read) == nameless(expected)
    assert [block.get("thinking", block.get("text")) for block in expected["content"]] == ["", "so"]
