"""What /generate, /tokenize and /detokenize take."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from engine_core.types.errors import InvalidRequestError
from services.router.chat.schema import MAX_TOOLS, Chat, ChatMessage, Tool, chat_of, check_contents
from services.router.edge.fields import MAX_INT, CountOrFlag, Ids, OptionalIds, Prompt
from services.router.edge.request_body import RequestBody
from services.router.sampling_schema import MAX_LOGPROBS, SamplingRequest


class GenerateRequest(SamplingRequest):
    """POST /generate: one prompt as text, input_ids or token_ids. What `sampling_params` holds counts as
    if it stood beside it."""

    text: str | None = Field(None, min_length=1)
    input_ids: OptionalIds = ()
    token_ids: OptionalIds = ()
    max_new_tokens: int | None = Field(None, ge=0, le=MAX_INT)
    logprobs: Annotated[int | None, CountOrFlag] = Field(None, ge=0, le=MAX_LOGPROBS)
    sampling_params: dict[str, Any] | None = None

    @classmethod
    def unfolded(cls, data: dict[str, Any]) -> dict[str, Any]:
        """See RequestBody."""
        inner = data.get("sampling_params")
        return {**inner, **data} if isinstance(inner, dict) else data

    def token_limit(self) -> int | None:
        """max_new_tokens or max_tokens."""
        return self.max_tokens if self.max_new_tokens is None else self.max_new_tokens

    def best_tokens(self) -> int | None:
        """See SamplingRequest."""
        return self.logprobs

    def prompt(self) -> Prompt:
        """Raises InvalidRequestError unless exactly one form is given."""
        given = [p for p in (self.text, self.input_ids, self.token_ids) if p]
        if len(given) != 1:
            raise InvalidRequestError("give exactly one of text, input_ids and token_ids", field="text")
        return given[0]


class TokenizeRequest(RequestBody):
    """POST /tokenize: a prompt or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = False

    def check(self) -> None:
        """See RequestBody."""
        check_contents(self.messages or ())

    def chat(self) -> Chat | None:
        """What the template gets, if this is a chat. Raises InvalidRequestError."""
        return None if self.messages is None else chat_of(self, self.messages, {})


class DetokenizeRequest(RequestBody):
    """POST /detokenize."""

    model: str | None = None
    tokens: Ids
