"""The sending half of a link's socket, and the greeting: what every writer is built on."""

from __future__ import annotations

import os
import select
import socket
import time

from engine_core.transfer.handshake import CHALLENGE_BYTES, VERDICT_BYTES, Claim, Claimant, Refusal
from engine_core.transfer.transport import CONNECT_SECONDS, STALL_SECONDS, Cancel, ConnectFailed, Dial, LinkBroken
from engine_core.transfer.transport import TransportContext as Context
from engine_core.transfer.wire import (
    VERSION,
    EndOfLink,
    FrameReader,
    Hello,
    ProtocolError,
    Ready,
    Refused,
    Welcome,
    encode,
    read_exactly,
    read_within,
)

IOV_MAX = 1024
"""Buffers per sendmsg or recvmsg_into."""


class Outgoing:
    """Sends whole frames from the push thread on a non-blocking socket."""

    def __init__(self, sock: socket.socket, dial: Dial, *, stall_seconds: float = STALL_SECONDS) -> None:
        self._sock, self._stop, self._interrupt = sock, dial.stop, dial.interrupt
        self._stall_seconds = stall_seconds
        self._poll = select.poll()
        self._poll.register(sock, select.POLLOUT)
        self._poll.register(dial.interrupt.fileno(), select.POLLIN)

    def send(self, buffers: list[memoryview], cancel: Cancel | None = None) -> None:
        """Sends all of it, straight from the buffers. Blocks while the peer takes nothing.

        Raises LinkBroken when the socket fails, when the link is being closed, or when `cancel` is set and
        the frame can't be finished within stall_seconds: the stream would be in pieces otherwise.
        """
        at, give_up = 0, 0.0
        while at < len(buffers):
            if self._stop.is_set():
                raise LinkBroken("the link is being closed")
            if cancel is not None and cancel.is_set():
                give_up = give_up or time.monotonic() + self._stall_seconds
                if time.monotonic() >= give_up:
                    raise LinkBroken(f"the peer did not take the rest of a frame within {self._stall_seconds:g} s")
            try:
                sent = self._sock.sendmsg(buffers[at : at + IOV_MAX], [], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                self._wait(give_up - time.monotonic() if give_up else None)
                continue
            except OSError as exc:
                raise LinkBroken(f"sending failed: {exc.strerror or exc}") from exc
            while at < len(buffers) and sent >= len(buffers[at]):
                sent -= len(buffers[at])
                at += 1
            if sent:
                buffers[at] = buffers[at][sent:]

    def _wait(self, seconds: float | None) -> None:
        events = self._poll.poll(None if seconds is None else max(0.0, seconds) * 1000)
        if any(fd == self._interrupt.fileno() for fd, _ in events):
            self._interrupt.clear()


class Greeting:
    """The connecting end of the handshake. Owns the socket until `accept` returns."""

    def __init__(self, context: Context, dial: Dial, transport: str, *, take_fds: bool) -> None:
        self._context, self._dial, self._transport = context, dial, transport
        self._deadline = time.monotonic() + CONNECT_SECONDS
        self._take_fds = take_fds

    @property
    def seconds_left(self) -> float:
        """Of CONNECT_SECONDS; never 0."""
        return max(0.001, self._deadline - time.monotonic())

    def hello(self, sock: socket.socket) -> tuple[FrameReader, Welcome]:
        """Proves itself, and greets. `reader.fds` are the caller's to close. Raises ConnectFailed; never closes the
        socket."""
        self._prove(sock)
        dial = self._dial
        message = Hello(
            version=VERSION,
            transport=self._transport,
            link_id=dial.link_id,
            incarnation=self._context.incarnation,
            peer_incarnation=dial.peer_incarnation,
            instance=self._context.instance,
            nonce=dial.descriptor.nonce,
        )
        reader = FrameReader(sock, take_fds=self._take_fds)
        try:
            sock.sendall(encode(message))
            answer = read_within(reader, sock, self._deadline, dial.stop.is_set)
        except (OSError, EndOfLink, ProtocolError) as exc:
            close_fds(reader)
            raise ConnectFailed(f"{self._transport}: {exc}") from exc
        if isinstance(answer, Welcome):
            reader.stop_taking_fds()
            return reader, answer
        close_fds(reader)
        why = answer.reason if isinstance(answer, Refused) else f"unexpected {type(answer).__name__}"
        raise ConnectFailed(f"{self._transport}: refused by the peer: {why}")

    def _prove(self, sock: socket.socket) -> None:
        dial, secrets = self._dial, self._context.secrets
        claim = Claim(dial.link_id, self._context.incarnation, dial.peer_incarnation)
        claimant = Claimant(claim, secrets.keys(dial.secret)[0])
        try:
            sock.sendall(claimant.answer(self._exactly(sock, CHALLENGE_BYTES)))
            claimant.check(self._exactly(sock, VERDICT_BYTES))
        except (OSError, EndOfLink, Refusal) as exc:
            raise ConnectFailed(f"{self._transport}: {exc}") from exc

    def _exactly(self, sock: socket.socket, size: int) -> bytearray:
        return read_exactly(sock, size, self._deadline, self._dial.stop.is_set)

    def ready(self, sock: socket.socket, reason: str) -> None:
        """Ends the handshake. Raises ConnectFailed."""
        try:
            sock.sendall(encode(Ready(reason)))
        except OSError as exc:
            raise ConnectFailed(f"{self._transport}: {exc}") from exc


def close_fds(reader: FrameReader) -> None:
    """Closes what was passed along."""
    for fd in reader.fds:
        os.close(fd)
    reader.fds.clear()
