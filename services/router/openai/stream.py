"""What OpenAI's replies have in common, whole and as chunks of a stream; and those of /v1/completions.

Chunks are put together from bytes that are fixed for the request, so that a token costs one dump of its
text. `token_ids`, `prompt_token_ids` and `prompt_logprobs` appear where vLLM has them, when asked for.

    take(index, delta)     the chunks of a stream, as deltas come; then end(results)
    collect(index, delta)  the same for a reply that comes whole; then complete(results)
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import orjson

from engine_core.types.sampling import TokenLogprobs
from services.router.journey import Delta, SampleResult
from services.router.reply_spec import ReplySpec
from services.router.token_report import CompletionLogprobs, TokenNames, check_count, prompt_logprobs


class Usage(msgspec.Struct):
    """Token counts of a request. `cached_tokens` is None until it is known."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int | None = 0
    reasoning_tokens: int = 0

    def as_json(self) -> dict[str, Any]:
        """As OpenAI writes it."""
        cached = None if self.cached_tokens is None else {"cached_tokens": self.cached_tokens, "audio_tokens": 0}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": cached,
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens, **_NO_SUCH_TOKENS},
        }


_NO_SUCH_TOKENS = {"audio_tokens": 0, "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
"""What OpenAI counts beside, and some clients read."""


class Reply:
    """What both kinds of reply have in common."""

    prefix = ""
    whole = ""
    part = ""
    more: Mapping[str, Any] = {}
    """What stands in the head of whole replies and chunks alike."""

    def __init__(self, spec: ReplySpec) -> None:
        self.spec = spec
        self._names = TokenNames(spec.tokenizer.bytes, as_ids=spec.tokens_as_ids)
        self._head = {
            "id": self.prefix + spec.request_id,
            "object": self.whole,
            "created": int(time.time()),
            "model": spec.model,
            "system_fingerprint": spec.system_fingerprint,
            **self.more,
        }
        head = orjson.dumps({**self._head, "object": self.part})[:-1]
        self._start = b"data: " + head + b',"choices":['
        self._usages: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        """What each prompt's first sample found in caches, once it has ended."""
        count = len(spec.prompts) * spec.samples
        self._texts: list[list[str]] = [[] for _ in range(count)]
        self._begun = [False] * count
        self._of_prompts: list[list[TokenLogprobs]] = [[] for _ in spec.prompts]

    # ---- for the routes -----------------------------------------------------------------------------

    def take(self, index: int, delta: Delta) -> bytes:
        """The chunks that a delta of choice `index` gives; none when there is nothing to show."""
        prompt = index // self.spec.samples
        if delta.prompt_logprobs:
            self._of_prompts[prompt] += delta.prompt_logprobs
        if not delta.text and not delta.token_ids and delta.result is None:
            return b""
        data = b""
        if not self._begun[index]:
            self._begun[index] = True
            data = self._first(index, prompt)
        if self.spec.continuous_usage:
            self._usages[index] = self._usages.get(index, 0) + len(delta.token_ids)
            if delta.result is not None and index % self.spec.samples == 0:
                self._cached[prompt] = delta.result.cached_tokens
        return data + self._next(index, delta)

    def collect(self, index: int, delta: Delta) -> None:
        """Keeps a delta of choice `index` for the whole."""
        self._of_prompts[index // self.spec.samples] += delta.prompt_logprobs
        self._texts[index].append(delta.text)

    def end(self, results: Sequence[SampleResult]) -> bytes:
        """The usage chunk, when asked for, and [DONE]."""
        if not self.spec.include_usage:
            return b"data: [DONE]\n\n"
        usage = orjson.dumps(self.usage(results).as_json())
        return self._start + b'],"usage":' + usage + b"}\n\ndata: [DONE]\n\n"

    def complete(self, results: Sequence[SampleResult]) -> dict[str, Any]:
        """The reply to a request that does not stream."""
        shown = self._shown(results)
        choices = [self._choice(i, index, results[index]) for i, index in enumerate(shown)]
        body = {**self._head, "choices": choices, "usage": self.usage(results).as_json()}
        if self.spec.timings is not None:
            body["pdmesh_timings"] = [self.spec.timings(i, results[index]) for i, index in enumerate(shown)]
        return {**body, **self._of_whole(results)}

    def usage(self, results: Sequence[SampleResult]) -> Usage:
        """Prompts count once each, however many samples they have; outputs all, those that are not shown too."""
        return Usage(
            prompt_tokens=sum(map(len, self.spec.prompts)),
            completion_tokens=sum(len(r.token_ids) for r in results),
            cached_tokens=sum(r.cached_tokens for r in results[:: self.spec.samples]),
            reasoning_tokens=self._reasoning_tokens(),
        )

    # ---- what each kind has -------------------------------------------------------------------------

    def _first(self, index: int, prompt: int) -> bytes:
        """What comes before a choice's first text."""
        raise NotImplementedError

    def _next(self, index: int, delta: Delta) -> bytes:
        """The chunk of a delta."""
        raise NotImplementedError

    def _choice(self, place: int, index: int, result: SampleResult) -> dict[str, Any]:
        """Choice `place` of the whole: sample `index`."""
        raise NotImplementedError

    def _of_whole(self, results: Sequence[SampleResult]) -> dict[str, Any]:
        """What stands beside the choices of a whole reply."""
        return {}

    def _reasoning_tokens(self) -> int:
        return 0

    # ---- parts ----------------------------------------------------------------------------------------

    def _shown(self, results: Sequence[SampleResult]) -> list[int]:
        """The samples to show: of each prompt those that the model finds likeliest per token, best first."""
        samples, keep = self.spec.samples, self.spec.keep
        if keep >= samples:
            return list(range(len(results)))
        shown: list[int] = []
        for first in range(0, len(results), samples):
            order = sorted(range(first, first + samples), key=lambda i: (-_mean(results[i]), i))
            shown += order[:keep]
        return shown

    def _chunk(
        self,
        index: int,
        content: bytes,
        delta: Delta | None,
        *,
        logprobs: bytes = b"null",
        more: bytes = b"",
        tail: bytes = b"",
    ) -> bytes:
        """A chunk; `content` is what it says, `more` stands beside it and `tail` beside the choices."""
        ids, finish = b"", b"null"
        if delta is not None:
            if self.spec.logprobs is not None and delta.token_ids:
                logprobs = self._logprobs(index, delta)
            if self.spec.token_ids:
                ids = b',"token_ids":' + orjson.dumps(delta.token_ids)
            if delta.result is not None:
                finish = orjson.dumps(self._finish_reason(index, delta.result))
                ids += b',"stop_reason":' + orjson.dumps(delta.result.stop_reason)
                if self.spec.timings is not None:
                    tail += b',"pdmesh_timings":' + orjson.dumps([self.spec.timings(index, delta.result)])
        choice = b'{"index":%d,%s,"logprobs":%s,"finish_reason":%s%s%s}' % (index, content, logprobs, finish, ids, more)
        return self._start + choice + b"]" + self._usage_now() + tail + b"}\n\n"

    def _finish_reason(self, index: int, result: SampleResult) -> str:
        return result.finish_reason

    def _logprobs(self, index: int, delta: Delta) -> bytes:
        raise NotImplementedError

    def _silent(self, delta: Delta) -> bool:
        """True for a delta whose chunk would say nothing."""
        wanted = self.spec.token_ids or self.spec.logprobs is not None
        return delta.result is None and not (delta.token_ids and wanted)

    def _usage_now(self) -> bytes:
        if self.spec.continuous_usage:
            prompt, output = sum(map(len, self.spec.prompts)), sum(self._usages.values())
            cached = sum(self._cached.values()) if len(self._cached) == len(self.spec.prompts) else None
            usage = Usage(prompt, output, cached, self._reasoning_tokens())
            return b',"usage":' + orjson.dumps(usage.as_json())
        return b',"usage":null' if self.spec.include_usage else b""

    def _prompt_logprobs(self, prompt: int) -> list[dict[str, Any] | None]:
        assert self.spec.prompt_logprobs is not None
        positions = self._of_prompts[prompt]  # of its first sample, which alone was asked for them
        check_count(self.spec.prompts[prompt][1:], positions)
        return prompt_logprobs(self._names, positions, self.spec.prompt_logprobs)


def _mean(result: SampleResult) -> float:
    return sum(p.logprob for p in result.logprobs) / max(len(result.logprobs), 1)


class CompletionReply(Reply):
    """Writes the replies of one request to /v1/completions. `echo` holds the text of each prompt to repeat."""

    prefix = "cmpl-"
    whole = part = "text_completion"

    def __init__(self, spec: ReplySpec, echo: Sequence[str] | None = None) -> None:
        super().__init__(spec)
        self._echo = echo
        self._lists = [self._new_lists() for _ in self._texts] if spec.logprobs is not None else []

    def _new_lists(self) -> CompletionLogprobs:
        return CompletionLogprobs(self._names, self.spec.logprobs or 0, self.spec.tokenizer, self.spec.detokenizer())

    def _first(self, index: int, prompt: int) -> bytes:
        spec, more = self.spec, b""
        if spec.prompt_logprobs is not None:
            more += b',"prompt_logprobs":' + orjson.dumps(self._prompt_logprobs(prompt))
        if spec.token_ids:
            more += b',"prompt_token_ids":' + orjson.dumps(list(spec.prompts[prompt])) + b',"token_ids":[]'
        if self._echo is None and not more:
            return b""
        text, told = b'""', b"null"
        if self._echo is not None:
            text = orjson.dumps(self._echo[prompt])
            if spec.logprobs is not None:
                told = orjson.dumps(self._prompt_lists(index, prompt))
        return self._chunk(index, b'"text":' + text, None, logprobs=told, more=more)

    def _next(self, index: int, delta: Delta) -> bytes:
        if not delta.text and self._silent(delta):
            return b""
        return self._chunk(index, b'"text":' + orjson.dumps(delta.text), delta)

    def _logprobs(self, index: int, delta: Delta) -> bytes:
        return orjson.dumps(self._lists[index].output(delta.token_ids, delta.logprobs))

    def _choice(self, place: int, index: int, result: SampleResult) -> dict[str, Any]:
        spec, prompt = self.spec, index // self.spec.samples
        text = "".join(self._texts[index])
        if self._echo is not None:
            text = self._echo[prompt] + text
        choice: dict[str, Any] = {"index": place, "text": text, "logprobs": None}
        if spec.logprobs is not None:
            lists = self._prompt_lists(index, prompt) if self._echo is not None else {}
            output = self._lists[index].output(result.token_ids, result.logprobs)
            choice["logprobs"] = {name: lists.get(name, []) + more for name, more in output.items()}
        choice |= {"finish_reason": result.finish_reason, "stop_reason": result.stop_reason}
        if spec.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._prompt_logprobs(prompt)
        if spec.token_ids:
            choice["token_ids"] = result.token_ids
            choice["prompt_token_ids"] = spec.prompts[prompt]
        return choice

    def _prompt_lists(self, index: int, prompt: int) -> dict[str, list[Any]]:
        assert self._echo is not None
        ids, positions, text = self.spec.prompts[prompt], self._of_prompts[prompt], self._echo[prompt]
        return self._lists[index].prompt(ids, positions, text)
