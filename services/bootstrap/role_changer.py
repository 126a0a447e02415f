"""Carries out what the policy of auto_role.py decides: one ChangeRole call per change.

Of several Bootstraps only one should be told to do this: each knows of its own changes alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import grpc

from engine_core.types.errors import Leg
from pdmesh.common.v1 import worker_pb2, worker_pb2_grpc
from services.bootstrap.auto_role import AutoRole, RoleChange
from services.runtime.channels import ChannelPool
from services.runtime.errors import from_rpc_error
from services.wire.bootstrap import RankRow
from services.wire.common import role_to_proto

log = logging.getLogger(__name__)

_LOOK = 0.5
_CALL_TIMEOUT = 5.0


class RoleChanger:
    """The shell around AutoRole. `rows` reads the rank table; `limit` is how long a worker's streams may take
    before they are handed over, in seconds."""

    def __init__(
        self,
        policy: AutoRole,
        rows: Callable[[], Sequence[RankRow]],
        channels: ChannelPool,
        clock: Callable[[], float],
        *,
        limit: float,
    ) -> None:
        self._policy, self._rows, self._channels, self._clock = policy, rows, channels, clock
        self._limit = limit

    async def run(self) -> None:
        """Looks at the table every half second; until cancelled."""
        while True:
            await asyncio.sleep(_LOOK)
            change = self._policy.step(self._rows(), self._clock())
            if change is not None:
                await self._carry_out(change)

    async def _carry_out(self, change: RoleChange) -> None:
        row = change.row
        log.warning(
            "%s changes its role from %s to %s: %s", row.instance.name, row.instance.role, change.role, change.reason
        )
        request = worker_pb2.ChangeRoleRequest(
            role=role_to_proto(change.role), limit_seconds=self._limit, incarnation=row.incarnation
        )
        try:
            with self._channels.use(row.endpoint) as channel:
                await worker_pb2_grpc.WorkerServiceStub(channel).ChangeRole(request, timeout=_CALL_TIMEOUT)
        except grpc.aio.AioRpcError as exc:
            log.error("%s does not change its role: %s", row.instance.name, from_rpc_error(exc, Leg.UNKNOWN))
            self._policy.failed(self._clock())
