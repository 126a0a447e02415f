"""What a reply has to show, for every API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from services.router.journey import SampleResult
from services.router.text.detokenizer import Detokenizer
from services.router.text.tokenizer import RouterTokenizer

TimingsOf = Callable[[int, SampleResult], dict[str, Any]]
"""Where the time of a choice went."""


class ReplySpec(msgspec.Struct, frozen=True):
    """What a reply has to show. `samples` per prompt are run, the `keep` best of them shown."""

    request_id: str
    model: str
    prompts: Sequence[Sequence[int]]
    tokenizer: RouterTokenizer
    samples: int = 1
    keep: int = 1
    token_ids: bool = False
    tokens_as_ids: bool = False
    skip_special_tokens: bool = True
    goes_on: bool = True
    kept_special_ids: tuple[int, ...] = ()
    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: int | None = None
    """Best tokens to show per output position; None shows nothing."""
    prompt_logprobs: int | None = None
    """The same per position of the prompt, in vLLM's form."""
    timings: TimingsOf | None = None
    system_fingerprint: str | None = None
    """Names the model and the arithmetic that replies come from."""

    def detokenizer(self) -> Detokenizer:
        """The state that one output's text comes from."""
        return self.tokenizer.detokenizer(
            skip_special_tokens=self.skip_special_tokens, kept_ids=self.kept_special_ids, goes_on=self.goes_on
        )
