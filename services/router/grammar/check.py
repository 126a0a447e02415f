"""Says before any work whether a grammar can be followed. Compiling is done by children that may be killed.

check ─▶ known ─▶ verdict
      ─▶ new ───▶ a child compiles it (two at a time; started when first needed) ─▶ verdict, kept
                      ends by a limit or a crash ─▶ the grammar is refused; the next one gets a new child
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import subprocess
import sys
from collections import OrderedDict

import msgspec

from engine_core.types.errors import InvalidRequestError, QueueFullError, UnavailableError
from engine_core.types.sampling import Grammar
from services.router.grammar.child import CPU_SECONDS, Verdict
from services.runtime.tasks import TaskOwner

log = logging.getLogger(__name__)

_CHILDREN = 2
_MAX_WAITING = 512
_MAX_KEPT = 1024
_MAX_KEPT_BYTES = 16 * 1024 * 1024
_SECONDS = 60.0
"""From the request to the verdict, a child's start included; on an idle machine it takes CPU_SECONDS at most."""
_DEATHS = {
    signal.SIGSEGV: "it is too deep to be compiled",
    signal.SIGBUS: "it is too deep to be compiled",
    signal.SIGABRT: "it takes too much memory to be compiled",
}


class _Child:
    """A process that compiles, and the socket to it."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.process, self.reader, self.writer = process, reader, writer

    @classmethod
    async def start(cls, directory: str, cpu_seconds: int) -> _Child:
        ours, theirs = socket.socketpair()
        with theirs:
            process = _spawn(directory, cpu_seconds, theirs.fileno())
        return cls(process, *await asyncio.open_connection(sock=ours))

    async def ask(self, grammar: Grammar) -> bytes:
        """Its answer; empty when it has ended instead."""
        try:
            self.writer.write(msgspec.json.encode(grammar) + b"\n")
            await self.writer.drain()
            return await self.reader.readline()
        except (ConnectionError, RuntimeError):  # the latter is uvloop's word for a transport that is closed
            return b""

    async def death(self) -> int:
        """How it ended, now that it has closed its end."""
        return await asyncio.to_thread(self.process.wait)

    async def end(self) -> None:
        """Kills it unless it has ended."""
        self.process.kill()
        self.writer.close()
        await asyncio.to_thread(self.process.wait)


def _spawn(directory: str, cpu_seconds: int, fd: int) -> subprocess.Popen[bytes]:
    """Not in asyncio's way, which forks: gRPC's threads may bring the process down by that. Popen uses vfork."""
    command = (sys.executable, "-m", "services.router.grammar.child", directory, str(cpu_seconds))
    return subprocess.Popen(command, stdin=fd, stdout=fd)


class GrammarCheck:
    """One per router."""

    def __init__(self, directory: str, cpu_seconds: int = CPU_SECONDS) -> None:
        """`directory` is the model's; a grammar may take `cpu_seconds` of a core, and up to one more."""
        self._directory, self._cpu_seconds = directory, cpu_seconds
        self._slots = asyncio.Semaphore(_CHILDREN)
        self._idle: list[_Child] = []
        self._all: set[_Child] = set()
        self._asked: dict[Grammar, asyncio.Task[Verdict]] = {}
        self._known: OrderedDict[Grammar, Verdict] = OrderedDict()
        self._known_bytes = 0
        self._tasks = TaskOwner("grammars")

    async def check(self, grammar: Grammar, field: str) -> None:
        """Raises InvalidRequestError naming `field` when the grammar can't be followed, QueueFullError when too many
        wait, UnavailableError when there is no verdict in time."""
        verdict = self._known.get(grammar)
        if verdict is None:
            task = self._asked.get(grammar)
            if task is None:
                if len(self._asked) >= _MAX_WAITING:
                    raise QueueFullError(f"{_MAX_WAITING} grammars are waiting to be compiled")
                task = self._asked[grammar] = self._tasks.spawn(self._judge(grammar), "judge")
                task.add_done_callback(lambda _: self._asked.pop(grammar, None))
            verdict = await asyncio.shield(task)  # others may wait for it too
        else:
            self._known.move_to_end(grammar)
        if verdict.error is not None:
            raise InvalidRequestError(f"{field}: {verdict.error}", field=field)

    async def close(self) -> None:
        """Ends the children."""
        await self._tasks.close()
        for child in list(self._all):
            await self._end(child)

    async def _judge(self, grammar: Grammar) -> Verdict:
        try:
            async with asyncio.timeout(_SECONDS), self._slots:
                verdict = await self._ask(grammar)
        except TimeoutError:
            raise UnavailableError(f"no verdict on the grammar within {_SECONDS:g} s") from None
        self._keep(grammar, verdict)
        return verdict

    async def _ask(self, grammar: Grammar) -> Verdict:
        child = await self._child()
        self._all.add(child)
        done = False
        try:
            line = await child.ask(grammar)
            if not line:
                return self._verdict_of_death(await child.death())
            done = True
            return msgspec.json.decode(line, type=Verdict)
        finally:
            if done:
                self._idle.append(child)
            else:
                await self._end(child)

    async def _child(self) -> _Child:
        """One that lives: whoever ended while it had nothing to do says nothing of a grammar."""
        while self._idle:
            child = self._idle.pop()
            if child.process.poll() is None:
                return child
            log.warning("a child that compiles grammars has ended with code %d while idle", child.process.returncode)
            await self._end(child)
        return await _Child.start(self._directory, self._cpu_seconds)

    async def _end(self, child: _Child) -> None:
        self._all.discard(child)
        await child.end()

    def _keep(self, grammar: Grammar, verdict: Verdict) -> None:
        self._known[grammar] = verdict
        self._known_bytes += len(grammar.text)
        while len(self._known) > _MAX_KEPT or (self._known_bytes > _MAX_KEPT_BYTES and len(self._known) > 1):
            oldest, _ = self._known.popitem(last=False)
            self._known_bytes -= len(oldest.text)

    def _verdict_of_death(self, code: int) -> Verdict:
        if code == -signal.SIGXCPU:
            return Verdict(f"compiling it takes more than {self._cpu_seconds} s")
        why = next((why for died_of, why in _DEATHS.items() if code == -died_of), None)
        if why is None:
            log.error("the child that compiles grammars ended with code %d", code)
            raise UnavailableError("the process that compiles grammars has ended; try again")
        return Verdict(why)
