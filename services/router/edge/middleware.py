"""What every request passes before its route: keys, origins, HEAD, and errors that nobody expected.

RequestIds ─▶ Origins (CORS, where asked for) ─▶ KeyGate ─▶ Plain ─▶ the routes
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine_core.types.errors import ConfigError, InvalidRequestError, PdmeshError, UnavailableError
from services.router.edge.http import LAST_WORD_SECONDS, SHUTS_DOWN, ApiKeyError, as_pdmesh_error, error_response
from services.runtime.api_keys import ApiKeys, shown_keys

OPEN_PATHS = frozenset({"/health", "/liveness", "/readiness", "/ping", "/metrics"})
"""Whoever asks there seldom has a key, and is told no more than numbers and whether the router is well."""
_CONSOLE, _CONSOLE_DATA = "/console", "/console/api/"
_ORIGIN = re.compile(r"https?://[A-Za-z0-9.\[\]:-]+")
_SHOWN_TO_PAGES = ("x-request-id", "request-id", "retry-after", "x-should-retry", "x-pdmesh-timings")

OnRefused = Callable[[str, PdmeshError], None]
"""Gets the path and why."""


def is_open(path: str) -> bool:
    """True for what needs no key: health, metrics, and the console's own page, which asks for one."""
    page = path == _CONSOLE or path.startswith(f"{_CONSOLE}/")
    return path in OPEN_PATHS or (page and not path.startswith(_CONSOLE_DATA))


class KeyGate:
    """Lets nobody in without a key, where keys are set up; `pdmesh.client` in the scope names its owner."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, on_refused: OnRefused) -> None:
        self._app, self._keys, self._on_refused = app, keys, on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on, or answers 401."""
        if scope["type"] == "http" and self._keys.required and not is_open(scope["path"]):
            shown = shown_keys(scope["headers"])
            holder = self._keys.holder(shown)
            if holder is None:
                what = "the API key that came is wrong" if shown else "there is no API key"
                exc = ApiKeyError(f"{what}: send one as 'Authorization: Bearer KEY'")
                self._on_refused(scope["path"], exc)
                await error_response(exc, scope)(scope, receive, send)
                return
            scope["pdmesh.client"] = holder
        await self._app(scope, receive, send)


class Plain:
    """HEAD is answered as GET is, without its body; a bug becomes a 500, and the end of a drain's time a 503."""

    def __init__(self, app: ASGIApp, body_seconds: float, on_failure: OnRefused) -> None:
        self._app, self._body_seconds, self._on_failure = app, body_seconds, on_failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = {**scope, "pdmesh.method": scope["method"], "pdmesh.body_seconds": self._body_seconds}
        if scope["method"] == "HEAD":  # the server leaves the body out: its own scope says HEAD
            scope["method"] = "GET"
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as exc:
            if started:
                raise
            known = as_pdmesh_error(exc)
            self._on_failure(scope["path"], known)
            await error_response(known, scope)(scope, receive, send)
        except asyncio.CancelledError:
            # The server does this to requests that outlast a drain, and waits for nothing more. A stream has said so.
            if not started:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LAST_WORD_SECONDS):
                        await error_response(UnavailableError(SHUTS_DOWN), scope)(scope, receive, send)


class Origins(CORSMiddleware):
    """Lets pages of these origins call, by the browser's rules; `*` is every page."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        super().__init__(
            app,
            allow_origins=tuple(origins),
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            expose_headers=_SHOWN_TO_PAGES,
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """The browser's question before it calls."""
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        refused = error_response(InvalidRequestError(bytes(response.body).decode(), field="origin", reason="CORS"))
        refused.headers["vary"] = response.headers["vary"]
        return refused


def check_origins(origins: Sequence[str]) -> None:
    """Raises ConfigError for what no browser sends as an origin."""
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"--cors-origin {origin!r}: an origin is like https://chat.example.com or http://localhost:3000, "
                "without a path; * is every one",
                field="cors_origin",
            )
