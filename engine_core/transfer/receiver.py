"""The accepting end of links: callers that still have to greet, and links that are up.

    accepted ─▶ Caller ── proofs, Hello, Welcome, Ready ──▶ InboundLink ── end of file ──▶ gone
                  └─ garbage, refusal, 2 s without a greeting ─▶ closed, nobody hears of it

All of it runs in the manager's loop and never blocks. What a link reads goes into the pool only inside
blocks that its session was granted; anything else is read into a sink, and the link lives on.
"""

from __future__ import annotations

import array
import contextlib
import logging
import socket
import time
from collections.abc import Callable

import numpy as np

from engine_core.transfer.base import PostEvent, QuietReceived
from engine_core.transfer.grants import Grant
from engine_core.transfer.handshake import (
    ACCEPTED,
    CLAIM_BYTES,
    NO_PROOF,
    NOT_EXPECTED,
    NOT_THIS_LIFE,
    REASONS,
    Challenger,
    Claim,
    Refusal,
    verdict,
)
from engine_core.transfer.outgoing import IOV_MAX
from engine_core.transfer.recent import Recent
from engine_core.transfer.transport import CONNECT_SECONDS, PoolRegion, Transport, TransportContext
from engine_core.transfer.wire import (
    VERSION,
    Abort,
    Close,
    Data,
    EndOfLink,
    FrameReader,
    Hello,
    Message,
    ProtocolError,
    Quiet,
    Ready,
    Received,
    Refused,
    Welcome,
    encode,
)
from engine_core.types.ids import Incarnation, SessionId
from engine_core.types.kv import KvLayout

log = logging.getLogger(__name__)

_EXPECT_SECONDS = 0.75 * CONNECT_SECONDS
_READS_PER_TURN = 64
_SINK_BYTES = 256 << 10
_WAKE_BYTES = 1 << 20
_MAX_UNSENT = 8 << 20
_MAX_FRAME_BYTES = 1 << 30
_MAX_GRANTS = 8192


class Caller:
    """A connection that has not greeted yet. `ready` is set when its link is to be opened.

    Nothing of it is read but one claim of fixed length, until that is proved (handshake.py). A claim of a peer whose
    link is not expected yet waits for that: go_on() looks again.
    """

    def __init__(
        self, sock: socket.socket, transport: Transport, context: TransportContext, taken: Callable[[int], bool]
    ) -> None:
        """Sends the challenge. Raises OSError."""
        self.sock, self.transport, self.reader = sock, transport, FrameReader(sock)
        self.deadline = time.monotonic() + CONNECT_SECONDS
        self.claim: Claim | None = None
        self.hello: Hello | None = None
        self.ready: Ready | None = None
        self.refusal = ""
        """Why the connection is to be closed, where the other end is told."""
        self._context, self._taken = context, taken
        self._challenger = Challenger()
        self._claim_bytes = bytearray()
        self._proved = self._waits = False
        sock.sendall(self._challenger.challenge())  # fits the empty buffer of a new socket

    def on_readable(self) -> bool:
        """Goes on with the handshake; False when the connection is to be closed."""
        try:
            if self._waits:
                raise EndOfLink("it did not wait for the answer")  # more bytes, or the end: nothing that a peer sends
            if not self._proved and not self._read_claim():
                return True
            return self.go_on()
        except (EndOfLink, ProtocolError, Refusal, OSError) as exc:
            log.debug("%s: a caller is let go: %s", self.transport.name, exc)
            return False

    def go_on(self) -> bool:
        """As on_readable, without reading a claim."""
        try:
            if not self._proved and not self._judge():
                return not self.refusal
            while self.ready is None and (message := self.reader.read()) is not None:
                if not self._take(message):
                    return False
        except (EndOfLink, ProtocolError, Refusal, OSError) as exc:
            log.debug("%s: a caller is let go: %s", self.transport.name, exc)
            return False
        return True

    def give_up(self) -> None:
        """Its time is over; says why when it waited to be expected."""
        if self.claim is not None and not self._proved and not self.refusal:
            self._refuse(NOT_EXPECTED)

    def _read_claim(self) -> bool:
        """True once the claim is here, all of it and nothing more."""
        try:
            while (left := CLAIM_BYTES - len(self._claim_bytes)) > 0:
                data = self.sock.recv(left)
                if not data:
                    raise EndOfLink("the peer closed the connection")
                self._claim_bytes += data
        except BlockingIOError:
            return False
        return True

    def _judge(self) -> bool:
        """True when the claim is proved. False while its peer is not expected, and once it is refused."""
        if len(self._claim_bytes) < CLAIM_BYTES or self.refusal:
            return False
        claim, nonce, proof = self._challenger.read(self._claim_bytes)
        self.claim = claim
        if claim.peer_incarnation != self._context.incarnation:
            self._refuse(NOT_THIS_LIFE)
            return False
        pair = self._context.secrets.of(claim.incarnation)
        self._waits = pair is None
        if pair is None:
            # Ends before the caller's own patience, so that it hears why.
            self.deadline = min(self.deadline, time.monotonic() + _EXPECT_SECONDS)
            return False
        answer = self._challenger.judge(claim, nonce, proof, self._context.secrets.keys(pair))
        if answer is None:
            self._refuse(NO_PROOF)
            return False
        self.sock.sendall(verdict(ACCEPTED, answer))
        self._proved = True
        return True

    def _refuse(self, code: int) -> None:
        self.refusal = REASONS[code]
        with contextlib.suppress(OSError):
            self.sock.sendall(verdict(code))

    def _take(self, message: Message) -> bool:
        if self.hello is not None:
            self.ready = message if isinstance(message, Ready) else None
            return self.ready is not None
        if not isinstance(message, Hello):
            return False
        refusal = self._refusal(message)
        if refusal:
            log.warning("%s: refused a link of %r: %s", self.transport.name, message.instance[:200], refusal)
            self.sock.send(encode(Refused(refusal)))
            return False
        self.hello = message
        welcome, fds = encode(Welcome(self._context.region.nbytes)), self.transport.passed_fds()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.sock.sendmsg([welcome], rights)
        return True

    def _refusal(self, hello: Hello) -> str:
        if hello.version != VERSION:
            return f"protocol version {hello.version}, not {VERSION}"
        if hello.transport != self.transport.name:
            return f"this is a {self.transport.name} socket"
        if Claim(hello.link_id, hello.incarnation, hello.peer_incarnation) != self.claim:
            return "it greets as another than it proved to be"
        if self._taken(hello.link_id):
            return f"link {hello.link_id:x} exists or existed"
        return self.transport.refusal(hello)


class _Payload:
    """The raw bytes of a Data message, on their way into the pool or the sink."""

    def __init__(self, data: Data, views: list[memoryview] | None, sink: memoryview) -> None:
        self.data, self.left = data, data.nbytes
        self.landed = 0
        self._views, self._sink, self._at = views, sink, 0

    def divert(self) -> None:
        """The rest goes to the sink."""
        self._views = None

    def receive(self, sock: socket.socket) -> None:
        """One read. Raises BlockingIOError, EndOfLink."""
        try:
            if self._views is None:
                got = sock.recv_into(self._sink, min(self.left, len(self._sink)))
            else:
                got = sock.recvmsg_into(self._views[self._at : self._at + IOV_MAX])[0]
        except BlockingIOError:
            raise
        except OSError as exc:
            raise EndOfLink(exc.strerror or str(exc)) from exc
        if not got:
            raise EndOfLink("the peer closed the connection")
        self.left -= got
        if self._views is None:
            return
        self.landed += got
        while self._at < len(self._views) and got >= len(self._views[self._at]):
            got -= len(self._views[self._at])
            self._at += 1
        if got:
            self._views[self._at] = self._views[self._at][got:]


class InboundLink:
    """A link on which a peer writes into this process's pool."""

    def __init__(
        self, caller: Caller, hello: Hello, reason: str, region: PoolRegion, layout: KvLayout, post: PostEvent
    ) -> None:
        self.sock, self.transport, self.hello, self.reason = caller.sock, caller.transport, hello, reason
        self.link_id, self.peer_incarnation = hello.link_id, Incarnation(hello.incarnation)
        self.bytes, self.failures = 0, 0
        self.closed = False
        self._reader, self._region, self._layout, self._post = caller.reader, region, layout, post
        self._takes_data = caller.transport.local_quiet
        self._muted = ""
        self._grants: Recent[SessionId, Grant] = Recent(_MAX_GRANTS)
        self._landed: dict[tuple[SessionId, int], int] = {}
        self._payload: _Payload | None = None
        self._sink = memoryview(bytearray(_SINK_BYTES))
        self._unsent = bytearray()
        self._low_water = 1

    # ---- commands -----------------------------------------------------------------------------------

    def prepare(self, session: SessionId, block_ids: tuple[tuple[int, ...], ...]) -> None:
        """Lets the session write. Blocks that are not in the pool are not granted."""
        if not self._takes_data:
            return
        try:
            self._grants[session] = Grant(self._layout, block_ids)
        except ValueError as exc:
            log.error("link %x: session %s is granted nothing: %s", self.link_id, session, exc)

    def drop(self, session: SessionId) -> bool:
        """Nothing more of the session reaches the pool through this process. True when that proves quiet."""
        self._grants.pop(session)
        self._landed = {key: n for key, n in self._landed.items() if key[0] != session}
        if self._payload is not None and self._payload.data.session == session:
            self._payload.divert()
        return self._takes_data

    def abort(self, session: SessionId) -> None:
        """Asks the writer to stop."""
        self._send(Abort(session))

    def ask_to_close(self) -> None:
        """Asks the writer to unmap and hang up."""
        self._send(Close())

    # ---- the socket ---------------------------------------------------------------------------------

    @property
    def wants_write(self) -> bool:
        """There are bytes that the socket did not take yet."""
        return bool(self._unsent)

    def on_writable(self) -> None:
        """Sends what is left. A broken socket shows when it is read."""
        try:
            while self._unsent:
                sent = self.sock.send(self._unsent, socket.MSG_NOSIGNAL)
                del self._unsent[:sent]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()

    def on_readable(self, between: Callable[[], None]) -> str | None:
        """Reads for a while, with `between` after each read. Returns why the link has ended, None if it hasn't.

        On tcp a peer that makes no sense ends the link; on shm only end-of-file does, for the peer may have
        the pool mapped.
        """
        try:
            for _ in range(_READS_PER_TURN):
                if self._muted:
                    if not self.sock.recv_into(self._sink):
                        raise EndOfLink(self._muted)
                elif self._payload is not None and self._payload.left:
                    self._payload.receive(self.sock)
                    self._wake_after(_WAKE_BYTES if self._payload.left >= _WAKE_BYTES else 1)
                else:
                    message = self._reader.read()
                    if message is None:
                        return None
                    between()  # grants that were given before these bytes were sent
                    if self.closed:
                        return None
                    self._take(message)
                if self._payload is not None and not self._payload.left:
                    self._end_frame(self._payload)
                between()
                if self.closed:
                    return None
        except BlockingIOError:
            return None
        except EndOfLink as exc:
            return str(exc)
        except ProtocolError as exc:
            return self.give_up(f"protocol error: {exc}")
        except OSError as exc:
            return exc.strerror or str(exc)
        return None

    def give_up(self, why: str) -> str | None:
        """What comes can't be understood. Returns as on_readable does."""
        log.error("link %x: %s", self.link_id, why)
        if self._takes_data:
            return why
        self._muted = why
        self.ask_to_close()
        return None

    def _take(self, message: Message) -> None:
        match message:
            case Quiet(session=session):
                self._post(QuietReceived(self.link_id, session))
            case Data() if self._takes_data:
                self._payload = self._begin_frame(message)
            case _:
                raise ProtocolError(f"{type(message).__name__} is nothing that a writer sends")

    def _begin_frame(self, data: Data) -> _Payload:
        if len(data.dst_offset) % 8 or len(data.dst_offset) != len(data.sizes):
            raise ProtocolError("the pieces of a frame can't be read")
        offsets = np.frombuffer(data.dst_offset, "<i8").astype(np.int64)
        sizes = np.frombuffer(data.sizes, "<i8").astype(np.int64)
        total = data.nbytes
        if not 0 <= total <= _MAX_FRAME_BYTES or ((sizes < 0) | (sizes > total)).any() or int(sizes.sum()) != total:
            raise ProtocolError("the pieces of a frame don't make up its bytes")
        grant = self._grants.get(data.session)
        if grant is None or not grant.covers(offsets, sizes):
            if grant is not None:
                self.failures += 1
                log.error("link %x: session %s writes outside its blocks; dropped", self.link_id, data.session)
            return _Payload(data, None, self._sink)
        pool = self._region.buffer
        views = [pool[start : start + n] for start, n in zip(offsets.tolist(), sizes.tolist(), strict=True) if n]
        return _Payload(data, views, self._sink)

    def _wake_after(self, nbytes: int) -> None:
        """In the midst of a long frame, fewer and larger reads cost both ends less. Never more than is to come."""
        if nbytes != self._low_water:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._low_water = nbytes

    def _end_frame(self, payload: _Payload) -> None:
        data, self._payload = payload.data, None
        self.bytes += payload.landed
        key = (data.session, data.push_id)
        landed = self._landed.pop(key, 0) + payload.landed
        if data.last:
            self._send(Received(data.session, data.push_id, landed))
        elif data.session in self._grants:
            self._landed[key] = landed

    def _send(self, message: Message) -> None:
        if len(self._unsent) > _MAX_UNSENT:
            log.error("link %x: the peer reads nothing; a message to it is lost", self.link_id)
            return
        self._unsent += encode(message)
        self.on_writable()
