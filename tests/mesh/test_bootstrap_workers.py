"""Registration and roster against real Bootstraps that die, come back, and are several."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from engine_core.lifecycle.membership import MembershipState
from engine_core.types.errors import FencedError
from engine_core.types.request import Role
from services.runtime.channels import ChannelPool
from services.wire.bootstrap import Load, RankRow
from services.worker.registration import Registration, mint_above_holders
from services.worker.roster import Roster
from tests.support.bootstraps import LocalBootstrap, watcher_of
from tests.support.rows import rank_row

READY, LOST, DRAINING = MembershipState.READY, MembershipState.LOST, MembershipState.DRAINING

LIMIT = 60.0
"""Seconds for what comes at once on a machine with time."""


@pytest.fixture
async def channels() -> AsyncIterator[ChannelPool]:
    pool = ChannelPool()
    yield pool
    await pool.close()


class Member:
    """A registration with what it said to its worker."""

    def __init__(self, channels: ChannelPool, row: RankRow, *bootstraps: LocalBootstrap) -> None:
        self.healthy = True
        self.load = Load()
        self.fenced: asyncio.Future[FencedError] = asyncio.get_running_loop().create_future()
        self.outranked: asyncio.Future[FencedError] = asyncio.get_running_loop().create_future()
        self.registration = Registration(
            [bootstrap.endpoint for bootstrap in bootstraps],
            row,
            channels,
            healthy=lambda: self.healthy,
            load=lambda: self.load,
            on_fenced=self.fenced.set_result,
            on_outranked=self.outranked.set_result,
        )
        self.registration.start()


async def until(look: Callable[[], object], what: str) -> None:
    """Polls a condition that must come true; the limit only ends a test that has failed."""
    deadline = asyncio.get_running_loop().time() + LIMIT
    while not look():
        assert asyncio.get_running_loop().time() < deadline, f"never came: {what}"
        await asyncio.sleep(0.01)


def states(roster: Roster) -> list[tuple[str, int, MembershipState]]:
    return [(row.instance.name, row.incarnation, row.state) for row in roster.rows()]


async def test_register_load_drain_leave(tmp_path: Any, channels: ChannelPool) -> None:
    async with LocalBootstrap(tmp_path / "b", renew=0.05) as bootstrap:
        watcher = watcher_of(channels, bootstrap)
        changes: list[int] = []
        watcher.on_change(lambda: changes.append(watcher.roster.version))
        assert await watcher.wait_synced(LIMIT)
        missing = asyncio.ensure_future(watcher.wait_for(lambda roster: roster.find("d:1", 100), LIMIT))
        member = Member(channels, rank_row(endpoint="d:1"), bootstrap)
        assert await member.registration.wait_registered(LIMIT)
        found = await missing
        assert found is not None
        assert found.endpoint == "d:1"
        assert await watcher.wait_for(lambda roster: roster.ready(Role.DECODE) or None, LIMIT)
        member.load = Load(running=3)
        await until(lambda: watcher.roster.rows()[0].load == Load(running=3), "load")
        await member.registration.drain()
        assert await watcher.wait_for(lambda r: states(r) == [("d0", 100, DRAINING)] or None, LIMIT)
        await member.registration.deregister()
        assert await watcher.wait_for(lambda r: not r.rows() or None, LIMIT)
        assert changes == sorted(changes)
        assert await watcher.wait_for(lambda roster: roster.find("nobody:1"), 0.05) is None
        await watcher.close()


async def test_an_engine_that_stalls_loses_its_row_and_gets_it_back(tmp_path: Any, channels: ChannelPool) -> None:
    async with LocalBootstrap(tmp_path / "b", ttl=0.4, renew=0.1) as bootstrap:
        watcher = watcher_of(channels, bootstrap)
        member = Member(channels, rank_row(), bootstrap)
        assert await watcher.wait_for(lambda r: states(r) == [("d0", 100, READY)] or None, LIMIT)
        member.healthy = False
        assert await watcher.wait_for(lambda r: states(r) == [("d0", 100, LOST)] or None, LIMIT)
        assert [row.instance.name for row in watcher.roster.ready(Role.DECODE)] == ["d0"]
        member.healthy = True
        assert await watcher.wait_for(lambda r: states(r) == [("d0", 100, READY)] or None, LIMIT)
        assert not member.fenced.done()
        await member.registration.close()
        await watcher.close()


async def test_a_restarted_bootstrap_learns_the_workers_anew(tmp_path: Any, channels: ChannelPool) -> None:
    bootstrap = LocalBootstrap(tmp_path / "b", renew=0.05)
    member = Member(channels, rank_row(), bootstrap)  # the worker is there first, and keeps asking
    watcher = watcher_of(channels, bootstrap)
    seen: list[tuple[tuple[str, int, MembershipState], ...]] = []
    watcher.on_change(lambda: seen.append(tuple(states(watcher.roster))))
    try:
        await bootstrap.start()
        assert await watcher.wait_for(lambda r: states(r) == [("d0", 100, READY)] or None, LIMIT)
        before = watcher.roster.revision
        await bootstrap.stop()
        await until(lambda: not watcher.roster.in_contact, "contact lost")
        await bootstrap.start()
        await until(lambda: bootstrap.table.rows(), "registered again")
        await until(lambda: watcher.roster.in_contact and watcher.roster.revision != before, "watched again")
        assert watcher.roster.revision is not None
        assert before is not None
        assert watcher.roster.revision.table_epoch > before.table_epoch
        # Whoever watched never saw the worker go away.
        assert states(watcher.roster) == [("d0", 100, READY)]
        first = seen.index((("d0", 100, READY),))
        assert set(seen[first:]) == {(("d0", 100, READY),)}
        assert not member.fenced.done()
    finally:
        await member.registration.close()
        await watcher.close()
        await bootstrap.stop()


async def test_a_replaced_worker_is_told_to_exit(tmp_path: Any, channels: ChannelPool) -> None:
    async with LocalBootstrap(tmp_path / "b", renew=0.05) as bootstrap:
        old = Member(channels, rank_row(incarnation=100), bootstrap)
        assert await old.registration.wait_registered(LIMIT)
        new = Member(channels, rank_row(incarnation=200), bootstrap)
        told = await asyncio.wait_for(old.fenced, LIMIT)
        assert told.peer_incarnation == 200
        assert (old.outranked.done(), new.fenced.done(), old.registration.leases) == (False, False, {})
        assert [row.incarnation for row in bootstrap.table.rows()] == [200]
        await old.registration.close()
        await new.registration.close()


async def test_a_clock_set_back_is_reported_and_minted_above(tmp_path: Any, channels: ChannelPool) -> None:
    async with LocalBootstrap(tmp_path / "b") as bootstrap:
        ahead = 1 << 62
        holder = Member(channels, rank_row(incarnation=ahead), bootstrap)
        assert await holder.registration.wait_registered(LIMIT)
        late = Member(channels, rank_row(incarnation=100), bootstrap)
        told = await asyncio.wait_for(late.outranked, LIMIT)
        assert (told.peer_incarnation, late.fenced.done()) == (ahead, False)
        gone = LocalBootstrap(tmp_path / "gone")
        minted = await mint_above_holders([bootstrap.endpoint, gone.endpoint], rank_row().key, channels)
        assert minted == ahead + 1
        other = await mint_above_holders([bootstrap.endpoint], rank_row("else").key, channels)
        assert other < ahead
        await holder.registration.close()
        await late.registration.close()


async def test_two_bootstraps_one_dies(tmp_path: Any, channels: ChannelPool) -> None:
    one, two = LocalBootstrap(tmp_path / "1", renew=0.05), LocalBootstrap(tmp_path / "2", renew=0.05)
    await one.start()
    await two.start()
    member = Member(channels, rank_row(), one, two)
    watcher = watcher_of(channels, one, two, ttl=0.2)
    try:
        await until(lambda: len(member.registration.leases) == 2, "both hold the row")
        assert await watcher.wait_for(lambda r: states(r) == [("d0", 100, READY)] or None, LIMIT)
        await one.stop()
        later = Member(channels, rank_row("d1", incarnation=300), one, two)
        assert await watcher.wait_for(lambda r: states(r) == [("d0", 100, READY), ("d1", 300, READY)] or None, LIMIT)
        # One without contact for more than its TTL; the other says READY, which counts.
        await asyncio.sleep(0.5)
        assert states(watcher.roster) == [("d0", 100, READY), ("d1", 300, READY)]
        await two.stop()
        # Nobody left to ask: the rows stay, to be tried last.
        assert await watcher.wait_for(lambda r: [s for *_, s in states(r)] == [LOST, LOST] or None, LIMIT)
        assert len(watcher.roster.ready(Role.DECODE)) == 2
        await one.start()
        await until(lambda: len(one.table.rows()) == 2, "both registered with the one that is back")
        assert await watcher.wait_for(lambda r: [s for *_, s in states(r)] == [READY, READY] or None, LIMIT)
        await later.registration.close()
    finally:
        await member.registration.close()
        await watcher.close()
        await one.stop()
        await two.stop()


async def test_leaving_does_not_wait_for_the_dead(tmp_path: Any, channels: ChannelPool) -> None:
    async with LocalBootstrap(tmp_path / "1") as one:
        two = LocalBootstrap(tmp_path / "2")
        await two.start()
        member = Member(channels, rank_row(), one, two)
        await until(lambda: len(member.registration.leases) == 2, "both hold the row")
        await two.stop()
        await asyncio.wait_for(member.registration.deregister(), LIMIT)
        assert one.table.rows() == ()
        assert member.registration.leases == {}


async def test_a_drained_worker_stays_known_and_is_never_placed_upon(tmp_path: Any, channels: ChannelPool) -> None:
    """A Bootstrap that was away when the drain began, or has forgotten all, hears of it: as DRAINING from the first."""
    one, two = LocalBootstrap(tmp_path / "1", renew=0.05), LocalBootstrap(tmp_path / "2", renew=0.05)
    await one.start()
    member = Member(channels, rank_row(), one, two)
    watcher = watcher_of(channels, two)
    seen: list[MembershipState] = []
    watcher.on_change(lambda: seen.extend(state for *_, state in states(watcher.roster)))
    try:
        await until(lambda: len(member.registration.leases) == 1, "the one there is holds the row")
        await member.registration.drain()
        await two.start()
        assert await watcher.wait_for(lambda r: states(r) == [("d0", 100, DRAINING)] or None, LIMIT)
        assert READY not in seen
        await until(lambda: len(member.registration.leases) == 2, "both leases are known")
        old = member.registration.leases[one.endpoint]
        await one.stop()
        await one.start()
        await until(lambda: [row.state for row in one.table.rows()] == [DRAINING], "it learns of it anew")
        await until(lambda: member.registration.leases.get(one.endpoint, old) != old, "its new lease is known")
        await member.registration.deregister()
        assert [bootstrap.table.rows() for bootstrap in (one, two)] == [(), ()]
    finally:
        await member.registration.close()
        await watcher.close()
        await one.stop()
        await two.stop()
