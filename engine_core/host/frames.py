"""The wire form of the messages between a service process and its engine process.

Each frame is a tagged msgpack message behind a 4-byte big-endian length, on a socket pair, first in,
first out both ways. The messages and the life of a session in them: engine_core/scheduler/messages.py.
"""

from __future__ import annotations

import socket
import struct

import msgspec

from engine_core.scheduler.messages import (
    Configure,
    ConnectLink,
    Delivered,
    EndSession,
    ErrorInfo,
    ExpectPeer,
    FirstToken,
    Frame,
    FromEngine,
    LegDelivered,
    LegFailed,
    LegStarted,
    LegToken,
    LinkDown,
    LinkUp,
    Moves,
    Open,
    OpenLeg,
    OpenPrefill,
    Outputs,
    PairStats,
    PromptLogprobs,
    Ready,
    ReportStats,
    SendTicket,
    SessionFailed,
    SessionOutput,
    Shutdown,
    Started,
    StartProfile,
    StartupFailed,
    Stats,
    StopProfile,
    TicketArrived,
    ToEngine,
    Tokens,
)

__all__ = [
    "Configure",
    "ConnectLink",
    "Delivered",
    "EndSession",
    "ErrorInfo",
    "ExpectPeer",
    "FirstToken",
    "Frame",
    "FrameSplitter",
    "FromEngine",
    "LegDelivered",
    "LegFailed",
    "LegStarted",
    "LegToken",
    "LinkDown",
    "LinkUp",
    "MAX_FRAME_BYTES",
    "Moves",
    "Open",
    "OpenLeg",
    "OpenPrefill",
    "Outputs",
    "PairStats",
    "PromptLogprobs",
    "Ready",
    "ReportStats",
    "SendTicket",
    "SessionFailed",
    "SessionOutput",
    "Shutdown",
    "StartProfile",
    "Started",
    "StartupFailed",
    "Stats",
    "StopProfile",
    "TicketArrived",
    "ToEngine",
    "Tokens",
    "encode",
    "frame_socketpair",
    "from_engine_decoder",
    "to_engine_decoder",
]

MAX_FRAME_BYTES = 64 * 1024 * 1024
_LENGTH = struct.Struct(">I")

_ENCODER = msgspec.msgpack.Encoder()
to_engine_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode(frame: Frame) -> bytes:
    """The frame with its length in front. Raises ValueError above MAX_FRAME_BYTES."""
    body = _ENCODER.encode(frame)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"frame {type(frame).__name__} of {len(body)} bytes is above {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class FrameSplitter:
    """Cuts a byte stream into frame bodies. Raises ValueError on a length above the limit."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Adds bytes; returns the bodies that are now complete."""
        self._buffer += data
        bodies = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer, start)
            if size > MAX_FRAME_BYTES:
                raise ValueError(f"frame of {size} bytes is above {MAX_FRAME_BYTES}")
            end = start + _LENGTH.size + size
            if end > len(self._buffer):
                break
            bodies.append(bytes(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return bodies


def frame_socketpair() -> tuple[socket.socket, socket.socket]:
    """A pair for one service and one engine process; the caller passes one end on."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
