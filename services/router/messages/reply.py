"""How Anthropic's messages look, whole and as events.

message_start, ping
per item    content_block_start, content_block_delta…, content_block_stop
message_delta, message_stop
a failure   error
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from engine_core.types.errors import PdmeshError
from services.router.chat.items import Closed, Grew, Item, ItemKind, Opened, Step
from services.router.edge.http import anthropic_error, error_status
from services.router.item_reply import ItemReply, event
from services.router.journey import SampleResult
from services.router.messages.schema import MessagesRequest
from services.router.prepare import PreparedChat

NO_OBJECT = "INVALID_JSON"
"""The key under which arguments stand that are no JSON object: the model may write what it likes, unless it is forced
by `strict` or `tool_choice`, and the limit of tokens may cut it."""

_DELTAS = {
    ItemKind.TEXT: ("text_delta", "text"),
    ItemKind.THOUGHT: ("thinking_delta", "thinking"),
    ItemKind.CALL: ("input_json_delta", "partial_json"),
}


class MessageReply(ItemReply):
    """Writes the replies of one request to /v1/messages."""

    def __init__(self, prepared: PreparedChat, asked: MessagesRequest) -> None:
        super().__init__(prepared)
        self._path = prepared.submission.path
        self._prompt_tokens = len(self.spec.prompts[0])
        self._shows_thoughts = asked.thinking is None or asked.thinking.display != "omitted"

    # ---- whole ------------------------------------------------------------------------------------

    def complete(self, results: Sequence[SampleResult]) -> dict[str, Any]:
        """See ItemReply."""
        result = results[0]
        content = [self._block(item) for item in self._items.all]
        return {**self._message(content, self._ended(result), self._usage(result)), **self._timings(result)}

    # ---- in events --------------------------------------------------------------------------------

    def _begin(self) -> bytes:
        message = self._message([], self._ended(None), self._usage(None))
        return event("message_start", {"message": message}) + event("ping", {})

    def _event(self, step: Step) -> bytes:
        item = step.item
        match step:
            case Opened():
                block = self._block(item, empty=True)
                return event("content_block_start", {"index": item.index, "content_block": block})
            case Grew(piece=piece):
                if item.kind is ItemKind.THOUGHT and not self._shows_thoughts:
                    return b""
                kind, name = _DELTAS[item.kind]
                return event("content_block_delta", {"index": item.index, "delta": {"type": kind, name: piece}})
            case Closed():
                return event("content_block_stop", {"index": item.index})

    def _finish(self, result: SampleResult) -> bytes:
        usage = self._usage(result)
        known = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens",
                 "output_tokens_details", "server_tool_use")  # fmt: skip
        data = {"delta": self._ended(result), "usage": {name: usage[name] for name in known}, **self._timings(result)}
        return event("message_delta", data) + event("message_stop", {})

    def _failed(self, exc: PdmeshError) -> bytes:
        body = anthropic_error(exc.message, error_status(exc, self._path), self.spec.request_id)
        return event("error", body)

    # ---- objects ----------------------------------------------------------------------------------

    def _message(self, content: list[dict[str, Any]], ended: dict[str, Any], usage: dict[str, Any]) -> dict[str, Any]:
        head = {"id": f"msg_{self.spec.request_id}", "type": "message", "role": "assistant", "model": self.spec.model}
        return {**head, "content": content, **ended, "usage": usage}

    def _block(self, item: Item, *, empty: bool = False) -> dict[str, Any]:
        text = "" if empty else item.text
        if item.kind is ItemKind.TEXT:
            return {"type": "text", "text": text, "citations": None}
        if item.kind is ItemKind.THOUGHT:
            return {"type": "thinking", "thinking": text if self._shows_thoughts else "", "signature": ""}
        given = {} if empty else _object(text)
        return {
            "type": "tool_use",
            "id": item.call_id,
            "name": item.name,
            "input": given,
            "caller": {"type": "direct"},
        }

    def _ended(self, result: SampleResult | None) -> dict[str, Any]:
        """Why it ended; nothing is known of that at the beginning."""
        reason, sequence = None, None
        if result is not None:
            reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(
                self._output.finish_reason(result), "end_turn"
            )
            if reason == "end_turn" and isinstance(result.stop_reason, str):
                reason, sequence = "stop_sequence", result.stop_reason
        return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None, "container": None}

    def _usage(self, result: SampleResult | None) -> dict[str, Any]:
        """As Anthropic counts: what was read from a cache is no input. How much that is is known at the end."""
        cached = 0 if result is None else result.cached_tokens
        return {
            "input_tokens": self._prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "cache_creation": None,
            "output_tokens": 0 if result is None else len(result.token_ids),
            "output_tokens_details": {"thinking_tokens": self._output.reasoning_tokens},
            "server_tool_use": None,
            "service_tier": "standard",
            "inference_geo": None,
        }


def _object(text: str) -> dict[str, Any]:
    """A call's arguments; those that are no object stand as text under one key, so that nothing is lost. None at all
    are what a stream shows that has no delta of them."""
    try:
        found = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        found = None
    return found if isinstance(found, dict) else {NO_OBJECT: text}
