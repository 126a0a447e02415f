"""/generate, /tokenize, /detokenize: token ids in and out, and where the time went."""

from __future__ import annotations

import time
from typing import Any

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from engine_core.types.errors import InvalidRequestError
from services.router.front import Front, Submission
from services.router.http import (
    DONE,
    EventResponse,
    EventStream,
    client_of,
    json_response,
    read_body,
    request_id_of,
    traceparent_of,
    until_disconnect,
    wants_timings,
)
from services.router.journey import Delta, SampleResult
from services.router.openai_schema import DetokenizeRequest, GenerateRequest, TokenizeRequest, parse_request
from services.router.options import options_of
from services.router.routes_openai import body_of
from services.router.trace import timings_of

_GENERATE_TOKENS = 128


def native_routes(front: Front) -> APIRouter:
    """The routes that pdmesh's own tools call."""
    router = APIRouter(tags=["native"])

    @router.post("/generate", openapi_extra=body_of(GenerateRequest))
    async def generate(request: Request) -> Response:
        """Generates from text or token ids; says which room it was and how long each stage took."""
        arrival = time.monotonic()
        asked = parse_request(GenerateRequest, await read_body(request, front.config.max_body_bytes))
        front.check_model(asked.model)
        options = options_of(asked, front.model.defaults, _GENERATE_TOKENS)
        if options.n != 1:
            raise InvalidRequestError("n: /generate gives one sample; use /v1/completions for more", field="n")
        prompt = asked.prompt()
        field = "text" if isinstance(prompt, str) else "input_ids" if asked.input_ids else "token_ids"
        ids = await front.encode_prompt(prompt, add_special_tokens=asked.add_special_tokens, field=field)
        submission = Submission(
            request_id=request_id_of(request.scope),
            path=request.url.path,
            prompts=(ids,),
            options=options,
            arrival=arrival,
            traceparent=traceparent_of(request),
            client=client_of(request, asked.user),
            timings=wants_timings(request),
        )
        if not options.stream:
            body = await until_disconnect(request.receive, _whole(front, submission), front.tasks)
            front.count_end(submission.path, None)
            return json_response(body)

        async def produce(stream: EventStream) -> None:
            async def sink(delta: Delta) -> None:
                data: dict[str, Any] = {"text": delta.text, "output_ids": delta.token_ids}
                if delta.result is not None:
                    data = {**_result(submission, "", delta.result), **data}
                await stream.write(b"data: " + orjson.dumps(data) + b"\n\n")

            await front.run(submission, lambda _index: sink)
            await stream.write(DONE)

        def on_end(failure: BaseException | None, started: bool) -> None:  # noqa: FBT001
            front.count_end(submission.path, failure, started=started)

        return EventResponse(
            produce, front.tasks, front.config.sse_comment_after, on_end, stall=front.config.client_stall_timeout
        )

    @router.post("/tokenize", openapi_extra=body_of(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Token ids of a prompt, or of a rendered chat."""
        asked = parse_request(TokenizeRequest, await read_body(request, front.config.max_body_bytes))
        front.check_model(asked.model)
        special = asked.add_special_tokens
        if asked.messages is not None:
            text = front.tokenizer.render_chat(
                [m.for_template() for m in asked.messages],
                add_generation_prompt=asked.add_generation_prompt is not False,
                template_kwargs=asked.chat_template_kwargs,
            )
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
        asked = parse_request(DetokenizeRequest, await read_body(request, front.config.max_body_bytes))
        front.check_model(asked.model)
        highest = max(asked.tokens, default=0)
        if highest >= front.model.vocab_size:
            message = f"tokens: token id {highest} is out of the vocabulary of {front.model.vocab_size}"
            raise InvalidRequestError(message, field="tokens")
        return json_response({"prompt": front.tokenizer.decode(asked.tokens, skip_special_tokens=False)})

    return router


async def _whole(front: Front, submission: Submission) -> dict[str, Any]:
    texts: list[str] = []

    async def sink(delta: Delta) -> None:
        texts.append(delta.text)

    results = await front.run(submission, lambda _index: sink)
    return _result(submission, "".join(texts), results[0])


def _result(submission: Submission, text: str, result: SampleResult) -> dict[str, Any]:
    more = {"pdmesh_timings": [timings_of(0, result)]} if submission.timings else {}
    return {
        "request_id": submission.request_id,
        "bootstrap_room": result.room,
        "text": text,
        "output_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "stop_reason": result.stop_reason,
        "usage": {
            "prompt_tokens": len(submission.prompts[0]),
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
