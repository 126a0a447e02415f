"""OpenTelemetry for a service: spans with times of their own, sent in batches to a collector over OTLP/gRPC.

Nothing of OpenTelemetry's SDK is imported before start_tracing(): where tracing is off it costs nothing. What a
process asks of it is in Tracer and OpenSpan; spans.py makes spans of state moves with these alone. Contexts travel
as W3C traceparent, "" meaning none.

The SDK's own OTEL_… variables hold as well, for attributes of the resource and sizes of batches.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from engine_core.types.errors import ConfigError
from services.runtime.telemetry.exposition import version

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

log = logging.getLogger(__name__)

Attributes = Mapping[str, str | int | float | bool]

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-[!-~]{0,64})?")
_EXPORT_SECONDS = 3.0
_BATCH_MILLISECONDS = 1_000
_CLOSE_SECONDS = 4.0


class OpenSpan(Protocol):
    """A span that has begun. Times are seconds since the epoch."""

    @property
    def traceparent(self) -> str:
        """What a call that belongs to it carries."""

    @property
    def trace_id(self) -> str:
        """Of its trace, in hex; "" when it isn't recorded."""

    def child(self, name: str, start: float, end: float, attributes: Attributes, error: str = "") -> None:
        """Adds a span below it that is over already."""

    def event(self, name: str, at: float, attributes: Attributes) -> None:
        """Marks a moment in it."""

    def end(self, at: float, attributes: Attributes, error: str = "") -> None:
        """Ends it. With `error` it has failed."""


class Tracer(Protocol):
    """What opens spans."""

    def open(self, name: str, traceparent: str, start: float, attributes: Attributes, *, serves: bool) -> OpenSpan:
        """Begins a span below what `traceparent` names, or a new trace. `serves`: it answers another process."""


class Tracing:
    """The Tracer of one process. Make one with start_tracing(); close() it."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("pdmesh", version())

    def open(self, name: str, traceparent: str, start: float, attributes: Attributes, *, serves: bool) -> OpenSpan:
        """See Tracer."""
        from opentelemetry.trace import SpanKind

        kind = SpanKind.SERVER if serves else SpanKind.INTERNAL
        span = self._tracer.start_span(
            name, _parent(traceparent), kind=kind, attributes=dict(attributes), start_time=_nanoseconds(start)
        )
        return _Open(self, span)

    def finished(self, below: Span, name: str, start: float, end: float, attributes: Attributes, error: str) -> None:
        """A span below another that is over already."""
        from opentelemetry.trace import set_span_in_context

        span = self._tracer.start_span(
            name, set_span_in_context(below), attributes=dict(attributes), start_time=_nanoseconds(start)
        )
        _end(span, end, {}, error)

    async def close(self) -> None:
        """Sends what is left, for some seconds at most."""
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await asyncio.to_thread(self._provider.shutdown)
        except TimeoutError:
            log.warning("the last spans could not be sent")


class _Open:
    def __init__(self, tracing: Tracing, span: Span) -> None:
        self._tracing, self._span = tracing, span

    @property
    def traceparent(self) -> str:
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    @property
    def trace_id(self) -> str:
        return f"{self._span.get_span_context().trace_id:032x}" if self._span.is_recording() else ""

    def child(self, name: str, start: float, end: float, attributes: Attributes, error: str = "") -> None:
        # An unsampled parent has no children, and one that ended may still get some.
        if self._span.get_span_context().trace_flags.sampled:
            self._tracing.finished(self._span, name, start, end, attributes, error)

    def event(self, name: str, at: float, attributes: Attributes) -> None:
        self._span.add_event(name, dict(attributes), _nanoseconds(at))

    def end(self, at: float, attributes: Attributes, error: str = "") -> None:
        _end(self._span, at, attributes, error)


def _end(span: Span, at: float, attributes: Attributes, error: str) -> None:
    from opentelemetry.trace import StatusCode

    span.set_attributes(dict(attributes))
    if error:
        span.set_status(StatusCode.ERROR, error)
    span.end(_nanoseconds(at))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _parent(traceparent: str) -> Context:
    """The context that spans begin in; an empty one, and so a new trace, for what is no traceparent."""
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None:
        return Context()
    trace_id, span_id, flags = (int(part, 16) for part in found.groups())
    remote = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))
    return set_span_in_context(NonRecordingSpan(remote), Context()) if remote.is_valid else Context()


def start_tracing(endpoint: str, ratio: float, service: str, instance: str) -> Tracing | None:
    """The tracing of this process; None, and nothing is imported, without an endpoint.

    `endpoint` is http://HOST:PORT or https://HOST:PORT of a collector's OTLP/gRPC; whether anybody answers there is
    not asked. `ratio` of the requests are traced where the caller does not say. Raises ConfigError.
    """
    if not endpoint:
        return None
    if not re.fullmatch(r"https?://[^/\s]+:\d{1,5}/?", endpoint):
        raise ConfigError(f"otlp_endpoint: {endpoint!r} is not like http://HOST:4317", field="otlp_endpoint")
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    except ImportError as exc:
        raise ConfigError(
            f"otlp_endpoint needs the package opentelemetry-exporter-otlp-proto-grpc: {exc}", field="otlp_endpoint"
        ) from exc
    logging.getLogger("opentelemetry.exporter").setLevel(logging.ERROR)  # not each retry
    resource = Resource.create(
        {"service.name": f"pdmesh-{service}", "service.version": version(), "service.instance.id": instance}
    )
    provider = TracerProvider(ParentBased(TraceIdRatioBased(ratio)), resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint, insecure=endpoint.startswith("http://"), timeout=_EXPORT_SECONDS)
    provider.add_span_processor(
        BatchSpanProcessor(
            exporter,
            schedule_delay_millis=_BATCH_MILLISECONDS,
            export_timeout_millis=_EXPORT_SECONDS * 1000,
        )
    )
    return Tracing(provider)
