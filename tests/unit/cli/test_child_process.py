"""Children of a process with threads: how they are started, waited for, ended, and what is left of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from services.cli.process import Process
from services.cli.supervisor import Child, ChildSpec, Exit

SLEEPS = (sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)")


async def said(process: Process) -> bytes:
    """All its output."""
    with process.output as output:
        return await asyncio.to_thread(output.read)


async def up(process: Process) -> None:
    assert await asyncio.to_thread(process.output.readline) == b"up\n"


def waiting_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("wait-")]


async def test_a_child_has_its_own_session_and_environment_and_no_input() -> None:
    script = "import os, sys; print(os.getsid(0) == os.getpid(), sorted(os.environ), sys.stdin.read()); sys.exit(7)"
    process = Process((sys.executable, "-SEc", script), environment={"ONE": "1", "LC_ALL": "C"})
    assert (await said(process)).startswith(b"True ['LC_ALL', 'ONE'] ")
    assert await process.ended() == 7


async def test_signals_and_what_comes_after_the_end() -> None:
    process = Process(SLEEPS)
    await up(process)
    process.send(signal.SIGTERM)
    assert await process.ended() == -signal.SIGTERM
    process.send(signal.SIGKILL)  # to nobody
    await process.close()
    assert await process.ended() == -signal.SIGTERM
    process.output.close()


async def test_close_kills_and_leaves_no_zombie() -> None:
    process = Process(SLEEPS)
    await up(process)
    await process.close()
    process.output.close()
    assert not os.path.exists(f"/proc/{process.pid}")
    while waiting_threads():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


FORKS = '''
import asyncio, ctypes, os, sys
from services.cli.process import Process
from services.runtime.tasks import run

forks, ran = [], ctypes.CFUNCTYPE(None)(lambda: forks.append(1))
assert ctypes.CDLL(None).__register_atfork(ran, None, None, None) == 0

async def by_process(stop):
    process = Process((sys.executable, "-c", ""))
    await process.ended()
    process.output.close()

async def by_the_loop(stop):
    await (await asyncio.create_subprocess_exec(sys.executable, "-c", "")).wait()

for way in (by_process, by_the_loop):
    run(way)
    print(way.__name__, len(forks))
'''  # fmt: skip


def test_no_fork_handler_runs() -> None:
    """gRPC has some, and they can't run while its threads are at work; the loop's own way calls them."""
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("by_process 0\nby_the_loop 1\n", 0), done.stderr


@contextlib.contextmanager
def no_more_files() -> Iterator[None]:
    """None can be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def child(*arguments: str) -> Child:
    spec = ChildSpec("some", arguments, 0)
    return Child(spec, lambda _name, _line: None, silence=30.0, start_timeout=60.0)


async def test_what_can_not_be_started_now_has_ended_and_may_be_tried_again() -> None:
    some = child("version")
    with no_more_files():
        end = await some.run_once()
    assert end == Exit(1, "it can't be started: Too many open files")


async def test_a_life_leaves_no_descriptor_and_no_thread() -> None:
    some = child("version", "--no-such-option")
    before = sorted(os.listdir("/proc/self/fd"))
    assert (await some.run_once()).code == 2
    assert sorted(os.listdir("/proc/self/fd")) == before
    while waiting_threads():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_who_no_longer_waits_for_a_child_has_killed_it() -> None:
    some = child("bootstrap", "--port", "0")
    life = asyncio.ensure_future(some.run_once())
    async with asyncio.timeout(60.0):
        await some.ready.wait()
    pid = some.pid
    life.cancel()
    with pytest.raises(asyncio.CancelledError):
        await life
    assert some.gone.is_set() and not os.path.exists(f"/proc/{pid}")
