"""Servicers that exist before what they need does.

A worker's gRPC server is up from its first moment, so that health, reflection and GetStats answer while
the model loads. Until the real servicer is set, calls to it are refused as UNAVAILABLE (JOINING).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from engine_core.types.errors import Leg, UnavailableError


class LateServicer:
    """Stands in for a servicer whose handlers are coroutine functions (no generators)."""

    def __init__(self, leg: Leg) -> None:
        self._leg = leg
        self._target: Any = None

    def set(self, target: Any) -> None:
        """The real one, from now on."""
        self._target = target

    def __getattr__(self, name: str) -> Callable[[Any, Any], Awaitable[Any]]:
        if not name[:1].isupper():
            raise AttributeError(name)

        async def call(request: Any, context: Any) -> Any:
            if self._target is None:
                raise UnavailableError("the worker is starting", leg=self._leg, reason="JOINING", retry_after=1.0)
            return await getattr(self._target, name)(request, context)

        return call
