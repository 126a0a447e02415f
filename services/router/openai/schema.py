"""What /v1/completions takes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from engine_core.types.errors import InvalidRequestError
from services.router.edge.fields import CountOrFlag, Prompts
from services.router.sampling_schema import MAX_LOGPROBS, MAX_N, SamplingRequest


class CompletionRequest(SamplingRequest):
    """POST /v1/completions."""

    model: str
    prompt: Prompts
    best_of: int | None = Field(None, ge=1, le=MAX_N)
    echo: bool | None = False
    logprobs: Annotated[int | None, CountOrFlag] = Field(None, ge=0, le=MAX_LOGPROBS)

    def best_tokens(self) -> int | None:
        """See SamplingRequest."""
        return self.logprobs

    def samples(self) -> int:
        """As many as the best are chosen from."""
        return max(self.best_of or 1, self.n or 1)

    def best_prompt_tokens(self) -> int | None:
        """prompt_logprobs, and what `echo` with `logprobs` shows of the prompt."""
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((w for w in wanted if w is not None), default=None)

    def echoes(self) -> bool:
        """See SamplingRequest."""
        return bool(self.echo)

    def check(self) -> None:
        """See RequestBody."""
        super().check()
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise InvalidRequestError(f"best_of: {self.best_of} is below n {self.n}", field="best_of")
        if self.stream and (self.best_of or 1) > (self.n or 1):
            raise InvalidRequestError(
                "best_of: not with stream: true: which samples are the best is known at the end", field="best_of"
            )
