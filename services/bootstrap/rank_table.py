"""The rank table: who is in the mesh, under which lease, at which revision.

The life of a row:

1. A worker registers a rank. The row is JOINING, and under a lease.
2. Once every rank of the instance is registered and live (JOINING, READY or DRAINING, with one
   fingerprint and one shape), all rows of the instance become READY. When one is lost or leaves, the
   others go back to JOINING.
3. Renewals keep the lease; they carry load, which is no change of the table.
4. A lease that lapses makes the row LOST. A new lease of the same incarnation brings it back, as
   DRAINING if it was. After ten times its length the row is LEFT.
5. Drain makes it DRAINING, Deregister LEFT, which removes it.

A later incarnation that registers takes the row over: the earlier one's lease is dead, and it is
refused (FencedError, with the holder's incarnation) from then on, also after the later one has left.

Every method takes `now`, in seconds on any clock that does not run backwards. Nothing here does I/O.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict, deque
from itertools import takewhile

import msgspec

from engine_core.lifecycle.machine import Machine, Move, MoveLog
from engine_core.lifecycle.membership import MembershipState, membership
from engine_core.types.errors import FencedError, InvalidRequestError, Leg, NotFoundError, QueueFullError
from engine_core.types.ids import SessionId
from engine_core.types.request import Role
from services.wire.bootstrap import (
    MAX_ROWS,
    InstanceSpec,
    Load,
    RankRow,
    Revision,
    RowChange,
    RowKey,
    RowLoad,
    Snapshot,
)

_LIVE = frozenset({MembershipState.JOINING, MembershipState.READY, MembershipState.DRAINING})
_MIN_TTL, _MAX_TTL = 0.05, 600.0
_LOST_TTLS = 10
MAX_ROWS_OF_PROCESS = 64
"""Rows that one incarnation may hold: the local ranks of a worker."""
_REMEMBERED = 10_000
"""Fences, dead leases and announcements that are kept for rows that are gone."""

TAKEN_OVER = "taken over by"
"""How the reason of a move begins that a later incarnation caused."""

InstanceKey = tuple[str, Role]


class Grant(msgspec.Struct, frozen=True):
    """A lease: its length, and how often to renew it, in seconds."""

    lease_id: int
    ttl: float
    renew: float
    revision: Revision


class _Fence(msgspec.Struct, frozen=True):
    incarnation: int
    deregistered: bool = False


class _Entry:
    """A row with what its watchers don't see. `due` is when the lease lapses or, once LOST, the row goes."""

    __slots__ = ("draining", "due", "lease_id", "load_seq", "machine", "row", "ttl")

    def __init__(self, row: RankRow, machine: Machine[MembershipState]) -> None:
        self.row, self.machine = row, machine
        self.lease_id, self.ttl, self.due, self.load_seq, self.draining = 0, 0.0, math.inf, 0, False


def _shape(spec: InstanceSpec) -> tuple[object, ...]:
    """What the ranks of one instance must agree on."""
    return (spec.fingerprint, spec.dp_size, spec.cp_size, spec.tp_size)


def _ignore(move: Move) -> None:
    pass


class RankTable:
    """The table of one life of Bootstrap, which `epoch` names."""

    def __init__(
        self, epoch: int, *, ttl: float = 15.0, renew: float = 5.0, log_size: int = 4_096, move_log: MoveLog = _ignore
    ) -> None:
        self._epoch, self._ttl, self._renew, self._move_log = epoch, ttl, renew, move_log
        self._n = 0
        self._log: deque[RankRow] = deque(maxlen=log_size)
        self._entries: dict[RowKey, _Entry] = {}
        self._instances: dict[InstanceKey, set[RowKey]] = {}
        self._specs: OrderedDict[InstanceKey, tuple[int, InstanceSpec]] = OrderedDict()
        self._fences: OrderedDict[RowKey, _Fence] = OrderedDict()
        self._leases: dict[int, RowKey] = {}
        self._dead: OrderedDict[int, RowKey] = OrderedDict()
        self._next_due = math.inf
        self._load_seq = 0
        # Ids must not repeat in the next life, or an old lease would meet another worker's row.
        self._ids = random.Random(epoch)

    # ---- reading ----------------------------------------------------------------------------------

    @property
    def revision(self) -> Revision:
        """The revision after the last change."""
        return Revision(self._epoch, self._n)

    @property
    def load_seq(self) -> int:
        """Counts load reports that changed something."""
        return self._load_seq

    def rows(self) -> tuple[RankRow, ...]:
        """All rows, ordered by key; LEFT ones are gone."""
        return tuple(self._entries[key].row for key in sorted(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def snapshot(self) -> Snapshot:
        """The whole table."""
        return Snapshot(self.revision, self.rows())

    def changes_after(self, after: Revision) -> list[RowChange] | None:
        """Changes behind a revision, oldest first; None when only a snapshot will do: another epoch, a
        revision that is not of this table, or one that the log no longer reaches."""
        if after.table_epoch != self._epoch or after.n > self._n or after.n < self._n - len(self._log):
            return None
        newer = list(takewhile(lambda row: row.revision.n > after.n, reversed(self._log)))
        return [RowChange(row.revision, row) for row in reversed(newer)]

    def loads_after(self, seq: int) -> tuple[RowLoad, ...]:
        """Loads that were reported behind a load_seq."""
        return tuple(
            RowLoad(key, entry.row.incarnation, entry.row.load)
            for key, entry in self._entries.items()
            if entry.load_seq > seq
        )

    def lease_seconds(self, now: float) -> tuple[tuple[RowKey, float], ...]:
        """Rows under a lease, with the seconds until it lapses."""
        return tuple((key, self._entries[key].due - now) for key in sorted(set(self._leases.values())))

    @property
    def next_due(self) -> float:
        """When expire() may next have something to do; inf when never."""
        return self._next_due

    # ---- what workers ask for ---------------------------------------------------------------------

    def register_instance(self, spec: InstanceSpec, incarnation: int, now: float) -> Revision:
        """Announces an instance. Rows of a running instance are not touched before a rank registers.
        Raises FencedError when a later incarnation runs it in another shape."""
        self.expire(now)
        key = (spec.name, spec.role)
        self._check_spec(spec, incarnation)
        if not self._instances.get(key):
            self._set_spec(spec, incarnation)
        return self.revision

    def register_rank(self, row: RankRow, ttl: float, now: float) -> Grant:
        """Puts a row under a new lease; `ttl` 0 takes the default. Its own earlier lease ends. A row that comes
        as DRAINING is never placed upon; any other state is the table's to find.

        Raises FencedError when a later incarnation holds or held the row, or this one deregistered;
        InvalidRequestError when the rank lies outside its instance.
        """
        self.expire(now)
        spec, coord, key = row.instance, row.coord, row.key
        if not (0 <= coord.dp < spec.dp_size and 0 <= coord.cp < spec.cp_size and 0 <= coord.tp < spec.tp_size):
            raise InvalidRequestError(f"rank {coord} lies outside its instance", field="row.coord", leg=Leg.BOOTSTRAP)
        self._check_fence(key, row.incarnation)
        fence = self._fences.get(key)
        if fence is not None and fence.incarnation == row.incarnation and fence.deregistered:
            raise FencedError(
                f"{key.instance} deregistered",
                leg=Leg.BOOTSTRAP,
                reason="DEREGISTERED",
                peer_incarnation=row.incarnation,
                retryable=False,
            )
        self._check_spec(spec, row.incarnation)
        self._check_room(row)
        self._set_spec(spec, row.incarnation)
        self._remember(self._fences, key, _Fence(row.incarnation))

        entry = self._entries.get(key)
        if entry is not None and entry.row.incarnation != row.incarnation:
            self._end_lease(entry)
            entry.machine.advance(MembershipState.LEFT, now, f"{TAKEN_OVER} incarnation {row.incarnation}")
            entry = None
        if entry is None:
            entry = self._enter(row, now)
        else:
            self._end_lease(entry)
            self._refresh(entry, row, now)
        if row.state is MembershipState.DRAINING:
            self._drain(entry, now, "registered as draining")
        self._lease(entry, ttl, now)
        self._settle((spec.name, spec.role), now)
        return Grant(entry.lease_id, entry.ttl, min(self._renew, entry.ttl / 3), self.revision)

    def renew(self, lease_id: int, incarnation: int, load: Load | None, now: float) -> float:
        """Keeps a lease and stores the load; returns its length in seconds.

        Raises FencedError when a later incarnation took the row, NotFoundError when the lease lapsed or
        is not known: register again.
        """
        self.expire(now)
        entry = self._held(lease_id, incarnation)
        entry.due = now + entry.ttl
        if load is not None and load != entry.row.load:
            self._load_seq += 1
            entry.load_seq = self._load_seq
            entry.row = msgspec.structs.replace(entry.row, load=load)
        return entry.ttl

    def drain(self, lease_id: int, incarnation: int, now: float) -> Revision:
        """Takes a row out of placement; idempotent. Raises as renew()."""
        self.expire(now)
        self._drain(self._held(lease_id, incarnation), now, "drain")
        return self.revision

    def deregister(self, lease_id: int, incarnation: int, now: float) -> Revision:
        """Removes a row. Its own last lease will do even when it has lapsed. Raises as renew()."""
        self.expire(now)
        key = self._leases.get(lease_id) or self._dead.get(lease_id)
        entry = None if key is None else self._entries.get(key)
        if key is None or entry is None or entry.lease_id != lease_id or entry.row.incarnation != incarnation:
            entry = self._held(lease_id, incarnation)  # raises what fits
        self._remember(self._fences, entry.row.key, _Fence(incarnation, deregistered=True))
        self._leave(entry, now, "deregistered")
        return self.revision

    def expire(self, now: float) -> bool:
        """Moves rows whose time has come: lapsed to LOST, long lost to LEFT. True when any moved."""
        if now < self._next_due:
            return False
        before = self._n
        for entry in [entry for entry in self._entries.values() if entry.due <= now]:
            key = entry.row.key
            if entry.row.state is not MembershipState.LOST:
                lapsed = entry.due
                self._end_lease(entry)
                entry.due = lapsed + _LOST_TTLS * entry.ttl
                self._move(entry, MembershipState.LOST, now, "lease lapsed")
                self._settle((key.instance, key.role), now)
            if entry.due <= now:
                self._leave(entry, now, "lost for too long")
        self._next_due = min((entry.due for entry in self._entries.values()), default=math.inf)
        return self._n != before

    # ---- inside -----------------------------------------------------------------------------------

    def _check_fence(self, key: RowKey, incarnation: int) -> None:
        fence = self._fences.get(key)
        if fence is not None and incarnation < fence.incarnation:
            raise FencedError(
                f"{key.role} {key.instance} rank {tuple(msgspec.structs.astuple(key.coord))} belongs to incarnation "
                f"{fence.incarnation}, which is later than {incarnation}",
                leg=Leg.BOOTSTRAP,
                peer_incarnation=fence.incarnation,
                retryable=False,
            )

    def _check_spec(self, spec: InstanceSpec, incarnation: int) -> None:
        holder = self._specs.get((spec.name, spec.role))
        if holder is not None and incarnation < holder[0] and _shape(holder[1]) != _shape(spec):
            raise FencedError(
                f"instance {spec.name} is run in another shape or fingerprint by incarnation {holder[0]}",
                leg=Leg.BOOTSTRAP,
                peer_incarnation=holder[0],
                retryable=False,
            )

    def _check_room(self, row: RankRow) -> None:
        """Raises QueueFullError when the table is full, InvalidRequestError when one process has too many rows."""
        if row.key in self._entries:
            return
        if len(self._entries) >= MAX_ROWS:
            raise QueueFullError(f"the rank table has {MAX_ROWS} rows", leg=Leg.BOOTSTRAP, reason="TABLE_FULL")
        of_process = sum(entry.row.incarnation == row.incarnation for entry in self._entries.values())
        if of_process >= MAX_ROWS_OF_PROCESS:
            raise InvalidRequestError(
                f"incarnation {row.incarnation} has {of_process} rows, which is the most that one process may have",
                leg=Leg.BOOTSTRAP,
                field="row.incarnation",
            )

    def _set_spec(self, spec: InstanceSpec, incarnation: int) -> None:
        key = (spec.name, spec.role)
        holder = self._specs.get(key)
        if holder is not None and incarnation < holder[0]:
            return
        self._specs[key] = (incarnation, spec)
        self._specs.move_to_end(key)
        if len(self._specs) > _REMEMBERED:
            idle = next((k for k in self._specs if not self._instances.get(k)), None)
            if idle is not None:
                del self._specs[idle]

    def _remember(self, fences: OrderedDict[RowKey, _Fence], key: RowKey, fence: _Fence) -> None:
        fences[key] = fence
        fences.move_to_end(key)
        if len(fences) > _REMEMBERED:
            gone = next((k for k in fences if k not in self._entries and k != key), None)
            if gone is not None:
                del fences[gone]

    def _enter(self, row: RankRow, now: float) -> _Entry:
        machine = membership(SessionId(row.incarnation, 0), self._move_log, now)
        entry = _Entry(row, machine)
        self._entries[row.key] = entry
        self._instances.setdefault((row.instance.name, row.instance.role), set()).add(row.key)
        self._publish(entry, msgspec.structs.replace(row, state=machine.state, load=Load()))
        return entry

    def _refresh(self, entry: _Entry, row: RankRow, now: float) -> None:
        """The same incarnation registers again: back from LOST, or with other details."""
        old = entry.row
        fresh = msgspec.structs.replace(row, state=old.state, load=old.load, revision=old.revision)
        entry.row = fresh
        if old.state is MembershipState.LOST:
            target = MembershipState.DRAINING if entry.draining else MembershipState.JOINING
            if target is MembershipState.JOINING and self._complete((row.key.instance, row.key.role), back=entry):
                target = MembershipState.READY
            self._move(entry, target, now, "new lease")
        elif fresh != old:
            self._publish(entry, fresh)

    def _drain(self, entry: _Entry, now: float, reason: str) -> None:
        entry.draining = True
        if entry.row.state is not MembershipState.DRAINING:
            self._move(entry, MembershipState.DRAINING, now, reason)

    def _lease(self, entry: _Entry, ttl: float, now: float) -> None:
        entry.lease_id = self._ids.getrandbits(62) + 1
        entry.ttl = min(max(ttl or self._ttl, _MIN_TTL), _MAX_TTL)
        entry.due = now + entry.ttl
        self._leases[entry.lease_id] = entry.row.key
        self._next_due = min(self._next_due, entry.due)

    def _end_lease(self, entry: _Entry) -> None:
        if self._leases.pop(entry.lease_id, None) is None:
            return
        self._dead[entry.lease_id] = entry.row.key
        if len(self._dead) > _REMEMBERED:
            self._dead.popitem(last=False)

    def _held(self, lease_id: int, incarnation: int) -> _Entry:
        """The entry under a live lease."""
        key = self._leases.get(lease_id)
        if key is not None and self._entries[key].row.incarnation == incarnation:
            return self._entries[key]
        known = key or self._dead.get(lease_id)
        if known is not None:
            self._check_fence(known, incarnation)
        raise NotFoundError("this lease lapsed or was never granted here", leg=Leg.BOOTSTRAP, field="lease_id")

    def _complete(self, key: InstanceKey, back: _Entry | None = None) -> bool:
        """True when all ranks of the shape that counts are live; `back` is taken as live."""
        counted = self._specs[key][1]
        entries = [self._entries[row_key] for row_key in self._instances.get(key, ())]
        live = sum(
            (entry.row.state in _LIVE or entry is back) and _shape(entry.row.instance) == _shape(counted)
            for entry in entries
        )
        return live == counted.world_size

    def _settle(self, key: InstanceKey, now: float) -> None:
        """Makes JOINING and READY of an instance's rows agree with what is there."""
        if key not in self._instances:
            return
        complete, shape = self._complete(key), _shape(self._specs[key][1])
        for row_key in sorted(self._instances[key]):
            entry = self._entries[row_key]
            belongs = complete and _shape(entry.row.instance) == shape
            if belongs and entry.row.state is MembershipState.JOINING:
                self._move(entry, MembershipState.READY, now, "all ranks are live")
            elif not belongs and entry.row.state is MembershipState.READY:
                self._move(entry, MembershipState.JOINING, now, "a rank of the instance is missing")

    def _leave(self, entry: _Entry, now: float, reason: str) -> None:
        key = entry.row.key
        instance = (key.instance, key.role)
        self._end_lease(entry)
        self._move(entry, MembershipState.LEFT, now, reason)
        del self._entries[key]
        self._instances[instance].discard(key)
        if not self._instances[instance]:
            del self._instances[instance], self._specs[instance]
        self._settle(instance, now)

    def _move(self, entry: _Entry, target: MembershipState, now: float, reason: str) -> None:
        entry.machine.advance(target, now, reason)
        self._publish(entry, msgspec.structs.replace(entry.row, state=target))

    def _publish(self, entry: _Entry, row: RankRow) -> None:
        self._n += 1
        entry.row = msgspec.structs.replace(row, revision=self.revision)
        self._log.append(entry.row)
