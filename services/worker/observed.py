"""What a session's stream leaves behind for those who look: the fields of its log lines, its spans, and one line at
its end. Wraps the whole of a stream; see services/runtime/telemetry."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from engine_core.types.errors import PdmeshError
from engine_core.types.request import GenerateSpec
from services.runtime.telemetry import log_fields
from services.runtime.telemetry.spans import SessionSpans, traceparent_in

log = logging.getLogger(__name__)

Metadata = tuple[tuple[str, str], ...]


class SessionObserver:
    """Observes the sessions of one worker. `spans` is None where tracing is off."""

    def __init__(self, instance: str = "", spans: SessionSpans | None = None) -> None:
        self._instance, self._spans = instance, spans

    @contextmanager
    def session(self, spec: GenerateSpec, context: grpc.aio.ServicerContext[Any, Any]) -> Iterator[Metadata]:
        """Holds while the stream runs; gives the metadata that calls made for it carry."""
        traceparent, trace_id = traceparent_in(context.invocation_metadata()), ""
        if self._spans is not None:
            attributes: dict[str, str | int | float | bool] = {
                "pdmesh.request_id": spec.request_id,
                "pdmesh.room": f"{spec.session.room:016x}",
                "pdmesh.attempt": spec.session.attempt,
                "pdmesh.instance": self._instance,
                "pdmesh.known_tokens": len(spec.prompt_token_ids) + len(spec.emitted_token_ids),
            }
            span = self._spans.begin(spec.session, traceparent, attributes)
            traceparent, trace_id = span.traceparent, span.trace_id
        sendable = spec.request_id.isascii() and spec.request_id.isprintable()
        onward: Metadata = (("x-request-id", spec.request_id),) if sendable else ()
        if traceparent:
            onward = (*onward, ("traceparent", traceparent))
        room, attempt = spec.session.room, spec.session.attempt
        error = ""
        with log_fields(request_id=spec.request_id, room=room, attempt=attempt, trace_id=trace_id):
            try:
                yield onward
                log.debug("session ended")
            except PdmeshError as exc:
                error = f"{exc.leg.value} {exc.reason}: {exc.message}"
                log.info("session failed: %s", error)
                raise
            except asyncio.CancelledError:
                error = "the caller went away"
                log.debug("session ended: %s", error)
                raise
            except Exception as exc:
                error = repr(exc)
                raise
            finally:
                if self._spans is not None:
                    self._spans.left(spec.session, error)
