"""Which worker should change its role, from the pressure of queues. Pure: rows and the time in, one change out.

    pressure   requests that wait for a role, per READY worker of it; see pressure_by_role
    need       a role's pressure is at least `high`, while the other's would stay below `low` with one
               worker less, for `hold` seconds without a break
    change     the least busy worker of the other role, if that leaves it another one; one change at a time,
               and `cooldown` seconds after it came about, or failed, before the next is looked for

Each fingerprint is a pool of its own. MIXED workers neither need nor give. Hysteresis is in `low` < `high`:
under a load that stays as it is, the worker that has moved is never missed where it came from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine_core.lifecycle.membership import MembershipState
from engine_core.types.request import Role
from services.wire.bootstrap import RankRow

_OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
_ROOM = 0.2
"""Share of a pool that is free or can be evicted, below which a decode worker counts as full."""

_CHANGE_TIMEOUT = 300.0
"""Seconds after which a change that has not come about counts as failed."""


@dataclass(frozen=True)
class AutoRoleSettings:
    """`high` and `low` are waiting requests per worker, the rest is in seconds."""

    high: float = 4.0
    low: float = 1.0
    hold: float = 10.0
    cooldown: float = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise ValueError(f"low must be in [0, high), got {self.low} and {self.high}")


@dataclass(frozen=True)
class RoleChange:
    """One worker, by its row, and what it should do from now on."""

    row: RankRow
    role: Role
    reason: str


@dataclass(frozen=True)
class Pressure:
    """Workers of one role and what waits for them."""

    workers: int
    waiting: int

    @property
    def each(self) -> float:
        """Waiting requests per worker."""
        return self.waiting / self.workers if self.workers else math.inf if self.waiting else 0.0

    def without_one(self) -> float:
        """The same with one worker less."""
        return Pressure(self.workers - 1, self.waiting).each


class AutoRole:
    """Watches one rank table. `now` is any clock that does not run backwards."""

    def __init__(self, settings: AutoRoleSettings) -> None:
        self._settings = settings
        self._needed_since: dict[tuple[str, Role], float] = {}
        self._changing: tuple[str, Role, float] | None = None
        self._rest_until = -math.inf

    @property
    def changing(self) -> bool:
        """True while a change is under way."""
        return self._changing is not None

    def step(self, rows: Iterable[RankRow], now: float) -> RoleChange | None:
        """What to change now, if anything. The change counts as under way from here on: failed() ends it early."""
        leaders = [row for row in rows if row.is_leader]
        if self._changing is not None:
            self._look_after_change(leaders, now)
        if self._changing is not None or now < self._rest_until:
            self._needed_since.clear()
            return None
        present = sorted({row.instance.fingerprint for row in leaders})
        self._needed_since = {key: since for key, since in self._needed_since.items() if key[0] in present}
        for fingerprint in present:
            pool = [row for row in leaders if row.instance.fingerprint == fingerprint]
            change = self._look(fingerprint, pool, now)
            if change is not None:
                self._changing = (change.row.instance.name, change.role, now)
                self._needed_since.clear()
                return change
        return None

    def failed(self, now: float) -> None:
        """The change could not be carried out."""
        self._changing, self._rest_until = None, now + self._settings.cooldown

    def _look_after_change(self, leaders: Sequence[RankRow], now: float) -> None:
        assert self._changing is not None
        name, role, since = self._changing
        done = any(
            row.instance.name == name and row.instance.role is role and row.state is MembershipState.READY
            for row in leaders
        )
        if done or now - since >= _CHANGE_TIMEOUT:
            self.failed(now)

    def _look(self, fingerprint: str, pool: Sequence[RankRow], now: float) -> RoleChange | None:
        pressures = pressure_by_role(pool)
        for role, other in _OTHER.items():
            key = (fingerprint, role)
            if not self._needs(pressures[role], pressures[other]):
                self._needed_since.pop(key, None)
                continue
            since = self._needed_since.setdefault(key, now)
            if now - since < self._settings.hold:
                continue
            donors = [row for row in pool if row.instance.role is other and row.state is MembershipState.READY]
            donor = min(donors, key=lambda row: (row.load.running + row.load.queued, row.instance.name))
            reason = (
                f"{pressures[role].waiting} requests wait for {pressures[role].workers} {role} workers, "
                f"{pressures[other].waiting} for {pressures[other].workers} {other} workers"
            )
            return RoleChange(donor, role, reason)
        return None

    def _needs(self, mine: Pressure, others: Pressure) -> bool:
        # Who has no worker at all can't be helped by taking one from a pool that is not whole either.
        return (
            mine.workers > 0
            and others.workers > 1
            and mine.each >= self._settings.high
            and others.without_one() < self._settings.low
        )


def pressure_by_role(pool: Iterable[RankRow]) -> dict[Role, Pressure]:
    """The pressure on both roles of one fingerprint.

    Every request is at a decode worker, whatever it waits for: it waits for decode only when that worker is full.
    Otherwise it waits for its prompt, as do all but one of the requests at a prefill worker that still has
    prompt tokens to compute.
    """
    ready = [row for row in pool if row.state is MembershipState.READY]
    prefills = [row for row in ready if row.instance.role is Role.PREFILL]
    decodes = [row for row in ready if row.instance.role is Role.DECODE]
    queued = sum(row.load.queued for row in prefills)
    computing = sum(max(row.load.running - 1, 0) for row in prefills if row.load.queued_tokens)
    unopened = sum(row.load.queued for row in decodes if not _full(row))
    return {
        Role.PREFILL: Pressure(len(prefills), computing + max(queued, unopened)),
        Role.DECODE: Pressure(len(decodes), sum(row.load.queued for row in decodes if _full(row))),
    }


def _full(row: RankRow) -> bool:
    """True when a decode worker's batch or pool has no room to speak of."""
    kv, batch = row.load.kv, row.instance.max_running
    return (0 < batch <= row.load.running) or kv.free + kv.cached < _ROOM * kv.total
