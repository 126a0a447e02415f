"""Logs, event-loop lag, and the ring of state moves that `pdmesh explain` reads."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Collection, Iterable

import msgspec

from engine_core.lifecycle.machine import Move

_FIELDS = ("request_id", "room", "attempt")
"""What log calls may pass in `extra`."""


class TextFormatter(logging.Formatter):
    """`12:34:56.789 I decode services.decode.worker: message request_id=… room=…`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """One line, plus the traceback if there is one."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        head = f"{clock}.{int(record.msecs):03d} {record.levelname[0]} {self._process} {record.name}:"
        fields = "".join(f" {key}={value}" for key, value in _fields(record).items())
        line = f"{head} {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """time (Unix seconds), level, process, logger, message, the fields, exception."""
        entry: dict[str, object] = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {key: record.__dict__[key] for key in _FIELDS if key in record.__dict__}


def setup_logging(level: str, log_format: str, process: str) -> None:
    """Sends all logs of this process to stderr, as `text` or `json`; replaces earlier handlers."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else TextFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("httpx", "httpcore", "asyncio"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))


class LoopLagMonitor:
    """How late the event loop wakes a timer: 10 ms ticks, the last 1,000 kept."""

    TICK = 0.010
    SAMPLES = 1_000

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=self.SAMPLES)

    def record(self, lag: float) -> None:
        """Adds one sample in seconds."""
        self._samples.append(lag)

    def p99(self) -> float:
        """99th percentile of the kept samples in seconds; 0 without any."""
        if not self._samples:
            return 0.0
        ordered = sorted(self._samples)
        return ordered[math.ceil(0.99 * len(ordered)) - 1]

    async def run(self) -> None:
        """Samples until cancelled; spawn it with a TaskOwner."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self.TICK
            await asyncio.sleep(self.TICK)
            self.record(max(0.0, loop.time() - due))


class RingEntry(msgspec.Struct, frozen=True, array_like=True):
    """A move with its time in seconds since the epoch."""

    unix_seconds: float
    move: Move


_CLOCK_SET = 0.010
"""Seconds by which the two clocks must have parted for somebody to have set one."""


def wall_offset() -> float:
    """Unix time minus CLOCK_MONOTONIC, in seconds, of the closest of a few readings: on a busy machine the process
    may be put aside between the two clocks."""
    best, offset = math.inf, 0.0
    for _ in range(5):
        before, wall, after = time.monotonic(), time.time(), time.monotonic()
        if after - before < best:
            best, offset = after - before, wall - (before + after) / 2
        if best < 1e-5:
            break
    return offset


class MoveRing:
    """The last `size` state moves of this process, engine's included.

    Their order is that of CLOCK_MONOTONIC: one offset makes all of them Unix time until the clock is set anew.
    """

    def __init__(self, size: int = 10_000) -> None:
        self._entries: deque[RingEntry] = deque(maxlen=size)
        self._offset = wall_offset()

    def log(self, move: Move) -> None:
        """Adds a move whose `at` is CLOCK_MONOTONIC of this host; fits as a MoveLog."""
        self.extend((move,))

    def extend(self, moves: Iterable[Move]) -> None:
        """As log(), for many: what an engine's Moves frame holds."""
        offset = wall_offset()
        if abs(offset - self._offset) > _CLOCK_SET:
            self._offset = offset
        self._entries.extend(RingEntry(self._offset + move.at, move) for move in moves)

    def find(self, rooms: Collection[int]) -> list[RingEntry]:
        """The moves of these rooms, oldest first."""
        wanted = frozenset(rooms)
        found = [entry for entry in self._entries if entry.move.session.room in wanted]
        return sorted(found, key=lambda entry: entry.unix_seconds)

    def __len__(self) -> int:
        return len(self._entries)
