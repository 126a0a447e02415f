"""Faults by a plan, on a mesh under test: processes killed, processes stopped and let go, connections delayed, stalled
and reset.

    plan = draw_plan(seed=7, seconds=600, targets=chaos.targets)          # pure: the same seed, the same faults
    async with Chaos(model, prefill=2, decode=2, routers=2, bootstraps=2) as chaos:
        await chaos.carry_out(plan)
        await chaos.recover()                                             # all run, nothing is held back

Every worker stands behind a proxy of its own, which is what it advertises: what routers and decode workers say to
it passes there. Whatever ends is started again, as a supervisor does.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any

from services.runtime.tasks import TaskOwner
from tests.support.mesh import Mesh
from tests.support.proxy import Proxy, free_port


class Kind(StrEnum):
    """What is done to a target."""

    KILL = "kill"
    KILL_ENGINE = "kill engine"
    STOP = "stop"
    STOP_ENGINE = "stop engine"
    DELAY = "delay"
    STALL = "stall"
    RESET = "reset"


OF_WORKERS = tuple(Kind)
OF_OTHERS = (Kind.KILL, Kind.STOP)


@dataclass(frozen=True)
class Fault:
    """One fault: `at` seconds after the start, for `lasts` seconds where it is none of a moment."""

    at: float
    kind: Kind
    target: str
    lasts: float = 0.0

    def __str__(self) -> str:
        return f"{self.at:.1f} s: {self.kind} {self.target}" + (f" for {self.lasts:.1f} s" if self.lasts else "")


def draw_plan(
    seed: int,
    seconds: float,
    workers: Sequence[str],
    others: Sequence[str],
    *,
    gap: tuple[float, float] = (2.0, 5.0),
    longest: float = 20.0,
) -> list[Fault]:
    """Faults every two to five seconds: one in two kills, the others last for up to `longest` seconds."""
    draw, at, plan = random.Random(seed), 0.0, []
    while (at := at + draw.uniform(*gap)) < seconds:
        target = draw.choice([*workers, *others])
        kinds = OF_WORKERS if target in workers else OF_OTHERS
        kills = [kind for kind in kinds if kind in (Kind.KILL, Kind.KILL_ENGINE)]
        kind = draw.choice(kills if draw.random() < 0.5 else [k for k in kinds if k not in kills])
        momentary = kind in (Kind.KILL, Kind.KILL_ENGINE, Kind.RESET)
        plan.append(Fault(at, kind, target, 0.0 if momentary else draw.uniform(0.5, longest)))
    return plan


class Chaos:
    """A mesh whose processes come back, and the means to hurt them; use it as an async context manager."""

    def __init__(
        self,
        model: Path,
        *,
        prefill: int = 2,
        decode: int = 2,
        routers: int = 2,
        bootstraps: int = 2,
        options: Mapping[str, Any] | None = None,
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.workers = [f"prefill-{i}" for i in range(prefill)] + [f"decode-{i}" for i in range(decode)]
        self.routers = ["router", *(f"router-{i}" for i in range(1, routers))]
        self.bootstraps = ["bootstrap", *(f"bootstrap-{i}" for i in range(1, bootstraps))]
        ports = {name: (free_port(), free_port()) for name in self.workers}
        self.proxies = {name: Proxy(own, shown) for name, (own, shown) in ports.items()}
        chosen = {
            n: {**(overrides or {}).get(n, {}), "port": own, "advertise_port": shown}
            for n, (own, shown) in ports.items()
        }
        rest = {n: o for n, o in (overrides or {}).items() if n not in ports}
        self.mesh = Mesh(
            model,
            prefill=prefill,
            decode=decode,
            routers=routers,
            bootstraps=bootstraps,
            options=options,
            overrides={**rest, **chosen},
        )
        self._stack = AsyncExitStack()
        self._tasks = TaskOwner("chaos")
        self._ending = False
        self.log: list[str] = []
        self.broken: dict[str, list[float]] = {name: [] for name in self.routers}
        """When each router was killed or stopped, on the event loop's clock."""

    @property
    def others(self) -> list[str]:
        """Processes that are no workers."""
        return [*self.routers, *self.bootstraps]

    async def __aenter__(self) -> Chaos:
        for proxy in self.proxies.values():
            await self._stack.enter_async_context(proxy)
        await self._stack.enter_async_context(self.mesh)
        for name in (*self.workers, *self.others):
            self._tasks.spawn(self._supervise(name), name)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending = True
        await self._tasks.close()
        if exc is not None:
            print(*self.log, sep="\n")
        await self._stack.__aexit__(kind, exc, trace)

    async def carry_out(self, plan: Sequence[Fault]) -> None:
        """Does all of it on time, and returns when the last one's time is over."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        async with asyncio.TaskGroup() as group:
            for fault in plan:
                await asyncio.sleep(max(0.0, begun + fault.at - loop.time()))
                self.log.append(str(fault))
                group.create_task(self._do(fault))

    async def recover(self, within: float = 120.0) -> None:
        """Waits until every process runs and is ready, and nothing is held back."""
        for proxy in self.proxies.values():
            proxy.heal()
        async with asyncio.timeout(within):
            while not all(self._up(name) for name in (*self.workers, *self.others)):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            for router in self.routers:
                await self.mesh.until_ready(within, router=router)
            while len(await self._ready()) < len(self.workers):  # noqa: ASYNC110
                await asyncio.sleep(0.2)

    def pids(self) -> dict[str, int]:
        """All processes: services by name, engines as NAME/engine."""
        found = dict(self.mesh.pids)
        return found | {f"{name}/engine": self.mesh.engine_pid(name) for name in self.workers if name in found}

    # ---- inside -----------------------------------------------------------------------------------

    def _up(self, name: str) -> bool:
        return bool(self.mesh.pid(name)) and self.mesh.ready(name)

    async def _ready(self) -> list[str]:
        ranks = (await self.mesh.status())["ranks"]
        return [rank["instance"] for rank in ranks if rank["answers"] and rank["table_state"] == "READY"]

    async def _supervise(self, name: str) -> None:
        while not self._ending:
            await self.mesh.gone(name, 1e6)
            self.log.append(f"{name} ended: {self.mesh.end_of(name)}")
            with suppress(AssertionError):  # killed while it started: it ends again, and comes here again
                await self.mesh.start(name)

    async def _do(self, fault: Fault) -> None:
        if fault.kind in (Kind.DELAY, Kind.STALL, Kind.RESET):
            await self._disturb(fault)
            return
        engine = fault.kind in (Kind.KILL_ENGINE, Kind.STOP_ENGINE)
        if not self._up(fault.target):
            return
        pid = self.mesh.engine_pid(fault.target) if engine else self.mesh.pid(fault.target)
        kill = fault.kind in (Kind.KILL, Kind.KILL_ENGINE)
        if fault.target in self.broken:
            self.broken[fault.target].append(asyncio.get_running_loop().time())
        if kill:
            self.mesh.mark_killed(fault.target)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if kill else signal.SIGSTOP)
        if kill:
            return
        try:
            await asyncio.sleep(fault.lasts)
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    async def _disturb(self, fault: Fault) -> None:
        proxy = self.proxies[fault.target]
        if fault.kind is Kind.RESET:
            proxy.reset()
            return
        if fault.kind is Kind.STALL:
            proxy.stall()
        else:
            proxy.delay(0.05)
        try:
            await asyncio.sleep(fault.lasts)
        finally:
            proxy.heal()
