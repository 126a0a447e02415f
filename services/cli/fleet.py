"""Orders to workers by name, for the commands that take them out, end them or change their role.

A name is looked up in the rank table of the first Bootstrap that answers; every leader of the instance gets
the order, for the incarnation that the table names.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from engine_core.types.errors import Leg, NotFoundError, UnavailableError
from pdmesh.bootstrap.v1 import rank_table_pb2
from pdmesh.common.v1 import worker_pb2, worker_pb2_grpc
from services.cli.status import get_table
from services.config import QueryConfig
from services.runtime.channels import ChannelPool
from services.runtime.errors import from_rpc_error
from services.runtime.security import Security

Say = Callable[[str], None]

LOOK = 0.3
"""Seconds between two looks at what is waited for."""


class Fleet:
    """The workers of a mesh. Make one with fleet()."""

    def __init__(self, config: QueryConfig, pool: ChannelPool) -> None:
        self._bootstraps, self._timeout, self._pool = config.bootstrap, config.query_timeout, pool

    async def rows(self) -> list[rank_table_pb2.RankRow]:
        """The rank table of the first Bootstrap that answers. Raises UnavailableError of the last one."""
        last = UnavailableError("no Bootstrap address is given")
        for address in self._bootstraps:
            try:
                return list((await get_table(self._pool, address, self._timeout)).rows)
            except UnavailableError as exc:
                last = exc
        raise last

    async def leaders(self, name: str) -> list[rank_table_pb2.RankRow]:
        """The leaders of an instance, of its latest life: one that changed its role may have an old row too.

        Raises NotFoundError that names the instances there are.
        """
        rows = await self.rows()
        found: dict[int, rank_table_pb2.RankRow] = {}
        for row in rows:
            if row.instance.name != name or row.coord.cp or row.coord.tp:
                continue
            if row.coord.dp not in found or row.incarnation > found[row.coord.dp].incarnation:
                found[row.coord.dp] = row
        if not found:
            there = ", ".join(sorted({row.instance.name for row in rows})) or "none"
            raise NotFoundError(f"no instance {name!r} is in the rank table; there are: {there}", field="instance")
        return [found[dp] for dp in sorted(found)]

    async def order(self, row: rank_table_pb2.RankRow, method: str, request: Any) -> Any:
        """Calls a method of a worker's WorkerService. Raises what the worker said, as PdmeshError."""
        stub = worker_pb2_grpc.WorkerServiceStub(self._pool.get(row.endpoint))
        try:
            return await getattr(stub, method)(request, timeout=self._timeout)
        except grpc.aio.AioRpcError as exc:
            raise from_rpc_error(exc, Leg.UNKNOWN) from exc

    async def stats(self, row: rank_table_pb2.RankRow) -> worker_pb2.GetStatsResponse | None:
        """What the life that the row names says of itself; None when it does not answer, or another one does."""
        try:
            stub = worker_pb2_grpc.WorkerServiceStub(self._pool.get(row.endpoint))
            stats = await stub.GetStats(worker_pb2.GetStatsRequest(), timeout=self._timeout)
        except grpc.aio.AioRpcError:
            return None
        return stats if stats.incarnation == row.incarnation else None


@asynccontextmanager
async def fleet(config: QueryConfig) -> AsyncIterator[Fleet]:
    """The mesh that the configuration names."""
    pool = ChannelPool(config.query_timeout, security=Security.of(config))
    try:
        yield Fleet(config, pool)
    finally:
        await pool.close()


async def follow(
    names: Sequence[str], look: Callable[[str], Awaitable[tuple[bool, str]]], timeout: float, say: Say
) -> list[str]:
    """Waits until `look(name)` is done for every name, saying what has changed; those that were not in time."""
    deadline = asyncio.get_running_loop().time() + timeout
    said: dict[str, str] = {}
    left = list(names)
    while left:
        for name in list(left):
            done, note = await look(name)
            if note and said.get(name) != note:
                said[name] = note
                say(f"{name}: {note}")
            if done:
                left.remove(name)
        if asyncio.get_running_loop().time() >= deadline:
            break
        if left:
            await asyncio.sleep(LOOK)
    return left
