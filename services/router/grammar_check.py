"""Says before any work whether a grammar can be followed. Compiling is done by children that may be killed.

check ─▶ known ─▶ verdict
      ─▶ new ───▶ a child compiles it (two at a time; started when first needed) ─▶ verdict, kept
                      ends by a limit or a crash ─▶ the grammar is refused; the next one gets a new child
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections import OrderedDict

import msgspec

from engine_core.types.errors import InvalidRequestError, QueueFullError, UnavailableError
from engine_core.types.sampling import Grammar
from services.router.grammar_child import CPU_SECONDS, Verdict
from services.runtime.tasks import TaskOwner

log = logging.getLogger(__name__)

_CHILDREN = 2
_MAX_WAITING = 64
_MAX_KEPT = 1024
_MAX_KEPT_BYTES = 16 * 1024 * 1024
_SECONDS = 60.0
"""From the request to the verdict, a child's start included; on an idle machine it takes CPU_SECONDS at most."""
_DEATHS = {
    signal.SIGSEGV: "it is too deep to be compiled",
    signal.SIGBUS: "it is too deep to be compiled",
    signal.SIGABRT: "it takes too much memory to be compiled",
}


class GrammarCheck:
    """One per router."""

    def __init__(self, directory: str, cpu_seconds: int = CPU_SECONDS) -> None:
        """`directory` is the model's; a grammar may take `cpu_seconds` of a core, and up to one more."""
        self._directory, self._cpu_seconds = directory, cpu_seconds
        self._slots = asyncio.Semaphore(_CHILDREN)
        self._idle: list[asyncio.subprocess.Process] = []
        self._all: set[asyncio.subprocess.Process] = set()
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
        child = self._idle.pop() if self._idle else await self._start()
        done = False
        try:
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write(msgspec.json.encode(grammar) + b"\n")
            line = b""
            try:
                await child.stdin.drain()
                line = await child.stdout.readline()
            except ConnectionError:
                log.debug("the grammar child went away while it was asked")
            if not line:
                return self._verdict_of_death(await child.wait())
            done = True
            return msgspec.json.decode(line, type=Verdict)
        finally:
            if done:
                self._idle.append(child)
            else:
                await self._end(child)

    async def _start(self) -> asyncio.subprocess.Process:
        command = (sys.executable, "-m", "services.router.grammar_child", self._directory, str(self._cpu_seconds))
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        self._all.add(child)
        return child

    async def _end(self, child: asyncio.subprocess.Process) -> None:
        self._all.discard(child)
        if child.returncode is None:
            child.kill()
        await child.wait()

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
