"""What streams of responses and messages must be: state machines that read events and put the reply together."""

from __future__ import annotations

import json
from typing import Any

Event = dict[str, Any]


def events_of(data: bytes) -> list[Event]:
    """The events of a stream, each of which names its type twice."""
    found = []
    blocks = data.decode().split("\n\n")
    assert blocks.pop() == "", "the last event is not whole"
    for block in blocks:
        if block.startswith(":"):
            continue
        head, line = block.split("\n")
        event = json.loads(line.removeprefix("data: "))
        assert head == f"event: {event['type']}"
        found.append(event)
    return found


class ResponseStream:
    """Reads the events of one response. Raises AssertionError at the first that may not come there."""

    TEXTS = {"response.output_text": "output_text", "response.reasoning_text": "reasoning_text"}  # noqa: RUF012

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.last: dict[str, Any] = {}
        """The response in the last event."""
        self.error: Event | None = None
        self._sequence = 0
        self._state = "before"
        self._item: dict[str, Any] = {}
        self._part: dict[str, Any] | None = None
        self._text = ""
        self._logprobs: list[Any] = []

    def read(self, events: list[Event]) -> ResponseStream:
        """All events of a stream that has ended."""
        for event in events:
            assert event["sequence_number"] == self._sequence, event
            self._sequence += 1
            getattr(self, "_" + event["type"].removeprefix("response.").replace(".", "_"))(event)
        assert self._state == "over", self._state
        return self

    def _go(self, before: str, after: str) -> None:
        assert self._state == before, f"{self._state}, where {before} must be"
        self._state = after

    def _at_item(self, event: Event) -> None:
        assert event["output_index"] == len(self.items) and event["item_id"] == self._item["id"]

    def _created(self, event: Event) -> None:
        self._go("before", "created")
        assert event["response"]["status"] == "in_progress" and event["response"]["output"] == []
        self.last = event["response"]

    def _in_progress(self, event: Event) -> None:
        self._go("created", "between")
        assert event["response"] == self.last and self.last["usage"] is None

    def _output_item_added(self, event: Event) -> None:
        item = event["item"]
        self._go("between", "call" if item["type"] == "function_call" else "item")
        assert event["output_index"] == len(self.items) and item["status"] == "in_progress"
        assert item.get("content", []) == [] and item.get("arguments", "") == ""
        self._item, self._text, self._logprobs = item, "", []

    def _content_part_added(self, event: Event) -> None:
        self._go("item", "part")
        self._at_item(event)
        self._part = event["part"]
        assert event["content_index"] == 0 and self._part["text"] == ""
        assert self._part["type"] == {"message": "output_text", "reasoning": "reasoning_text"}[self._item["type"]]

    def _delta(self, event: Event) -> None:
        assert self._state == "part" and self._part is not None
        self._at_item(event)
        assert self.TEXTS[event["type"].removesuffix(".delta")] == self._part["type"]
        assert event["delta"] or event["logprobs"], "a delta that says nothing"
        self._text += event["delta"]
        self._logprobs += event.get("logprobs", [])

    _output_text_delta = _reasoning_text_delta = _delta

    def _done(self, event: Event) -> None:
        self._go("part", "text done")
        self._at_item(event)
        assert event["text"] == self._text and event.get("logprobs", []) == self._logprobs

    _output_text_done = _reasoning_text_done = _done

    def _content_part_done(self, event: Event) -> None:
        self._go("text done", "part done")
        self._at_item(event)
        assert self._part is not None
        whole = {"text": self._text, **({"logprobs": self._logprobs} if self._item["type"] == "message" else {})}
        assert event["part"] == {**self._part, **whole}
        self._part = event["part"]

    def _function_call_arguments_delta(self, event: Event) -> None:
        assert self._state == "call" and event["delta"]
        self._at_item(event)
        self._text += event["delta"]

    def _function_call_arguments_done(self, event: Event) -> None:
        self._go("call", "part done")
        self._at_item(event)
        assert event["arguments"] == self._text and event["name"] == self._item["name"]

    def _output_item_done(self, event: Event) -> None:
        self._go("part done", "between")
        item = event["item"]
        whole = {"arguments": self._text} if item["type"] == "function_call" else {"content": [self._part]}
        assert item == {**self._item, **whole, "status": item["status"]}
        assert item["status"] in ("completed", "incomplete")
        self.items.append(item)

    def _completed(self, event: Event) -> None:
        self._end(event, "completed")

    def _incomplete(self, event: Event) -> None:
        self._end(event, "incomplete")

    def _end(self, event: Event, status: str) -> None:
        self._go("between", "over")
        self.last = event["response"]
        assert self.last["status"] == status and self.last["output"] == self.items and self.items
        *others, last = self.items
        assert all(item["status"] == "completed" for item in others)
        # A stop of the client's ends a response, but may cut its last call.
        assert last["status"] == status or (last["type"], last["status"]) == ("function_call", "incomplete")

    def _error(self, event: Event) -> None:
        assert self._state not in ("before", "created", "over")
        assert {**event, **event["error"]} | {"type": "error"} == event
        self.error, self._state = event, "failing"

    def _failed(self, event: Event) -> None:
        self._go("failing", "over")
        self.last = event["response"]
        assert self.last["status"] == "failed" and self.last["error"]["message"] == self.error["message"]  # type: ignore[index]
        assert self.last["output"][: len(self.items)] == self.items


class MessageStream:
    """Reads the events of one of Anthropic's messages. Raises AssertionError at the first that may not come there."""

    DELTAS = {  # noqa: RUF012
        "text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking"),
        "tool_use": ("input_json_delta", "partial_json"),
    }  # fmt: skip

    def __init__(self) -> None:
        self.message: dict[str, Any] = {}
        """As if it had come whole."""
        self.error: dict[str, Any] | None = None
        self._state = "before"
        self._block: dict[str, Any] = {}
        self._text = ""

    def read(self, events: list[Event]) -> MessageStream:
        """All events of a stream that has ended."""
        for event in events:
            getattr(self, "_" + event["type"])(event)
        assert self._state == "over", self._state
        return self

    def _go(self, before: str, after: str) -> None:
        assert self._state == before, f"{self._state}, where {before} must be"
        self._state = after

    def _message_start(self, event: Event) -> None:
        self._go("before", "between")
        self.message = event["message"]
        assert self.message["content"] == [] and self.message["stop_reason"] is None

    def _ping(self, event: Event) -> None:
        assert event == {"type": "ping"} and self._state not in ("before", "over")

    def _content_block_start(self, event: Event) -> None:
        self._go("between", "block")
        assert event["index"] == len(self.message["content"])
        self._block, self._text = event["content_block"], ""
        name = {"text": "text", "thinking": "thinking", "tool_use": "input"}[self._block["type"]]
        assert not self._block[name]

    def _content_block_delta(self, event: Event) -> None:
        assert self._state == "block" and event["index"] == len(self.message["content"])
        kind, name = self.DELTAS[self._block["type"]]
        assert event["delta"]["type"] == kind and event["delta"][name]
        self._text += event["delta"][name]

    def _content_block_stop(self, event: Event) -> None:
        self._go("block", "between")
        assert event["index"] == len(self.message["content"])
        kind = self._block["type"]
        try:
            whole = json.loads(self._text or "{}") if kind == "tool_use" else self._text
        except json.JSONDecodeError:
            whole = {"INVALID_JSON": self._text}
        self.message["content"].append({**self._block, "input" if kind == "tool_use" else kind: whole})

    def _message_delta(self, event: Event) -> None:
        self._go("between", "ended")
        assert event["delta"]["stop_reason"] and self.message["content"]
        self.message |= event["delta"]
        self.message["usage"] |= event["usage"]

    def _message_stop(self, event: Event) -> None:
        self._go("ended", "over")
        assert event == {"type": "message_stop"}

    def _error(self, event: Event) -> None:
        assert self._state != "over"
        self._state, self.error = "over", event["error"]
