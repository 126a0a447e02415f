"""`pdmesh top` as its user runs it: one frame in a pipe, and live in a terminal."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import signal
import struct
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.mesh.conftest import Served
from tests.support.asking import random_prompt, until
from tests.support.mesh import Mesh

pytestmark = pytest.mark.asyncio(loop_scope="session")

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def arguments(mesh: Mesh, *more: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "services.cli.main", "top", "--bootstrap", mesh.bootstrap, *more)


class Terminal:
    """A pseudo terminal with `pdmesh top` in it."""

    def __init__(self, master: int, slave: int, process: asyncio.subprocess.Process) -> None:
        self.master, self.slave, self.process = master, slave, process
        self._bytes = b""
        asyncio.get_running_loop().add_reader(master, self._read)

    def _read(self) -> None:
        self._bytes += os.read(self.master, 65536)

    @property
    def frame(self) -> str:
        """What was drawn since the last key or change of size, without colours."""
        return _ESCAPES.sub("", self._bytes.decode("utf-8", "replace"))

    def press(self, key: str) -> None:
        self._bytes = b""
        os.write(self.master, key.encode())

    def resize(self, width: int, height: int) -> None:
        """Kernels tell only those whose controlling terminal it is; the test tells by itself."""
        self._bytes = b""
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        os.kill(self.process.pid, signal.SIGWINCH)

    async def shows(self, *texts: str) -> None:
        await until(lambda: all(text in self.frame for text in texts), 30.0, lambda: f"{texts} in {self.frame[-3000:]}")


@asynccontextmanager
async def terminal(mesh: Mesh) -> AsyncIterator[Terminal]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 80, 0, 0))
    process = await asyncio.create_subprocess_exec(
        *arguments(mesh), stdin=slave, stdout=slave, stderr=slave, env={**os.environ, "TERM": "xterm-256color"}
    )
    try:
        yield Terminal(master, slave, process)
    finally:
        asyncio.get_running_loop().remove_reader(master)
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(master)
        os.close(slave)


async def test_once_prints_a_frame(llama: Served) -> None:
    await llama.asker.generate(random_prompt(80, 5), max_tokens=4)
    process = await asyncio.create_subprocess_exec(
        *arguments(llama.mesh, "--once"), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60.0):
        out, err = (part.decode() for part in await process.communicate())
    assert (process.returncode, err) == (0, "") and "\x1b" not in out
    rows = out.splitlines()
    assert max(map(len, rows)) <= 80
    assert "workers 3/3 ready" in rows[0] and "routers 1/1" in rows[0]
    for name, role in (("prefill-0", "PREFILL"), ("prefill-1", "PREFILL"), ("decode-0", "DECODE")):
        row = next(line for line in rows if line.startswith(f"{name} ") and role in line)
        assert row.split()[1:3] == [role, "READY"] and row.rstrip().endswith("/1024")
    assert any(line.startswith("prefill-1 → decode-0") and " tcp " in line for line in rows)
    assert any(line.startswith("REQUEST (0)") for line in rows)


async def test_live_in_a_terminal(llama: Served) -> None:
    async with terminal(llama.mesh) as term:
        before = termios.tcgetattr(term.slave)
        await term.shows("workers 3/3 ready", "prefill-0", "decode-0", "sort (by name)")
        term.press("s")
        await term.shows("sort (by load)")
        term.resize(120, 40)
        await term.shows("sort (by load)", "WHILE MOVING")
        await until(lambda: any(len(line) > 100 for line in term.frame.splitlines()), 30.0, lambda: term.frame)
        await llama.mesh.kill_engine("decode-0", signal.SIGSTOP)
        try:
            asking = llama.asker.start(random_prompt(40, 6), max_tokens=4)
            await term.shows(asking.request_id[:10], "REQUEST (1)")  # the column may be that narrow
        finally:
            await llama.mesh.kill_engine("decode-0", signal.SIGCONT)
        assert (await asking.whole()).ok
        term.press("q")
        async with asyncio.timeout(30.0):
            assert await term.process.wait() == 0
        assert termios.tcgetattr(term.slave) == before
