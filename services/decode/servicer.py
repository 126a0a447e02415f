"""DecodeService: one stream per session; the engine decides, this file relays.

The life of a stream:

    request        incarnation, fingerprint, ranges and attempt are checked
    peer, link     the prefill worker is looked up in the watched rank table (awaited for 1 s: it may have
                   registered a moment ago); the pair's link is there or is negotiated
    Open           to the engine, which queues, and says OpenLeg once the prompt may be computed
    OpenLeg        the prefill leg runs beside; SendTicket goes out on its stream
    PromptLogprobs from the engine that computed the prompt: this one's, or by the leg; before the first token
    Outputs        one message per step, or one for all that waited for a slow reader
    the end        finish: OK; error: its status; a cancel: both legs end

EndSession is queued exactly once for each session that was opened, before anything is awaited.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from engine_core.host import frames
from engine_core.types.errors import DeadlineError, InternalError, InvalidRequestError, Leg, PdmeshError
from engine_core.types.request import GenerateSpec, Role
from pdmesh.common.v1 import identity_pb2
from pdmesh.decode.v1 import decode_service_pb2, decode_service_pb2_grpc
from services.decode.peers import PrefillPeers
from services.decode.prefill_leg import PrefillLeg
from services.decode.replies import output_messages, prompt_messages
from services.runtime.channels import ChannelPool
from services.runtime.errors import from_error_info
from services.runtime.tasks import TaskOwner
from services.wire.bootstrap import RankRow
from services.wire.common import MAX_ENDPOINT, checked_text
from services.wire.generation import monotonic_deadline, seconds_left, spec_from_proto
from services.wire.logprobs import PromptPositions
from services.worker.engine_client import EngineClient
from services.worker.identity import WorkerIdentity
from services.worker.links import DecodeLinks
from services.worker.observed import Metadata, SessionObserver
from services.worker.session_handle import SessionHandle
from services.worker.sessions import SessionTable

DEADLINE_GRACE = 1.0
"""The engine ends a session at its deadline; the stream waits this much longer for its word."""

LAST_WORD_SECONDS = 0.5
"""Seconds that a prefill worker's service process has to say why the link to its engine broke."""

_OF_A_BROKEN_LINK = frozenset({"LINK_DOWN", "PUSH_FAILED"})

_Context = grpc.aio.ServicerContext[decode_service_pb2.GenerateRequest, decode_service_pb2.GenerateResponse]


class DecodeServicer(decode_service_pb2_grpc.DecodeServiceServicer):
    """Serves Generate, for DECODE and MIXED instances. `peers` and `links` are None on a MIXED one."""

    def __init__(
        self,
        engine: EngineClient,
        identity: WorkerIdentity,
        sessions: SessionTable,
        tasks: TaskOwner,
        channels: ChannelPool,
        *,
        peers: PrefillPeers | None,
        links: DecodeLinks | None,
        token_stall_timeout: float = 30.0,
        observer: SessionObserver | None = None,
    ) -> None:
        self._engine, self._identity, self._sessions = engine, identity, sessions
        self._tasks, self._channels = tasks, channels
        self._peers, self._links = peers, links
        self._stall = token_stall_timeout
        self._observer = observer or SessionObserver()

    async def Generate(self, request: decode_service_pb2.GenerateRequest, context: _Context) -> None:
        """Runs one session. Raises PdmeshError."""
        self._identity.check_incarnation(request.decode_incarnation)
        self._identity.check_fingerprint(request.request.fingerprint)
        spec = spec_from_proto(request.request, monotonic_deadline(context.time_remaining()))
        self._check_role(request)
        with self._observer.session(spec, context) as metadata, self._sessions.enter(spec.session):
            target: RankRow | None = None
            frame = frames.Open(spec=spec, remote=False)
            if request.HasField("prefill"):
                target = await self._find(request.prefill)
                frame = await self._remote(spec, target)
            await self._run(frame, target, context, metadata)

    def _check_role(self, request: decode_service_pb2.GenerateRequest) -> None:
        if self._identity.role is Role.MIXED and request.HasField("prefill"):
            raise InvalidRequestError("a MIXED instance computes prompts itself", leg=Leg.DECODE, field="prefill")
        if self._identity.role is Role.DECODE and not request.HasField("prefill"):
            raise InvalidRequestError("a DECODE instance needs a prefill worker", leg=Leg.DECODE, field="prefill")

    async def _find(self, peer: identity_pb2.PeerRef) -> RankRow:
        assert self._peers is not None
        endpoint = checked_text(peer.endpoint, "prefill.endpoint", MAX_ENDPOINT)
        return await self._peers.find(endpoint, peer.incarnation)

    async def _remote(self, spec: GenerateSpec, target: RankRow) -> frames.Open:
        """What to open for a prompt that prefill computes. One token needs no KV here, and no link."""
        assert self._links is not None
        if spec.sampling.max_tokens - len(spec.emitted_token_ids) == 1:
            return frames.Open(spec=spec, remote=True, without_transfer=True)
        try:
            async with asyncio.timeout(seconds_left(spec.deadline, Leg.TRANSFER)):
                link_id = await self._links.ensure(target)
        except TimeoutError:
            raise DeadlineError("the deadline passed before the link was up", leg=Leg.TRANSFER) from None
        return frames.Open(spec=spec, remote=True, link_id=link_id)

    async def _run(self, opened: frames.Open, target: RankRow | None, context: _Context, metadata: Metadata) -> None:
        """Opens the engine session and relays until it has ended, with its leg."""
        handle = self._engine.open(opened)
        leg = None
        if target is not None:
            proof = self._links.proof(target, opened.link_id, handle.session) if self._links and opened.link_id else b""
            leg = PrefillLeg(opened, handle, self._identity, target, self._channels, proof, metadata)
        session = _Relay(handle, opened.spec, leg, self._tasks, self._stall, self._engine)
        reason = "stream closed"
        try:
            await session.relay(context)
            reason = "finished"
        except Exception as exc:
            reason = str(exc) or type(exc).__name__
            raise
        finally:
            handle.end(reason)
            await session.close()


class _Relay:
    """The state of one stream between engine and caller."""

    def __init__(
        self,
        handle: SessionHandle,
        spec: GenerateSpec,
        leg: PrefillLeg | None,
        tasks: TaskOwner,
        stall: float,
        engine: EngineClient,
    ) -> None:
        self._handle, self._spec, self._leg = handle, spec, leg
        self._tasks, self._stall, self._engine = tasks, stall, engine
        self._leg_task: asyncio.Task[None] | None = None
        self._first_index = self._next_index = len(spec.emitted_token_ids)
        self._decoding = False
        sampling = spec.sampling
        self._wants_logprobs = sampling.logprobs is not None
        self._prompt = PromptPositions(
            len(spec.prompt_token_ids), Leg.DECODE, asked=sampling.prompt_logprobs is not None
        )

    async def relay(self, context: _Context) -> None:
        """Returns after the output's finish. Raises the engine's error, InternalError on a gap or overlap,
        DeadlineError when the deadline passes, or when neither a token comes nor the engine steps."""
        while True:
            item = await self._next()
            match item:
                case frames.SessionOutput():
                    if await self._output(item, context):
                        return
                case frames.PromptLogprobs():
                    self._prompt.take(item.first_position, len(item.positions))
                    for message in prompt_messages(item):
                        await context.write(message)
                case frames.OpenLeg() if self._leg is not None and self._leg_task is None:
                    self._leg_task = self._tasks.spawn(self._leg.run(), f"leg {self._handle.session}")
                case frames.SendTicket() if self._leg is not None:
                    await self._leg.send_ticket(item.ticket)
                case _:
                    raise InternalError(f"engine sent {type(item).__name__} out of turn", leg=Leg.DECODE)

    async def _next(self) -> Any:
        while True:
            left = seconds_left(self._spec.deadline + DEADLINE_GRACE, Leg.DECODE)
            stalls_first = self._decoding and self._stall < left
            before = self._engine.progress
            try:
                async with asyncio.timeout(self._stall if stalls_first else left):
                    return await self._handle.next()
            except TimeoutError:
                if not stalls_first:
                    raise DeadlineError("the deadline passed", leg=Leg.DECODE) from None
            # An engine that steps for others serves this one later: preempted sessions wait for blocks.
            if self._engine.progress == before:
                raise DeadlineError(
                    f"no token for {self._stall:g} s", leg=Leg.DECODE, reason="TOKEN_STALL", retryable=True
                )

    async def _output(self, output: frames.SessionOutput, context: _Context) -> bool:
        """Writes what is new; True when it was the last."""
        if output.token_ids:
            if output.first_index != self._next_index:
                kind = "gap" if output.first_index > self._next_index else "overlap"
                raise InternalError(
                    f"{kind} in the output: token {output.first_index} came where {self._next_index} was due",
                    leg=Leg.DECODE,
                    reason="OUTPUT_GAP",
                )
            self._prompt.tokens_begin()
            if len(output.logprobs) != (len(output.token_ids) if self._wants_logprobs else 0):
                raise InternalError(
                    f"{len(output.logprobs)} log probabilities came with {len(output.token_ids)} tokens",
                    leg=Leg.DECODE,
                    reason="LOGPROBS",
                )
            self._next_index += len(output.token_ids)
            # Token 1 may be prefill's; whoever has it may still wait for KV or a place in the batch.
            self._decoding = self._next_index > self._first_index + 1
        for message in output_messages(output):
            await context.write(message)
        if output.error is not None:
            raise await self._why(from_error_info(output.error))
        return output.finish is not None

    async def _why(self, error: PdmeshError) -> PdmeshError:
        """A link that breaks is mostly a worker that died: its service process then says how, a moment later."""
        if error.reason not in _OF_A_BROKEN_LINK or self._leg is None or self._leg_task is None:
            return error
        await asyncio.wait({self._leg_task}, timeout=LAST_WORD_SECONDS)
        return self._leg.failure or error

    async def close(self) -> None:
        """Ends the leg: its stream is cancelled first, so that prefill aborts at once. Awaited with a limit."""
        if self._leg is None or self._leg_task is None:
            return
        self._leg.cancel()
        self._leg_task.cancel()
        await asyncio.wait({self._leg_task}, timeout=5.0)
