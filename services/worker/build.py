"""Composition root of a worker's service process, for every role.

    live      listen, engine, register, serve, drain (services/worker/life.py)
    change    ordered to come back in another role: the next life begins on the same port under the same
              name, with a new incarnation, a new engine and the services of that role
    end       a stop, a drain that was to end the process, the engine's death, or a later incarnation in the row

The engine's death ends the process with an error after its streams have failed; the supervisor starts
the pair anew, in the role of its command.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

from engine_core.lifecycle.membership import MembershipState
from engine_core.types.errors import PdmeshError
from engine_core.types.request import Role
from services.config import WorkerConfig, service_manager
from services.runtime.tasks import Stop, TaskOwner
from services.worker.identity import WorkerIdentity
from services.worker.life import Life, RoleServices, WorkerParts

OnReady = Callable[[dict[str, Any]], None]
ServicesOf = Callable[[Role], RoleServices]


async def run_worker(
    config: WorkerConfig,
    stop: Stop,
    on_ready: OnReady,
    services_of: ServicesOf,
    *,
    engine_command: Sequence[str] | None = None,
) -> None:
    """Runs a worker to its end; returns after a stop that was asked for.

    `on_ready` gets {"service", "instance", "endpoint", "port", "pid", "engine_pid", "incarnation"}, once per
    life: a change of role begins another. Raises ConfigError before anything is registered when configuration
    or model are wrong, UnavailableError when the engine died or too much of its pool is quarantined, FencedError
    when a later incarnation holds the row. `engine_command` replaces the engine's program, in tests.
    """
    worker = _Worker(config, stop, on_ready, services_of, engine_command)
    try:
        while await worker.live():
            pass
    finally:
        await worker.close()


class _Worker:
    """One process through its lives."""

    def __init__(
        self,
        config: WorkerConfig,
        stop: Stop,
        on_ready: OnReady,
        services_of: ServicesOf,
        engine_command: Sequence[str] | None,
    ) -> None:
        self._config, self._stop, self._on_ready = config, stop, on_ready
        self._services_of, self._engine_command = services_of, engine_command
        self._tasks = TaskOwner("worker process")
        self._life: Life | None = None
        self._announced = False

    async def close(self) -> None:
        """Ends what outlasts a life."""
        await self._tasks.close()

    async def live(self) -> bool:
        """One life, from listening to its end; True when another one in another role follows."""
        config, stop = self._config, self._stop
        services = self._services_of(config.role)
        async with AsyncExitStack() as stack:
            stack.callback(self._forget)
            life = await Life.begin(config, services, self._engine_command, stack)
            ready = await life.unless_stopped(stop, life.engine.start())
            if ready is None:
                return False
            identity = WorkerIdentity(life.state.instance, config.role, life.state.incarnation, ready)
            watcher = life.watch(stack)
            services.connect(
                WorkerParts(
                    config,
                    identity,
                    life.engine,
                    life.sessions,
                    life.session_tasks,
                    life.tasks,
                    life.channels,
                    watcher,
                    life.observer,
                )
            )
            life.state.identity = identity
            if not await life.register(identity, stop, stack):
                return False
            if not life.sessions.draining:
                life.state.membership = MembershipState.READY
                await life.server.set_serving(True)
            self._life = life
            self._tell(life, identity)
            try:
                role = await life.serve(stop)
            except PdmeshError as exc:
                await life.give_up(exc)
                raise
        if role is None or stop.draining.is_set():
            return False
        # Named as before, where it was before: only the role is another one.
        self._config = config.model_copy(
            update={"role": role, "instance": identity.instance, "port": life.server.port}
            | ({"metrics_port": life.metrics.port} if life.metrics is not None else {})
        )
        return True

    def _forget(self) -> None:
        self._life = None

    def _tell(self, life: Life, identity: WorkerIdentity) -> None:
        self._on_ready(
            {
                "service": identity.role.value.lower(),
                "instance": identity.instance,
                "endpoint": life.server.endpoint,
                "port": life.server.port,
                "pid": os.getpid(),
                "engine_pid": life.engine.pid,
                "incarnation": identity.incarnation,
            }
        )
        if not self._announced:
            self._announced = True
            # By the rule that keeps the lease: who may not renew it may not keep the manager's watchdog quiet either.
            self._tasks.spawn(service_manager().accompany(self._stop, self._progressing), "service manager")

    def _progressing(self) -> bool:
        return self._life is None or self._life.engine.progressing()
