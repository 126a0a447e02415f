"""BootstrapService over real gRPC: every method, watches, errors with details."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from engine_core.lifecycle.membership import MembershipState
from engine_core.types.errors import ConfigError, FencedError, InvalidRequestError, Leg, NotFoundError, UnavailableError
from engine_core.types.request import Role
from pdmesh.bootstrap.v1 import bootstrap_service_pb2 as pb
from pdmesh.bootstrap.v1 import bootstrap_service_pb2_grpc
from services.bootstrap import main
from services.bootstrap.servicer import SERVICE_NAME
from services.config import BootstrapConfig
from services.runtime.channels import ChannelPool
from services.runtime.errors import from_rpc_error
from services.runtime.tasks import Stop
from services.wire.bootstrap import (
    Load,
    LoadUpdate,
    Revision,
    RoomRoute,
    RowChange,
    Snapshot,
    WatchedService,
    event_from_proto,
    revision_to_proto,
    route_from_proto,
    route_to_proto,
    row_from_proto,
    row_to_proto,
    service_to_proto,
    spec_to_proto,
)
from services.wire.common import load_to_proto
from tests.support.bootstraps import LocalBootstrap
from tests.support.rows import full_row, instance_spec, rank_row

LIMIT = 60.0
"""Seconds for what comes at once on a machine with time."""


@pytest.fixture
async def bootstrap(tmp_path: Any) -> AsyncIterator[LocalBootstrap]:
    async with LocalBootstrap(tmp_path / "b", log_size=4) as made:
        yield made


@pytest.fixture
async def stub(bootstrap: LocalBootstrap) -> AsyncIterator[Any]:
    pool = ChannelPool()
    yield bootstrap_service_pb2_grpc.BootstrapServiceStub(pool.get(bootstrap.endpoint))
    await pool.close()


async def register(stub: Any, row: Any, ttl: float = 0.0) -> Any:
    return await stub.RegisterRank(pb.RegisterRankRequest(row=row_to_proto(row), ttl_seconds=ttl), timeout=LIMIT)


class Watch:
    """A watch stream, read event by event with a deadline."""

    def __init__(
        self, stub: Any, name: str = "router", after: Revision | None = None, *, without_loads: bool = False
    ) -> None:
        self.call = stub.WatchRankTable(
            pb.WatchRankTableRequest(
                after=None if after is None else revision_to_proto(after),
                watcher=service_to_proto(WatchedService(name, 5, "h")),
                without_loads=without_loads,
            )
        )

    async def next(self) -> Any:
        return event_from_proto(await asyncio.wait_for(self.call.read(), LIMIT))


async def failure(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value, Leg.ROUTER)


async def test_a_row_lives_over_the_wire(stub: Any) -> None:
    row = rank_row(pid=3)
    await stub.RegisterInstance(
        pb.RegisterInstanceRequest(instance=spec_to_proto(row.instance), incarnation=100), timeout=5
    )
    grant = await register(stub, row)
    assert (grant.ttl_seconds, grant.renew_seconds, grant.revision.n) == (15.0, 5.0, 2)
    load = Load(running=2)
    renewed = await stub.RenewLease(
        pb.RenewLeaseRequest(lease_id=grant.lease_id, incarnation=100, load=load_to_proto(load)), timeout=5
    )
    assert renewed.ttl_seconds == 15.0
    table = await stub.GetRankTable(pb.GetRankTableRequest(), timeout=LIMIT)
    (seen,) = [row_from_proto(sent) for sent in table.rows]
    assert (seen.state, seen.load, seen.pid, seen.revision.n) == (MembershipState.READY, load, 3, 2)
    assert [service.name for service in table.services] == ["bootstrap"]
    await stub.Drain(pb.DrainRequest(lease_id=grant.lease_id, incarnation=100), timeout=LIMIT)
    table = await stub.GetRankTable(pb.GetRankTableRequest(), timeout=LIMIT)
    assert row_from_proto(table.rows[0]).state is MembershipState.DRAINING
    gone = await stub.Deregister(pb.DeregisterRequest(lease_id=grant.lease_id, incarnation=100), timeout=LIMIT)
    assert gone.revision.n == 4
    assert not (await stub.GetRankTable(pb.GetRankTableRequest(), timeout=LIMIT)).rows


async def test_errors_carry_details(stub: Any) -> None:
    grant = await register(stub, rank_row(incarnation=200))
    fenced = await failure(register(stub, rank_row(incarnation=100)))
    assert (type(fenced), fenced.peer_incarnation, fenced.leg) == (FencedError, 200, Leg.BOOTSTRAP)
    unknown = await failure(stub.RenewLease(pb.RenewLeaseRequest(lease_id=1, incarnation=1), timeout=LIMIT))
    assert type(unknown) is NotFoundError
    broken = row_to_proto(full_row())
    broken.instance.role = 0
    wrong = await failure(stub.RegisterRank(pb.RegisterRankRequest(row=broken), timeout=LIMIT))
    assert (type(wrong), wrong.field) == (InvalidRequestError, "row.instance.role")
    endless = await failure(register(stub, rank_row("endless"), ttl=float("nan")))
    assert (type(endless), endless.field) == (InvalidRequestError, "ttl_seconds")
    nowhere = await failure(stub.RouteRoom(pb.RouteRoomRequest(room=5), timeout=LIMIT))
    assert (type(nowhere), nowhere.retryable) == (UnavailableError, True)
    assert grant.lease_id > 0


async def test_a_watch_sees_changes_and_loads_and_resumes(bootstrap: LocalBootstrap, stub: Any) -> None:
    watch = Watch(stub)
    assert await watch.next() == Snapshot(bootstrap.table.revision, ())
    grant = await register(stub, rank_row())
    changes = [await watch.next(), await watch.next()]
    assert [change.row.state for change in changes] == [MembershipState.JOINING, MembershipState.READY]
    await stub.RenewLease(
        pb.RenewLeaseRequest(lease_id=grant.lease_id, incarnation=100, load=load_to_proto(Load(queued=7))), timeout=5
    )
    loads = await watch.next()
    assert isinstance(loads, LoadUpdate)
    assert (loads.revision, [load.load.queued for load in loads.loads]) == (changes[1].revision, [7])
    table = await stub.GetRankTable(pb.GetRankTableRequest(), timeout=LIMIT)
    assert [service.name for service in table.services] == ["bootstrap", "router"]
    watch.call.cancel()

    quiet = Watch(stub, after=changes[1].revision)
    alive = await quiet.next()
    assert isinstance(alive, LoadUpdate)
    assert alive.revision == changes[1].revision
    quiet.call.cancel()
    await stub.Drain(pb.DrainRequest(lease_id=grant.lease_id, incarnation=100), timeout=LIMIT)
    resumed = Watch(stub, after=changes[1].revision)
    event = await resumed.next()
    assert isinstance(event, RowChange)
    assert (event.row.state, event.revision.n) == (MembershipState.DRAINING, 3)
    resumed.call.cancel()
    elsewhere = Watch(stub, after=Revision(1, 3))
    assert isinstance(await elsewhere.next(), Snapshot)
    elsewhere.call.cancel()


async def test_who_places_nothing_gets_no_loads(bootstrap: LocalBootstrap, stub: Any) -> None:
    worker, routers = Watch(stub, "decode", without_loads=True), [Watch(stub) for _ in range(3)]
    for watch in (worker, *routers):
        await watch.next()
    grant = await register(stub, rank_row())
    for watch in (worker, *routers):
        assert [(await watch.next()).row.state for _ in range(2)] == [MembershipState.JOINING, MembershipState.READY]
    for queued in (7, 8):
        load = load_to_proto(Load(queued=queued))
        await stub.RenewLease(pb.RenewLeaseRequest(lease_id=grant.lease_id, incarnation=100, load=load), timeout=LIMIT)
        for watch in routers:
            assert [told.load.queued for told in (await watch.next()).loads] == [queued]
    await stub.Drain(pb.DrainRequest(lease_id=grant.lease_id, incarnation=100), timeout=LIMIT)
    assert (await worker.next()).row.state is MembershipState.DRAINING
    for watch in (worker, *routers):
        watch.call.cancel()


async def test_a_watcher_that_fell_behind_the_log_gets_a_snapshot(bootstrap: LocalBootstrap, stub: Any) -> None:
    first = bootstrap.table.revision
    for index in range(4):
        await register(stub, rank_row(f"d{index}"))
    watch = Watch(stub, after=first)
    event = await watch.next()
    assert isinstance(event, Snapshot)
    assert [row.instance.name for row in event.rows] == ["d0", "d1", "d2", "d3"]
    watch.call.cancel()


async def test_a_crowd_of_changes_comes_as_one_snapshot(tmp_path: Any) -> None:
    async with LocalBootstrap(tmp_path / "b", log_size=4096) as bootstrap:
        pool = ChannelPool()
        stub = bootstrap_service_pb2_grpc.BootstrapServiceStub(pool.get(bootstrap.endpoint))
        revisions = [bootstrap.table.revision]
        for index in range(20):  # two changes each
            await register(stub, rank_row(f"d{index:02}"))
            revisions.append(bootstrap.table.revision)
        for behind, kind in ((16, RowChange), (17, Snapshot)):
            watch = Watch(stub, after=revisions[-1 - behind])
            event = await watch.next()
            assert isinstance(event, kind)
            watch.call.cancel()
        await pool.close()


async def test_a_lapse_reaches_watchers_by_itself(stub: Any) -> None:
    watch = Watch(stub)
    await watch.next()
    await register(stub, rank_row(), ttl=0.1)
    states = [(await watch.next()).row.state for _ in range(4)]
    assert states == [MembershipState.JOINING, MembershipState.READY, MembershipState.LOST, MembershipState.LEFT]
    watch.call.cancel()


async def test_watchers_that_leave_are_forgotten(bootstrap: LocalBootstrap, stub: Any) -> None:
    watches = [Watch(stub, name=f"w{index}") for index in range(3)]
    for watch in watches:
        await watch.next()
    assert bootstrap.servicer.watchers == 3
    for watch in watches:
        watch.call.cancel()
    async with asyncio.timeout(LIMIT):
        while bootstrap.servicer.watchers:  # noqa: ASYNC110  # what the server has seen has no event
            await asyncio.sleep(0.01)


async def test_rooms_over_the_wire(stub: Any) -> None:
    await register(stub, rank_row("p0", Role.PREFILL, incarnation=1, endpoint="p:1"))
    await register(stub, rank_row("d0", Role.DECODE, incarnation=2, endpoint="d:1"))
    route = RoomRoute(9, 1, "req", "p0", 0, 1, "d0", 0, 2)
    await stub.RecordRooms(pb.RecordRoomsRequest(rooms=[route_to_proto(route)]), timeout=LIMIT)
    found = await stub.LookupRooms(pb.LookupRoomsRequest(rooms=[9, 10], request_ids=["req"]), timeout=LIMIT)
    assert [route_from_proto(sent) for sent in found.rooms] == [route]
    for room, recorded in ((9, True), (10, False)):
        routed = await stub.RouteRoom(pb.RouteRoomRequest(room=room), timeout=LIMIT)
        assert routed.recorded is recorded
        assert (routed.prefill.endpoint, routed.prefill.incarnation) == ("p:1", 1)
        assert (routed.decode.endpoint, routed.decode.incarnation, routed.route.room) == ("d:1", 2, room)


async def test_the_process_serves_with_health_and_reflection() -> None:
    stop, ready = Stop(), asyncio.get_running_loop().create_future()
    running = asyncio.ensure_future(main.run(BootstrapConfig(port=0, lease_ttl=6.0), stop, ready.set_result))
    pool = ChannelPool()
    try:
        said = await asyncio.wait_for(ready, LIMIT)
        assert said["endpoint"] == f"127.0.0.1:{said['port']}"
        channel = pool.get(said["endpoint"])
        checks = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE_NAME):
            answer = await checks.Check(health_pb2.HealthCheckRequest(service=name), timeout=LIMIT)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflect = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = iter([reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE_NAME)])
        described = [answer async for answer in reflect.ServerReflectionInfo(asked, timeout=LIMIT)]
        assert described[0].file_descriptor_response.file_descriptor_proto
        stub = bootstrap_service_pb2_grpc.BootstrapServiceStub(channel)
        assert (await register(stub, rank_row(spec=instance_spec()))).ttl_seconds == 6.0
        table = await stub.GetRankTable(pb.GetRankTableRequest(), timeout=LIMIT)
        assert [(s.name, s.pid, s.host) for s in table.services] == [("bootstrap", said["pid"], socket.gethostname())]
        assert table.revision.table_epoch == said["epoch"]
        with pytest.raises(ConfigError, match="cannot listen"):
            await main.run(BootstrapConfig(port=said["port"]), Stop(), lambda said: None)
        watch = Watch(stub)
        await watch.next()
        stop.request()
        await asyncio.wait_for(running, LIMIT)
        # An open watch ends with the process; it does not hold it up.
        assert await watch.call.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        stop.request_now()
        await asyncio.wait_for(running, LIMIT)
        await pool.close()
