"""The door of a process that accepts links: listening sockets, and callers that have not greeted yet.

Runs in the manager's loop. Whoever sends garbage, is refused, or does not greet within CONNECT_SECONDS is
let go, and nobody else hears of it; whoever greets well is handed over with the socket registered still.
"""

from __future__ import annotations

import functools
import logging
import selectors
import socket
import struct
import time
from collections.abc import Callable, Sequence

from engine_core.transfer.receiver import Caller
from engine_core.transfer.transport import Transport, TransportContext
from engine_core.types.kv import TransferDescriptor

log = logging.getLogger(__name__)

_MAX_CALLERS = 64
_QUIET_SECONDS = 10.0


class Acceptor:
    """Owns its sockets until `arrived(caller)` takes one over."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        context: TransportContext,
        taken: Callable[[int], bool],
        arrived: Callable[[Caller], None],
    ) -> None:
        self._selector, self._context = selector, context
        self._taken, self._arrived = taken, arrived
        self._listening: list[socket.socket] = []
        self._callers: dict[socket.socket, Caller] = {}
        self._complained: dict[str, float] = {}

    def listen(self, transports: Sequence[Transport]) -> list[TransferDescriptor]:
        """Opens the door of each transport. Raises ConfigError; what is open then is closed by `close`."""
        descriptors = []
        for transport in transports:
            sock, descriptor = transport.listen()
            self._listening.append(sock)
            descriptors.append(descriptor)
            self._selector.register(sock, selectors.EVENT_READ, functools.partial(self._on_accept, sock, transport))
        return descriptors

    @property
    def deadline(self) -> float | None:
        """When the next caller is to be let go (time.monotonic)."""
        return min((caller.deadline for caller in self._callers.values()), default=None)

    def drop_late(self) -> None:
        """Lets go of callers whose time is up."""
        if self._callers:
            now = time.monotonic()
            for caller in [c for c in self._callers.values() if c.deadline <= now]:
                caller.give_up()
                self._drop(caller)

    def expected(self, incarnation: int) -> None:
        """Links of this peer are expected from now on: a caller may wait for that."""
        for caller in [c for c in self._callers.values() if c.claim is not None and c.claim.incarnation == incarnation]:
            self._after(caller, goes_on=caller.go_on())

    def close(self) -> None:
        """Closes the door, and lets go of all callers. Idempotent."""
        for listener in self._listening:
            self._selector.unregister(listener)
            listener.close()
        self._listening.clear()
        for caller in list(self._callers.values()):
            self._drop(caller)

    def _on_accept(self, listener: socket.socket, transport: Transport, mask: int) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as exc:
            log.error("%s: a connection can't be accepted: %s", transport.name, exc.strerror)
            time.sleep(0.05)  # out of descriptors, most likely; the caller stays in the backlog
            return
        try:
            sock.setblocking(False)
            transport.accepted(sock)
        except OSError:
            sock.close()
            return
        if len(self._callers) >= _MAX_CALLERS:
            log.warning("%s: %d callers have not greeted yet; another is let go", transport.name, len(self._callers))
            sock.close()
            return
        try:
            caller = Caller(sock, transport, self._context, self._taken)
        except OSError:
            sock.close()
            return
        self._callers[sock] = caller
        self._selector.register(sock, selectors.EVENT_READ, functools.partial(self._on_caller, caller))

    def _on_caller(self, caller: Caller, mask: int) -> None:
        goes_on = False
        try:
            goes_on = caller.on_readable()
        finally:
            if not goes_on:
                self._drop(caller)
        self._after(caller, goes_on=goes_on)

    def _after(self, caller: Caller, *, goes_on: bool) -> None:
        """Drops a caller, hands it over when it has greeted, or leaves it as it is."""
        if not goes_on:
            self._drop(caller)
            return
        if caller.hello is None or caller.ready is None:
            return
        if self._taken(caller.hello.link_id):  # two callers greeted for one link
            self._drop(caller)
            return
        del self._callers[caller.sock]
        self._arrived(caller)

    def _drop(self, caller: Caller) -> None:
        if self._callers.pop(caller.sock, None) is None:
            return
        if caller.refusal:
            self._complain(caller)
        self._selector.unregister(caller.sock)
        caller.sock.close()

    def _complain(self, caller: Caller) -> None:
        """A line for each reason, and not again for some seconds: strangers must not fill the log."""
        now = time.monotonic()
        if now - self._complained.get(caller.refusal, -_QUIET_SECONDS) < _QUIET_SECONDS:
            return
        self._complained[caller.refusal] = now
        claim = caller.claim
        who = f" (incarnation {claim.incarnation}, link {claim.link_id:x})" if claim is not None else ""
        log.warning("%s: refused a link of %s%s: %s", caller.transport.name, _peer(caller.sock), who, caller.refusal)


def _peer(sock: socket.socket) -> str:
    """Who is at the other end, for people."""
    try:
        if sock.family == socket.AF_UNIX:
            pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            return f"process {pid} of user {uid}"
        host, port = sock.getpeername()[:2]
        return f"{host}:{port}"
    except OSError:
        return "a peer that is gone"
