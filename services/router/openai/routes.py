"""/v1/completions, /v1/chat/completions, /v1/models."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from engine_core.types.errors import InvalidRequestError, NotFoundError
from services.router.answer import answer, submission_of
from services.router.chat.schema import ChatRequest
from services.router.edge.fields import Prompt
from services.router.edge.http import json_response
from services.router.edge.request_body import body_of
from services.router.front import Front
from services.router.openai.chat_reply import ChatReply
from services.router.openai.schema import CompletionRequest
from services.router.openai.stream import CompletionReply
from services.router.prepare import prepare_chat, reply_spec

_COMPLETION_TOKENS = 16
"""OpenAI's limit for completions when a client names none."""


def openai_routes(front: Front) -> APIRouter:
    """The routes that OpenAI's clients call."""
    router = APIRouter(tags=["openai"])

    @router.post("/v1/completions", openapi_extra=body_of(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Completes prompts."""
        arrival = time.monotonic()
        asked = await front.read(request, CompletionRequest)
        model = front.check_model(asked.model)
        options = front.options(asked, front.config.max_tokens_default or _COMPLETION_TOKENS)
        if len(asked.prompt) > front.config.max_prompts:
            most = front.config.max_prompts
            raise InvalidRequestError(f"prompt: holds {len(asked.prompt)} prompts; there may be {most}", field="prompt")
        special = asked.add_special_tokens
        prompts = [await front.encode_prompt(p, add_special_tokens=special, field="prompt") for p in asked.prompt]
        submission = submission_of(request, asked, prompts, options, arrival)
        echo = None
        if asked.echo:
            skip = options.skip_special_tokens
            echo = [_text_of(front, p, ids, skip=skip) for p, ids in zip(asked.prompt, prompts, strict=True)]
        reply = CompletionReply(reply_spec(front, asked, submission, model), echo)
        return await answer(front, request, submission, reply)

    @router.post("/v1/chat/completions", openapi_extra=body_of(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Answers a chat."""
        arrival = time.monotonic()
        asked = await front.read(request, ChatRequest)
        prepared = await prepare_chat(front, request, asked, arrival)
        reply = ChatReply(prepared.spec, prepared.parser_of)
        return await answer(front, request, prepared.submission, reply)

    @router.get("/v1/models")
    async def models() -> Response:
        """Lists the served names."""
        return json_response({"object": "list", "data": [_card(front, name) for name in front.model.names]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """Describes one served name."""
        if name not in (*front.model.names, "default"):
            front.check_model(name)
            raise NotFoundError(f"the model {name!r} is not served here", field="model", reason="MODEL_NOT_FOUND")
        return json_response(_card(front, name))

    return router


def _card(front: Front, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": front.model.created,
        "owned_by": "pdmesh",
        "root": front.model.names[0],
        "parent": None,
        "max_model_len": front.token_limit,
    }


def _text_of(front: Front, prompt: Prompt, ids: tuple[int, ...], *, skip: bool) -> str:
    """What `echo` repeats."""
    return prompt if isinstance(prompt, str) else front.tokenizer.decode(ids, skip_special_tokens=skip)
