"""The rank table under a virtual clock, one behaviour per test."""

from __future__ import annotations

import msgspec
import pytest

from engine_core.lifecycle.machine import Move
from engine_core.lifecycle.membership import MembershipState
from engine_core.types.errors import FencedError, InvalidRequestError, NotFoundError
from engine_core.types.ids import RankCoord
from engine_core.types.request import Role
from services.bootstrap.rank_table import MAX_ROWS_OF_PROCESS, RankTable
from services.wire.bootstrap import Load, Revision
from tests.support.rows import instance_spec, rank_row

READY, JOINING, LOST, DRAINING, LEFT = (
    MembershipState.READY,
    MembershipState.JOINING,
    MembershipState.LOST,
    MembershipState.DRAINING,
    MembershipState.LEFT,
)


def states(table: RankTable) -> list[MembershipState]:
    return [row.state for row in table.rows()]


def test_one_rank_is_ready_at_once_and_lost_when_its_lease_lapses() -> None:
    moves: list[Move] = []
    table = RankTable(7, ttl=15, renew=5, move_log=moves.append)
    grant = table.register_rank(rank_row(), 0, now=0)
    assert (grant.ttl, grant.renew, grant.revision) == (15, 5, Revision(7, 2))
    assert states(table) == [READY]
    assert table.renew(grant.lease_id, 100, None, now=10) == 15
    assert not table.expire(24.9)
    assert table.next_due <= 25
    assert table.expire(25)
    assert states(table) == [LOST]
    assert not table.expire(174.9)
    assert table.expire(175)
    assert table.rows() == ()
    assert [(move.source, move.target) for move in moves] == [
        ("JOINING", "READY"), ("READY", "LOST"), ("LOST", "LEFT"),
    ]  # fmt: skip


def test_a_late_timer_takes_a_row_all_the_way() -> None:
    table = RankTable(1, ttl=1)
    table.register_rank(rank_row(), 0, now=0)
    table.expire(1_000)
    assert table.rows() == ()
    changes = table.changes_after(Revision(1, 2))
    assert changes is not None
    assert [change.row.state for change in changes] == [LOST, LEFT]


def test_a_lapsed_lease_is_unknown_and_a_new_one_brings_the_row_back() -> None:
    table = RankTable(1, ttl=10)
    first = table.register_rank(rank_row(), 0, now=0)
    with pytest.raises(NotFoundError):
        table.renew(first.lease_id, 100, None, now=10)
    assert states(table) == [LOST]
    second = table.register_rank(rank_row(), 0, now=11)
    assert second.lease_id != first.lease_id
    assert states(table) == [READY]
    table.renew(second.lease_id, 100, None, now=12)
    with pytest.raises(NotFoundError):
        table.renew(first.lease_id, 100, None, now=12)


def test_a_draining_row_that_was_lost_comes_back_draining() -> None:
    table = RankTable(1, ttl=10)
    grant = table.register_rank(rank_row(), 0, now=0)
    table.drain(grant.lease_id, 100, now=1)
    again = table.drain(grant.lease_id, 100, now=2)
    assert (states(table), again) == ([DRAINING], Revision(1, 3))
    table.expire(50)
    table.register_rank(rank_row(), 0, now=51)
    assert states(table) == [DRAINING]


def test_an_instance_is_ready_when_all_its_ranks_are() -> None:
    spec = instance_spec(dp_size=2, tp_size=2)
    coords = [RankCoord(dp, 0, tp) for dp in range(2) for tp in range(2)]
    table = RankTable(1, ttl=10)
    grants = []
    for coord in coords:
        assert all(state is JOINING for state in states(table))
        grants.append(table.register_rank(rank_row(spec=spec, coord=coord), 0, now=0))
    assert states(table) == [READY] * 4
    for grant in grants[1:]:
        table.renew(grant.lease_id, 100, None, now=9)
    table.expire(10)
    assert states(table) == [LOST, JOINING, JOINING, JOINING]
    table.register_rank(rank_row(spec=spec, coord=coords[0], incarnation=101), 0, now=11)
    assert states(table) == [READY] * 4
    table.drain(grants[1].lease_id, 100, now=11)
    assert states(table) == [READY, DRAINING, READY, READY]
    table.deregister(grants[1].lease_id, 100, now=12)
    assert states(table) == [JOINING] * 3


def test_a_later_incarnation_takes_over_and_the_earlier_is_refused_everywhere() -> None:
    table = RankTable(1, ttl=10)
    old = table.register_rank(rank_row(incarnation=100), 0, now=0)
    new = table.register_rank(rank_row(incarnation=200, endpoint="new:1"), 0, now=1)
    assert [(row.incarnation, row.endpoint, row.state) for row in table.rows()] == [(200, "new:1", READY)]
    calls = [
        lambda: table.register_rank(rank_row(incarnation=100), 0, now=2),
        lambda: table.renew(old.lease_id, 100, None, now=2),
        lambda: table.drain(old.lease_id, 100, now=2),
        lambda: table.deregister(old.lease_id, 100, now=2),
    ]
    for refused in calls:
        with pytest.raises(FencedError) as caught:
            refused()
        assert caught.value.peer_incarnation == 200
    # It learns the holder, so that it can mint above it; and it is refused as well once the holder has left.
    table.deregister(new.lease_id, 200, now=3)
    with pytest.raises(FencedError):
        calls[0]()
    table.register_rank(rank_row(incarnation=201), 0, now=4)
    assert [row.incarnation for row in table.rows()] == [201]


def test_who_deregistered_does_not_come_back_by_a_late_message() -> None:
    table = RankTable(1)
    grant = table.register_rank(rank_row(), 0, now=0)
    table.deregister(grant.lease_id, 100, now=1)
    with pytest.raises(FencedError) as caught:
        table.register_rank(rank_row(), 0, now=2)
    assert (caught.value.reason, caught.value.peer_incarnation) == ("DEREGISTERED", 100)
    with pytest.raises(NotFoundError):
        table.deregister(grant.lease_id, 100, now=3)


def test_a_lapsed_lease_still_lets_its_row_leave() -> None:
    table = RankTable(1, ttl=10)
    grant = table.register_rank(rank_row(), 0, now=0)
    table.expire(11)
    assert states(table) == [LOST]
    table.deregister(grant.lease_id, 100, now=12)
    assert table.rows() == ()


def test_an_unrelated_lease_is_no_key() -> None:
    table = RankTable(1)
    table.register_rank(rank_row("a"), 0, now=0)
    other = table.register_rank(rank_row("b", incarnation=300), 0, now=0)
    for incarnation in (100, 301):
        with pytest.raises((NotFoundError, FencedError)):
            table.renew(other.lease_id, incarnation, None, now=1)
    with pytest.raises(NotFoundError):
        table.renew(12345, 100, None, now=1)


def test_leases_of_another_life_are_unknown() -> None:
    before, after = RankTable(1), RankTable(2)
    old = before.register_rank(rank_row("a"), 0, now=0)
    new = after.register_rank(rank_row("b", incarnation=101), 0, now=0)
    assert old.lease_id != new.lease_id
    with pytest.raises(NotFoundError):
        after.renew(old.lease_id, 100, None, now=1)


def test_load_is_stored_without_a_revision() -> None:
    table = RankTable(1)
    grant = table.register_rank(rank_row(), 0, now=0)
    before = table.revision
    table.renew(grant.lease_id, 100, Load(running=3), now=1)
    assert (table.revision, table.load_seq) == (before, 1)
    table.renew(grant.lease_id, 100, Load(running=3), now=2)
    assert table.load_seq == 1
    assert [(load.incarnation, load.load.running) for load in table.loads_after(0)] == [(100, 3)]
    assert table.loads_after(1) == ()
    assert table.rows()[0].load == Load(running=3)


def test_registering_again_with_other_details_is_a_change_and_with_the_same_none() -> None:
    table = RankTable(1)
    table.register_rank(rank_row(engine_pid=1), 0, now=0)
    before = table.revision
    table.register_rank(rank_row(engine_pid=1), 0, now=1)
    assert table.revision == before
    table.register_rank(rank_row(engine_pid=2), 0, now=2)
    assert table.revision == Revision(1, before.n + 1)
    assert [(row.engine_pid, row.state) for row in table.rows()] == [(2, READY)]


def test_ranks_of_two_fingerprints_never_make_an_instance() -> None:
    one = instance_spec(dp_size=2)
    other = msgspec.structs.replace(one, fingerprint="other")
    table = RankTable(1)
    table.register_rank(rank_row(spec=one, coord=RankCoord(0), incarnation=100), 0, now=0)
    table.register_rank(rank_row(spec=other, coord=RankCoord(1), incarnation=200), 0, now=0)
    assert states(table) == [JOINING, JOINING]
    with pytest.raises(FencedError) as caught:
        table.register_rank(rank_row(spec=one, coord=RankCoord(0), incarnation=100), 0, now=1)
    assert caught.value.peer_incarnation == 200
    table.register_rank(rank_row(spec=other, coord=RankCoord(0), incarnation=201), 0, now=2)
    assert states(table) == [READY, READY]


def test_announcing_does_not_disturb_what_runs() -> None:
    table = RankTable(1)
    table.register_rank(rank_row(), 0, now=0)
    before = table.revision
    assert table.register_instance(instance_spec(fingerprint="new"), 200, now=1) == before
    assert states(table) == [READY]
    with pytest.raises(FencedError):
        table.register_instance(instance_spec(fingerprint="new"), 50, now=1)


def test_names_are_unique_per_role() -> None:
    table = RankTable(1)
    table.register_rank(rank_row("x", Role.PREFILL, incarnation=200), 0, now=0)
    table.register_rank(rank_row("x", Role.DECODE, incarnation=100), 0, now=0)
    assert states(table) == [READY, READY]


def test_ranks_outside_their_instance_are_refused() -> None:
    with pytest.raises(InvalidRequestError):
        RankTable(1).register_rank(rank_row(coord=RankCoord(1)), 0, now=0)


def test_a_watch_resumes_within_the_log_and_not_beyond() -> None:
    table = RankTable(9, log_size=3)
    for index in range(3):
        table.register_rank(rank_row(f"d{index}"), 0, now=0)  # two changes each
    assert table.revision == Revision(9, 6)
    assert table.changes_after(Revision(9, 6)) == []
    resumed = table.changes_after(Revision(9, 3))
    assert resumed is not None
    assert [change.revision.n for change in resumed] == [4, 5, 6]
    for after in (Revision(9, 2), Revision(8, 6), Revision(10, 1), Revision(9, 7)):
        assert table.changes_after(after) is None
    assert RankTable(9).changes_after(Revision(9, 0)) == []


def test_one_process_has_so_many_rows_and_no_more() -> None:
    table = RankTable(1)
    for number in range(MAX_ROWS_OF_PROCESS):
        table.register_rank(rank_row(spec=instance_spec(name=f"w-{number}"), incarnation=7), 0, now=0)
    with pytest.raises(InvalidRequestError, match="incarnation 7 has 64 rows") as caught:
        table.register_rank(rank_row(spec=instance_spec(name="another"), incarnation=7), 0, now=0)
    assert caught.value.field == "row.incarnation"
    table.register_rank(rank_row(spec=instance_spec(name="w-3"), incarnation=7), 0, now=1)  # a row that it has
    table.register_rank(rank_row(spec=instance_spec(name="another"), incarnation=8), 0, now=1)
    assert len(table.rows()) == MAX_ROWS_OF_PROCESS + 1
