"""How /generate replies: token ids, text, and where the request went."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from engine_core.types.sampling import TokenLogprobs
from services.router.edge.http import DONE
from services.router.front import Submission
from services.router.journey import Delta, SampleResult
from services.router.text.tokenizer import RouterTokenizer
from services.router.token_report import TokenNames, check_count, finite, prompt_logprobs
from services.router.trace import timings_of


class GenerateReply:
    """Writes the replies of one request of one sample."""

    def __init__(self, submission: Submission, tokenizer: RouterTokenizer, *, tokens_as_ids: bool) -> None:
        self._submission = submission
        self._names = TokenNames(tokenizer.bytes, as_ids=tokens_as_ids)
        self._texts: list[str] = []
        self._of_prompt: list[TokenLogprobs] = []

    def take(self, index: int, delta: Delta) -> bytes:
        """One event per delta; the last one says all else."""
        self._of_prompt += delta.prompt_logprobs
        if not delta.token_ids and delta.result is None:
            return b""
        data: dict[str, Any] = {"text": delta.text, "output_ids": delta.token_ids}
        if self._submission.options.logprobs is not None:
            data["logprobs"] = self._listed(delta.token_ids, delta.logprobs)
        if delta.result is not None:
            data = {**self._result("", delta.result), **data}
        return b"data: " + orjson.dumps(data) + b"\n\n"

    def end(self, results: Sequence[SampleResult]) -> bytes:
        """[DONE]."""
        return DONE

    def collect(self, index: int, delta: Delta) -> None:
        """Keeps a delta."""
        self._of_prompt += delta.prompt_logprobs
        self._texts.append(delta.text)

    def complete(self, results: Sequence[SampleResult]) -> dict[str, Any]:
        """The whole."""
        result = results[0]
        body = self._result("".join(self._texts), result)
        if self._submission.options.logprobs is not None:
            body["logprobs"] = self._listed(result.token_ids, result.logprobs)
        return body

    def _result(self, text: str, result: SampleResult) -> dict[str, Any]:
        prompt, options = self._submission.prompts[0], self._submission.options
        more: dict[str, Any] = {"pdmesh_timings": [timings_of(0, result)]} if self._submission.timings else {}
        if options.prompt_logprobs is not None:
            check_count(prompt[1:], self._of_prompt)
            more["prompt_logprobs"] = prompt_logprobs(self._names, self._of_prompt, options.prompt_logprobs)
        return {
            "request_id": self._submission.request_id,
            "bootstrap_room": result.room,
            "text": text,
            "output_ids": result.token_ids,
            "finish_reason": result.finish_reason,
            "stop_reason": result.stop_reason,
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": len(result.token_ids),
                "cached_tokens": result.cached_tokens,
            },
            "timings": result.timings,
            "attempts": result.attempts,
            "path": result.path,
            "transport": result.transport,
            "prefill_instance": result.prefill_instance,
            "decode_instance": result.decode_instance,
            **more,
        }

    def _listed(self, token_ids: Sequence[int], positions: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        """Per token: its id, name, log probability and rank, and the best ids with theirs."""
        check_count(token_ids, positions)
        top = self._submission.options.logprobs or 0
        return [
            {
                "token_id": p.token_id,
                "token": self._names.completion(p.token_id),
                "logprob": finite(p.logprob),
                "rank": p.rank,
                "top": [[t, finite(v)] for t, v in p.top[:top]],
            }
            for p in positions
        ]
