"""Tells every Bootstrap which room ran where: batched each second, best effort, bounded."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence

import grpc

from pdmesh.bootstrap.v1 import bootstrap_service_pb2, bootstrap_service_pb2_grpc
from services.router.routing.placement import Placement
from services.runtime.channels import ChannelPool
from services.wire.bootstrap import RoomRoute, route_to_proto

log = logging.getLogger(__name__)

_KEPT = 20_000
_PER_CALL = 5_000
_CALL_TIMEOUT = 2.0


def route_of(room: int, attempt: int, request_id: str, placement: Placement) -> RoomRoute:
    """The record of one attempt."""
    prefill, decode = placement.prefill, placement.decode
    return RoomRoute(
        room=room,
        attempt=attempt,
        request_id=request_id,
        prefill_instance=prefill.instance.name if prefill else "",
        prefill_dp=prefill.coord.dp if prefill else 0,
        prefill_incarnation=prefill.incarnation if prefill else 0,
        decode_instance=decode.instance.name,
        decode_dp=decode.coord.dp,
        decode_incarnation=decode.incarnation,
    )


class RoomRecorder:
    """Collects routes; run() sends them. What a Bootstrap misses is not sent again: rooms are for explain."""

    def __init__(self, pool: ChannelPool, bootstraps: Sequence[str], period: float = 1.0) -> None:
        self._pool, self._bootstraps, self._period = pool, tuple(bootstraps), period
        self._routes: deque[RoomRoute] = deque(maxlen=_KEPT)

    def record(self, route: RoomRoute) -> None:
        """Queues one route; when too many wait, the oldest is dropped."""
        self._routes.append(route)

    async def run(self) -> None:
        """Sends until cancelled; spawn it with a TaskOwner."""
        while True:
            await asyncio.sleep(self._period)
            await self.flush()

    async def flush(self) -> None:
        """Sends all that waits now; a Bootstrap that does not answer holds up no other."""
        while self._routes:
            batch = [self._routes.popleft() for _ in range(min(len(self._routes), _PER_CALL))]
            request = bootstrap_service_pb2.RecordRoomsRequest(rooms=[route_to_proto(r) for r in batch])
            await asyncio.gather(*(self._send(endpoint, request) for endpoint in self._bootstraps))

    async def _send(self, endpoint: str, request: bootstrap_service_pb2.RecordRoomsRequest) -> None:
        stub = bootstrap_service_pb2_grpc.BootstrapServiceStub(self._pool.get(endpoint))
        try:
            await stub.RecordRooms(request, timeout=_CALL_TIMEOUT)
        except grpc.aio.AioRpcError as exc:
            log.debug("rooms were not recorded at %s: %s", endpoint, exc.code())
