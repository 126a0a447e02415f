"""Commands to the transfer side, events from it, and the transport interface.

The engine's loop (single thread) issues commands; transfer threads carry them out and post events.
EngineCore is pure over these types, so that the explorer drives it without a thread.

A link is opened by prefill (the writer) towards the socket on which decode's engine listens. Over it
travel the pushed KV and, for every transport, the control messages Abort (decode to prefill) and
Quiet (prefill to decode).

What proves that a destination is quiet:
  * PushDone for the last push: the writer finished and told so (DELIVERED), or
  * QuietReceived: the writer answered an Abort, or
  * ReceiveQuiet: this end's own reader dropped the session (tcp), or
  * LinkDown with quiet_proved: the writing process can write no more (shm: end-of-file on the socket
    that the writer holds as long as it maps the pool; tcp: the reader has ended).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from engine_core.types.ids import Incarnation, SessionId
from engine_core.types.kv import KvLayout, TransferDescriptor

# ---- commands: loop -> transfer threads -------------------------------------------------------------


class Connect(msgspec.Struct, frozen=True):
    """Open a link to a decode engine (writer's side). `secret` is the pair's: handshake.py."""

    link_id: int
    peer_incarnation: Incarnation
    peer_instance: str
    layout: KvLayout
    descriptors: tuple[TransferDescriptor, ...]
    transport: str
    secret: bytes = b""


class ExpectLink(msgspec.Struct, frozen=True):
    """Links of this peer may come, proved by this secret of the pair. Of no link yet, so not in order with any."""

    peer_incarnation: Incarnation
    secret: bytes


class SetTokens(msgspec.Struct, frozen=True):
    """The mesh's tokens from now on, for links that are opened later."""

    tokens: tuple[bytes, ...]


class PrepareReceive(msgspec.Struct, frozen=True):
    """Let a session write into these blocks (per group), and nowhere else. Before its ticket is sent."""

    link_id: int
    session: SessionId
    block_ids: tuple[tuple[int, ...], ...]
    expected_bytes: int


class DropReceive(msgspec.Struct, frozen=True):
    """Stop accepting bytes of a session. Answered by ReceiveQuiet where that alone proves quiet."""

    link_id: int
    session: SessionId


class SendAbort(msgspec.Struct, frozen=True):
    """Tell the writer to stop; it answers Quiet."""

    link_id: int
    session: SessionId


class SendQuiet(msgspec.Struct, frozen=True):
    """Answer an Abort: nothing of this session is or will be written."""

    link_id: int
    session: SessionId


class Push(msgspec.Struct, frozen=True):
    """Copy whole blocks, per group, source to destination. Pushes of a session run in order."""

    link_id: int
    session: SessionId
    push_id: int
    src_blocks: tuple[tuple[int, ...], ...]
    dst_blocks: tuple[tuple[int, ...], ...]


class CancelPush(msgspec.Struct, frozen=True):
    """Stop pushing a session. Answered by SourceQuiet once no thread reads or writes for it."""

    link_id: int
    session: SessionId


class VerifyBlocks(msgspec.Struct, frozen=True):
    """Compute the checksum of received blocks (--verify-kv). Answered by Verified."""

    link_id: int
    session: SessionId
    block_ids: tuple[tuple[int, ...], ...]


class CloseLink(msgspec.Struct, frozen=True):
    """Close a link; a writer unmaps before it closes."""

    link_id: int


LinkCommand = (
    Connect | PrepareReceive | DropReceive | SendAbort | SendQuiet | Push | CancelPush | VerifyBlocks | CloseLink
)
"""Commands about one link, which they name by `link_id`."""

TransferCommand = LinkCommand | ExpectLink | SetTokens

# ---- events: transfer threads -> loop ---------------------------------------------------------------


class LinkOpened(msgspec.Struct, frozen=True):
    """A link is up, at either end. `local_quiet`: DropReceive alone proves quiet on it (tcp)."""

    link_id: int
    peer_incarnation: Incarnation
    peer_instance: str
    transport: str
    reason: str
    local_quiet: bool


class LinkClosed(msgspec.Struct, frozen=True):
    """A link is gone, or could not be opened. `quiet_proved`: the other end can write no more."""

    link_id: int
    peer_incarnation: Incarnation
    reason: str
    quiet_proved: bool


class PushDone(msgspec.Struct, frozen=True):
    """A push arrived whole, by the receiver's count. `checksum` is CRC-32 over the session so far."""

    link_id: int
    session: SessionId
    push_id: int
    bytes: int
    blocks: int
    seconds: float
    checksum: int | None = None


class PushFailed(msgspec.Struct, frozen=True):
    """A push did not arrive whole; nothing more of this session is written after this event."""

    link_id: int
    session: SessionId
    push_id: int
    reason: str


class SourceQuiet(msgspec.Struct, frozen=True):
    """Answer to CancelPush."""

    link_id: int
    session: SessionId


class AbortReceived(msgspec.Struct, frozen=True):
    """Decode wants the session stopped."""

    link_id: int
    session: SessionId


class QuietReceived(msgspec.Struct, frozen=True):
    """The writer proved the session quiet."""

    link_id: int
    session: SessionId


class ReceiveQuiet(msgspec.Struct, frozen=True):
    """This end's reader writes nothing more for the session."""

    link_id: int
    session: SessionId


class Verified(msgspec.Struct, frozen=True):
    """CRC-32 of received blocks in push order."""

    link_id: int
    session: SessionId
    checksum: int


TransferEvent = (
    LinkOpened | LinkClosed | PushDone | PushFailed | SourceQuiet | AbortReceived | QuietReceived | ReceiveQuiet
    | Verified
)  # fmt: skip


class LinkFigures(msgspec.Struct, frozen=True):
    """What one link moved so far (bytes, seconds of pushing, failed pushes)."""

    link_id: int
    peer_incarnation: Incarnation
    peer_instance: str
    transport: str
    reason: str
    up: bool
    bytes: int = 0
    seconds: float = 0.0
    failures: int = 0


class TransferPort(Protocol):
    """What the engine's loop sees of KV transfer. Implemented by KVTransferManager.

    `submit` never blocks and never raises for a link that is gone: the event says so. Events are
    posted to the callback given at construction, from transfer threads.
    """

    def descriptors(self) -> tuple[TransferDescriptor, ...]:
        """How peers reach this pool; empty when it accepts no links."""

    def submit(self, command: TransferCommand) -> None:
        """Carries out a command, in order per link."""

    def figures(self) -> tuple[LinkFigures, ...]:
        """Figures per link."""

    def close(self) -> None:
        """Ends all threads, unmaps, closes. Idempotent; waits at most 5 s."""


PostEvent = Callable[[TransferEvent], None]
