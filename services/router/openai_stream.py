"""How OpenAI's replies look: whole, and as chunks of a stream.

Chunks are put together from bytes that are fixed for the request, so that a token costs one dump of its
text. `token_ids` and `prompt_token_ids` appear where vLLM has them, when asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import orjson

from services.router.journey import SampleResult

TimingsOf = Callable[[int, SampleResult], dict[str, Any]]
"""Where the time of a choice went."""


class Usage(msgspec.Struct):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0

    def as_json(self) -> dict[str, Any]:
        """As OpenAI writes it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Reply:
    """Writes the replies of one request to /v1/completions; ChatReply those of a chat."""

    prefix = "cmpl-"
    whole = "text_completion"
    part = "text_completion"

    def __init__(
        self,
        request_id: str,
        model: str,
        prompts: Sequence[Sequence[int]],
        *,
        n: int,
        token_ids: bool,
        include_usage: bool,
        continuous_usage: bool,
        timings: TimingsOf | None = None,
    ) -> None:
        self._prompts, self._n, self._token_ids = prompts, n, token_ids
        self._include_usage, self._continuous = include_usage, continuous_usage
        self._timings = timings
        self._head = {
            "id": self.prefix + request_id,
            "object": self.whole,
            "created": int(time.time()),
            "model": model,
        }
        head = orjson.dumps({**self._head, "object": self.part})[:-1]
        self._start = b"data: " + head + b',"choices":['
        self._usages: dict[int, int] = {}

    # ---- whole ------------------------------------------------------------------------------------

    def complete(self, texts: Sequence[str], results: Sequence[SampleResult]) -> dict[str, Any]:
        """The reply to a request that does not stream."""
        choices = [self._choice(i, t, r) for i, (t, r) in enumerate(zip(texts, results, strict=True))]
        body = {**self._head, "choices": choices, "usage": self.usage(results).as_json()}
        if self._timings is not None:
            body["pdmesh_timings"] = [self._timings(i, result) for i, result in enumerate(results)]
        return {**body, **self._prompt_of_whole()}

    def usage(self, results: Sequence[SampleResult]) -> Usage:
        """Prompts count once each, however many samples they have."""
        return Usage(
            prompt_tokens=sum(map(len, self._prompts)),
            completion_tokens=sum(len(r.token_ids) for r in results),
            cached_tokens=sum(r.cached_tokens for r in results[:: self._n]),
        )

    def _choice(self, index: int, text: str, result: SampleResult) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": result.finish_reason}
        choice["stop_reason"] = result.stop_reason
        if self._token_ids:
            choice["token_ids"] = result.token_ids
            choice["prompt_token_ids"] = self._prompts[index // self._n]
        return choice

    def _prompt_of_whole(self) -> dict[str, Any]:
        return {}

    # ---- in parts ---------------------------------------------------------------------------------

    def first(self, index: int) -> bytes:
        """What comes before a choice's first text."""
        if not self._token_ids:
            return b""
        prompt = orjson.dumps(list(self._prompts[index // self._n]))
        return self._chunk(index, b'"text":""', b"null", b',"prompt_token_ids":' + prompt + b',"token_ids":[]')

    def delta(self, index: int, text: str, token_ids: list[int]) -> bytes:
        """A chunk with text; nothing when there is none to show."""
        self._count(index, token_ids)
        if not text and not (self._token_ids and token_ids):
            return b""
        return self._chunk(index, self._text(text), b"null", self._ids(token_ids))

    def last(self, index: int, text: str, token_ids: list[int], result: SampleResult) -> bytes:
        """The last chunk of a choice: what is left of its text, and why it ended."""
        self._count(index, token_ids)
        extra = b',"stop_reason":' + orjson.dumps(result.stop_reason) + self._ids(token_ids)
        tail = b""
        if self._timings is not None:
            tail = b',"pdmesh_timings":' + orjson.dumps([self._timings(index, result)])
        return self._chunk(index, self._last_text(text), orjson.dumps(result.finish_reason), extra, tail)

    def end(self, results: Sequence[SampleResult]) -> bytes:
        """The usage chunk, when asked for, and [DONE]."""
        if not self._include_usage:
            return b"data: [DONE]\n\n"
        usage = orjson.dumps(self.usage(results).as_json())
        return self._start + b'],"usage":' + usage + b"}\n\ndata: [DONE]\n\n"

    def _chunk(self, index: int, content: bytes, finish_reason: bytes, extra: bytes, tail: bytes = b"") -> bytes:
        choice = b'{"index":%d,%s,"logprobs":null,"finish_reason":%s%s}' % (index, content, finish_reason, extra)
        return self._start + choice + b"]" + self._usage_now() + tail + b"}\n\n"

    def _usage_now(self) -> bytes:
        if self._continuous:
            usage = Usage(sum(map(len, self._prompts)), sum(self._usages.values()))
            return b',"usage":' + orjson.dumps(usage.as_json())
        return b',"usage":null' if self._include_usage else b""

    def _count(self, index: int, token_ids: list[int]) -> None:
        if self._continuous:
            self._usages[index] = self._usages.get(index, 0) + len(token_ids)

    def _ids(self, token_ids: list[int]) -> bytes:
        return b',"token_ids":' + orjson.dumps(token_ids) if self._token_ids else b""

    def _text(self, text: str) -> bytes:
        return b'"text":' + orjson.dumps(text)

    def _last_text(self, text: str) -> bytes:
        return self._text(text)


class ChatReply(Reply):
    """Writes the replies of one request to /v1/chat/completions."""

    prefix = "chatcmpl-"
    whole = "chat.completion"
    part = "chat.completion.chunk"

    def _choice(self, index: int, text: str, result: SampleResult) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice: dict[str, Any] = {"index": index, "message": message, "logprobs": None}
        choice |= {"finish_reason": result.finish_reason, "stop_reason": result.stop_reason}
        if self._token_ids:
            choice["token_ids"] = result.token_ids
        return choice

    def _prompt_of_whole(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._prompts[0]} if self._token_ids else {}

    def first(self, index: int) -> bytes:
        """The role."""
        tail = b',"prompt_token_ids":' + orjson.dumps(list(self._prompts[0])) if self._token_ids else b""
        return self._chunk(index, b'"delta":{"role":"assistant","content":""}', b"null", b"", tail)

    def _text(self, text: str) -> bytes:
        return b'"delta":{"content":' + orjson.dumps(text) + b"}"

    def _last_text(self, text: str) -> bytes:
        return self._text(text) if text else b'"delta":{}'
