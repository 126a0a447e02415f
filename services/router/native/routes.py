"""/generate, /tokenize, /detokenize: token ids in and out, and where the time went."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from engine_core.types.errors import InvalidRequestError
from services.router.answer import answer, submission_of
from services.router.edge.http import json_response
from services.router.edge.request_body import body_of
from services.router.front import Front
from services.router.native.reply import GenerateReply
from services.router.native.schema import DetokenizeRequest, GenerateRequest, TokenizeRequest

_GENERATE_TOKENS = 128


def native_routes(front: Front) -> APIRouter:
    """The routes that pdmesh's own tools call."""
    router = APIRouter(tags=["native"])

    @router.post("/generate", openapi_extra=body_of(GenerateRequest))
    async def generate(request: Request) -> Response:
        """Generates from text or token ids; says which room it was and how long each stage took."""
        arrival = time.monotonic()
        asked = await front.read(request, GenerateRequest)
        front.check_model(asked.model)
        options = front.options(asked, _GENERATE_TOKENS)
        if options.n != 1:
            raise InvalidRequestError("n: /generate gives one sample; use /v1/completions for more", field="n")
        prompt = asked.prompt()
        field = "text" if isinstance(prompt, str) else "input_ids" if asked.input_ids else "token_ids"
        ids = await front.encode_prompt(prompt, add_special_tokens=asked.add_special_tokens, field=field)
        submission = submission_of(request, asked, [ids], options, arrival)
        reply = GenerateReply(submission, front.tokenizer, tokens_as_ids=bool(asked.return_tokens_as_token_ids))
        return await answer(front, request, submission, reply)

    @router.post("/tokenize", openapi_extra=body_of(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Token ids of a prompt, or of a rendered chat."""
        asked = await front.read(request, TokenizeRequest)
        front.check_model(asked.model)
        special = asked.add_special_tokens
        chat = asked.chat()
        if chat is not None:
            text = await front.render_chat(chat)
            special = bool(special)
        elif asked.prompt is not None:
            text = asked.prompt
        else:
            raise InvalidRequestError("give prompt or messages", field="prompt")
        ids = await front.tokenizer.encode_async(text, add_special_tokens=special is not False)
        names = front.tokenizer.tokens(ids) if asked.return_token_strs else None
        return json_response(
            {"count": len(ids), "max_model_len": front.token_limit, "tokens": ids, "token_strs": names}
        )

    @router.post("/detokenize", openapi_extra=body_of(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """Text of token ids, special tokens included."""
        asked = await front.read(request, DetokenizeRequest)
        front.check_model(asked.model)
        highest = max(asked.tokens, default=0)
        if highest >= front.model.vocab_size:
            message = f"tokens: token id {highest} is out of the vocabulary of {front.model.vocab_size}"
            raise InvalidRequestError(message, field="tokens")
        return json_response({"prompt": front.tokenizer.decode(asked.tokens, skip_special_tokens=False)})

    return router
