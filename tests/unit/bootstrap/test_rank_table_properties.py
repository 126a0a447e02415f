"""The rank table against a naive model: random joins, losses, restarts, drains and watch resumptions.

Workers are (row, incarnation) with the lease they believe to hold. Watchers resume at whatever revision
they saw last, as rarely as they like, also across restarts of Bootstrap.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_core.lifecycle.membership import MembershipState
from engine_core.types.errors import FencedError, NotFoundError
from engine_core.types.ids import RankCoord
from engine_core.types.request import Role
from services.bootstrap.rank_table import RankTable
from services.wire.bootstrap import InstanceSpec, Load, RankRow, Revision, RowKey
from tests.support.rows import instance_spec, rank_row

TTL = 15.0
SPECS = [instance_spec("single"), instance_spec("pair", Role.PREFILL, tp_size=2), instance_spec("dp", dp_size=2)]
PLACES = [(spec, RankCoord(dp, 0, tp)) for spec in SPECS for dp in range(spec.dp_size) for tp in range(spec.tp_size)]
LIVE = {MembershipState.JOINING, MembershipState.READY, MembershipState.DRAINING}


@dataclass
class Worker:
    """One process: what it asked for last."""

    spec: InstanceSpec
    coord: RankCoord
    incarnation: int
    lease_id: int = 0
    lapses: float = 0.0
    left: bool = False

    def row(self) -> RankRow:
        return rank_row(spec=self.spec, coord=self.coord, incarnation=self.incarnation)


@dataclass
class Watcher:
    """Its rows, by what it was sent."""

    seen: Revision | None = None
    rows: dict[RowKey, RankRow] = field(default_factory=dict)

    def resume(self, table: RankTable) -> None:
        changes = None if self.seen is None else table.changes_after(self.seen)
        if changes is None:
            snapshot = table.snapshot()
            self.rows = {row.key: row for row in snapshot.rows}
            self.seen = snapshot.revision
            return
        for change in changes:
            assert self.seen is not None
            assert change.revision == Revision(self.seen.table_epoch, self.seen.n + 1)
            self.seen = change.revision
            if change.row.state is MembershipState.LEFT:
                del self.rows[change.row.key]
            else:
                self.rows[change.row.key] = change.row


def without_load(row: RankRow) -> RankRow:
    return msgspec.structs.replace(row, load=Load())


class TableMachine(RuleBasedStateMachine):
    """The model: who may own a row, and until when its lease holds."""

    @initialize(log_size=st.sampled_from([2, 8, 1000]))
    def begin(self, log_size: int) -> None:
        self.now, self.epoch, self.log_size, self.minted = 100.0, 0, log_size, 1000
        self.workers: list[Worker] = []
        self.watchers = [Watcher() for _ in range(3)]
        self.restart()

    @rule()
    def restart(self) -> None:
        """Bootstrap starts anew and knows nothing."""
        self.epoch += 1
        self.table = RankTable(self.epoch, ttl=TTL, log_size=self.log_size)
        self.highest: dict[RowKey, int] = {}
        self.draining: set[tuple[RowKey, int]] = set()
        for worker in self.workers:
            worker.lapses, worker.left = 0.0, False

    @rule(place=st.sampled_from(PLACES), set_back=st.integers(0, 3))
    def start_worker(self, place: tuple[InstanceSpec, RankCoord], set_back: int) -> None:
        """A process starts; sometimes on a clock behind the others'."""
        self.minted += 1
        self.workers.append(Worker(*place, incarnation=self.minted * 10 - set_back * 25))

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.workers))
        key = worker.row().key
        highest = self.highest.get(key, 0)
        try:
            grant = self.table.register_rank(worker.row(), 0, self.now)
        except FencedError as exc:
            assert exc.peer_incarnation == highest
            assert worker.incarnation < highest or worker.left
            return
        assert worker.incarnation >= highest
        assert not worker.left
        for other in self.workers:
            if other.row().key == key:
                other.lapses = 0.0
        self.highest[key] = worker.incarnation
        worker.lease_id, worker.lapses = grant.lease_id, self.now + grant.ttl

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), running=st.integers(0, 3))
    def renew(self, data: st.DataObject, running: int) -> None:
        worker = data.draw(st.sampled_from(self.workers))
        before = self.table.revision
        try:
            self.table.renew(worker.lease_id, worker.incarnation, Load(running=running), self.now)
        except NotFoundError:
            assert self.now >= worker.lapses
            return
        except FencedError as exc:
            assert exc.peer_incarnation == self.highest[worker.row().key] > worker.incarnation
            return
        assert self.now < worker.lapses
        assert self.table.revision == before
        worker.lapses = self.now + TTL
        assert {row.key: row for row in self.table.rows()}[worker.row().key].load == Load(running=running)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.workers))
        try:
            self.table.drain(worker.lease_id, worker.incarnation, self.now)
        except (NotFoundError, FencedError):
            assert self.now >= worker.lapses
            return
        assert self.now < worker.lapses
        self.draining.add((worker.row().key, worker.incarnation))

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def deregister(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.workers))
        try:
            self.table.deregister(worker.lease_id, worker.incarnation, self.now)
        except (NotFoundError, FencedError):
            assert self.now >= worker.lapses
            return
        worker.lapses, worker.left = 0.0, True
        self.draining.discard((worker.row().key, worker.incarnation))
        assert worker.row().key not in {row.key for row in self.table.rows()}

    @rule(seconds=st.sampled_from([0.0, 1.0, 7.0, TTL, 10 * TTL]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(index=st.integers(0, 2))
    def resume(self, index: int) -> None:
        """A watcher catches up, from wherever it was."""
        watcher = self.watchers[index]
        watcher.resume(self.table)
        assert watcher.seen == self.table.revision
        assert {key: without_load(row) for key, row in watcher.rows.items()} == {
            row.key: without_load(row) for row in self.table.rows()
        }

    @invariant()
    def no_earlier_incarnation_owns_a_row(self) -> None:
        for row in self.table.rows():
            assert row.incarnation == self.highest[row.key]

    @invariant()
    def rows_are_live_as_long_as_their_leases(self) -> None:
        self.table.expire(self.now)
        leased = {(w.row().key, w.incarnation) for w in self.workers if self.now < w.lapses}
        rows = {(row.key, row.incarnation) for row in self.table.rows() if row.state in LIVE}
        assert rows == leased
        for row in self.table.rows():
            if row.state is MembershipState.DRAINING:
                assert (row.key, row.incarnation) in self.draining

    @invariant()
    def an_instance_is_ready_when_all_its_ranks_are_live(self) -> None:
        rows = self.table.rows()
        for spec in SPECS:
            live = [row for row in rows if row.instance == spec and row.state in LIVE]
            expected = MembershipState.READY if len(live) == spec.world_size else MembershipState.JOINING
            assert {row.state for row in live if row.state is not MembershipState.DRAINING} <= {expected}

    @invariant()
    def the_timer_is_never_late(self) -> None:
        due = [w.lapses for w in self.workers if self.now < w.lapses]
        assert self.table.next_due <= min(due, default=float("inf"))


TableMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRankTable = TableMachine.TestCase
