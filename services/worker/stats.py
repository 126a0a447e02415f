"""WorkerService: what a worker answers about itself, at any time of its life.

Figures of the engine are asked for anew; when a long step keeps it from answering, they are those of its
last heartbeat. Everything else is live.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc

from engine_core.host.frames import Stats
from engine_core.lifecycle.membership import MembershipState
from engine_core.types.errors import NotFoundError, UnavailableError
from engine_core.types.ids import Incarnation, RankCoord
from engine_core.types.request import Role
from pdmesh.common.v1 import worker_pb2, worker_pb2_grpc
from services.runtime.tasks import TaskOwner
from services.runtime.telemetry import LoopLagMonitor, MoveRing
from services.wire.common import (
    Load,
    checked_int,
    checked_size,
    coord_to_proto,
    load_to_proto,
    move_to_proto,
    role_to_proto,
)
from services.worker.engine_client import EngineClient
from services.worker.identity import WorkerIdentity
from services.worker.sessions import SessionTable

MAX_ROOMS = 10_000
MAX_PROFILE_STEPS = 10_000
STATS_SECONDS = 0.5
"""How long GetStats waits for the engine's figures of now; a long step may keep them."""


class WorkerState:
    """What there is to tell about a worker; filled in while it starts."""

    def __init__(
        self, instance: str, role: Role, incarnation: Incarnation, sessions: SessionTable, tasks: TaskOwner
    ) -> None:
        self.instance, self.role, self.incarnation = instance, role, incarnation
        self.sessions, self.session_tasks = sessions, tasks
        self.moves, self.lag = MoveRing(), LoopLagMonitor()
        self.started = time.monotonic()
        self.membership = MembershipState.JOINING
        self.engine: EngineClient | None = None
        self.identity: WorkerIdentity | None = None

    @property
    def engine_stats(self) -> Stats | None:
        """The engine's last heartbeat."""
        return self.engine.stats if self.engine is not None else None

    def load(self) -> Load:
        """What placement looks at."""
        stats = self.engine_stats
        return Load() if stats is None else Load(stats.running, stats.queued, stats.queued_tokens, stats.kv)

    def counters(self) -> dict[str, float]:
        """Counts since start, the engine's and the service process's own."""
        own = {
            "sessions_opened": float(self.sessions.opened),
            "sessions_fenced": float(self.sessions.fenced),
            "sessions_refused": float(self.sessions.refused),
        }
        stats = self.engine_stats
        if self.engine is not None:
            own["frames_dropped"] = float(self.engine.dropped_frames)
        if self.identity is not None:
            own["engine_seconds_to_ready"] = self.identity.ready.seconds_to_ready
        return (dict(stats.counters) | {"steps": float(stats.steps)} if stats is not None else {}) | own


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Serves WorkerService. `drain` stops admission everywhere; it is called at most once."""

    def __init__(self, state: WorkerState, tasks: TaskOwner, drain: Callable[[], Awaitable[None]]) -> None:
        self._state, self._tasks, self._drain = state, tasks, drain
        self._profile_path = ""
        self._host = socket.gethostname()
        self._draining: asyncio.Task[None] | None = None

    async def GetStats(
        self, request: worker_pb2.GetStatsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.GetStatsResponse:
        """Live figures."""
        state = self._state
        stats = await state.engine.fresh_stats(STATS_SECONDS) if state.engine is not None else None
        pairs = [
            worker_pb2.TransferPair(
                peer_incarnation=pair.peer_incarnation,
                peer_instance=pair.peer_instance,
                transport=pair.transport,
                reason=pair.reason,
                up=pair.up,
                bytes=pair.bytes,
                seconds=pair.seconds,
                failures=pair.failures,
            )
            for pair in (stats.pairs if stats is not None else ())
        ]
        return worker_pb2.GetStatsResponse(
            instance=state.instance,
            role=role_to_proto(state.role),
            coord=coord_to_proto(RankCoord()),
            incarnation=state.incarnation,
            pid=os.getpid(),
            engine_pid=state.engine.pid if state.engine is not None else 0,
            host=self._host,
            state=state.membership.value,
            load=load_to_proto(state.load()),
            pairs=pairs,
            streams=len(state.sessions),
            tasks=state.session_tasks.count,
            sessions=stats.sessions if stats is not None else 0,
            uptime_seconds=time.monotonic() - state.started,
            fingerprint=state.identity.fingerprint if state.identity is not None else "",
            loop_lag_p99_seconds=state.lag.p99(),
            counters=state.counters(),
        )

    async def Explain(
        self, request: worker_pb2.ExplainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.ExplainResponse:
        """The moves of rooms that are still in the ring."""
        checked_size(request.rooms, "rooms", MAX_ROOMS)
        return worker_pb2.ExplainResponse(moves=[move_to_proto(e) for e in self._state.moves.find(set(request.rooms))])

    async def StartProfile(
        self, request: worker_pb2.StartProfileRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.StartProfileResponse:
        """Records the engine's next steps into a Chrome trace, which is there once they have run."""
        steps = checked_int(request.steps, "steps", 0, MAX_PROFILE_STEPS)
        folder = Path(tempfile.mkdtemp(prefix="pdmesh-profile-"))
        path = str(folder / f"{self._state.instance}-{int(time.time())}.json")
        self._engine().start_profile(path, steps)
        self._profile_path = path
        return worker_pb2.StartProfileResponse(path=path)

    async def StopProfile(
        self, request: worker_pb2.StopProfileRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.StopProfileResponse:
        """Ends the recording that StartProfile began last. NOT_FOUND when there was none."""
        if not self._profile_path:
            raise NotFoundError("no profile was started", field="path")
        self._engine().stop_profile()
        return worker_pb2.StopProfileResponse(path=self._profile_path)

    def _engine(self) -> EngineClient:
        if self._state.engine is None:
            raise UnavailableError("the engine is not up yet", reason="STARTING")
        return self._state.engine

    async def DrainWorker(
        self, request: worker_pb2.DrainWorkerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.DrainWorkerResponse:
        """Takes no new sessions from now on; the process stays. With a limit, what is left then is cut."""
        if self._draining is None:
            self._draining = self._tasks.spawn(self._drain_within(request.limit_seconds), "drain")
        return worker_pb2.DrainWorkerResponse(sessions=len(self._state.sessions))

    async def _drain_within(self, limit: float) -> None:
        await self._drain()
        if limit > 0 and not await self._state.sessions.wait_idle(limit):
            self._state.sessions.cut("the worker was drained")
