"""A page that engine and service process share: which sessions the engine is busy with at this moment.

The engine writes it before it works on a session's behalf and clears it afterwards. After the engine's end the
service process reads it, and knows whose step it was that ended so. A write costs some microseconds and no system
call; a page that was cut short by the end itself is not marked busy yet.

    0   u32 busy       1 from begin() to end()
    4   u32 count      sessions that follow; TOO_MANY when they did not fit
    8   (u64 room, u64 attempt) * count
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence

from engine_core.types.ids import SessionId

PAGE_BYTES = 64 * 1024
TOO_MANY = 0xFFFF_FFFF
_HEAD = struct.Struct("<II")
_MOST = (PAGE_BYTES - _HEAD.size) // 16


def create_page() -> int:
    """A new page; returns its descriptor, to be closed by the caller. Raises OSError."""
    fd = os.memfd_create("pdmesh-step")
    try:
        os.ftruncate(fd, PAGE_BYTES)
    except OSError:
        os.close(fd)
        raise
    return fd


class StepPage:
    """Either end of a page."""

    def __init__(self, fd: int) -> None:
        """Maps the page; the descriptor stays the caller's. Raises OSError or ValueError when it is none."""
        self._map = mmap.mmap(fd, PAGE_BYTES)

    def begin(self, sessions: Sequence[SessionId]) -> None:
        """The engine works for these sessions from now on."""
        count = len(sessions)
        if count > _MOST:
            _HEAD.pack_into(self._map, 0, 1, TOO_MANY)
            return
        numbers = [n for s in sessions for n in (s.room, s.attempt)]
        struct.pack_into(f"<{2 * count}Q", self._map, _HEAD.size, *numbers)
        _HEAD.pack_into(self._map, 0, 1, count)

    def end(self) -> None:
        """It works for nobody in particular."""
        _HEAD.pack_into(self._map, 0, 0, 0)

    def busy_with(self, session: SessionId) -> bool:
        """True when the engine was working for this session when it wrote last."""
        busy, count = _HEAD.unpack_from(self._map, 0)
        if not busy or count == TOO_MANY:
            return bool(busy)
        numbers = struct.unpack_from(f"<{2 * count}Q", self._map, _HEAD.size)
        return (session.room, session.attempt) in zip(numbers[::2], numbers[1::2], strict=True)

    def close(self) -> None:
        """Unmaps it."""
        self._map.close()
