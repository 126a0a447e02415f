"""How OpenAI's replies to chats look, whole and as chunks: content, reasoning, tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from services.router.chat.output import ChatOutput, Gathered, ParserOf
from services.router.journey import Delta, SampleResult
from services.router.openai.stream import Reply
from services.router.parsers.base import Content, Part, Reasoning, ToolCallArguments, ToolCallBegin
from services.router.reply_spec import ReplySpec
from services.router.token_report import chat_logprobs, check_count


class ChatReply(Reply):
    """Writes the replies of one request to /v1/chat/completions. `parser_of` makes the parser of each choice's
    output; without one all text is content."""

    prefix = "chatcmpl-"
    whole = "chat.completion"
    part = "chat.completion.chunk"
    more = {"service_tier": "default"}  # noqa: RUF012  # there is one

    def __init__(self, spec: ReplySpec, parser_of: ParserOf | None = None) -> None:
        super().__init__(spec)
        self._outputs: list[ChatOutput] = []
        self._gathered: list[Gathered] = []
        if parser_of is not None:
            self._outputs = [ChatOutput(parser_of, spec.detokenizer) for _ in self._texts]
            self._gathered = [Gathered() for _ in self._texts]

    # ---- whole ------------------------------------------------------------------------------------

    def collect(self, index: int, delta: Delta) -> None:
        """See Reply."""
        super().collect(index, delta)
        if self._outputs:
            self._gathered[index].add(self._outputs[index].take(delta))

    def _choice(self, place: int, index: int, result: SampleResult) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": place, "message": self._message(index), "logprobs": None}
        if self.spec.logprobs is not None:
            check_count(result.token_ids, result.logprobs)
            listed = chat_logprobs(self._names, result.logprobs, self.spec.logprobs)
            choice["logprobs"] = {"content": listed, "refusal": None}
        choice |= {"finish_reason": self._finish_reason(index, result), "stop_reason": result.stop_reason}
        if self.spec.token_ids:
            choice["token_ids"] = result.token_ids
        return choice

    def _message(self, index: int) -> dict[str, Any]:
        if not self._outputs:
            return {"role": "assistant", "content": "".join(self._texts[index]), **_NOT_HERE}
        found = self._gathered[index]
        calls, reasoning = found.calls, found.reasoning
        content = found.content or (None if calls or reasoning else "")
        message: dict[str, Any] = {"role": "assistant", "content": content, **_NOT_HERE}
        if reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if calls:
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls
            ]
        return message

    def _of_whole(self, results: Sequence[SampleResult]) -> dict[str, Any]:
        more: dict[str, Any] = {}
        if self.spec.token_ids:
            more["prompt_token_ids"] = self.spec.prompts[0]
        if self.spec.prompt_logprobs is not None:
            more["prompt_logprobs"] = self._prompt_logprobs(0)
        return more

    # ---- in parts ---------------------------------------------------------------------------------

    def _first(self, index: int, prompt: int) -> bytes:
        """The role."""
        tail = b',"prompt_token_ids":' + orjson.dumps(list(self.spec.prompts[0])) if self.spec.token_ids else b""
        if self.spec.prompt_logprobs is not None:
            tail += b',"prompt_logprobs":' + orjson.dumps(self._prompt_logprobs(0))
        return self._chunk(index, b'"delta":{"role":"assistant","content":"","refusal":null}', None, tail=tail)

    def _next(self, index: int, delta: Delta) -> bytes:
        if self._outputs:
            parts = self._outputs[index].take(delta)
            if not parts and self._silent(delta):
                return b""
            return self._chunk(index, b'"delta":' + orjson.dumps(_delta_of(parts)), delta)
        if delta.text:
            return self._chunk(index, b'"delta":{"content":' + orjson.dumps(delta.text) + b"}", delta)
        return b"" if self._silent(delta) else self._chunk(index, b'"delta":{}', delta)

    def _finish_reason(self, index: int, result: SampleResult) -> str:
        return self._outputs[index].finish_reason(result) if self._outputs else result.finish_reason

    def _logprobs(self, index: int, delta: Delta) -> bytes:
        check_count(delta.token_ids, delta.logprobs)
        listed = chat_logprobs(self._names, delta.logprobs, self.spec.logprobs or 0)
        return orjson.dumps({"content": listed, "refusal": None})

    def _reasoning_tokens(self) -> int:
        return sum(output.reasoning_tokens for output in self._outputs)


_NOT_HERE: Mapping[str, Any] = {"refusal": None, "annotations": []}
"""What OpenAI's messages always have, and clients read."""


def _delta_of(parts: Sequence[Part]) -> dict[str, Any]:
    """A chunk's delta with all that came at once: one entry per call."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        match part:
            case Content(text):
                delta["content"] = delta.get("content", "") + text
            case Reasoning(text):
                delta["reasoning_content"] = delta["reasoning"] = delta.get("reasoning", "") + text
            case ToolCallBegin(index, name, call_id):
                function = {"name": name, "arguments": ""}
                calls[index] = {"index": index, "id": call_id, "type": "function", "function": function}
            case ToolCallArguments(index, text):
                entry = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                entry["function"]["arguments"] += text
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta
