"""Runs the commands that deployment files hold, as processes of this machine.

A Service is what a file says of one process: the command line after `pdmesh`, its environment, how it is probed, and
how long its stop may take. `Place` turns addresses, ports and paths of containers and hosts into ones that are free
here; nothing else of the files is changed, but the size of the KV pool and the number of threads.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from services.cli import health
from services.runtime.tasks import TaskOwner

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PDMESH = Path(sys.executable).with_name("pdmesh")
READY_WITHIN = 240.0
STOPPED_WITHIN = 60.0
SMALL: Mapping[str, str] = {"PDMESH_KV_MEMORY_MB": "64", "PDMESH_THREADS": "1"}
STOP_ORDER = ("router", "decode", "prefill", "bootstrap")


@dataclass(frozen=True)
class Service:
    """One process as a file describes it."""

    role: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    probes: tuple[tuple[str, ...], ...] = ()
    """Command lines after `pdmesh` that end with 0 once the process serves."""
    grace: float = 0.0
    """Seconds between the signal to stop and the kill."""
    watchdog: float | None = None
    """Seconds of the watchdog of a manager that wants to be notified; None without such a manager."""


class Ports:
    """Free ports for the ports of files; one of these per mesh."""

    def __init__(self) -> None:
        self._chosen: dict[str, str] = {}
        self._held: list[socket.socket] = []

    def get(self, number: int | str, owner: str = "") -> str:
        """The port that stands for a port of `owner`, the same whenever it is asked for."""
        key = f"{owner}:{number}"
        if key not in self._chosen:
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", 0))
            self._held.append(sock)  # all are held until release(), so that no two are one
            self._chosen[key] = str(sock.getsockname()[1])
        return self._chosen[key]

    def release(self) -> None:
        """The ports are about to be used."""
        while self._held:
            self._held.pop().close()


@dataclass(frozen=True)
class Place:
    """Names of the world of one way, and what stands for them here. Longer names win."""

    ports: Ports
    names: dict[str, str] = field(default_factory=dict)

    def here(self, text: str) -> str:
        """The text with every name replaced, once, from left to right."""
        if not self.names:
            return text
        known = sorted(self.names, key=len, reverse=True)
        return re.sub("|".join(map(re.escape, known)), lambda found: self.names[found.group()], text)

    def service(self, service: Service) -> Service:
        """The service as it can be started here."""
        environment = {n: self.here(v) for n, v in service.environment.items() if n != "HOME"}
        return Service(
            service.role,
            tuple(map(self.here, service.arguments)),
            environment | {n: v for n, v in SMALL.items() if service.role in ("prefill", "decode", "serve")},
            tuple(tuple(map(self.here, probe)) for probe in service.probes),
            service.grace,
            service.watchdog,
        )


class Notified:
    """The socket of a manager that wants to be notified."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind(str(path))
        self._sock.setblocking(False)
        self._seen: list[str] = []

    def seen(self) -> list[str]:
        """All lines so far."""
        while True:
            try:
                self._seen += self._sock.recv(4096).decode().split("\n")
            except BlockingIOError:
                return self._seen

    def close(self) -> None:
        self._sock.close()


class Running:
    """One process."""

    def __init__(self, service: Service, folder: Path, number: int) -> None:
        self.service = service
        self._log = folder / f"{number}-{service.role}.log"
        self.notified = Notified(folder / f"{number}.notify") if service.watchdog is not None else None
        environment = {n: v for n, v in os.environ.items() if not n.startswith(("PDMESH_", "NOTIFY_", "WATCHDOG_"))}
        environment |= service.environment
        if self.notified is not None:
            environment["NOTIFY_SOCKET"] = str(self.notified.path)
        if service.watchdog:
            environment["WATCHDOG_USEC"] = str(round(service.watchdog * 1e6))
        with self._log.open("wb") as out:
            self.process = subprocess.Popen(
                [str(PDMESH), *service.arguments],
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment, cwd=folder,
            )  # fmt: skip

    def said(self) -> str:
        """Its output."""
        return self._log.read_text(errors="replace")

    async def serves(self) -> None:
        """Waits for the manager to be told, and for every probe to succeed."""
        async with asyncio.timeout(READY_WITHIN):
            while self.notified is not None and "READY=1" not in self.notified.seen():
                await self._still_there()
            # Asked in this process until it serves, for the sake of a busy machine; then by the command itself.
            for name, *arguments in self.service.probes:
                assert name == "health"
                while await asyncio.to_thread(health.main, arguments) != 0:
                    await self._still_there()
            for probe in self.service.probes[-1:]:
                while await self._probe(*probe) != 0:
                    await self._still_there()

    async def _still_there(self) -> None:
        assert self.process.poll() is None, f"{self.service.role} ended with {self.process.returncode}:\n{self.said()}"
        await asyncio.sleep(0.2)

    async def _probe(self, *command: str) -> int:
        probe = await asyncio.create_subprocess_exec(
            str(PDMESH), *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        return await probe.wait()

    async def stop(self) -> int:
        """SIGTERM, as every manager here stops a service; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(min(self.service.grace, STOPPED_WITHIN)):
            while self.process.poll() is None:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return self.process.returncode

    def kill(self) -> None:
        """Whatever is left."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.notified is not None:
            self.notified.close()


class Fleet:
    """The processes of one mesh."""

    def __init__(self, ports: Ports, services: Sequence[Service], folder: Path) -> None:
        self._ports, self._services, self._folder = ports, services, folder
        self.running: list[Running] = []

    async def __aenter__(self) -> Fleet:
        self._ports.release()
        try:
            for number, service in enumerate(self._services):
                self.running.append(Running(service, self._folder, number))
            owner = TaskOwner("fleet")
            waits = [owner.spawn(one.serves(), one.service.role) for one in self.running]
            try:
                await asyncio.gather(*waits)
            finally:
                await owner.close()
        except BaseException:
            self._end(failed=True)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(failed=exc is not None)

    def of(self, role: str) -> list[Running]:
        """Those of one role."""
        return [one for one in self.running if one.service.role == role]

    async def stop(self) -> dict[str, list[int]]:
        """Stops all, in the order that every guide gives; exit codes by role."""
        codes: dict[str, list[int]] = {}
        for role in STOP_ORDER:
            codes[role] = list(await asyncio.gather(*(one.stop() for one in self.of(role))))
        return codes

    def _end(self, *, failed: bool) -> None:
        for one in self.running:
            one.kill()
            if failed:
                print(f"--- {one.service.role} ({one.process.returncode})", one.said()[-4000:], sep="\n")


async def complete(url: str, **body: Any) -> dict[str, Any]:
    """One completion of the mesh's own model."""
    async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
        answer = await client.post(f"{url}/v1/completions", json={"model": "default", **body})
        assert answer.status_code == 200, answer.text
        whole: dict[str, Any] = answer.json()
        return whole


async def metrics(url: str) -> str:
    """What a process says at /metrics."""
    async with httpx.AsyncClient(timeout=10.0, trust_env=False) as client:
        answer = await client.get(f"{url}/metrics")
        assert answer.status_code == 200, answer.text
        return answer.text
