"""Messages between a service process and its engine: the vocabulary of both schedulers' borders.

The life of a session in messages:

    decode, mixed   Open ▶ …  ◀ OpenLeg   ▶ LegStarted   ◀ SendTicket   ▶ LegToken  ▶ LegDelivered
                               ◀ Outputs* (the last one carries finish or error)   ▶ EndSession
    prefill         OpenPrefill ▶  ◀ Started   ▶ TicketArrived   ◀ FirstToken   ◀ Delivered   ▶ EndSession

    whoever computes the prompt, when its log probabilities are asked for:   ◀ PromptLogprobs*   before the first token

The engine owns every session and block. EndSession is sent exactly once per opened session, whatever
happened before; what was granted, the engine takes back. The engine may go on with a session after
its end until its blocks are quiet.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine_core.lifecycle.machine import Move
from engine_core.scheduler.figures import HistogramFigures
from engine_core.types.errors import PdmeshError
from engine_core.types.ids import Incarnation, SessionId
from engine_core.types.kv import (
    KvLayout,
    KvUsage,
    ShardCount,
    Ticket,
    TransferDescriptor,
)
from engine_core.types.request import Finish, GenerateSpec, StageTimings
from engine_core.types.sampling import TokenLogprobs


class Frame(msgspec.Struct, frozen=True, tag=True):
    """Base of all frames."""


# ---- service -> engine ----------------------------------------------------------------------------


class Configure(Frame, frozen=True):
    """First frame: the InferenceConfig as plain data, who this worker is, and the mesh's tokens, for links."""

    config: dict[str, Any]
    incarnation: Incarnation
    instance: str
    tokens: tuple[bytes, ...] = ()


class Open(Frame, frozen=True):
    """Opens a decode or mixed session. `remote` asks for the prompt's KV from a prefill worker."""

    spec: GenerateSpec
    remote: bool
    link_id: int = 0
    without_transfer: bool = False


class OpenPrefill(Frame, frozen=True):
    """Opens a prefill session. Without transfer no ticket will come: the first token is all."""

    spec: GenerateSpec
    link_id: int
    without_transfer: bool = False


class LegStarted(Frame, frozen=True):
    """Prefill reserved its blocks and computes."""

    session: SessionId


class LegToken(Frame, frozen=True):
    """Prefill's token 1."""

    session: SessionId
    token_id: int
    cached_tokens: int = 0
    timings: StageTimings = StageTimings()
    logprobs: TokenLogprobs | None = None


class LegDelivered(Frame, frozen=True):
    """Every shard arrived."""

    session: SessionId
    shards: tuple[ShardCount, ...]
    timings: StageTimings = StageTimings()


class LegFailed(Frame, frozen=True):
    """The prefill leg is over before it was done."""

    session: SessionId
    error: ErrorInfo


class TicketArrived(Frame, frozen=True):
    """Decode's ticket."""

    session: SessionId
    ticket: Ticket


class EndSession(Frame, frozen=True):
    """The stream is gone; its session may end at once."""

    session: SessionId
    reason: str = "stream closed"


class ConnectLink(Frame, frozen=True):
    """Asks a prefill engine to open a link to a decode engine. Answered by LinkUp or LinkDown."""

    link_id: int
    peer_incarnation: Incarnation
    peer_instance: str
    layout: KvLayout
    descriptors: tuple[TransferDescriptor, ...]
    transport: str = "auto"
    secret: bytes = b""


class ExpectPeer(Frame, frozen=True):
    """Tells a decode engine that a prefill engine may open links, proved by the pair's secret."""

    peer_incarnation: Incarnation
    secret: bytes


class Tokens(Frame, frozen=True):
    """The mesh's tokens have changed; links that are up stay up."""

    tokens: tuple[bytes, ...]


class ReportStats(Frame, frozen=True):
    """Asks for Stats now instead of within a second."""


class StartProfile(Frame, frozen=True):
    """Records the next `steps` steps (0: the default) into a Chrome trace at `path`."""

    path: str
    steps: int = 0


class StopProfile(Frame, frozen=True):
    """Ends a recording early; no-op without one."""


class Shutdown(Frame, frozen=True):
    """The service process is done; the engine exits."""


class ErrorInfo(msgspec.Struct, frozen=True):
    """A PdmeshError as data; `kind` is the class name."""

    kind: str
    message: str
    reason: str = "INTERNAL"
    leg: str = "unknown"
    field: str = ""
    peer_incarnation: int = 0
    retryable: bool = False
    retry_after: float = 0.0


# ---- engine -> service ----------------------------------------------------------------------------


class Ready(Frame, frozen=True):
    """Model loaded, KV allocated, warmed up."""

    pid: int
    layout: KvLayout
    descriptors: tuple[TransferDescriptor, ...]
    fingerprint_parts: dict[str, str]
    max_model_len: int
    num_kv_tokens: int
    eos_token_ids: tuple[int, ...]
    seconds_to_ready: float = 0.0


class StartupFailed(Frame, frozen=True):
    """The engine cannot start; one line says why."""

    message: str


class SessionOutput(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one session. `first_index` counts from attempt 0 (emitted tokens included)."""

    session: SessionId
    first_index: int
    token_ids: tuple[int, ...]
    finish: Finish | None = None
    error: ErrorInfo | None = None
    cached_tokens: int | None = None
    """With the first tokens: those of the prompt that were not computed anew."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token id, when asked for."""

    def joined(self, later: SessionOutput) -> SessionOutput:
        """This output and the one that follows it, as one."""
        return SessionOutput(
            self.session,
            self.first_index,
            self.token_ids + later.token_ids,
            later.finish,
            later.error,
            self.cached_tokens if later.cached_tokens is None else later.cached_tokens,
            self.logprobs + later.logprobs,
        )


class Outputs(Frame, frozen=True):
    """All new tokens and ends of one step."""

    outputs: tuple[SessionOutput, ...]


class PromptLogprobs(Frame, frozen=True):
    """Log probabilities of prompt positions from `first_position` on: in order, without a gap, all of them before
    the first token."""

    session: SessionId
    first_position: int
    positions: tuple[TokenLogprobs, ...]


class OpenLeg(Frame, frozen=True):
    """Decode wants the prefill stream of a session opened."""

    session: SessionId


class SendTicket(Frame, frozen=True):
    """Decode granted blocks; the ticket goes out on the prefill stream."""

    session: SessionId
    ticket: Ticket


class Started(Frame, frozen=True):
    """Prefill reserved the whole prompt's blocks."""

    session: SessionId
    cached_tokens: int = 0


class FirstToken(Frame, frozen=True):
    """Prefill's token 1; sent once sampled and ticketed."""

    session: SessionId
    token_id: int
    cached_tokens: int
    timings: StageTimings
    logprobs: TokenLogprobs | None = None


class Delivered(Frame, frozen=True):
    """All shards arrived by the receiver's count; the prefill session is done."""

    session: SessionId
    shards: tuple[ShardCount, ...]
    timings: StageTimings


class SessionFailed(Frame, frozen=True):
    """A prefill session ended in an error."""

    session: SessionId
    error: ErrorInfo


class LinkUp(Frame, frozen=True):
    """A link is open, at either end."""

    link_id: int
    peer_incarnation: Incarnation
    peer_instance: str
    transport: str
    reason: str


class LinkDown(Frame, frozen=True):
    """A link is gone or could not be opened."""

    link_id: int
    peer_incarnation: Incarnation
    reason: str


class PairStats(msgspec.Struct, frozen=True):
    """One link's figures."""

    link_id: int
    peer_incarnation: Incarnation
    peer_instance: str
    transport: str
    reason: str
    up: bool
    bytes: int = 0
    seconds: float = 0.0
    failures: int = 0


class Stats(Frame, frozen=True):
    """Sent each second and when asked; also the heartbeat that the watchdog listens to."""

    running: int
    queued: int
    queued_tokens: int
    sessions: int
    kv: KvUsage
    steps: int
    busy: bool
    pairs: tuple[PairStats, ...] = ()
    counters: dict[str, float] = {}
    histograms: dict[str, HistogramFigures] = {}
    states: dict[str, int] = {}
    """Sessions by "machine.STATE"."""
    quarantined: dict[str, int] = {}
    """Blocks by the instance that may still write them."""
    stuck: int = 0
    """Blocks quarantined for longer than a living writer needs to answer."""


class Moves(Frame, frozen=True):
    """State moves since the last such frame; `at` is CLOCK_MONOTONIC."""

    moves: tuple[Move, ...]


ToEngine = (
    Configure | Open | OpenPrefill | LegStarted | LegToken | LegDelivered | LegFailed | TicketArrived
    | EndSession | ConnectLink | ExpectPeer | Tokens | ReportStats | StartProfile | StopProfile | Shutdown
)  # fmt: skip
FromEngine = (
    Ready | StartupFailed | Outputs | PromptLogprobs | OpenLeg | SendTicket | Started | FirstToken | Delivered
    | SessionFailed | LinkUp | LinkDown | Stats | Moves
)  # fmt: skip


def error_info(exc: PdmeshError) -> ErrorInfo:
    """The error as data."""
    return ErrorInfo(
        kind=type(exc).__name__,
        message=exc.message,
        reason=exc.reason,
        leg=exc.leg.value,
        field=exc.field,
        peer_incarnation=exc.peer_incarnation,
        retryable=exc.retryable,
        retry_after=exc.retry_after,
    )
