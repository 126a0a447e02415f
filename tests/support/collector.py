"""A collector of traces for tests: OTLP/gRPC on loopback, keeps every span.

async with Collector() as collector:
    ...  "otlp_endpoint": collector.endpoint
    tree = await collector.tree(trace_id, within=20.0, until=lambda spans: …)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class Span:
    """One span as it arrived. Times are seconds since the epoch."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    start: float
    end: float
    error: str
    attributes: dict[str, Any] = field(hash=False)
    events: tuple[str, ...] = ()


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens while its block runs."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.endpoint = ""
        self._server = grpc.aio.server()

    async def __aenter__(self) -> Collector:
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.stop(None)

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Takes a batch."""
        for resource in request.resource_spans:
            service = next(a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
            for scope in resource.scope_spans:
                self.spans += [_span(span, service) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def of(self, trace_id: str) -> list[Span]:
        """The spans of one trace, by start."""
        return sorted((s for s in self.spans if s.trace_id == trace_id), key=lambda s: s.start)

    async def until(self, trace_id: str, complete: Callable[[list[Span]], bool], within: float = 30.0) -> list[Span]:
        """Waits until the spans of a trace are complete. Raises AssertionError with what was there."""
        deadline = asyncio.get_running_loop().time() + within
        while not complete(self.of(trace_id)):  # noqa: ASYNC110  # other processes have no events
            assert asyncio.get_running_loop().time() < deadline, [(s.service, s.name) for s in self.of(trace_id)]
            await asyncio.sleep(0.05)
        return self.of(trace_id)


def names_below(spans: Iterable[Span], parent: Span) -> list[str]:
    """Names of a span's children, in order of their starts."""
    return [s.name for s in spans if s.parent_id == parent.span_id]


def _span(span: Any, service: str) -> Span:
    return Span(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        service=service,
        start=span.start_time_unix_nano / 1e9,
        end=span.end_time_unix_nano / 1e9,
        error=span.status.message if span.status.code == 2 else "",
        attributes={a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes},
        events=tuple(event.name for event in span.events),
    )
