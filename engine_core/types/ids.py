"""Identities: incarnations, rooms, sessions, ranks."""

from __future__ import annotations

import secrets
import time
from typing import NewType

import msgspec

Incarnation = NewType("Incarnation", int)
"""Names one life of a process: 44 bits of milliseconds since the epoch, then 20 random bits."""

LinkId = NewType("LinkId", int)
"""Names one link of a pair of incarnations."""

_RANDOM_BITS = 20
_MAX_INCARNATION = (1 << 63) - 1


class SessionId(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One attempt of one room."""

    room: int
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.room:016x}.{self.attempt}"


class RankCoord(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Place of an engine process inside its instance."""

    dp: int = 0
    cp: int = 0
    tp: int = 0


def mint_incarnation(now_ms: int | None = None, above: int = 0) -> Incarnation:
    """Returns a new incarnation, ordered by time and strictly above `above`.

    `above` is for a process whose clock was set back behind the holder of its row.
    """
    ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    minted = ((ms << _RANDOM_BITS) | secrets.randbits(_RANDOM_BITS)) & _MAX_INCARNATION
    return Incarnation(max(minted, above + 1))


def mint_room() -> int:
    """Returns a random positive 63-bit room id."""
    return secrets.randbits(63) or 1
