"""The notification protocol: what goes to the manager's socket, and when the watchdog falls silent."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_core.types.errors import ConfigError
from services.config import child_environment, engine_environment, service_manager
from services.runtime.notify import ManagerAddress, ServiceManager
from services.runtime.tasks import Stop, TaskOwner


class Listener:
    """A manager's end of the socket."""

    def __init__(self, address: str) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind(address)
        self._sock.setblocking(False)

    async def next(self) -> dict[str, str]:
        """The next message."""
        data = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self._sock, 4096), 20.0)
        return dict(line.split("=", 1) for line in data.decode().split("\n"))

    async def until(self, **wanted: str) -> list[dict[str, str]]:
        """All messages up to the one that holds `wanted`."""
        seen = [await self.next()]
        while not wanted.items() <= seen[-1].items():
            seen.append(await self.next())
        return seen

    def waiting(self) -> list[dict[str, str]]:
        """What lies in the socket now."""
        found = []
        while True:
            try:
                data = self._sock.recv(4096)
            except BlockingIOError:
                return found
            found.append(dict(line.split("=", 1) for line in data.decode().split("\n")))

    def close(self) -> None:
        self._sock.close()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "notify")


@pytest.fixture
def listener(path: str) -> Iterator[Listener]:
    made = Listener(path)
    yield made
    made.close()


async def test_ready_then_pings_then_stopping(path: str, listener: Listener) -> None:
    stop, owner = Stop(), TaskOwner("test")
    owner.spawn(ServiceManager(ManagerAddress(path, 0.02)).accompany(stop), "manager")
    assert await listener.next() == {"READY": "1", "STATUS": "serving"}
    assert await listener.next() == {"WATCHDOG": "1"}
    assert await listener.next() == {"WATCHDOG": "1"}
    stop.request()
    seen = await listener.until(STOPPING="1")
    assert seen[-1] == {"STOPPING": "1", "STATUS": "draining"}
    assert await listener.next() == {"WATCHDOG": "1"}, "a drain shows progress too"
    await owner.close()


async def test_no_ping_while_nothing_progresses(path: str, listener: Listener) -> None:
    stop, owner, healthy = Stop(), TaskOwner("test"), True
    looks: list[bool] = []

    def look() -> bool:
        looks.append(healthy)
        return healthy

    owner.spawn(ServiceManager(ManagerAddress(path, 0.02)).accompany(stop, look), "manager")
    await listener.until(WATCHDOG="1")
    healthy = False
    await listener.until(STATUS="the engine makes no progress")
    looked = len(looks)
    while len(looks) < looked + 5:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert listener.waiting() == [], "five looks at an engine that stands still, and no ping"
    healthy = True
    assert await listener.next() == {"STATUS": "serving"}
    assert await listener.next() == {"WATCHDOG": "1"}
    await owner.close()


async def test_an_end_without_a_drain_says_stopping(path: str, listener: Listener) -> None:
    owner = TaskOwner("test")
    owner.spawn(ServiceManager(ManagerAddress(path, 0.0)).accompany(Stop()), "manager")
    assert await listener.next() == {"READY": "1", "STATUS": "serving"}
    await owner.close()
    assert await listener.next() == {"STOPPING": "1"}
    assert listener.waiting() == [], "no watchdog was asked for"


async def test_the_abstract_namespace(tmp_path: Path) -> None:
    name = f"pdmesh-test-{os.getpid()}-{tmp_path.name}"
    listener = Listener(f"\0{name}")
    assert ServiceManager(ManagerAddress(f"@{name}")).tell(STATUS="one\nline")
    assert await listener.next() == {"STATUS": "one line"}
    listener.close()


async def test_without_a_manager_nothing_is_sent(caplog: pytest.LogCaptureFixture) -> None:
    manager = ServiceManager(ManagerAddress())
    assert manager.tell(READY=1) is False
    await manager.accompany(Stop())  # returns: there is nobody to accompany it for
    assert caplog.records == []


def test_an_unreachable_manager_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager = ServiceManager(ManagerAddress(str(tmp_path / "nobody")))
    assert [manager.tell(WATCHDOG=1) for _ in range(3)] == [False] * 3
    assert len(caplog.records) == 1
    assert "nobody can't be told anything: No such file or directory" in caplog.text


async def test_what_the_environment_says(path: str, listener: Listener) -> None:
    manager = service_manager({"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "20000", "WATCHDOG_PID": "7"}, pid=7)
    owner = TaskOwner("test")
    owner.spawn(manager.accompany(Stop()), "manager")
    assert (await listener.until(WATCHDOG="1"))[0]["READY"] == "1"
    await owner.close()


async def test_the_watchdog_of_another_process_is_not_ours(path: str, listener: Listener) -> None:
    manager = service_manager({"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "20000", "WATCHDOG_PID": "8"}, pid=7)
    looks: list[int] = []

    def look() -> bool:
        looks.append(1)
        return True

    owner = TaskOwner("test")
    owner.spawn(manager.accompany(Stop(), look), "manager")
    assert await listener.next() == {"READY": "1", "STATUS": "serving"}
    while not looks:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert listener.waiting() == []
    await owner.close()


def test_a_number_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="WATCHDOG_USEC and WATCHDOG_PID must be whole numbers"):
        service_manager({"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "30s"})


def test_children_don_t_speak_for_their_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("LANG", "C.UTF-8")
    for environment in (child_environment(), engine_environment()):
        assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"} & environment.keys()
        assert environment["LANG"] == "C.UTF-8"
