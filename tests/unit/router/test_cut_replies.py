"""Outputs that end anywhere, by the limit or a stop: a stream shows what comes whole, in every API."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import pytest

from services.router.chat.schema import ChatRequest
from services.router.front import Submission
from services.router.item_reply import ItemReply
from services.router.journey import Delta, SampleResult
from services.router.messages.reply import MessageReply
from services.router.messages.schema import MessagesRequest
from services.router.openai.chat_reply import ChatReply
from services.router.options import SamplingDefaults, options_of
from services.router.parsers.base import ToolCallBegin
from services.router.prepare import PreparedChat
from services.router.reply_spec import ReplySpec
from services.router.responses.reply import ResponseReply
from services.router.responses.schema import ResponsesRequest
from services.router.text.tokenizer import RouterTokenizer
from tests.support.item_streams import MessageStream, ResponseStream, events_of
from tests.support.models import tiny_model
from tests.support.outputs import RECORDED, Output

CALLING = [o for o in RECORDED if any(isinstance(part, ToolCallBegin) for part in o.parts)]
SHORTEST = {o.written.tools: o for o in sorted(CALLING, key=lambda o: -len(o.text))}
"""Of each family the shortest output that calls."""
ENDS = [("length", None), ("stop", None), ("stop", "END"), ("stop", 7)]
ASKED: dict[str, Any] = {"model": "m", "input": "hi"}


@functools.cache
def tokenizer() -> RouterTokenizer:
    return RouterTokenizer.load(tiny_model())


def deltas(text: str, reason: str, stop: str | int | None, *, each: bool) -> list[Delta]:
    """The output token by token, or all at once."""
    ids = tokenizer().encode(text, add_special_tokens=False)
    result = SampleResult(1, 1, ids, reason, stop, 2, {})
    if not each:
        return [Delta(text, ids, result)]
    state = tokenizer().detokenizer()
    return [*(Delta(state.add([i]), [i]) for i in ids), Delta(state.flush(), [], result)]


def chat(output: Output, some: Sequence[Delta]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The choice, whole and as its chunks join."""
    spec = ReplySpec("r", "m", [(5, 6)], tokenizer())
    reply = ChatReply(spec, output.parser)
    for delta in some:
        reply.collect(0, delta)
    assert some[-1].result is not None
    whole = reply.complete([some[-1].result])["choices"][0]
    reply, joined = ChatReply(spec, output.parser), dict[str, Any]()
    calls: list[dict[str, Any]] = []
    data = b"".join(reply.take(0, delta) for delta in some).decode()
    for line in filter(None, data.split("\n\n")):
        choice = json.loads(line.removeprefix("data: "))["choices"][0]
        for name in ("content", "reasoning_content"):
            joined[name] = joined.get(name, "") + (choice["delta"].get(name) or "")
        for entry in choice["delta"].get("tool_calls", ()):
            if entry["index"] == len(calls):
                calls.append({"name": entry["function"]["name"], "arguments": ""})
            calls[entry["index"]]["arguments"] += entry["function"]["arguments"]
        joined |= {name: choice.get(name) for name in ("finish_reason", "stop_reason")}
    message = whole["message"]
    found = {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "finish_reason": whole["finish_reason"],
        "stop_reason": whole["stop_reason"],
        "calls": [c["function"] for c in message.get("tool_calls", ())],
    }
    return found, {**joined, "calls": calls}


def item_reply(output: Output, kind: str) -> ItemReply:
    options = options_of(ChatRequest.model_construct(messages=[]), SamplingDefaults(), None)
    submission = Submission("r1", f"/v1/{kind}", ((5, 6, 7),), options, 0.0)
    prepared = PreparedChat(submission, ReplySpec("r1", "m", ((5, 6, 7),), tokenizer()), output.parser)
    if kind == "responses":
        return ResponseReply(prepared, ResponsesRequest.model_validate(ASKED))
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 99}
    return MessageReply(prepared, MessagesRequest.model_validate(asked))


def items(output: Output, kind: str, some: Sequence[Delta]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The reply, whole and as its events join."""
    reply, result = item_reply(output, kind), some[-1].result
    assert result is not None
    for delta in some:
        reply.collect(0, delta)
    whole = json.loads(json.dumps(reply.complete([result])))
    reply = item_reply(output, kind)
    events = events_of(b"".join(reply.take(0, delta) for delta in some) + reply.end([result]))
    read = ResponseStream().read(events).last if kind == "responses" else MessageStream().read(events).message
    return nameless(whole), nameless(read)


def nameless(value: Any) -> Any:
    """Without what is minted anew for every reply."""
    if isinstance(value, list):
        return [nameless(v) for v in value]
    if isinstance(value, dict):
        return {k: nameless(v) for k, v in value.items() if k not in ("id", "call_id", "created_at", "completed_at")}
    return value


@pytest.mark.parametrize("output", SHORTEST.values(), ids=lambda o: o.name)
def test_chunks_join_to_the_whole_wherever_the_output_ends(output: Output) -> None:
    text = output.text
    for at in range(len(text) + 1):
        reason, stop = ENDS[at % len(ENDS)]
        at_once, _ = chat(output, deltas(text[:at], reason, stop, each=False))
        whole, streamed = chat(output, deltas(text[:at], reason, stop, each=True))
        assert streamed == whole == at_once
        called = whole["calls"] and (stop is None or is_json(whole["calls"][-1]["arguments"]))
        assert whole["finish_reason"] == ("tool_calls" if called and reason == "stop" else reason)


@pytest.mark.parametrize("kind", ["responses", "messages"])
@pytest.mark.parametrize("output", SHORTEST.values(), ids=lambda o: o.name)
def test_events_join_to_the_whole_wherever_the_output_ends(output: Output, kind: str) -> None:
    text = output.text
    for at in range(0, len(text) + 1, 3):
        reason, stop = ENDS[at % len(ENDS)]
        at_once, _ = items(output, kind, deltas(text[:at], reason, stop, each=False))
        whole, streamed = items(output, kind, deltas(text[:at], reason, stop, each=True))
        assert streamed == whole == at_once
        if kind == "responses":
            assert whole["status"] == ("incomplete" if reason == "length" else "completed")
            cut = [item["status"] == "incomplete" for item in whole["output"]]
            last = whole["output"][-1]
            by_stop = stop is not None and last["type"] == "function_call" and not is_json(last["arguments"])
            assert cut == [False] * (len(cut) - 1) + [reason == "length" or by_stop]
        else:
            assert (whole["stop_reason"] == "max_tokens") == (reason == "length")
            assert (whole["stop_sequence"] is not None) == (whole["stop_reason"] == "stop_sequence")


def test_a_stop_string_in_a_call_ends_no_call() -> None:
    output = next(o for o in CALLING if o.name == "hermes")
    at = output.text.index('"Oslo"')
    whole, _ = chat(output, deltas(output.text[:at], "stop", "Oslo", each=True))
    assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", "Oslo")
    assert whole["calls"] == [{"name": "get_weather", "arguments": '{"city": '}]
    message, _ = items(output, "messages", deltas(output.text[:at], "stop", "Oslo", each=True))
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "Oslo")
    behind = output.text.index("\n</tool_call>")
    whole, _ = chat(output, deltas(output.text[:behind], "stop", "</tool_call>", each=True))
    assert (whole["finish_reason"], whole["stop_reason"]) == ("tool_calls", "</tool_call>")


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
