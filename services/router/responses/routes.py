"""/v1/responses, and what there is to say of responses that are not stored."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from engine_core.types.errors import NotFoundError
from services.router.answer import answer
from services.router.chat.client_names import client_names
from services.router.edge.request_body import body_of
from services.router.front import Front
from services.router.prepare import prepare_chat
from services.router.responses.reply import ResponseReply
from services.router.responses.schema import ResponsesRequest


def responses_routes(front: Front) -> APIRouter:
    """The routes of OpenAI's responses."""
    router = APIRouter(tags=["openai"])

    @router.post("/v1/responses", openapi_extra=body_of(ResponsesRequest))
    async def responses(request: Request) -> Response:
        """Answers an input of text or items."""
        arrival = time.monotonic()
        asked = await front.read(request, ResponsesRequest)
        chat, names = asked.chat()
        with client_names(names):
            prepared = await prepare_chat(front, request, chat, arrival, names)
            reply = ResponseReply(prepared, asked)
            return await answer(front, request, prepared.submission, reply, reply.fail)

    @router.post("/v1/responses/compact", include_in_schema=False)
    async def compact() -> Response:
        """Refused."""
        raise NotFoundError("responses are not compacted here: send the input that is to count")

    @router.api_route("/v1/responses/{rest:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
    async def stored(rest: str) -> Response:
        """Refused: whatever it is, it is not there."""
        name = rest.partition("/")[0]
        raise NotFoundError(f"there is no response {name!r}: responses are not stored here", field="response_id")

    return router
