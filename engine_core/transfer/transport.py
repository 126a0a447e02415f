"""What a transport is to the links: how a pool is offered, how one is reached, how bytes get there.

A Transport lives as long as the manager; a Writer as long as its link, and only that link's push thread
calls it. Transports neither start threads nor post events: sender and receiver do.

To add one: implement both protocols, enter it in engine_core.plugins.TRANSPORTS, and run the contract
suite (tests/contract/test_transports.py) on it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from engine_core.config import DisaggConfig
from engine_core.transfer.copy_plan import CopyOps
from engine_core.transfer.handshake import LinkSecrets
from engine_core.transfer.wire import FrameReader, Hello
from engine_core.types.errors import PdmeshError
from engine_core.types.ids import Incarnation, SessionId
from engine_core.types.kv import KvLayout, TransferDescriptor


class TransferFault(PdmeshError):
    """A push did not get through; the link goes on."""

    reason = "TRANSFER"


class ConnectFailed(PdmeshError):
    """No link by this descriptor; the message says why, for people."""

    reason = "CONNECT"


class LinkBroken(PdmeshError):
    """Nothing more can be sent on this link; it has to be closed."""

    reason = "LINK"


class PoolRegion(Protocol):
    """A mapped pool: engine_core.kv.storage.KvRegion, of which transfer knows no more than this."""

    @property
    def fd(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def buffer(self) -> memoryview: ...
    @property
    def nonce(self) -> bytes: ...

    def open_peer(self, fd: int, nbytes: int, nonce: bytes) -> PoolRegion:
        """Maps a peer's pool; raises InternalError unless it carries the nonce."""

    def populate(self) -> None:
        """Maps every page now; best effort."""

    def close(self) -> None:
        """Unmaps."""


class Interrupt:
    """Wakes one thread out of poll. Set from any thread; closed by its owner when no thread is left."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        """For poll and selectors."""
        return self._fd

    def set(self) -> None:
        """Wakes the thread, now or at its next poll."""
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Takes the wake-up; afterwards the thread looks at what it was woken for."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class Cancel:
    """A flag that wakes the push thread, and that native code can look at."""

    def __init__(self, interrupt: Interrupt) -> None:
        self.flag = ctypes.c_int32(0)
        self._interrupt = interrupt

    def set(self) -> None:
        """Asks for the end; final."""
        self.flag.value = 1
        self._interrupt.set()

    def is_set(self) -> bool:
        """True once set."""
        return self.flag.value != 0

    def wait(self, seconds: float) -> bool:
        """Waits in the push thread; True as soon as it is set."""
        poll = select.poll()
        poll.register(self._interrupt.fileno(), select.POLLIN)
        deadline = time.monotonic() + seconds
        while not self.is_set():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if poll.poll(left * 1000):
                self._interrupt.clear()
        return True


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Where a push reads: bytes at an address of this process, also as a memoryview."""

    address: int
    nbytes: int
    buffer: memoryview


@dataclasses.dataclass(frozen=True, slots=True)
class PushJob:
    """One push, planned. Offsets of `ops` count from the source's and the destination's start."""

    session: SessionId
    push_id: int
    ops: CopyOps
    source: Source
    cancel: Cancel


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """What a writer did: bytes handed over, and bytes to be reported (the same, but for faked ones)."""

    nbytes: int
    claimed: int


@dataclasses.dataclass(frozen=True, slots=True)
class TransportContext:
    """What this process is, for all its transports."""

    config: DisaggConfig
    incarnation: Incarnation
    instance: str
    region: PoolRegion
    layout: KvLayout
    secrets: LinkSecrets


@dataclasses.dataclass(frozen=True, slots=True)
class Dial:
    """One attempt to open a link, by one descriptor. `secret` is the pair's; `stop`: the link is being closed
    meanwhile."""

    link_id: int
    peer_incarnation: Incarnation
    secret: bytes
    descriptor: TransferDescriptor
    interrupt: Interrupt
    stop: Cancel


class Writer(Protocol):
    """The writing end of one link."""

    sock: socket.socket
    """The link's socket, non-blocking. Closed by the links, after `release`."""

    reader: FrameReader
    """What reads the peer's messages from it."""

    reason: str
    """Why this transport was chosen, for people."""

    local_quiet: bool
    """At the other end, dropping a session alone proves it quiet."""

    awaits_count: bool
    """A push is done when the receiver's count came, not when `write` returns."""

    def write(self, job: PushJob) -> Written:
        """Writes all of it, or what it could until the job was cancelled. Blocks.

        When it returns or raises, nothing touches source or destination for this job any more. Raises
        TransferFault (the push failed), ValueError (pieces outside a region), LinkBroken.
        """

    def send(self, frame: bytes) -> None:
        """Sends a control message. Blocks while the socket is full; raises LinkBroken."""

    def release(self) -> None:
        """Unmaps what was mapped of the peer. Idempotent; nothing is written afterwards."""


class Transport(Protocol):
    """One way to move KV, for both ends of a link."""

    name: str

    kinds: tuple[str, ...]
    """Kinds of descriptor that `connect` takes, the preferred first."""

    local_quiet: bool
    """Bytes arrive through this process's own reader: dropping a session alone proves it quiet."""

    def __init__(self, context: TransportContext) -> None: ...

    def listen(self) -> tuple[socket.socket, TransferDescriptor]:
        """Starts to accept links: a listening, non-blocking socket. Raises ConfigError."""

    def refusal(self, hello: Hello) -> str:
        """Why this transport won't have the caller; empty when it will."""

    def passed_fds(self) -> Sequence[int]:
        """Descriptors that go with Welcome."""

    def accepted(self, sock: socket.socket) -> None:
        """Sets options of an accepted socket. May raise OSError."""

    def connect(self, dial: Dial) -> Writer:
        """Opens a link within CONNECT_SECONDS. Blocks; raises ConnectFailed."""

    def close(self) -> None:
        """Takes back what `listen` left in the file system. Idempotent."""


CONNECT_SECONDS = 2.0
"""Time for connecting and greeting, per attempt; and for a caller to greet."""

STALL_SECONDS = 5.0
"""Time for a cancelled frame to be finished before the link is given up."""

TransportFactory = Callable[[TransportContext], Transport]
