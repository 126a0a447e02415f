"""What travels on a link's socket, and how it is framed.

A frame is a 4-byte little-endian length and a msgpack message of at most 1 MiB; after a Data message
come its `nbytes` raw bytes. Before all of it both ends prove who they are (handshake.py). Prefill connects:

    prefill ── Hello ──▶ decode      who I am, whom I mean, which link
    prefill ◀─ Welcome ─ decode      (shm: with the pool's memfd by SCM_RIGHTS) or Refused, then the end
    prefill ── Ready ──▶ decode      the nonce fits: the link is up at both ends
    prefill ◀─ Abort, Received, Close ─ decode
    prefill ── Data, Quiet ──▶ decode
"""

from __future__ import annotations

import array
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from engine_core.types.ids import SessionId

VERSION = 1
MAX_MESSAGE_BYTES = 1 << 20

_LENGTH = struct.Struct("<I")


class _Message(msgspec.Struct, frozen=True, array_like=True):
    pass


class Hello(_Message, frozen=True, tag="hello"):
    """Opens a link. `nonce` is the pool's, as the descriptor had it: the secret of a TCP link."""

    version: int
    transport: str
    link_id: int
    incarnation: int
    peer_incarnation: int
    instance: str
    nonce: bytes


class Welcome(_Message, frozen=True, tag="welcome"):
    """The pool's payload bytes; on shm the memfd comes with it."""

    region_bytes: int


class Refused(_Message, frozen=True, tag="refused"):
    """No link, and why. The socket is closed next."""

    reason: str


class Ready(_Message, frozen=True, tag="ready"):
    """The writer is convinced; `reason` says by what."""

    reason: str


class Data(_Message, frozen=True, tag="data"):
    """Raw bytes follow, for these pieces of the destination's region (int64 arrays, little-endian)."""

    session: SessionId
    push_id: int
    last: bool
    nbytes: int
    dst_offset: bytes
    sizes: bytes


class Received(_Message, frozen=True, tag="received"):
    """Bytes of a push that reached the pool, after its last frame."""

    session: SessionId
    push_id: int
    nbytes: int


class Abort(_Message, frozen=True, tag="abort"):
    """Stop writing for the session, and answer Quiet."""

    session: SessionId


class Quiet(_Message, frozen=True, tag="quiet"):
    """Nothing of the session is or will be written."""

    session: SessionId


class Close(_Message, frozen=True, tag="close"):
    """Unmap, then close this socket."""


Message = Hello | Welcome | Refused | Ready | Data | Received | Abort | Quiet | Close

M = TypeVar("M", bound=_Message)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


class ProtocolError(Exception):
    """The other end does not speak this protocol; nothing it says later can be understood."""


class EndOfLink(Exception):
    """The other end closed its socket, or its process ended."""


def encode(message: Message) -> bytes:
    """The whole frame, length and all."""
    body = _encoder.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a {type(message).__name__} of {len(body)} bytes is too long to be sent")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Reads messages from a non-blocking socket, never a byte beyond the message that it returns.

    With `take_fds` it collects descriptors passed along, CLOEXEC, in `fds`; the caller owns them.
    """

    def __init__(self, sock: socket.socket, *, take_fds: bool = False) -> None:
        self._sock, self._take_fds = sock, take_fds
        self._buffer, self._have, self._in_body = bytearray(_LENGTH.size), 0, False
        self.fds: list[int] = []

    def read(self) -> Message | None:
        """The next message; None while it is not all there. Raises EndOfLink, ProtocolError."""
        while True:
            with memoryview(self._buffer) as view:
                try:
                    got = self._receive(view[self._have :])
                except BlockingIOError:
                    return None
                except OSError as exc:
                    raise EndOfLink(exc.strerror or str(exc)) from exc
            if not got:
                raise EndOfLink("the peer closed the connection")
            self._have += got
            if self._have < len(self._buffer):
                continue
            if self._in_body:
                body = self._buffer
                self._expect(_LENGTH.size, in_body=False)
                try:
                    return _decoder.decode(body)
                except msgspec.DecodeError as exc:
                    raise ProtocolError(f"a message can't be read: {exc}") from exc
            (length,) = _LENGTH.unpack(self._buffer)
            if not 0 < length <= MAX_MESSAGE_BYTES:
                raise ProtocolError(f"a message of {length} bytes is announced")
            self._expect(length, in_body=True)

    def stop_taking_fds(self) -> None:
        """From here on a passed descriptor is dropped by the kernel."""
        self._take_fds = False

    def _expect(self, length: int, *, in_body: bool) -> None:
        self._buffer, self._have, self._in_body = bytearray(length), 0, in_body

    def _receive(self, view: memoryview) -> int:
        if not self._take_fds:
            return self._sock.recv_into(view)
        got, control, _, _ = self._sock.recvmsg_into([view], socket.CMSG_SPACE(_LENGTH.size), socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in control:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self.fds.extend(fds)
        return got


def read_within(reader: FrameReader, sock: socket.socket, deadline: float, stopped: Callable[[], bool]) -> Message:
    """Waits for one message until `deadline` (time.monotonic). Raises TimeoutError too; looks at `stopped`."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    while (message := reader.read()) is None:
        left = deadline - time.monotonic()
        if left <= 0 or stopped():
            raise TimeoutError("no answer in time" if left <= 0 else "the link was closed meanwhile")
        poll.poll(min(left, 0.05) * 1000)
    return message


def read_exactly(sock: socket.socket, size: int, deadline: float, stopped: Callable[[], bool]) -> bytearray:
    """As read_within, for bytes that are no message. Raises EndOfLink, TimeoutError, OSError."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    data = bytearray()
    while len(data) < size:
        try:
            got = sock.recv(size - len(data))
        except BlockingIOError:
            left = deadline - time.monotonic()
            if left <= 0 or stopped():
                raise TimeoutError("no answer in time" if left <= 0 else "the link was closed meanwhile") from None
            poll.poll(min(left, 0.05) * 1000)
            continue
        if not got:
            raise EndOfLink("the peer closed the connection")
        data += got
    return data
