"""The ASGI application: routes, errors as OpenAI bodies, and the description in /openapi.json."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from engine_core.types.errors import CancelledSessionError, PdmeshError
from services.router.console.routes import console_routes
from services.router.edge.http import (
    RequestIds,
    anthropic_error,
    as_pdmesh_error,
    error_response,
    is_anthropic,
    json_response,
    request_id_of,
)
from services.router.edge.middleware import KeyGate, Origins, Plain
from services.router.front import Front
from services.router.messages.routes import messages_routes
from services.router.native.routes import native_routes
from services.router.openai.routes import openai_routes
from services.router.openapi import describe
from services.router.ops.discovery import discovery_routes
from services.router.ops.routes import ops_routes
from services.router.responses.routes import responses_routes
from services.runtime.api_keys import ApiKeys

_COUNTED = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/generate"})


def make_app(front: Front, keys: ApiKeys) -> FastAPI:
    """Builds the application over one front."""
    app = FastAPI(
        title="pdmesh",
        version=metadata.version("pdmesh"),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    for routes in (openai_routes, responses_routes, messages_routes, native_routes, ops_routes, discovery_routes):
        app.include_router(routes(front))
    if front.config.serves_console:
        app.include_router(console_routes(front))

    def count(path: str, exc: PdmeshError) -> None:
        if path in _COUNTED:
            front.count_end(path, exc)

    # The last one added is the first that a request comes to.
    app.add_middleware(Plain, body_seconds=front.config.body_timeout, on_failure=count)
    app.add_middleware(KeyGate, keys=keys, on_refused=count)
    if front.config.cors_origin:
        app.add_middleware(Origins, origins=front.config.cors_origin)
    app.add_middleware(RequestIds)

    async def on_error(request: Request, exc: Exception) -> Response:
        known = as_pdmesh_error(exc)
        count(request.url.path, known)
        if isinstance(known, CancelledSessionError):
            return Response(status_code=499)  # nobody reads it
        return error_response(known, request.scope)

    app.add_exception_handler(PdmeshError, on_error)
    app.add_exception_handler(HTTPException, _on_http_error)  # type: ignore[arg-type]

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = describe(
                app,
                keys_required=keys.required,
                vocab_size=front.model.vocab_size,
                names=front.model.names,
            )
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
    return app


async def _on_http_error(request: Request, exc: HTTPException) -> Response:
    """Unknown paths and methods, with the same body as all other errors."""
    method = request.scope.get("pdmesh.method", request.method)
    what = {404: f"there is no {request.url.path}", 405: f"{method} is not allowed here"}
    headers = dict(exc.headers or {})
    if headers.get("Allow") == "GET":
        headers["Allow"] = "GET, HEAD"
    message = what.get(exc.status_code, str(exc.detail))
    if is_anthropic(request.url.path):
        body = anthropic_error(message, exc.status_code, request_id_of(request.scope))
        return json_response(body, exc.status_code, headers)
    error = {
        "message": message,
        "type": "invalid_request_error",
        "param": None,
        "code": {404: "not_found", 405: "method_not_allowed"}.get(exc.status_code, "http_error"),
    }
    return json_response({"error": error}, exc.status_code, headers)
