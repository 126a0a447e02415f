"""/console: a page of this router's own, and the data that it shows. Read-only.

The page loads nothing from elsewhere and runs no script but its own files; its headers forbid the browser
anything else. Chats go to /v1/chat/completions like those of any client.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from engine_core.types.errors import InvalidRequestError, NotFoundError
from services.router.console.overview import Overview
from services.router.edge.http import json_response
from services.router.front import Front

STATIC = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
_DATA = {**HEADERS, "cache-control": "no-store"}


class _File:
    """One file of the page, read once."""

    def __init__(self, path: Path) -> None:
        self.body = path.read_bytes()
        self.media_type = _TYPES[path.suffix]
        self.etag = f'"{hashlib.sha256(self.body).hexdigest()[:32]}"'


def console_routes(front: Front) -> APIRouter:
    """The page and its data."""
    router = APIRouter(prefix="/console", include_in_schema=False)
    files = {path.name: _File(path) for path in STATIC.iterdir() if path.suffix in _TYPES}
    overview = Overview(front)

    @router.get("")
    async def bare() -> Response:
        """The page has its files beside it, so its address ends with a slash."""
        return RedirectResponse("console/", headers=HEADERS)

    @router.get("/api/mesh")
    async def mesh(since: str = "0") -> Response:
        """The mesh now, and the history after `since` (seconds since the epoch)."""
        try:
            after = float(since)
        except ValueError:
            raise InvalidRequestError("since: must be seconds since the epoch", field="since") from None
        return Response(await overview.as_json(after), media_type="application/json", headers=_DATA)

    @router.get("/api/explain/{request_id}")
    async def explain(request_id: str) -> Response:
        """What router and workers did for a request."""
        return json_response(await overview.explain(request_id), headers=_DATA)

    @router.get("/{name:path}")
    async def file(request: Request, name: str) -> Response:
        """The page, its scripts and its style."""
        found = files.get(name or "index.html")
        if found is None:
            raise NotFoundError(f"there is no {request.url.path}")
        headers = {**HEADERS, "cache-control": "no-cache", "etag": found.etag}
        if request.headers.get("if-none-match") == found.etag:
            return Response(status_code=304, headers=headers)
        return Response(found.body, media_type=found.media_type, headers=headers)

    return router
