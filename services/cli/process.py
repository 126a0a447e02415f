"""A child process of a process with threads.

It is started by subprocess, which uses vfork where nothing has to run between fork and exec: no thread is copied, no
fork handler of a library runs, and locks that gRPC's threads hold don't matter. (uvloop's own way forks.) A thread
waits for its end, and this loop reaps it: until then its pid is nobody else's, so a signal can't hit a stranger.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import IO

_KILLED_WITHIN = 5.0
"""Seconds in which the kernel ends a process after SIGKILL; it may be held up in a call to a device."""


class Process:
    """One child in its own session, without standard input.

    Make it on the event loop's own thread: where the child asked for it, the kernel ends it together with the very
    thread that started it. Give it back by ended() or close().
    """

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None, pass_fds: Sequence[int] = ()
    ) -> None:
        """`environment` None is this process's own. Raises OSError."""
        self._process = subprocess.Popen(
            list(command), env=environment, pass_fds=tuple(pass_fds), start_new_session=True, bufsize=0,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert self._process.stdout is not None
        self.output: IO[bytes] = self._process.stdout
        """Standard output and error; whoever reads it closes it."""
        self._over = asyncio.Event()
        loop = asyncio.get_running_loop()
        try:
            threading.Thread(target=self._wait, args=(loop,), name=f"wait-{self.pid}", daemon=True).start()
        except RuntimeError as exc:
            with self._process:  # closes and reaps
                self._process.kill()
            raise OSError(errno.EAGAIN, str(exc)) from exc

    @property
    def pid(self) -> int:
        """Stays the same after its end."""
        return self._process.pid

    def send(self, number: signal.Signals) -> None:
        """A signal to the process itself; nothing once it has ended."""
        self._process.send_signal(number)

    async def ended(self) -> int:
        """Waits for the end; the exit code, or the signal's number as a negative one."""
        await self._over.wait()
        return self._process.wait()

    async def close(self) -> None:
        """Kills it unless it has ended."""
        if self._process.returncode is None:
            self.send(signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_KILLED_WITHIN):
                    await self.ended()

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(ChildProcessError):  # a signal was sent after its end, which has reaped it
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(RuntimeError):  # the loop has ended first
            loop.call_soon_threadsafe(self._over.set)
