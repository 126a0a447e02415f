"""WorkerService: what a worker answers about itself, at any time of its life.

Figures of the engine are asked for anew; when a long step keeps it from answering, they are those of its
last heartbeat. Everything else is live.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from engine_core.host.frames import Stats
from engine_core.lifecycle.machine import Move
from engine_core.lifecycle.membership import MembershipState
from engine_core.types.errors import FencedError, InvalidRequestError, NotFoundError, UnavailableError
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
    role_from_proto,
    role_to_proto,
)
from services.worker.drain import Drain, DrainOrder
from services.worker.engine_client import EngineClient
from services.worker.identity import WorkerIdentity
from services.worker.registration import Registration
from services.worker.sessions import SessionTable

MAX_ROOMS = 10_000
MAX_PROFILE_STEPS = 10_000
MAX_LIMIT = 30 * 24 * 3600.0
"""Seconds that a drain may be told to wait."""
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
        self.drain = Drain()
        self.engine: EngineClient | None = None
        self.identity: WorkerIdentity | None = None
        self.registration: Registration | None = None
        self._move_listeners: list[Callable[[Sequence[Move]], None]] = []

    def on_moves(self, listener: Callable[[Sequence[Move]], None]) -> None:
        """Calls `listener` with the engine's moves from now on."""
        self._move_listeners.append(listener)

    def take_moves(self, moves: Sequence[Move]) -> None:
        """Takes moves from the engine."""
        self.moves.extend(moves)
        for listener in self._move_listeners:
            listener(moves)

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
    """Serves WorkerService. `order` begins a drain at once, or changes one; `last_pair` is true when no other
    pair of the own fingerprint is ready."""

    def __init__(self, state: WorkerState, order: Callable[[DrainOrder], None], last_pair: Callable[[], bool]) -> None:
        self._state, self._order, self._last_pair = state, order, last_pair
        self._profile_path = ""
        self._host = socket.gethostname()

    async def GetStats(
        self, request: worker_pb2.GetStatsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.GetStatsResponse:
        """Live figures."""
        state, asked = self._state, time.monotonic()
        stats = await state.engine.fresh_stats(STATS_SECONDS) if state.engine is not None else None
        told = state.engine.stats_at if state.engine is not None else 0.0
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
            unix_seconds=time.time(),
            fingerprint=state.identity.fingerprint if state.identity is not None else "",
            loop_lag_p99_seconds=state.lag.p99(),
            counters=state.counters(),
            drain_note=state.drain.note,
            drained=state.drain.done,
            stalled_seconds=state.engine.stalled_seconds if state.engine is not None else 0.0,
            figures_age_seconds=0.0 if stats is None or told >= asked else time.monotonic() - told,
        )

    async def Explain(
        self, request: worker_pb2.ExplainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.ExplainResponse:
        """The moves of rooms that are still in the ring."""
        checked_size(request.rooms, "rooms", MAX_ROOMS)
        for i, room in enumerate(request.rooms):
            checked_int(room, f"rooms[{i}]", 1)
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
        """Takes no new sessions from now on; what becomes of those that are there, services/worker/drain.py says.
        The process stays unless `stop` is set."""
        self._check(request.incarnation)
        self._order(DrainOrder(_limit(request), force=request.force, stop=request.stop))
        return worker_pb2.DrainWorkerResponse(sessions=len(self._state.sessions), last_pair=self._last_pair())

    async def ChangeRole(
        self, request: worker_pb2.ChangeRoleRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.ChangeRoleResponse:
        """Drains, then begins another life in that role. Raises UnavailableError while the worker starts or stops,
        FencedError (LAST_PAIR) when nobody could serve the fingerprint meanwhile, unless it is forced."""
        state = self._state
        role = role_from_proto(request.role)
        self._check(request.incarnation)
        order = state.drain.order
        if state.membership is MembershipState.JOINING:
            raise UnavailableError(f"{state.instance} is starting", reason="JOINING", retry_after=1.0)
        if order is not None and order.stop:
            raise UnavailableError(f"{state.instance} is stopping", reason="STOPPING", retryable=False)
        if role is state.role and order is None:
            return worker_pb2.ChangeRoleResponse(sessions=len(state.sessions), changed=False)
        if not request.force and order is None and self._last_pair():
            raise FencedError(
                f"{state.instance} is part of the last pair of its fingerprint: nobody could serve while it changes; "
                "add a pair first, or force it (--force)",
                reason="LAST_PAIR",
                retryable=False,
                peer_incarnation=state.incarnation,
            )
        self._order(DrainOrder(_limit(request), force=request.force, role=role))
        return worker_pb2.ChangeRoleResponse(sessions=len(state.sessions), changed=True)

    def _check(self, incarnation: int) -> None:
        """Raises FencedError when the caller means another life. 0 means any."""
        if incarnation not in (0, self._state.incarnation):
            raise FencedError(
                f"{self._state.instance} is incarnation {self._state.incarnation}; incarnation {incarnation} was meant",
                reason="INCARNATION_MISMATCH",
                peer_incarnation=self._state.incarnation,
            )


def _limit(request: worker_pb2.DrainWorkerRequest | worker_pb2.ChangeRoleRequest) -> float | None:
    """Seconds. Raises InvalidRequestError for what is no number of seconds."""
    if not request.HasField("limit_seconds"):
        return None
    if not 0 <= request.limit_seconds <= MAX_LIMIT:  # NaN too
        raise InvalidRequestError(
            f"limit_seconds is {request.limit_seconds}, must be in [0, {MAX_LIMIT:g}]", field="limit_seconds"
        )
    return request.limit_seconds
