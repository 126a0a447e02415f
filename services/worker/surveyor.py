"""Asking all workers again and again, for those who watch a mesh.

A worker that is slow to answer holds up nobody: it is shown with its last figures, and their age. It is asked again
when it has answered or its time is up, so it never has two questions at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from pdmesh.bootstrap.v1 import rank_table_pb2
from pdmesh.common.v1 import worker_pb2, worker_pb2_grpc
from services.runtime.channels import ChannelPool
from services.runtime.tasks import TaskOwner
from services.worker.flows import Flows
from services.worker.survey import ask, rank_as_data

_OF_NOW = ("state", "table_state", "answers", "error")
"""What holds of a worker that does not answer; the rest is what it said last."""


class _Known:
    __slots__ = ("rank", "since", "task")

    def __init__(self) -> None:
        self.rank: dict[str, Any] | None = None
        self.since = 0.0
        self.task: asyncio.Task[None] | None = None


class Surveyor:
    """Keeps the last answer of each worker, by incarnation. Used on one event loop only.

    An answer may take `timeout` seconds; a survey waits `grace` for them. `clock` is monotonic, in seconds.
    """

    def __init__(
        self,
        pool: ChannelPool,
        tasks: TaskOwner,
        *,
        timeout: float = 3.0,
        grace: float = 0.3,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool, self._tasks, self._timeout, self._grace, self._clock = pool, tasks, timeout, grace, clock
        self._known: dict[int, _Known] = {}
        self._flows = Flows()

    async def survey(self, rows: Sequence[rank_table_pb2.RankRow]) -> list[dict[str, Any]]:
        """One entry per leader: survey.rank_as_data with `age` in seconds (None before the first answer) and `rates`
        of its counters per second. Asks every worker that has no question open."""
        leaders = [row for row in rows if row.coord.cp == row.coord.tp == 0]
        self._known = {row.incarnation: self._known.get(row.incarnation, _Known()) for row in leaders}
        self._flows.keep(self._known)
        for row in leaders:
            known = self._known[row.incarnation]
            if known.task is None or known.task.done():
                known.task = self._tasks.spawn(self._ask(row, known), f"figures of {row.endpoint}")
        waiting = [known.task for known in self._known.values() if known.task is not None]
        if waiting:
            await asyncio.wait(waiting, timeout=self._grace)
        return [self._rank(row) for row in leaders]

    def links(self, ranks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The links between the workers that survey() gave; see Flows.links."""
        return self._flows.links(ranks)

    async def _ask(self, row: rank_table_pb2.RankRow, known: _Known) -> None:
        stub = worker_pb2_grpc.WorkerServiceStub(self._pool.get(row.endpoint))
        live, error = await ask(stub.GetStats(worker_pb2.GetStatsRequest(), timeout=self._timeout))
        rank = rank_as_data(row, live, error) | {"incarnation": row.incarnation}
        if live is not None:
            known.rank, known.since = rank, self._clock()
            self._flows.update(rank, known.since)
        else:
            known.rank = (known.rank or rank) | {name: rank[name] for name in _OF_NOW}
            self._flows.still(row.incarnation)

    def _rank(self, row: rank_table_pb2.RankRow) -> dict[str, Any]:
        known = self._known[row.incarnation]
        table = rank_as_data(row, None, "not asked yet")
        rank = known.rank if known.rank is not None else table
        # The table knows first of a worker that is lost or drained; the worker itself of all else.
        own = rank["answers"] and table["state"] == "READY"
        return rank | {
            "state": rank["state"] if own else table["state"],
            "age": self._clock() - known.since if known.since else None,
            "rates": self._flows.rates(row.incarnation),
        }
