"""Child processes that are kept running. The life of one:

    spawn → output goes to `say`, line by line → ready (handshake; `on_change`) → serves, beating → exit (`on_change`)
      exit before it was ever ready: the whole start has failed, `failed` gets the reason
      exit later: reported, waited for (0.5 s doubling to 10 s, afresh after 60 s up), spawned again as it was
                  commanded: a worker that has changed its role comes back in that of its command
      exit 0: it was told to end (a drain with --stop, a signal of its own) and stays down
      silent for `silence` seconds (stopped, hung): killed, then as above

Each child has its own session, so that Ctrl-C in the terminal reaches the supervisor alone, and dies with
the supervisor (see handshake.die_with). stop() ends them in groups: SIGTERM, and at a deadline SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from services.cli.handshake import parse
from services.cli.process import Process
from services.runtime.tasks import TaskOwner

Say = Callable[[str, str], None]
"""say(name, line): one line of a child's output, or about it."""


class Backoff:
    """How long to wait before a restart: `first` doubling to `limit`, afresh after a life of `calm` seconds."""

    def __init__(self, first: float = 0.5, limit: float = 10.0, calm: float = 60.0) -> None:
        self._first, self._limit, self._calm = first, limit, calm
        self._next = first

    def after(self, uptime: float) -> float:
        """The delay after a life of `uptime` seconds."""
        if uptime >= self._calm:
            self._next = self._first
        delay, self._next = self._next, min(2 * self._next, self._limit)
        return delay


@dataclass(frozen=True)
class ChildSpec:
    """One child. `arguments` follow `pdmesh`; children of a lower `stop_group` are stopped first."""

    name: str
    arguments: tuple[str, ...]
    stop_group: int
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Exit:
    """How a child ended."""

    code: int
    message: str = ""

    @property
    def reason(self) -> str:
        """In words."""
        how = f"killed by {signal.Signals(-self.code).name}" if self.code < 0 else f"exit code {self.code}"
        return f"{self.message} ({how})" if self.message else how


class StartFailedError(Exception):
    """A child ended, or was not ready in time, at its first start."""

    def __init__(self, name: str, end: Exit) -> None:
        super().__init__(f"{name}: {end.message or end.reason}")
        self.name, self.end = name, end


class Child:
    """One child process at a time, made from one spec."""

    def __init__(
        self,
        spec: ChildSpec,
        say: Say,
        *,
        silence: float,
        start_timeout: float,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.spec = spec
        self.ready = asyncio.Event()
        """Set while the process is ready."""
        self.info: dict[str, Any] = {}
        """What it reported last when it became ready."""
        self.pid = 0
        """0 while there is no process."""
        self.gone = asyncio.Event()
        """Set while there is no process."""
        self.gone.set()
        self._say, self._silence, self._start_timeout = say, silence, start_timeout
        self._on_change = on_change
        self._process: Process | None = None
        self._message = ""
        self._heard = self._ended_at = 0.0

    async def run_once(self) -> Exit:
        """Spawns the process and waits for its end."""
        self._message = ""
        try:
            process, events = self._spawn()
        except OSError as exc:  # no memory, no file, no process left; later there may be
            return Exit(1, f"it can't be started: {exc.strerror or exc}")
        self._process = process
        self.pid = process.pid
        self.gone.clear()
        self._heard = asyncio.get_running_loop().time()
        readers, watcher = TaskOwner(self.spec.name), TaskOwner(self.spec.name)
        try:
            async with _reading(process.output) as output, _reading(events) as told:
                readers.spawn(self._read_output(output), "output")
                readers.spawn(self._read_events(told), "events")
                watcher.spawn(self._watch(process), "watch")
                code = await process.ended()
                self._is_gone()
                # What it said last is still in the pipes; a grandchild may hold them open, so not for long.
                await readers.join(timeout=1.0)
        finally:
            await watcher.close()
            await readers.close()
            await process.close()
            self._is_gone()
        return Exit(code, self._message)

    def _spawn(self) -> tuple[Process, IO[bytes]]:
        """The process, and where it tells of itself. Raises OSError."""
        read_fd, write_fd = os.pipe()
        events = os.fdopen(read_fd, "rb", buffering=0)
        handshake = ("--ready-fd", str(write_fd), "--parent", str(os.getpid()))
        command = (sys.executable, "-m", "services.cli.main", *self.spec.arguments, *handshake)
        try:
            return Process(command, environment=self.spec.environment or None, pass_fds=(write_fd,)), events
        except BaseException:
            events.close()
            raise
        finally:
            os.close(write_fd)

    def _is_gone(self) -> None:
        if self.gone.is_set():
            return
        self.pid = 0
        self.gone.set()
        self.ready.clear()
        self._ended_at = asyncio.get_running_loop().time()
        self._on_change()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process, if there is one."""
        if self.pid and self._process is not None:
            self._process.send(number)

    async def _read_output(self, stream: asyncio.StreamReader) -> None:
        rest = b""
        while chunk := await stream.read(65536):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._say(self.spec.name, line.decode(errors="replace"))
        if rest:
            self._say(self.spec.name, rest.decode(errors="replace"))

    async def _read_events(self, stream: asyncio.StreamReader) -> None:
        loop = asyncio.get_running_loop()
        while line := await stream.readline():
            self._heard = loop.time()
            self._take(parse(line) or {})

    def _take(self, event: dict[str, Any]) -> None:
        if event.get("event") == "ready":
            if self.info:
                down = asyncio.get_running_loop().time() - self._ended_at
                self._say(self.spec.name, f"is ready again, {down:.1f} s after its end")
            self.info = event
            self.ready.set()
            self._on_change()
        elif event.get("event") == "failed":
            self._message = str(event.get("message", ""))

    async def _watch(self, process: Process) -> None:
        """Kills a process whose loop is silent, or that is never ready. Counts its own ticks: when this
        process was stopped, one long tick says nothing about the child."""
        loop = asyncio.get_running_loop()
        tick = self._silence / 10
        silent, starting, heard = 0.0, 0.0, self._heard
        while True:
            await asyncio.sleep(tick)
            silent = silent + tick if self._heard == heard else 0.0
            heard = self._heard
            starting = 0.0 if self.ready.is_set() else starting + tick
            if silent >= self._silence and self.ready.is_set():
                self._message = f"no sign of life for {self._silence:g} s"
            elif starting >= self._start_timeout:
                self._message = f"not ready within {self._start_timeout:g} s"
            else:
                continue
            process.send(signal.SIGKILL)
            await loop.create_future()  # cancelled when the process has ended


@contextlib.asynccontextmanager
async def _reading(pipe: IO[bytes]) -> AsyncIterator[asyncio.StreamReader]:
    """The pipe as a stream; closed in the end."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        yield reader
    finally:
        transport.close()


async def _all_ready(children: Sequence[Child]) -> None:
    for child in children:
        await child.ready.wait()


async def _all_gone(children: Sequence[Child]) -> None:
    for child in children:
        await child.gone.wait()


class Supervisor:
    """Keeps children running until stop()."""

    def __init__(
        self,
        say: Say,
        *,
        silence: float = 30.0,
        start_timeout: float = 300.0,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change()` is called when a child has become ready, and when it has ended."""
        self._say, self._silence, self._start_timeout, self._on_change = say, silence, start_timeout, on_change
        self._tasks = TaskOwner("supervisor", on_error=lambda _name, exc: self._fail(exc))
        self._stopping = asyncio.Event()
        self.children: list[Child] = []
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets StartFailedError when a child can't start the first time."""
        self.failed.add_done_callback(lambda f: f.cancelled() or f.exception())

    @property
    def down(self) -> list[str]:
        """Names of the children that are not ready."""
        return [child.spec.name for child in self.children if not child.ready.is_set()]

    def add(self, spec: ChildSpec) -> Child:
        """Starts to keep a child running."""
        child = Child(
            spec, self._say, silence=self._silence, start_timeout=self._start_timeout, on_change=self._on_change
        )
        self.children.append(child)
        self._tasks.spawn(self._keep(child), spec.name)
        return child

    async def until_ready(self, children: Sequence[Child], timeout: float) -> None:
        """Waits until all of them are ready. Raises StartFailedError."""
        ready = self._tasks.spawn(_all_ready(children), "all ready")
        try:
            await asyncio.wait({ready, self.failed}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if self.failed.done():
                self.failed.result()
            if not ready.done():
                late = next(child.spec.name for child in children if not child.ready.is_set())
                raise StartFailedError(late, Exit(1, f"not ready within {timeout:g} s"))
        finally:
            ready.cancel()

    async def stop(self, now: asyncio.Event, timeout: float) -> None:
        """Ends the children group by group with SIGTERM; SIGKILL to all when `now` is set or time is out."""
        self._stopping.set()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        hurry = self._tasks.spawn(now.wait(), "second signal")
        for group in sorted({child.spec.stop_group for child in self.children}):
            members = [child for child in self.children if child.spec.stop_group == group]
            for child in members:
                child.signal(signal.SIGTERM)
            ended = self._tasks.spawn(_all_gone(members), "stopped")
            await asyncio.wait({hurry, ended}, timeout=deadline - loop.time(), return_when=asyncio.FIRST_COMPLETED)
        left = [child for child in self.children if child.pid]
        for child in left:
            self._say(child.spec.name, "killed" if now.is_set() else "killed: it did not end in time")
            child.signal(signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5.0):
                await _all_gone(self.children)
        await self._tasks.close()

    def _fail(self, exc: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(exc)

    async def _keep(self, child: Child) -> None:
        loop = asyncio.get_running_loop()
        backoff = Backoff()
        name, was_ready = child.spec.name, False
        while not self._stopping.is_set():
            started = loop.time()
            end = await child.run_once()
            was_ready = was_ready or bool(child.info)
            if self._stopping.is_set():
                return
            if not was_ready:
                self._fail(StartFailedError(name, end))
                return
            if end.code == 0:
                self._say(name, "ended as it was told to; it stays down")
                return
            delay = backoff.after(loop.time() - started)
            self._say(name, f"died: {end.reason}; starts again in {delay:g} s")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._stopping.wait()
