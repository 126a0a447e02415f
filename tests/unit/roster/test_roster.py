"""The merged roster under a virtual clock."""

from __future__ import annotations

from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.lifecycle.membership import MembershipState
from engine_core.types.errors import NotFoundError
from engine_core.types.ids import RankCoord
from engine_core.types.request import Role
from services.bootstrap.rank_table import RankTable
from services.wire.bootstrap import Load, LoadUpdate, RankRow, Revision, RowChange, RowLoad, Snapshot
from services.worker.roster import Roster
from tests.support.rows import instance_spec, rank_row

JOINING, READY, DRAINING, LOST, LEFT = (
    MembershipState.JOINING,
    MembershipState.READY,
    MembershipState.DRAINING,
    MembershipState.LOST,
    MembershipState.LEFT,
)


def snap(epoch: int, *rows: RankRow, n: int = 1) -> Snapshot:
    return Snapshot(Revision(epoch, n), rows)


def change(epoch: int, n: int, row: RankRow) -> RowChange:
    return RowChange(Revision(epoch, n), row)


def seen(roster: Roster) -> list[tuple[str, int, MembershipState]]:
    return [(row.instance.name, row.incarnation, row.state) for row in roster.rows()]


def test_rows_follow_snapshots_changes_and_loads() -> None:
    roster = Roster(["b"])
    assert (roster.synced, roster.revision, roster.rows(), roster.in_contact) == (False, None, [], False)
    assert roster.apply("b", snap(5, rank_row("d0", state=READY)), now=0)
    assert (roster.synced, roster.revision, roster.in_contact) == (True, Revision(5, 1), True)
    version = roster.version
    key = rank_row("d0").key
    assert not roster.apply("b", LoadUpdate(Revision(5, 1), (RowLoad(key, 100, Load(running=4)),)), now=0)
    assert not roster.apply("b", LoadUpdate(Revision(5, 1), (RowLoad(key, 99, Load(running=9)),)), now=0)
    assert (roster.rows()[0].load.running, roster.version) == (4, version)
    assert roster.apply("b", change(5, 2, rank_row("d1", state=JOINING)), now=0)
    assert roster.apply("b", change(5, 3, rank_row("d0", state=LEFT)), now=0)
    assert seen(roster) == [("d1", 100, JOINING)]
    assert roster.ready(Role.DECODE) == []
    assert roster.resume_after("b") == Revision(5, 3)
    assert roster.version == version + 2


def test_two_tables_merge() -> None:
    roster = Roster(["a", "b"])
    roster.apply("a", snap(1, rank_row("d0", incarnation=5, state=READY), rank_row("d1", state=LOST)), now=0)
    roster.apply("b", snap(9, rank_row("d0", incarnation=6, state=JOINING), rank_row("d1", state=READY)), now=0)
    assert seen(roster) == [("d0", 6, JOINING), ("d1", 100, READY)]
    roster.apply("a", change(1, 2, rank_row("d1", state=DRAINING)), now=0)
    assert seen(roster)[1] == ("d1", 100, DRAINING)
    assert roster.revision == Revision(9, 1)
    roster.contact_lost("b", now=1)
    assert roster.revision == Revision(1, 2)


def test_lost_rows_are_offered_only_when_nothing_is_ready() -> None:
    roster = Roster(["b"])
    spec = instance_spec("tp", tp_size=2)
    followers = [rank_row(spec=spec, coord=RankCoord(0, 0, tp), state=READY) for tp in range(2)]
    roster.apply("b", snap(1, *followers, rank_row("d1", state=LOST)), now=0)
    assert [row.key for row in roster.ready(Role.DECODE)] == [followers[0].key]
    roster.apply("b", change(1, 2, rank_row(spec=spec, coord=RankCoord(), state=DRAINING)), now=0)
    assert [row.instance.name for row in roster.ready(Role.DECODE)] == ["d1"]
    assert roster.ready(Role.PREFILL) == []


def test_find_by_endpoint_and_incarnation() -> None:
    roster = Roster(["b"])
    roster.apply(
        "b",
        snap(1, rank_row("d0", endpoint="h:1", incarnation=5), rank_row("d1", endpoint="h:1", incarnation=6)),
        now=0,
    )
    at = roster.find("h:1")
    assert at is not None
    assert at.incarnation == 6
    old = roster.find("h:1", 5)
    assert old is not None
    assert old.instance.name == "d0"
    assert roster.find("h:1", 7) is None
    assert roster.find("h:2") is None
    found = roster.find_incarnation(5)
    assert found is not None
    assert found.endpoint == "h:1"


def test_a_restarted_bootstrap_keeps_old_rows_for_one_ttl() -> None:
    roster = Roster(["b"], ttl=15)
    roster.apply(
        "b", snap(1, rank_row("d0", state=READY), rank_row("d1", state=READY), rank_row("d2", state=READY)), now=0
    )
    roster.contact_lost("b", now=5)
    assert not roster.apply("b", snap(2), now=10)
    assert [row.state for row in roster.ready(Role.DECODE)] == [READY] * 3
    # d0 is back; d1 is back as a later process; d2 stays away.
    roster.apply("b", change(2, 1, rank_row("d0", state=JOINING)), now=11)
    assert seen(roster)[0] == ("d0", 100, READY)
    roster.apply("b", change(2, 2, rank_row("d0", state=READY)), now=11)
    roster.apply("b", change(2, 3, rank_row("d1", incarnation=200, state=JOINING)), now=11)
    assert seen(roster) == [("d0", 100, READY), ("d1", 200, JOINING), ("d2", 100, READY)]
    roster.apply("b", change(2, 4, rank_row("d0", state=LEFT)), now=12)
    assert seen(roster) == [("d1", 200, JOINING), ("d2", 100, READY)]
    assert not roster.expire(24.9)
    assert roster.expire(25)
    assert seen(roster) == [("d1", 200, JOINING)]


def test_a_snapshot_within_one_life_removes_at_once() -> None:
    roster = Roster(["b"])
    roster.apply("b", snap(1, rank_row("d0", state=READY), rank_row("d1", state=READY)), now=0)
    roster.apply("b", snap(1, rank_row("d1", state=READY), n=90), now=0)
    assert seen(roster) == [("d1", 100, READY)]


def test_without_contact_rows_stay_and_count_as_lost_after_one_ttl() -> None:
    roster = Roster(["a", "b"], ttl=15)
    roster.apply("a", snap(1, rank_row("d0", state=READY), rank_row("d2", state=DRAINING)), now=0)
    roster.apply("b", snap(2, rank_row("d0", state=READY), rank_row("d1", state=READY)), now=0)
    roster.contact_lost("b", now=10)
    roster.contact_lost("b", now=20)  # still gone: the first time counts
    assert not roster.expire(24.9)
    assert roster.expire(25)
    assert seen(roster) == [("d0", 100, READY), ("d1", 100, LOST), ("d2", 100, DRAINING)]
    roster.contact_lost("a", now=30)
    roster.expire(1_000)
    assert seen(roster) == [("d0", 100, LOST), ("d1", 100, LOST), ("d2", 100, DRAINING)]
    assert [row.instance.name for row in roster.ready(Role.DECODE)] == ["d0", "d1"]
    roster.apply("b", LoadUpdate(Revision(2, 1)), now=1_001)
    assert seen(roster) == [("d0", 100, READY), ("d1", 100, READY), ("d2", 100, DRAINING)]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["register", "renew", "lapse", "drain", "deregister", "restart", "watch", "cut"]),
        st.integers(0, 1),
        st.sampled_from(["d0", "d1", "p0"]),
    ),
    max_size=40,
)


@settings(max_examples=80, deadline=None)
@given(STEPS)
def test_after_a_ttl_in_contact_the_roster_is_the_merge_of_the_tables(steps: list[tuple[str, int, str]]) -> None:
    """Two Bootstraps, three workers, watches that break and resume: in the end only what the tables say counts."""
    names, now, incarnation, epoch = ["a", "b"], 0.0, 1, 10
    tables = [RankTable(1, ttl=15), RankTable(2, ttl=15)]
    leases: dict[tuple[int, str], tuple[int, int]] = {}
    roster = Roster(names, ttl=15)

    def watch(which: int) -> None:
        after = roster.resume_after(names[which])
        changes = None if after is None else tables[which].changes_after(after)
        for event in [tables[which].snapshot()] if changes is None else changes or [LoadUpdate(tables[which].revision)]:
            roster.apply(names[which], event, now)

    for what, which, name in steps:
        table, lease = tables[which], leases.get((which, name))
        if what == "register":
            incarnation += 1
            role = Role.PREFILL if name == "p0" else Role.DECODE
            leases[which, name] = (
                table.register_rank(rank_row(name, role, incarnation=incarnation), 0, now).lease_id,
                incarnation,
            )
        elif what == "lapse":
            now += 20
            for each in tables:
                each.expire(now)
        elif what == "restart":
            epoch += 1
            tables[which] = RankTable(epoch, ttl=15)
            leases = {at: held for at, held in leases.items() if at[0] != which}
        elif what == "watch":
            watch(which)
        elif what == "cut":
            roster.contact_lost(names[which], now)
        elif lease is not None:
            with suppress(NotFoundError):  # it lapsed
                if what == "renew":
                    table.renew(*lease, None, now)
                else:
                    (table.drain if what == "drain" else table.deregister)(*lease, now)

    for index in range(2):
        watch(index)
    now += 15
    roster.expire(now)
    rows = [row for table in tables for row in table.rows()]
    latest = {key: max(row.incarnation for row in rows if row.key == key) for key in {row.key for row in rows}}
    assert {row.key: row.incarnation for row in roster.rows()} == latest
    for row in roster.rows():
        told = {r.state for r in rows if r.key == row.key and r.incarnation == row.incarnation}
        strongest = next(state for state in (DRAINING, READY, JOINING, LOST) if state in told)
        assert row.state is strongest


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5), st.integers(0, 2), st.integers(1, 3)), max_size=40))
def test_merging_what_was_touched_is_merging_all(steps: list[tuple[str, int, int, int]]) -> None:
    """Each event merges its own rows only; that must never differ from merging the tables whole."""
    roster, now, n = Roster(["a", "b"], ttl=4.0), 0.0, 0
    for bootstrap, what, which, number in steps:
        now, n = now + number, n + 1
        row = rank_row(f"d{which}", incarnation=number, state=[JOINING, READY, DRAINING][number - 1])
        if what == 0:
            roster.apply(bootstrap, snap(number, row, n=n), now)
        elif what == 1:
            roster.apply(bootstrap, change(1, n, row), now)
        elif what == 2:
            roster.apply(bootstrap, change(1, n, rank_row(f"d{which}", incarnation=number, state=LEFT)), now)
        elif what == 3:
            load = RowLoad(row.key, number, Load(running=n))
            roster.apply(bootstrap, LoadUpdate(Revision(1, n), (load,)), now)
        elif what == 4:
            roster.contact_lost(bootstrap, now)
        else:
            roster.expire(now)
        rows, version = roster.rows(), roster.version
        assert not roster._merge(now, None)
        assert (roster.rows(), roster.version) == (rows, version)
