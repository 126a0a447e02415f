"""The prefill half of a decode session: one Prefill stream, relayed into frames of the session.

    run()          opens the stream, turns Started, FirstToken and Delivered into LegStarted, LegToken and
                   LegDelivered; whatever ends it before it is done becomes LegFailed, once. PromptLogprobs go to
                   the session's own stream at once, past the engine: the token, which comes from there, is later
    send_ticket()  writes the engine's ticket onto the stream, after Started
    cancel()       cancels the stream at once; prefill aborts its session

Failures keep what the prefill worker said of them: code, reason, retryable; the leg is prefill unless
the worker named another.
"""

from __future__ import annotations

from typing import Any

import grpc

from engine_core.host import frames
from engine_core.types.errors import InternalError, Leg, PdmeshError, PeerFailedError
from engine_core.types.kv import Ticket
from engine_core.types.sampling import TokenLogprobs
from pdmesh.prefill.v1 import prefill_service_pb2, prefill_service_pb2_grpc
from services.runtime.channels import ChannelPool
from services.runtime.errors import from_rpc_error, to_error_info
from services.runtime.streams import Duplex
from services.wire.bootstrap import RankRow
from services.wire.generation import seconds_left, spec_to_proto, timings_from_proto
from services.wire.logprobs import PromptPositions, logprobs_from_proto
from services.wire.transfer import shard_counts_from_proto, ticket_to_proto
from services.worker.identity import WorkerIdentity
from services.worker.observed import Metadata
from services.worker.session_handle import SessionHandle

_Call = Duplex[prefill_service_pb2.PrefillRequest, prefill_service_pb2.PrefillResponse]


class PrefillLeg:
    """One prefill stream. run() is a task of the session's; the rest is called from the session's own."""

    def __init__(
        self,
        opened: frames.Open,
        handle: SessionHandle,
        identity: WorkerIdentity,
        target: RankRow,
        channels: ChannelPool,
        link_proof: bytes = b"",
        metadata: Metadata = (),
    ) -> None:
        self._opened, self._handle, self._identity = opened, handle, identity
        self._target, self._channels, self._link_proof = target, channels, link_proof
        self._metadata = metadata
        self._call: _Call | None = None
        self._cancelled = False
        spec = opened.spec
        self._sampling = spec.sampling
        self._prompt = PromptPositions(
            len(spec.prompt_token_ids), Leg.PREFILL, asked=spec.sampling.prompt_logprobs is not None
        )
        self.failure: PdmeshError | None = None
        """What run() ended with."""

    async def run(self) -> None:
        """Until the stream has ended. Raises nothing but CancelledError."""
        try:
            with self._channels.use(self._target.endpoint) as channel:
                await self._relay(prefill_service_pb2_grpc.PrefillServiceStub(channel))
        except PdmeshError as exc:
            if exc.leg is Leg.UNKNOWN:
                exc.leg = Leg.PREFILL
            exc.peer_incarnation = exc.peer_incarnation or self._target.incarnation
            self.failure = exc
            self._handle.send(frames.LegFailed(session=self._handle.session, error=to_error_info(exc)))
        except Exception:  # a bug of ours: the session must not wait for a leg that is gone
            self.failure = InternalError("the prefill leg broke", leg=Leg.PREFILL)
            self._handle.send(frames.LegFailed(session=self._handle.session, error=to_error_info(self.failure)))
            raise
        finally:
            self.cancel()

    async def send_ticket(self, ticket: Ticket) -> None:
        """Writes the ticket. A stream that is over says so in run(); here that is no error."""
        if self._call is None or self._cancelled:
            return
        if await self._call.write(prefill_service_pb2.PrefillRequest(ticket=ticket_to_proto(ticket))):
            await self._call.done_writing()

    def cancel(self) -> None:
        """Ends the stream from this side; a no-op when it has ended."""
        self._cancelled = True
        if self._call is not None:
            self._call.cancel()

    async def _relay(self, stub: Any) -> None:
        spec = self._opened.spec
        self._call = call = Duplex(
            stub.Prefill(timeout=seconds_left(spec.deadline, Leg.PREFILL), metadata=self._metadata)
        )
        request = prefill_service_pb2.OpenPrefill(
            request=spec_to_proto(spec, self._identity.fingerprint),
            prefill_incarnation=self._target.incarnation,
            decode_incarnation=self._identity.incarnation,
            without_transfer=self._opened.without_transfer,
            link_id=self._opened.link_id,
            link_proof=self._link_proof,
        )
        done = False
        try:
            written = await call.write(prefill_service_pb2.PrefillRequest(open=request))
            if written and self._opened.without_transfer:
                await call.done_writing()
            async for message in call:
                done = self._take(message) or done
        except grpc.aio.AioRpcError as exc:
            raise from_rpc_error(exc, Leg.PREFILL) from exc
        if not done:
            raise PeerFailedError("prefill ended its stream before it was done", leg=Leg.PREFILL)

    def _take(self, message: prefill_service_pb2.PrefillResponse) -> bool:
        """Relays one message; True when nothing more has to come."""
        session = self._handle.session
        match message.WhichOneof("message"):
            case "started":
                self._handle.send(frames.LegStarted(session=session))
            case "first_token":
                token = message.first_token
                self._prompt.tokens_begin()
                self._handle.send(
                    frames.LegToken(
                        session=session,
                        token_id=token.token_id,
                        cached_tokens=token.cached_tokens,
                        timings=timings_from_proto(token.timings),
                        logprobs=self._logprobs(token),
                    )
                )
                return self._opened.without_transfer
            case "prompt_logprobs":
                self._scores(message.prompt_logprobs)
            case "delivered":
                done = message.delivered
                self._handle.send(
                    frames.LegDelivered(
                        session=session,
                        shards=shard_counts_from_proto(list(done.shards), "delivered.shards"),
                        timings=timings_from_proto(done.timings),
                    )
                )
                return True
            case other:
                raise InternalError(f"prefill sent a message of unknown kind {other}", leg=Leg.PREFILL)
        return False

    def _logprobs(self, token: prefill_service_pb2.FirstToken) -> TokenLogprobs | None:
        asked = self._sampling.logprobs
        if token.HasField("logprobs") != (asked is not None):
            wrong = "without" if asked is not None else "with"
            raise InternalError(f"prefill sent its token {wrong} log probabilities", leg=Leg.PREFILL, reason="LOGPROBS")
        return None if asked is None else logprobs_from_proto(token.logprobs, asked, Leg.PREFILL)

    def _scores(self, scores: prefill_service_pb2.PromptLogprobs) -> None:
        self._prompt.take(scores.first_position, len(scores.positions))
        most = self._sampling.prompt_logprobs or 0
        positions = tuple(logprobs_from_proto(position, most, Leg.PREFILL) for position in scores.positions)
        self._handle.give(frames.PromptLogprobs(self._handle.session, scores.first_position, positions))
