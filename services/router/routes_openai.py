"""/v1/completions, /v1/chat/completions, /v1/models."""

from __future__ import annotations

import time

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from engine_core.types.errors import InvalidRequestError, NotFoundError
from services.router.answer import answer, submission_of
from services.router.chat_plan import plan_chat
from services.router.chat_reply import ChatReply
from services.router.front import Front, Submission
from services.router.http import json_response, read_body
from services.router.openai_schema import ChatRequest, CompletionRequest, Prompt, SamplingRequest, parse_request
from services.router.openai_stream import CompletionReply, ReplySpec
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
        options = front.options(asked, front.config.max_tokens_default or _COMPLETION_TOKENS)
        if len(asked.prompt) > front.config.max_prompts:
            most = front.config.max_prompts
            raise InvalidRequestError(f"prompt: holds {len(asked.prompt)} prompts; there may be {most}", field="prompt")
        special = asked.add_special_tokens
        prompts = [await front.encode_prompt(p, add_special_tokens=special, field="prompt") for p in asked.prompt]
        submission = submission_of(request, asked, prompts, options, arrival)
        echo = [_text_of(front, *pair) for pair in zip(asked.prompt, prompts, strict=True)] if asked.echo else None
        reply = CompletionReply(reply_spec(front, asked, submission, model), echo)
        return await answer(front, request, submission, reply)

    @router.post("/v1/chat/completions", openapi_extra=body_of(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Answers a chat."""
        arrival = time.monotonic()
        asked = parse_request(ChatRequest, await read_body(request, front.config.max_body_bytes))
        model = front.check_model(asked.model)
        text = await front.render_chat(asked.chat())
        plan = plan_chat(asked, front.model.format, text)
        options = front.options(asked, None, plan.grammar)
        options = msgspec.structs.replace(options, kept_special_ids=plan.kept_special_ids)
        prompt = await front.encode_text(text, add_special_tokens=False, field="messages")
        submission = submission_of(request, asked, [prompt], options, arrival)
        reply = ChatReply(reply_spec(front, asked, submission, model), plan.parser_of)
        return await answer(front, request, submission, reply)

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


def reply_spec(front: Front, asked: SamplingRequest, submission: Submission, model: str) -> ReplySpec:
    """What the reply to a request has to show."""
    options = submission.options
    return ReplySpec(
        request_id=submission.request_id,
        model=model,
        prompts=submission.prompts,
        tokenizer=front.tokenizer,
        samples=options.n,
        keep=asked.n or 1,
        token_ids=options.return_token_ids,
        tokens_as_ids=bool(asked.return_tokens_as_token_ids),
        skip_special_tokens=options.skip_special_tokens,
        kept_special_ids=options.kept_special_ids,
        include_usage=options.include_usage,
        continuous_usage=options.continuous_usage,
        logprobs=asked.best_tokens(),
        prompt_logprobs=asked.prompt_logprobs,
        timings=timings_of if submission.timings else None,
    )


def _text_of(front: Front, prompt: Prompt, ids: tuple[int, ...]) -> str:
    """What `echo` repeats."""
    return prompt if isinstance(prompt, str) else front.tokenizer.decode(ids)
