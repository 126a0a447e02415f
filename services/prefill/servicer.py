"""PrefillService: one stream per session, relayed to and from the engine.

The life of a stream:

    open arrives     incarnation, attempt and ranges are checked; the caller must be in the rank table, and have
                     proved that the link is its own; OpenPrefill goes to the engine
    Started          the prompt's blocks are reserved; the caller answers with its ticket
    ticket arrives   read while events are written; TicketArrived goes to the engine
    PromptLogprobs   as chunks are computed, where asked for
    FirstToken       without transfer the stream ends here, OK
    Delivered        the stream ends, OK
    any other end    the caller's cancel, an error, a deadline: EndSession tells the engine

EndSession is queued exactly once for each session that was opened, before anything is awaited.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from engine_core.host import frames
from engine_core.types.errors import DeadlineError, InternalError, InvalidRequestError, Leg
from pdmesh.prefill.v1 import prefill_service_pb2, prefill_service_pb2_grpc
from services.prefill.links import PrefillLinks
from services.prefill.peers import DecodePeers
from services.runtime.errors import from_error_info
from services.runtime.tasks import TaskOwner
from services.wire.generation import monotonic_deadline, seconds_left, spec_from_proto, timings_to_proto
from services.wire.logprobs import logprobs_to_proto, pieces
from services.wire.transfer import shard_count_to_proto, ticket_from_proto
from services.worker.engine_client import EngineClient
from services.worker.identity import WorkerIdentity
from services.worker.observed import SessionObserver
from services.worker.session_handle import SessionHandle
from services.worker.sessions import SessionTable

OPEN_TIMEOUT = 10.0
"""Seconds within which the first message must come."""

DEADLINE_GRACE = 1.0
"""The engine ends a session at its deadline; the stream waits this much longer for its word."""

Request = prefill_service_pb2.PrefillRequest
Response = prefill_service_pb2.PrefillResponse


class PrefillServicer(prefill_service_pb2_grpc.PrefillServiceServicer):
    """Serves Prefill."""

    def __init__(
        self,
        engine: EngineClient,
        identity: WorkerIdentity,
        sessions: SessionTable,
        links: PrefillLinks,
        peers: DecodePeers,
        tasks: TaskOwner,
        *,
        observer: SessionObserver | None = None,
    ) -> None:
        self._engine, self._identity, self._sessions = engine, identity, sessions
        self._links, self._peers, self._tasks = links, peers, tasks
        self._observer = observer or SessionObserver()

    async def Prefill(
        self, request_iterator: AsyncIterator[Request], context: grpc.aio.ServicerContext[Request, Response]
    ) -> None:
        """Runs one session. Raises PdmeshError."""
        opened = await _first_message(request_iterator)
        self._identity.check_incarnation(opened.prefill_incarnation)
        spec = spec_from_proto(opened.request, monotonic_deadline(context.time_remaining()))
        self._identity.check_fingerprint(opened.request.fingerprint)
        await self._peers.find(opened.decode_incarnation)
        if not opened.without_transfer:
            self._links.check(opened.link_id, opened.decode_incarnation, spec.session, opened.link_proof)
        with self._observer.session(spec, context), self._sessions.enter(spec.session):
            frame = frames.OpenPrefill(spec=spec, link_id=opened.link_id, without_transfer=opened.without_transfer)
            handle = self._engine.open(frame)
            reader: asyncio.Task[None] | None = None
            reason = "stream closed"
            try:
                reader = self._tasks.spawn(_read_ticket(request_iterator, handle, frame), f"ticket {spec.session}")
                reason = await self._relay(handle, frame, context)
            except Exception as exc:
                reason = str(exc) or type(exc).__name__
                raise
            finally:
                handle.end(reason)
                if reader is not None:
                    reader.cancel()
                    await asyncio.wait({reader}, timeout=5.0)

    async def _relay(
        self,
        handle: SessionHandle,
        opened: frames.OpenPrefill,
        context: grpc.aio.ServicerContext[Request, Response],
    ) -> str:
        """Writes what the engine says until the session is done; returns how it ended."""
        while True:
            try:
                async with asyncio.timeout(seconds_left(opened.spec.deadline + DEADLINE_GRACE, Leg.PREFILL)):
                    item = await handle.next()
            except TimeoutError:
                raise DeadlineError("the deadline passed during prefill", leg=Leg.PREFILL) from None
            match item:
                case frames.Started():
                    message = prefill_service_pb2.Started(cached_tokens=item.cached_tokens)
                    await context.write(Response(started=message))
                case frames.PromptLogprobs():
                    for first, positions in pieces(item.first_position, item.positions):
                        scores = prefill_service_pb2.PromptLogprobs(
                            first_position=first, positions=[logprobs_to_proto(position) for position in positions]
                        )
                        await context.write(Response(prompt_logprobs=scores))
                case frames.FirstToken():
                    token = prefill_service_pb2.FirstToken(
                        token_id=item.token_id,
                        cached_tokens=item.cached_tokens,
                        timings=timings_to_proto(item.timings),
                        logprobs=None if item.logprobs is None else logprobs_to_proto(item.logprobs),
                    )
                    await context.write(Response(first_token=token))
                    if opened.without_transfer:
                        return "first token sent"
                case frames.Delivered():
                    self._links.delivered(opened.link_id, handle.session)
                    done = prefill_service_pb2.Delivered(
                        shards=[shard_count_to_proto(shard) for shard in item.shards],
                        timings=timings_to_proto(item.timings),
                    )
                    await context.write(Response(delivered=done))
                    return "delivered"
                case frames.SessionFailed():
                    raise from_error_info(item.error)
                case _:
                    raise InternalError(f"engine sent {type(item).__name__} to a prefill session", leg=Leg.PREFILL)


async def _first_message(requests: AsyncIterator[Request]) -> prefill_service_pb2.OpenPrefill:
    try:
        async with asyncio.timeout(OPEN_TIMEOUT):
            first = await anext(requests, None)
    except TimeoutError:
        raise DeadlineError(f"no message within {OPEN_TIMEOUT:g} s", leg=Leg.PREFILL) from None
    if first is None or first.WhichOneof("message") != "open":
        raise InvalidRequestError("the first message must be open", leg=Leg.PREFILL, field="open")
    return first.open


async def _read_ticket(requests: AsyncIterator[Any], handle: SessionHandle, opened: frames.OpenPrefill) -> None:
    """Passes the ticket on. A second message, or none at all where one must come, fails the session."""
    ticketed = False
    try:
        async for message in requests:
            if message.WhichOneof("message") != "ticket" or ticketed or opened.without_transfer:
                kind = message.WhichOneof("message") or "empty"
                handle.fail(
                    InvalidRequestError(f"a message of kind {kind} is not expected now", leg=Leg.PREFILL, field=kind)
                )
                return
            ticketed = True
            frame = frames.TicketArrived(session=handle.session, ticket=ticket_from_proto(message.ticket))
            handle.send(frame)
    except InvalidRequestError as exc:
        handle.fail(exc)
        return
    except (grpc.aio.BaseError, grpc.aio.UsageError):
        return  # the call is over; its own end says how
    if not ticketed and not opened.without_transfer:
        handle.fail(InvalidRequestError("the stream ended without a ticket", leg=Leg.PREFILL, field="ticket"))
