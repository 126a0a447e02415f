"""pdmesh.common.v1: identities, load, state moves; and the checks that all of wire/ uses."""

from __future__ import annotations

from collections.abc import Sized

import msgspec

from engine_core.types.errors import InvalidRequestError
from engine_core.types.ids import RankCoord, SessionId
from engine_core.types.kv import KvUsage
from engine_core.types.request import Role
from pdmesh.common.v1 import identity_pb2, worker_pb2
from services.runtime.telemetry import RingEntry

MAX_INT64 = (1 << 63) - 1
MAX_INT32 = (1 << 31) - 1
MAX_NAME = 256
MAX_ENDPOINT = 512
MAX_PARALLEL = 4_096
"""Largest parallel size or rank that is believed."""


class Load(msgspec.Struct, frozen=True):
    """What placement looks at: requests running and queued, prompt tokens that wait, block account."""

    running: int = 0
    queued: int = 0
    queued_tokens: int = 0
    kv: KvUsage = KvUsage(total=0, free=0)


def checked_text(value: str, field: str, limit: int = MAX_NAME, *, empty: bool = True) -> str:
    """The string. Raises InvalidRequestError when it is too long, or empty where it must not be."""
    if len(value) > limit:
        raise InvalidRequestError(f"{field} has {len(value)} characters, at most {limit} are allowed", field=field)
    if not value and not empty:
        raise InvalidRequestError(f"{field} is missing", field=field)
    return value


def checked_int(value: int, field: str, low: int = 0, high: int = MAX_INT64) -> int:
    """The number. Raises InvalidRequestError outside [low, high]."""
    if not low <= value <= high:
        raise InvalidRequestError(f"{field} is {value}, must be in [{low}, {high}]", field=field)
    return value


def checked_size(items: Sized, field: str, limit: int) -> None:
    """Raises InvalidRequestError when there are more than `limit` items."""
    if len(items) > limit:
        raise InvalidRequestError(f"{field} has {len(items)} entries, at most {limit} are allowed", field=field)


def session_to_proto(session: SessionId) -> identity_pb2.SessionId:
    """SessionId as a message."""
    return identity_pb2.SessionId(room=session.room, attempt=session.attempt)


def session_from_proto(message: identity_pb2.SessionId, field: str = "session") -> SessionId:
    """Rooms are positive, attempts count from 0."""
    return SessionId(
        checked_int(message.room, f"{field}.room", 1), checked_int(message.attempt, f"{field}.attempt", 0, MAX_INT32)
    )


def coord_to_proto(coord: RankCoord) -> identity_pb2.RankCoord:
    """RankCoord as a message."""
    return identity_pb2.RankCoord(dp=coord.dp, cp=coord.cp, tp=coord.tp)


def coord_from_proto(message: identity_pb2.RankCoord, field: str = "coord") -> RankCoord:
    """Ranks are in [0, 4096)."""
    return RankCoord(
        *(checked_int(getattr(message, n), f"{field}.{n}", 0, MAX_PARALLEL - 1) for n in ("dp", "cp", "tp"))
    )


_ROLE_TO_PROTO: dict[Role, identity_pb2.Role] = {
    Role.PREFILL: identity_pb2.ROLE_PREFILL,
    Role.DECODE: identity_pb2.ROLE_DECODE,
    Role.MIXED: identity_pb2.ROLE_MIXED,
}
_ROLE_FROM_PROTO: dict[int, Role] = {number: role for role, number in _ROLE_TO_PROTO.items()}


def role_to_proto(role: Role) -> identity_pb2.Role:
    """Role as an enum value."""
    return _ROLE_TO_PROTO[role]


def role_from_proto(value: int, field: str = "role") -> Role:
    """Refuses the unspecified role and those of a later version."""
    role = _ROLE_FROM_PROTO.get(value)
    if role is None:
        raise InvalidRequestError(f"{field} is missing or unknown ({value})", field=field)
    return role


_USAGE = ("total", "free", "used", "cached", "pinned", "quarantined")


def usage_to_proto(usage: KvUsage) -> worker_pb2.KvUsage:
    """KvUsage as a message."""
    return worker_pb2.KvUsage(**{name: getattr(usage, name) for name in _USAGE})


def usage_from_proto(message: worker_pb2.KvUsage, field: str = "kv") -> KvUsage:
    """Counts are not negative; whether they add up is for the reader to judge."""
    return KvUsage(**{name: checked_int(getattr(message, name), f"{field}.{name}") for name in _USAGE})


def load_to_proto(load: Load) -> worker_pb2.Load:
    """Load as a message."""
    return worker_pb2.Load(
        running=load.running, queued=load.queued, queued_tokens=load.queued_tokens, kv=usage_to_proto(load.kv)
    )


def load_from_proto(message: worker_pb2.Load, field: str = "load") -> Load:
    """Counts are not negative."""
    return Load(
        running=checked_int(message.running, f"{field}.running"),
        queued=checked_int(message.queued, f"{field}.queued"),
        queued_tokens=checked_int(message.queued_tokens, f"{field}.queued_tokens"),
        kv=usage_from_proto(message.kv, f"{field}.kv"),
    )


def move_to_proto(entry: RingEntry) -> worker_pb2.StateMove:
    """One entry of the ring that `pdmesh explain` reads."""
    move = entry.move
    return worker_pb2.StateMove(
        unix_seconds=entry.unix_seconds,
        session=session_to_proto(move.session),
        machine=move.machine,
        from_state=move.source,
        to_state=move.target,
        reason=move.reason,
        seconds=move.seconds,
    )
