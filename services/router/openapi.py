"""/openapi.json: what is really accepted and answered, errors and keys included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from services.router.answer import TIMEOUT_HEADER
from services.router.chat.schema import ChatRequest
from services.router.edge.http import OVERLOADED, is_anthropic
from services.router.edge.middleware import is_open
from services.router.messages.models import MessageObject, MessagesError, TokenCount
from services.router.messages.schema import CountTokensRequest, MessagesRequest
from services.router.native.schema import DetokenizeRequest, GenerateRequest, TokenizeRequest
from services.router.openai import reply_models as replies
from services.router.openai.schema import CompletionRequest
from services.router.responses.models import ResponseObject
from services.router.responses.schema import ResponsesRequest
from services.router.sampling_schema import MAX_TIMEOUT

_REF = "#/components/schemas/{model}"
_REQUESTS: tuple[type[BaseModel], ...] = (
    CompletionRequest,
    ChatRequest,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
    GenerateRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
_REPLIES: dict[str, type[BaseModel]] = {
    "/v1/completions": replies.Completion,
    "/v1/chat/completions": replies.ChatCompletion,
    "/v1/responses": ResponseObject,
    "/v1/messages": MessageObject,
    "/v1/messages/count_tokens": TokenCount,
    "/v1/models": replies.ModelList,
    "/v1/models/{name}": replies.Model,
    "/generate": replies.Generation,
    "/tokenize": replies.Tokens,
    "/detokenize": replies.Text,
    "/health": replies.Status,
    "/liveness": replies.Status,
    "/ping": replies.Status,
    "/readiness": replies.Status,
    "/health_generate": replies.Status,
    "/version": replies.Version,
    "/workers": replies.Workers,
    "/explain/{request_id}": replies.Moves,
    "/sd": replies.ScrapeTargets,
}
_PROMPTS = {
    "CompletionRequest": ("prompt",),
    "GenerateRequest": ("text", "input_ids", "token_ids"),
    "DetokenizeRequest": ("tokens",),
}
_LISTS = frozenset({"/sd"})
_STREAMS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/generate"})

_SAID = {
    400: "The request is wrong; `param` names the field",
    401: "There is no API key, or a wrong one",
    404: "There is no such model, or nothing under this name",
    408: "The body did not come in time, or the time that the client allows is over",
    413: "The body is too large",
    415: "The body is declared to be something else than JSON",
    429: "The queue is full, or the wait would be too long; Retry-After says when to come again",
    500: "A fault of the mesh",
    503: "No worker can serve it now; Retry-After says when to come again",
    OVERLOADED: "What others call 503",
    504: "The time that the request may take is over",
}
_OF_BODIES = (400, 408, 413, 415)
_OF_MODELS = (404,)
_OF_WORK = (429, 500, 503, 504)


def describe(app: FastAPI, *, keys_required: bool, vocab_size: int, names: Sequence[str]) -> dict[str, Any]:
    """The document for this application's routes, with a model of so many tokens that is served under these names."""
    schema = get_openapi(
        title=app.title,
        version=app.version,
        routes=app.routes,
        description="OpenAI's API, and what pdmesh serves beside it. Unknown fields are ignored; null is as absent.",
    )
    parts = schema.setdefault("components", {})
    parts["schemas"] = schemas(vocab_size, names)
    parts["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    schema["security"] = [{"bearer": []}, {"x-api-key": []}, *([] if keys_required else [{}])]
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            _complete(path, method, operation)
    return schema


def schemas(vocab_size: int, names: Sequence[str]) -> dict[str, Any]:
    """The schemas of all requests and replies, by their names."""
    asked = [(kind, "validation") for kind in _REQUESTS]
    answered = [(kind, "serialization") for kind in {*_REPLIES.values(), replies.ErrorBody, MessagesError}]
    _, found = models_json_schema([*asked, *answered], ref_template=_REF)  # type: ignore[list-item]
    models: dict[str, Any] = found["$defs"]
    for model, fields in _PROMPTS.items():
        for field in fields:
            _limit_ids(models[model]["properties"][field], vocab_size)
        if len(fields) > 1:
            models[model]["anyOf"] = [{"required": [field]} for field in (*fields, "sampling_params")]
    for model in ("CompletionRequest", "GenerateRequest"):  # some load generators send the chat API's
        models[model]["properties"]["logprobs"]["anyOf"].append({"type": "boolean"})
    served = {"type": "string", "enum": list(dict.fromkeys((*names, "default")))}
    for kind in _REQUESTS:
        required = "model" in models[kind.__name__].get("required", ())
        models[kind.__name__]["properties"]["model"] = served if required else {"anyOf": [served, {"type": "null"}]}
    models["TokenizeRequest"]["anyOf"] = [{"required": ["prompt"]}, {"required": ["messages"]}]
    return models


def _limit_ids(schema: dict[str, Any], vocab_size: int) -> None:
    """Token ids of prompts end with the vocabulary."""
    for part in schema.get("anyOf", [schema]):
        items = part.get("items", {})
        for numbers in (items, items.get("items", {})):
            if numbers.get("type") == "integer":
                numbers["maximum"] = vocab_size - 1


def _complete(path: str, method: str, operation: dict[str, Any]) -> None:
    """Adds what FastAPI can't know of routes that read and write by themselves."""
    operation["operationId"] = f"{method}_{path.strip('/').replace('/', '_').replace('{', '').replace('}', '')}"
    if is_open(path):
        operation["security"] = []
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if path in _REPLIES:
        shape = _ref(_REPLIES[path])
        content = {"application/json": {"schema": {"type": "array", "items": shape} if path in _LISTS else shape}}
    if path in _STREAMS:
        content["text/event-stream"] = {"schema": {"type": "string"}}
        limit = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT}
        said = "Seconds for the whole request"
        operation["parameters"] = [{"name": TIMEOUT_HEADER, "in": "header", "description": said, "schema": limit}]
    answers: dict[str, Any] = {"200": {"description": "The answer", "content": content}}
    failure = MessagesError if is_anthropic(path) else replies.ErrorBody
    for status in sorted(_failures(path, method)):
        answers[str(status)] = {
            "description": _SAID[status],
            "content": {"application/json": {"schema": _ref(failure)}},
        }
    operation["responses"] = answers


def _failures(path: str, method: str) -> set[int]:
    found = set() if is_open(path) else {401}
    if method == "post":
        found |= {*_OF_BODIES, *_OF_MODELS}
    if path in _STREAMS or path == "/health_generate":
        found |= {OVERLOADED if status == 503 and is_anthropic(path) else status for status in _OF_WORK}
    if "{" in path:
        found |= {404}
    if path == "/readiness":
        found |= {503}
    return found


def _ref(kind: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": _REF.format(model=kind.__name__)}
