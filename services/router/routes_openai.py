"""/v1/completions, /v1/chat/completions, /v1/models."""

from __future__ import annotations

import time
from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from engine_core.types.errors import InvalidRequestError, NotFoundError
from services.router.front import Front, Submission
from services.router.http import (
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
from services.router.journey import Delta, Sink
from services.router.openai_schema import ChatRequest, CompletionRequest, parse_request
from services.router.openai_stream import ChatReply, Reply
from services.router.options import GenerationOptions, options_of
from services.router.trace import timings_of

_COMPLETION_TOKENS = 16
"""OpenAI's limit for completions when a client names none."""


def body_of(kind: type[object]) -> dict[str, object]:
    """The request body for /openapi.json; app.py adds the schemas."""
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def openai_routes(front: Front) -> APIRouter:
    """The routes that OpenAI's clients call."""
    router = APIRouter(tags=["openai"])

    @router.post("/v1/completions", openapi_extra=body_of(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Completes prompts."""
        arrival = time.monotonic()
        asked = parse_request(CompletionRequest, await read_body(request, front.config.max_body_bytes))
        model = front.check_model(asked.model)
        default = front.config.max_tokens_default or _COMPLETION_TOKENS
        options = options_of(asked, front.model.defaults, default)
        if len(asked.prompt) > front.config.max_prompts:
            most = front.config.max_prompts
            raise InvalidRequestError(f"prompt: holds {len(asked.prompt)} prompts; there may be {most}", field="prompt")
        special = asked.add_special_tokens
        prompts = [await front.encode_prompt(p, add_special_tokens=special, field="prompt") for p in asked.prompt]
        submission = _submission(request, prompts, options, arrival, asked.user)
        return await _answer(front, request, submission, _reply(Reply, submission, model))

    @router.post("/v1/chat/completions", openapi_extra=body_of(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Answers a chat."""
        arrival = time.monotonic()
        asked = parse_request(ChatRequest, await read_body(request, front.config.max_body_bytes))
        model = front.check_model(asked.model)
        options = options_of(asked, front.model.defaults, None)
        prompt = await front.encode_chat(
            [m.for_template() for m in asked.messages],
            add_generation_prompt=asked.add_generation_prompt,
            template_kwargs=asked.chat_template_kwargs,
        )
        submission = _submission(request, [prompt], options, arrival, asked.user)
        return await _answer(front, request, submission, _reply(ChatReply, submission, model))

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


def _submission(
    request: Request, prompts: Sequence[tuple[int, ...]], options: GenerationOptions, arrival: float, user: str | None
) -> Submission:
    return Submission(
        request_id=request_id_of(request.scope),
        path=request.url.path,
        prompts=tuple(prompts),
        options=options,
        arrival=arrival,
        traceparent=traceparent_of(request),
        client=client_of(request, user),
        timings=wants_timings(request),
    )


def _reply(kind: type[Reply], submission: Submission, model: str) -> Reply:
    options = submission.options
    return kind(
        submission.request_id,
        model,
        submission.prompts,
        n=options.n,
        token_ids=options.return_token_ids,
        include_usage=options.include_usage,
        continuous_usage=options.continuous_usage,
        timings=timings_of if submission.timings else None,
    )


async def _answer(front: Front, request: Request, submission: Submission, reply: Reply) -> Response:
    front.check_samples(submission)
    if not submission.options.stream:
        body = await until_disconnect(request.receive, _whole(front, submission, reply), front.tasks)
        front.count_end(submission.path, None)
        return json_response(body)

    async def produce(stream: EventStream) -> None:
        def sink_of(index: int) -> Sink:
            begun = False

            async def sink(delta: Delta) -> None:
                nonlocal begun
                data = b"" if begun else reply.first(index)
                begun = True
                if delta.result is None:
                    data += reply.delta(index, delta.text, delta.token_ids)
                else:
                    data += reply.last(index, delta.text, delta.token_ids, delta.result)
                if data:
                    await stream.write(data)

            return sink

        await stream.write(reply.end(await front.run(submission, sink_of)))

    def on_end(failure: BaseException | None, started: bool) -> None:  # noqa: FBT001
        front.count_end(submission.path, failure, started=started)

    return EventResponse(
        produce, front.tasks, front.config.sse_comment_after, on_end, stall=front.config.client_stall_timeout
    )


async def _whole(front: Front, submission: Submission, reply: Reply) -> dict[str, object]:
    texts: list[list[str]] = [[] for _ in range(submission.samples)]

    def sink_of(index: int) -> Sink:
        async def sink(delta: Delta) -> None:
            texts[index].append(delta.text)

        return sink

    results = await front.run(submission, sink_of)
    return reply.complete(["".join(parts) for parts in texts], results)
