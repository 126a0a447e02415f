"""One life of a worker's service process: one incarnation, one engine, one role.

listen        gRPC server up: health NOT_SERVING, GetStats answers
engine        spawned, model loaded; what is wrong with it ends the process before it registers
services      the role's servicers take over; rank table watched
register      with every Bootstrap; then SERVING
serve         until a signal, an order, the engine's death, or a later incarnation in the own row
drain         out of placement, no new sessions, until none is left or they are handed over (drain.py)
end           drained, or a second signal: deregister, cut what is left, end the engine
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import grpc

from engine_core.lifecycle.membership import MembershipState
from engine_core.types.errors import FencedError, Leg, PdmeshError, UnavailableError
from engine_core.types.ids import RankCoord
from engine_core.types.request import Role
from pdmesh.common.v1 import worker_pb2_grpc
from services.config import WorkerConfig
from services.runtime.addresses import bracketed, is_loopback
from services.runtime.channels import ChannelPool
from services.runtime.security import Security
from services.runtime.server import GrpcServer
from services.runtime.tasks import Stop, TaskOwner
from services.runtime.telemetry.exposition import MetricsServer
from services.runtime.telemetry.spans import SessionSpans
from services.runtime.telemetry.tracing import start_tracing
from services.wire.bootstrap import InstanceSpec, RankRow, RowKey, WatchedService
from services.worker.drain import HANDOVER, DrainOrder, Verdict
from services.worker.engine_client import EngineClient
from services.worker.engine_config import inference_config
from services.worker.identity import WorkerIdentity
from services.worker.late import LateServicer
from services.worker.metrics import WorkerMetrics
from services.worker.observed import SessionObserver
from services.worker.registration import Registration, mint_above_holders
from services.worker.roster import RosterWatcher
from services.worker.sessions import SessionTable
from services.worker.stats import WorkerServicer, WorkerState

logger = logging.getLogger(__name__)

T = TypeVar("T")
WORKER_SERVICE = "pdmesh.common.v1.WorkerService"

_STOP_GRACE = 1.0
_DRAIN_LOOK = 0.05
_ENGINE_LOOK = 0.5
MAX_STUCK_SHARE = 0.5
"""Share of the pool without proof of quiet above which a worker starts anew: a new pool is quiet."""


@dataclass(frozen=True)
class WorkerParts:
    """What a role's services are made of."""

    config: WorkerConfig
    identity: WorkerIdentity
    engine: EngineClient
    sessions: SessionTable
    session_tasks: TaskOwner
    tasks: TaskOwner
    channels: ChannelPool
    watcher: RosterWatcher
    observer: SessionObserver


class RoleServices(Protocol):
    """The services of one role."""

    @property
    def names(self) -> Sequence[str]:
        """Full service names."""

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds servicers that refuse until connect()."""

    def connect(self, parts: WorkerParts) -> None:
        """The engine is ready: serve."""


class Life:
    """What a worker holds while it lives. Everything that must be closed is on the exit stack."""

    def __init__(
        self,
        config: WorkerConfig,
        server: GrpcServer,
        state: WorkerState,
        engine: EngineClient,
        channels: ChannelPool,
        tasks: TaskOwner,
    ) -> None:
        self._config, self.server, self.state, self.engine = config, server, state, engine
        self.channels, self.tasks = channels, tasks
        self._registration: Registration | None = None
        self._failure: PdmeshError | None = None
        self._over = asyncio.Event()
        self._ordered = asyncio.Event()
        self._watcher: RosterWatcher | None = None
        self.metrics: MetricsServer | None = None
        self.observer = SessionObserver()

    @property
    def sessions(self) -> SessionTable:
        """Open streams."""
        return self.state.sessions

    @property
    def session_tasks(self) -> TaskOwner:
        """Tasks that belong to streams."""
        return self.state.session_tasks

    @classmethod
    async def begin(
        cls,
        config: WorkerConfig,
        services: RoleServices,
        engine_command: Sequence[str] | None,
        stack: AsyncExitStack,
    ) -> Life:
        """Listens, mints the incarnation, prepares the engine. Raises ConfigError."""
        leg = Leg.PREFILL if config.role is Role.PREFILL else Leg.DECODE
        socket_dir = config.socket_dir
        if not socket_dir:
            socket_dir = tempfile.mkdtemp(prefix="pdmesh-")
            stack.callback(shutil.rmtree, socket_dir, ignore_errors=True)
        security = Security.of(config)
        if config.transfer_host:
            security.check_host(config.transfer_host, "--transfer-host")
        channels = ChannelPool(config.connect_timeout, security=security)
        tasks, session_tasks = TaskOwner("worker"), TaskOwner("sessions")
        stack.push_async_callback(channels.close)
        stack.push_async_callback(tasks.close)
        late = LateServicer(leg)

        def add(server: grpc.aio.Server) -> None:
            services.add_to(server)
            worker_pb2_grpc.add_WorkerServiceServicer_to_server(late, server)

        names = (*services.names, WORKER_SERVICE)
        address = f"{bracketed(config.host)}:{config.port}"
        server = await GrpcServer.start(
            address,
            add,
            names,
            leg=leg,
            advertise_host=config.advertise_host,
            advertise_port=config.advertise_port,
            security=security,
        )
        stack.push_async_callback(server.stop, _STOP_GRACE)
        stack.push_async_callback(session_tasks.close)
        instance = config.instance or _default_name(config, server.port)
        key = RowKey(instance, config.role, RankCoord())
        incarnation = await mint_above_holders(config.bootstrap, key, channels, config.connect_timeout)
        state = WorkerState(instance, config.role, incarnation, SessionTable(leg, incarnation), session_tasks)
        engine = state.engine = EngineClient(
            inference_config(config, socket_dir),
            incarnation,
            instance,
            leg=leg,
            tokens=security.link_secrets,
            command=engine_command,
            watchdog_timeout=config.watchdog_timeout,
            on_moves=state.take_moves,
        )
        stack.push_async_callback(engine.close)
        security.on_change(lambda: engine.set_tokens(security.link_secrets))
        life = cls(config, server, state, engine, channels, tasks)
        late.set(WorkerServicer(state, life.give, life.last_pair))
        await life.be_seen(stack)
        tasks.spawn(state.lag.run(), "loop lag")
        tasks.spawn(security.watch(), "key files")
        return life

    async def be_seen(self, stack: AsyncExitStack) -> None:
        """Serves /metrics, and traces, where that is asked for. Raises ConfigError."""
        config, state = self._config, self.state
        role = "prefill" if config.role is Role.PREFILL else "decode"
        tracing = start_tracing(config.otlp_endpoint, config.trace_sample_ratio, role, state.instance)
        if tracing is not None:
            spans = SessionSpans(tracing, role)
            stack.push_async_callback(tracing.close)
            stack.callback(spans.close)
            state.on_moves(spans.observe)
            self.observer = SessionObserver(state.instance, spans)
        if config.metrics_port >= 0:
            figures = WorkerMetrics(state)
            state.on_moves(figures.observe)
            self.metrics = await MetricsServer.start(
                config.host, config.metrics_port, figures.registry,
                refresh=figures.refresh, advertise_host=config.advertise_host,
            )  # fmt: skip
            stack.push_async_callback(self.metrics.stop)

    def watch(self, stack: AsyncExitStack) -> RosterWatcher:
        """Starts to watch the rank table."""
        service = WatchedService(name=self.state.role.value.lower(), pid=os.getpid(), host=socket.gethostname())
        watcher = RosterWatcher(self._config.bootstrap, service, self.channels, loads=False)
        watcher.start()
        stack.push_async_callback(watcher.close)
        self._watcher = watcher
        self.tasks.spawn(self._watch_engine(), "engine")
        return watcher

    async def register(self, identity: WorkerIdentity, stop: Stop, stack: AsyncExitStack) -> bool:
        """Puts the row into every Bootstrap; True once one has it, False when a stop came first."""
        self._registration = registration = Registration(
            self._config.bootstrap,
            self._row(identity),
            self.channels,
            healthy=self.engine.progressing,
            load=self.state.load,
            on_fenced=self._on_replaced,
            on_outranked=self._on_replaced,
        )
        self.state.registration = registration
        registration.start()
        stack.push_async_callback(registration.deregister)
        if self.sessions.draining:
            await registration.drain()

        async def lease() -> None:
            while not await registration.wait_registered(60.0):
                logger.warning("no Bootstrap has answered yet")

        registered = self.tasks.spawn(lease(), "wait for a lease")
        try:
            await self.any_set(stop.draining, also=registered)
            return registered.done()
        finally:
            registered.cancel()

    def _row(self, identity: WorkerIdentity) -> RankRow:
        config, ready = self._config, identity.ready
        spec = InstanceSpec(
            name=identity.instance,
            role=identity.role,
            fingerprint=identity.fingerprint,
            fingerprint_parts=ready.fingerprint_parts,
            served_model_names=config.served_model_name or (Path(config.model).name,),
            max_model_len=ready.max_model_len,
            version=_version(),
            tokenizer_digest=ready.fingerprint_parts.get("tokenizer", ""),
            kv_capacity_tokens=ready.num_kv_tokens,
            eos_token_ids=ready.eos_token_ids,
            max_running=config.max_running,
        )
        return RankRow(
            instance=spec,
            coord=RankCoord(),
            endpoint=self.server.endpoint,
            incarnation=identity.incarnation,
            layout=ready.layout,
            descriptors=ready.descriptors,
            load=self.state.load(),
            host=socket.gethostname(),
            pid=os.getpid(),
            engine_pid=self.engine.pid,
            metrics_endpoint=self.metrics.endpoint if self.metrics is not None else "",
        )

    def _on_replaced(self, exc: FencedError) -> None:
        self._fail(exc)

    def _fail(self, exc: PdmeshError) -> None:
        self._failure = self._failure or exc
        self._over.set()

    # ---- waiting and ending -----------------------------------------------------------------------------

    async def any_set(
        self, *events: asyncio.Event, also: asyncio.Task[Any] | None = None, timeout: float | None = None
    ) -> None:
        """Waits for one of the events, the task or the timeout. Raises when the engine died, the row has a later
        holder, or too much of the pool is quarantined."""
        every = (*events, self.engine.dead, self._over)
        waits: list[asyncio.Task[Any]] = [self.tasks.spawn(event.wait(), "wait") for event in every]
        try:
            await asyncio.wait(
                [*waits, *([also] if also is not None else [])], timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for wait in waits:
                wait.cancel()
        if self.engine.death is not None:
            raise UnavailableError(self.engine.death, leg=self.engine.leg, reason="ENGINE_DIED")
        if self._failure is not None:
            raise self._failure

    async def unless_stopped(self, stop: Stop, work: Coroutine[Any, Any, T]) -> T | None:
        """The work's result, or None when a stop came first. Raises what the work raises."""

        async def outcome() -> T | PdmeshError:
            try:
                return await work
            except PdmeshError as exc:
                return exc

        task = self.tasks.spawn(outcome(), "start")
        stopped = self.tasks.spawn(stop.draining.wait(), "stopped")
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                return None
            result = task.result()
        finally:
            stopped.cancel()
            task.cancel()
        if isinstance(result, PdmeshError):
            raise result
        return result

    async def leave_placement(self) -> None:
        """No new sessions from now on, here and in the rank table. Idempotent."""
        self.sessions.drain(f"{self.state.instance} is draining")
        self.state.membership = MembershipState.DRAINING
        await self.server.set_serving(False)
        if self._registration is not None:
            await self._registration.drain()

    async def give_up(self, why: PdmeshError) -> None:
        """Refuses and ends everything: the engine died, the row has a later holder, or the pool is lost."""
        self.sessions.drain(why.message)
        await self.server.set_serving(False)
        if why.reason == HANDOVER:  # who resumes must not come back here
            await self.leave_placement()
        if self.engine.death is not None:  # the streams say themselves whether it was their step
            await self.sessions.wait_idle(_STOP_GRACE)
        self.sessions.cut(why.message, why.reason)
        await self.sessions.wait_idle(_STOP_GRACE)

    def give(self, order: DrainOrder) -> None:
        """An order to drain; serve() carries it out."""
        self.state.drain.give(order, time.monotonic())
        self.sessions.drain(f"{self.state.instance} is draining")
        self._ordered.set()

    def last_pair(self) -> bool:
        """True when no other pair of the own fingerprint is ready."""
        identity = self.state.identity
        if identity is None or self._watcher is None:
            return True
        return not self._watcher.roster.others_serve(identity.fingerprint, identity.incarnation)

    async def serve(self, stop: Stop) -> Role | None:
        """Serves until a stop or an order, and drains. Returns the role to come back in, or None to end.

        Raises what any_set raises.
        """
        await self.any_set(stop.draining, self._ordered)
        await self.leave_placement()
        drain, said, stopping = self.state.drain, "", False
        while not stop.now.is_set():
            self._ordered.clear()
            if stop.draining.is_set() and not stopping:
                stopping = True
                self.give(DrainOrder(limit=self._config.drain_timeout, force=True, stop=True))
            verdict = drain.look(
                time.monotonic(), streams=len(self.sessions), quiet=self._quiet(), last_pair=self.last_pair()
            )
            if (now_said := drain.note.partition(", at most")[0]) != said:
                said = now_said
                logger.info("draining: %s", drain.note)
            order = drain.order
            if verdict is Verdict.DONE and order is not None and order.leaves:
                return None if order.stop else order.role
            if verdict is Verdict.HAND_OVER:
                self.sessions.cut(f"{self.state.instance} hands its streams over", HANDOVER)
            wakers = [stop.now, self._ordered] + ([] if stopping else [stop.draining])
            await self.any_set(*wakers, timeout=None if verdict is Verdict.DONE else _DRAIN_LOOK)
        if len(self.sessions):
            logger.warning("cutting %d streams", len(self.sessions))
            self.sessions.cut(f"{self.state.instance} stops", HANDOVER)
            await self.sessions.wait_idle(_STOP_GRACE)
        return None

    async def _watch_engine(self) -> None:
        """Reports an engine that stands still, and ends this life when too much of the pool can't be proved quiet."""
        stalled = False
        while True:
            await asyncio.sleep(_ENGINE_LOOK)
            if self.engine.progressing() is stalled:
                stalled = not stalled
                await self._report_stall(stalled)
            stats = self.engine.stats
            if stats is not None and stats.stuck > MAX_STUCK_SHARE * stats.kv.total:
                # The engine is well, so streams are handed over rather than lost.
                share = stats.stuck / stats.kv.total
                why = f"{share:.0%} of the KV cache waits for a proof of quiet; {self.state.instance} starts anew"
                logger.error("%s", why)
                self._fail(
                    UnavailableError(why, leg=self.engine.leg, reason=HANDOVER, peer_incarnation=self.state.incarnation)
                )
                return

    async def _report_stall(self, stalled: bool) -> None:  # noqa: FBT001  # what the engine's figures say
        if stalled and self.engine.death is None:
            logger.error(
                "the engine (pid %d) has made no progress for %.0f s; it is killed at %.0f s",
                self.engine.pid, self.engine.stalled_seconds, self._config.watchdog_timeout,
            )  # fmt: skip
        elif not stalled:
            logger.warning("the engine (pid %d) makes progress again", self.engine.pid)
        if self.state.membership is MembershipState.READY:
            await self.server.set_serving(not stalled)

    def _quiet(self) -> bool:
        """True when no stream is open and a heartbeat since then says that the engine has no session."""
        stats = self.engine.stats
        fresh = self.engine.stats_at > self.sessions.idle_since
        return not len(self.sessions) and (
            self.sessions.opened == 0 or (stats is not None and fresh and not stats.sessions)
        )


def _default_name(config: WorkerConfig, port: int) -> str:
    """A name that no other worker of the mesh has: beyond this machine the port alone would not do."""
    host = "" if is_loopback(config.advertise_host or config.host) else f"{socket.gethostname()}-"
    return f"{config.role.value.lower()}-{host}{port}"


def _version() -> str:
    try:
        return importlib.metadata.version("pdmesh")
    except importlib.metadata.PackageNotFoundError:
        return ""
