"""The service processes' relays: streams on one side, frames on the other. They own no state of a session
but its streams; EndSession is queued in what would be the stream's `finally`."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from engine_core.host import frames
from engine_core.types.errors import FencedError, Leg, PeerFailedError
from engine_core.types.ids import Incarnation, SessionId
from engine_core.types.request import GenerateSpec
from tests.support.explorer.symbols import Violation
from tests.support.explorer.wires import CANCELLED, OK, UNAVAILABLE, Call

if TYPE_CHECKING:
    from tests.support.explorer.engines import EngineProcess
    from tests.support.explorer.world import World

CONNECT_TIMEOUT = 2.0


class Generate(msgspec.Struct, frozen=True):
    """Opens a Generate call; `prefill` is (slot, incarnation) or None."""

    spec: GenerateSpec
    incarnation: Incarnation
    prefill: tuple[int, Incarnation] | None


class OpenLegCall(msgspec.Struct, frozen=True):
    """Opens a Prefill call."""

    spec: GenerateSpec
    incarnation: Incarnation
    link_id: int
    without_transfer: bool


class Negotiate(msgspec.Struct, frozen=True):
    """Asks prefill for a link to this decode incarnation."""

    decode: Incarnation
    prefill: Incarnation


def refusal(kind: str, message: str, leg: Leg, *, retryable: bool = True) -> frames.ErrorInfo:
    """An error that the service itself gives."""
    return frames.ErrorInfo(kind=kind, message=message, leg=leg.value, retryable=retryable)


def fenced(leg: Leg) -> frames.ErrorInfo:
    """Another incarnation was meant, or an old attempt."""
    return refusal(FencedError.__name__, "another incarnation or attempt is meant", leg)


class Shell:
    """A service process with its engine process. Either one's death ends the other."""

    def __init__(self, world: World, engine: EngineProcess) -> None:
        self.world, self.engine = world, engine
        self.incarnation = engine.incarnation
        self.frames_in: deque[Any] = deque()
        self.alive, self.stopped = True, False
        self.streams: dict[SessionId, Call] = {}
        self.newest: dict[int, int] = {}
        engine.shell = self

    @property
    def running(self) -> bool:
        """Alive and not stopped."""
        return self.alive and not self.stopped

    def send(self, frame: Any) -> None:
        """Queues a frame to the engine."""
        if self.engine.alive:
            self.engine.frames_in.append(self.world.through_wire(frame, to_engine=True))

    def take_frame(self) -> None:
        """Handles the next frame of the engine."""
        self.on_frame(self.frames_in.popleft())

    def on_frame(self, frame: Any) -> None:
        """Handles a frame."""
        raise NotImplementedError

    def enter(self, call: Call, session: SessionId) -> bool:
        """Fences attempts: a lower or equal one than seen is refused, a higher one aborts the lower."""
        seen = self.newest.get(session.room, -1)
        if session.attempt <= seen:
            return False
        self.newest[session.room] = session.attempt
        lower = self.streams.get(SessionId(session.room, seen))
        if lower is not None:
            self.close(SessionId(session.room, seen), UNAVAILABLE, fenced(Leg.UNKNOWN))
        self.streams[session] = call
        return True

    def close(self, session: SessionId, status: str, detail: Any = None) -> None:
        """Ends a session's stream, and so the session."""
        raise NotImplementedError

    def die(self) -> None:
        """kill -9."""
        self.alive = False
        self.frames_in.clear()
        self.streams.clear()
        for call in self.world.calls:
            call.drop_side(self)


class DecodeShell(Shell):
    """Relays Generate calls, opens legs, negotiates links."""

    def __init__(self, world: World, engine: EngineProcess) -> None:
        super().__init__(world, engine)
        self.requests: dict[SessionId, Generate] = {}
        self.legs: dict[SessionId, Call] = {}
        self.link_of: dict[SessionId, int] = {}
        self.without_transfer: dict[SessionId, bool] = {}
        self.links: dict[Incarnation, int] = {}
        self.up: set[int] = set()
        self.down: set[int] = set()
        self.waiting: dict[Incarnation, list[SessionId]] = {}
        self.negotiations: dict[Incarnation, Call] = {}
        self.timeouts: dict[Incarnation, float] = {}

    # ---- Generate, server side ----

    def on_message(self, call: Call, message: Any) -> None:
        """A message of a Generate call (server), or of a leg or negotiation (client)."""
        if isinstance(message, Generate):
            self._generate(call, message)
        else:
            self._leg_message(call, message)

    def _generate(self, call: Call, message: Generate) -> None:
        session = message.spec.session
        call.state = session
        if message.incarnation != self.incarnation or not self.enter(call, session):
            call.finish(UNAVAILABLE, fenced(Leg.DECODE))
            return
        self.requests[session] = message
        if message.prefill is None:
            self._open(session, 0)
            return
        link = self.links.get(message.prefill[1])
        if self._without_transfer(session):
            self._open(session, 0)
        elif link is not None and link in self.up:
            self._open(session, link)
        else:
            self._negotiate(session, message.prefill)

    def _without_transfer(self, session: SessionId) -> bool:
        known = self.without_transfer.get(session)
        if known is None:
            spec = self.requests[session].spec
            spec = self.requests[session].spec
            left = spec.sampling.max_tokens - len(spec.emitted_token_ids)
            only_one = left == 1 and self.requests[session].prefill is not None
            known = self.without_transfer[session] = only_one and self.world.rng.random() < 0.6
        return known

    def _open(self, session: SessionId, link_id: int) -> None:
        request = self.requests[session]
        self.link_of[session] = link_id
        self.send(frames.Open(request.spec, request.prefill is not None, link_id, self._without_transfer(session)))

    def on_end(self, call: Call, status: str, detail: Any) -> None:
        """A call is over."""
        if isinstance(call.state, SessionId):
            if self.streams.get(call.state) is call:
                self.close(call.state, CANCELLED)
        elif isinstance(call.state, tuple) and call.state[0] == "leg":
            self._leg_end(call, status, detail)
        elif isinstance(call.state, tuple) and self.negotiations.get(call.state[1]) is call:
            self._negotiated(call.state[1], None, detail or status)

    def close(self, session: SessionId, status: str, detail: Any = None) -> None:
        """Ends the session's stream; leg and engine follow."""
        call = self.streams.pop(session)
        call.finish(status, detail)
        leg = self.legs.pop(session, None)
        if leg is not None:
            leg.cancel()
        for sessions in self.waiting.values():
            if session in sessions:
                sessions.remove(session)
        if session in self.link_of:
            del self.link_of[session]
            self.send(frames.EndSession(session))
        self.without_transfer.pop(session, None)
        del self.requests[session]

    # ---- links ----

    def _negotiate(self, session: SessionId, prefill: tuple[int, Incarnation]) -> None:
        slot, incarnation = prefill
        self.waiting.setdefault(incarnation, []).append(session)
        if incarnation in self.negotiations or incarnation in self.links:
            return  # asked for, or open at the other end and not yet at this one
        call = self.world.call(f"negotiate {self.engine.instance}", self, self.world.prefill_at(slot), self)
        call.state = ("negotiate", incarnation)
        self.negotiations[incarnation] = call
        self.timeouts[incarnation] = self.world.clock.now + CONNECT_TIMEOUT
        call.write(Negotiate(self.incarnation, incarnation))

    def _negotiated(self, peer: Incarnation, link_id: int | None, why: Any) -> None:
        self.negotiations.pop(peer, None)
        if link_id is not None and link_id not in self.down:
            self.links[peer] = link_id
            if link_id in self.up:
                self._link_usable(peer, link_id)
            return
        self._link_unusable(peer, why)

    def _link_usable(self, peer: Incarnation, link_id: int) -> None:
        self.timeouts.pop(peer, None)
        for session in self.waiting.pop(peer, []):
            self._open(session, link_id)

    def _link_unusable(self, peer: Incarnation, why: Any) -> None:
        self.timeouts.pop(peer, None)
        self.links.pop(peer, None)
        error = refusal(PeerFailedError.__name__, f"no link: {why}", Leg.PREFILL)
        for session in list(self.waiting.pop(peer, [])):
            self.close(session, UNAVAILABLE, error)

    def expire(self) -> None:
        """Gives up on negotiations that take too long."""
        for peer, when in list(self.timeouts.items()):
            if when <= self.world.clock.now:
                call = self.negotiations.pop(peer, None)
                if call is not None:
                    call.cancel()
                self._link_unusable(peer, "timeout")

    # ---- the leg, client side ----

    def _leg_message(self, call: Call, message: Any) -> None:
        if call.state[0] == "negotiate":
            if self.negotiations.get(call.state[1]) is call:
                self._negotiated(call.state[1], message, "")
            return
        session = call.state[1]
        if self.legs.get(session) is not call:
            return
        match message:
            case frames.Started():
                self.send(frames.LegStarted(session))
            case frames.FirstToken():
                self.send(
                    frames.LegToken(session, message.token_id, message.cached_tokens, message.timings, message.logprobs)
                )
            case frames.PromptLogprobs():
                self._scores(message)
            case frames.Delivered():
                self.send(frames.LegDelivered(session, message.shards, message.timings))

    def _leg_end(self, call: Call, status: str, detail: Any) -> None:
        session = call.state[1]
        if self.legs.get(session) is not call:
            return
        del self.legs[session]
        if status != OK:
            error = detail or refusal(PeerFailedError.__name__, f"the prefill stream ended: {status}", Leg.PREFILL)
            self.send(frames.LegFailed(session, error))

    # ---- frames of the engine ----

    def on_frame(self, frame: Any) -> None:
        """Relays a frame."""
        match frame:
            case frames.Outputs():
                for output in frame.outputs:
                    self._output(output)
            case frames.PromptLogprobs():
                self._scores(frame)
            case frames.OpenLeg():
                self._open_leg(frame.session)
            case frames.SendTicket():
                leg = self.legs.get(frame.session)
                if leg is not None:
                    leg.write(frame.ticket)
            case frames.LinkUp():
                self.up.add(frame.link_id)
                if self.links.get(frame.peer_incarnation) == frame.link_id:
                    self._link_usable(frame.peer_incarnation, frame.link_id)
            case frames.LinkDown():
                self.up.discard(frame.link_id)
                self.down.add(frame.link_id)
                if self.links.get(frame.peer_incarnation) == frame.link_id:
                    self._link_unusable(frame.peer_incarnation, frame.reason)
            case frames.Stats() | frames.Moves():
                pass
            case _:
                raise Violation(f"decode's service got {frame}")

    def _output(self, output: frames.SessionOutput) -> None:
        call = self.streams.get(output.session)
        if call is None:
            return
        if output.token_ids or output.finish is not None:
            call.reply(output)
        if output.error is not None:
            self.close(output.session, UNAVAILABLE, output.error)
        elif output.finish is not None:
            self.close(output.session, OK)

    def _scores(self, scores: frames.PromptLogprobs) -> None:
        """The engine's own, or the leg's, past the engine."""
        call = self.streams.get(scores.session)
        if call is not None:
            call.reply(scores)

    def _open_leg(self, session: SessionId) -> None:
        request = self.requests.get(session)
        if request is None:
            return
        assert request.prefill is not None
        if session in self.legs:
            raise Violation(f"a second leg for {session}")
        slot, incarnation = request.prefill
        leg = self.world.call(f"leg {session}", self, self.world.prefill_at(slot), self)
        leg.state = ("leg", session)
        self.legs[session] = leg
        leg.write(OpenLegCall(request.spec, incarnation, self.link_of[session], self._without_transfer(session)))

    def die(self) -> None:
        """kill -9."""
        super().die()
        self.legs.clear()
        self.timeouts.clear()


class PrefillShell(Shell):
    """Relays Prefill calls, opens links when asked."""

    def __init__(self, world: World, engine: EngineProcess) -> None:
        super().__init__(world, engine)
        self.connecting: dict[int, Call] = {}
        self.up: dict[Incarnation, int] = {}

    def on_message(self, call: Call, message: Any) -> None:
        """A message of a Prefill or NegotiateLayout call."""
        if isinstance(message, Negotiate):
            self._negotiate(call, message)
        elif isinstance(message, OpenLegCall):
            session = message.spec.session
            if message.incarnation != self.incarnation or not self.enter(call, session):
                call.finish(UNAVAILABLE, fenced(Leg.PREFILL))
                return
            self.world.server_state[call] = session
            self.send(frames.OpenPrefill(message.spec, message.link_id, message.without_transfer))
        else:
            owner = self.world.server_state.get(call)
            if owner is not None and self.streams.get(owner) is call:
                self.send(frames.TicketArrived(owner, message))

    def _negotiate(self, call: Call, message: Negotiate) -> None:
        if message.prefill != self.incarnation:
            call.finish(UNAVAILABLE, fenced(Leg.PREFILL))
            return
        known = self.up.get(message.decode)
        if known is not None:  # it may have ended without this end knowing
            call.reply(known)
            call.finish(OK)
            return
        link_id = self.world.new_link_id()
        self.connecting[link_id] = call
        peer = self.world.engine_of(message.decode)
        layout = peer.layout if peer is not None else self.engine.layout
        self.send(frames.ConnectLink(link_id, message.decode, "decode", layout, ()))

    def on_end(self, call: Call, status: str, detail: Any) -> None:
        """The caller went away."""
        session = self.world.server_state.get(call)
        if session is not None and self.streams.get(session) is call:
            self.close(session, CANCELLED)

    def close(self, session: SessionId, status: str, detail: Any = None) -> None:
        """Ends the session's stream, and so the session."""
        call = self.streams.pop(session)
        self.world.server_state.pop(call, None)
        call.finish(status, detail)
        self.send(frames.EndSession(session))

    def on_frame(self, frame: Any) -> None:
        """Relays a frame."""
        match frame:
            case frames.LinkUp():
                self.up[frame.peer_incarnation] = frame.link_id
                call = self.connecting.pop(frame.link_id, None)
                if call is not None:
                    call.reply(frame.link_id)
                    call.finish(OK)
            case frames.LinkDown():
                if self.up.get(frame.peer_incarnation) == frame.link_id:
                    del self.up[frame.peer_incarnation]
                call = self.connecting.pop(frame.link_id, None)
                if call is not None:
                    call.finish(UNAVAILABLE, frame.reason)
            case frames.Stats() | frames.Moves():
                pass
            case _:
                self._session_frame(frame)

    def _session_frame(self, frame: Any) -> None:
        call = self.streams.get(frame.session)
        if call is None:
            return
        match frame:
            case frames.Started() | frames.PromptLogprobs() | frames.FirstToken():
                call.reply(frame)
            case frames.Delivered():
                call.reply(frame)
                self.close(frame.session, OK)
            case frames.SessionFailed():
                self.close(frame.session, UNAVAILABLE, frame.error)
            case _:
                raise Violation(f"prefill's service got {frame}")
