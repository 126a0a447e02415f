"""/v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from services.router.answer import answer
from services.router.chat.client_names import client_names
from services.router.edge.http import json_response
from services.router.edge.request_body import body_of
from services.router.front import Front
from services.router.messages.reply import MessageReply
from services.router.messages.schema import CountTokensRequest, MessagesRequest
from services.router.prepare import prepare_chat


def messages_routes(front: Front) -> APIRouter:
    """The routes that Anthropic's clients call."""
    router = APIRouter(tags=["anthropic"])

    @router.post("/v1/messages", openapi_extra=body_of(MessagesRequest))
    async def messages(request: Request) -> Response:
        """Answers a conversation."""
        arrival = time.monotonic()
        asked = await front.read(request, MessagesRequest)
        chat, names = asked.chat()
        with client_names(names):
            prepared = await prepare_chat(front, request, chat, arrival, names)
            reply = MessageReply(prepared, asked)
            return await answer(front, request, prepared.submission, reply, reply.fail)

    @router.post("/v1/messages/count_tokens", openapi_extra=body_of(CountTokensRequest))
    async def count_tokens(request: Request) -> Response:
        """Counts the tokens of the prompt that a conversation becomes."""
        asked = await front.read(request, CountTokensRequest)
        front.check_model(asked.model)
        chat, names = asked.chat()
        with client_names(names):
            text = await front.render_chat(chat.chat())
        ids = await front.tokenizer.encode_async(text, add_special_tokens=False)
        return json_response({"input_tokens": len(ids)})

    return router
