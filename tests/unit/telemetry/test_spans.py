"""State moves as spans, over a tracer that keeps what it is told."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_core.lifecycle.machine import Move
from engine_core.types.ids import SessionId
from services.runtime.telemetry.spans import RequestSpans, SessionSpans, traceparent_in
from services.runtime.telemetry.tracing import Attributes

SESSION = SessionId(7, 0)


@dataclass
class Kept:
    """A span as it was told."""

    name: str
    parent: str
    start: float
    attributes: dict[str, object]
    serves: bool = False
    finish: float | None = None
    error: str = ""
    children: list[tuple[str, float, float, str]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    @property
    def traceparent(self) -> str:
        return f"of {self.name}"

    @property
    def trace_id(self) -> str:
        return "t"

    def child(self, name: str, start: float, end: float, attributes: Attributes, error: str = "") -> None:
        self.children.append((name, round(start, 6), round(end, 6), error))

    def event(self, name: str, at: float, attributes: Attributes) -> None:
        self.events.append(name)

    def end(self, at: float, attributes: Attributes, error: str = "") -> None:
        assert self.finish is None, "ended twice"
        self.finish, self.error = at, error
        self.attributes |= attributes


class Keeper:
    """The tracer."""

    def __init__(self) -> None:
        self.spans: list[Kept] = []

    def open(self, name: str, traceparent: str, start: float, attributes: Attributes, *, serves: bool) -> Kept:
        self.spans.append(Kept(name, traceparent, start, dict(attributes), serves))
        return self.spans[-1]


def move(machine: str, source: str, target: str, at: float, seconds: float, reason: str = "") -> Move:
    return Move(machine, SESSION, source, target, reason, at, seconds)


class Worker:
    """SessionSpans on a clock that the test sets; moves are 1,000 s behind it."""

    def __init__(self, role: str) -> None:
        self.now, self.keeper = 1000.0, Keeper()
        self.spans = SessionSpans(self.keeper, role, wall=lambda: self.now, offset=lambda: 1000.0)

    def begin(self) -> Kept:
        span = self.spans.begin(SESSION, "caller", {"a": 1})
        assert isinstance(span, Kept)
        return span


def test_a_decode_session() -> None:
    worker = Worker("decode")
    span = worker.begin()
    assert (span.name, span.parent, span.start, span.serves) == ("decode", "caller", 1000.0, True)
    worker.spans.observe(
        [
            move("decode_request", "ADMITTED", "QUEUED", 0.0, 0.0),
            move("decode_request", "QUEUED", "AWAITING_START", 0.5, 0.5),
            move("transfer_session", "OPEN", "TICKETED", 0.7, 0.7),
            move("decode_request", "AWAITING_START", "AWAITING_KV", 0.7, 0.2),
            move("transfer_session", "TICKETED", "DELIVERED", 1.0, 0.3),
            move("transfer_session", "DELIVERED", "RELEASED", 1.0, 0.0),
            move("decode_request", "AWAITING_KV", "READY", 1.0, 0.3),
            move("decode_request", "READY", "DECODING", 1.1, 0.1),
        ]
    )
    assert span.finish is None and len(worker.spans) == 1
    worker.spans.observe([move("decode_request", "DECODING", "FINISHED", 2.0, 0.9, "length")])
    assert span.children == [
        ("decode.queued", 1000.0, 1000.5, ""),
        ("decode.awaiting_start", 1000.5, 1000.7, ""),
        ("transfer.receive", 1000.7, 1001.0, ""),
        ("decode.awaiting_kv", 1000.7, 1001.0, ""),
        ("decode.ready", 1001.0, 1001.1, ""),
        ("decode.decoding", 1001.1, 1002.0, ""),
    ]
    assert (span.finish, span.error) == (1002.0, "")
    assert span.attributes == {"a": 1, "pdmesh.end": "finished", "pdmesh.reason": "length"}
    assert len(worker.spans) == 0


def test_a_prefill_session_that_fails_keeps_its_late_moves() -> None:
    worker = Worker("prefill")
    span = worker.begin()
    worker.spans.observe(
        [
            move("prefill_request", "QUEUED", "COMPUTING", 1.0, 1.0),
            move("transfer_session", "TICKETED", "PUSHING", 1.5, 0.1),
            move("prefill_request", "COMPUTING", "FAILED", 2.0, 1.0, "link closed"),
            move("transfer_session", "PUSHING", "ABORTING", 2.0, 0.5, "link closed"),
        ]
    )
    assert (span.finish, span.error) == (1002.0, "link closed") and len(worker.spans) == 1
    worker.now = 1002.1
    worker.spans.left(SESSION, "transfer LINK_DOWN: link closed")
    worker.spans.observe([move("transfer_session", "ABORTING", "QUIET", 3.0, 1.0, "no thread pushes")])
    assert span.children == [
        ("prefill.queued", 1000.0, 1001.0, ""),
        ("prefill.computing", 1001.0, 1002.0, "link closed"),
        ("transfer.push", 1001.5, 1002.0, "link closed"),
        ("transfer.abort", 1002.0, 1003.0, ""),
    ]
    assert len(worker.spans) == 0


def test_a_refused_session_ends_with_its_stream() -> None:
    worker = Worker("decode")
    span = worker.begin()
    worker.now = 1000.25
    worker.spans.left(SESSION, "decode QUEUE_FULL: full")
    assert (span.finish, span.error, len(worker.spans)) == (1000.25, "decode QUEUE_FULL: full", 0)


def test_an_engine_that_tells_no_end_is_not_awaited_for_ever() -> None:
    worker = Worker("decode")
    span = worker.begin()
    worker.spans.observe([move("decode_request", "QUEUED", "AWAITING_START", 0.5, 0.5)])
    worker.now = 1001.0
    worker.spans.left(SESSION, "decode ENGINE_DIED: gone")
    assert span.finish is None
    worker.now = 1007.0
    worker.spans.begin(SessionId(8, 0), "", {})
    assert (span.finish, span.error, len(worker.spans)) == (1001.0, "decode ENGINE_DIED: gone", 1)
    worker.spans.close()
    assert [s.error for s in worker.keeper.spans] == ["decode ENGINE_DIED: gone", "the process ended"]
    worker.spans.observe([move("decode_request", "AWAITING_START", "FAILED", 9.0, 1.0)])
    assert span.finish == 1001.0


def test_a_request_with_two_attempts() -> None:
    keeper = Keeper()
    spans = RequestSpans(keeper, "client", 10.0, {})
    request = keeper.spans[0]
    assert (request.name, request.parent, spans.traceparent(5)) == ("router.request", "client", "of router.request")
    spans.move(5, 0, "", 10.1, "QUEUED", 10.1, "")
    spans.move(5, 0, "QUEUED", 10.1, "PLACING", 10.2, "")
    spans.move(5, 0, "PLACING", 10.2, "PLACED", 10.3, "p + d")
    assert spans.traceparent(5) == "of router.attempt"
    spans.move(5, 0, "PLACED", 10.3, "SENT", 10.3, "")
    spans.move(5, 0, "SENT", 10.3, "FIRST_TOKEN", 10.5, "")
    spans.move(5, 0, "FIRST_TOKEN", 10.5, "RESUMING", 10.6, "decode died")
    spans.move(5, 1, "RESUMING", 10.6, "PLACED", 10.7, "p + e")
    spans.move(5, 1, "SENT", 10.7, "RESUMED", 10.8, "")
    spans.move(5, 1, "RESUMED", 10.8, "FINISHED", 11.0, "stop")
    spans.end(11.1, {"tokens": 3})
    first, second = keeper.spans[1:]
    assert request.children == [
        ("router.queue", 10.1, 10.2, ""), ("router.place", 10.2, 10.3, ""), ("router.place", 10.6, 10.7, ""),
    ]  # fmt: skip
    assert (first.finish, first.error, first.events) == (10.6, "decode died", ["first_token"])
    assert (second.finish, second.error, second.events) == (11.0, "", ["resumed"])
    assert [s.attributes["pdmesh.attempt"] for s in (first, second)] == [0, 1]
    assert (request.finish, request.error, request.attributes["tokens"]) == (11.1, "", 3)


def test_a_request_that_is_given_up_ends_its_attempts() -> None:
    keeper = Keeper()
    spans = RequestSpans(keeper, "", 1.0, {})
    spans.move(5, 0, "PLACING", 1.0, "PLACED", 2.0, "")
    spans.end(3.0, {}, "the client went away")
    assert [(s.name, s.finish, s.error) for s in keeper.spans] == [
        ("router.request", 3.0, "the client went away"), ("router.attempt", 3.0, "the client went away"),
    ]  # fmt: skip


def test_the_context_in_metadata() -> None:
    assert traceparent_in((("x-request-id", "a"), ("traceparent", "00-x"))) == "00-x"
    assert traceparent_in((("traceparent", b"bytes"),)) == traceparent_in(()) == traceparent_in(None) == ""
