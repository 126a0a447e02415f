"""Tasks with owners, and the two-stage stop of a process.

The first SIGINT or SIGTERM sets `Stop.draining`: take nothing new, let what runs end. The second sets
`Stop.now` and cancels the main coroutine shortly after.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")

_GRACE_AFTER_NOW = 2.0
"""Seconds that the main coroutine has after the second signal before it is cancelled."""


class TaskOwner:
    """Owns tasks: each is logged if it fails, removed when it ends, and cancelled by close().

    `on_error(task_name, exc)` is called for a task that failed, after it is logged.
    """

    def __init__(self, name: str, on_error: Callable[[str, BaseException], None] | None = None) -> None:
        self._name = name
        self._tasks: set[asyncio.Task[Any]] = set()
        self._on_error = on_error
        self._closed = False

    @property
    def count(self) -> int:
        """Live tasks."""
        return len(self._tasks)

    def spawn(self, coro: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Starts a task. Raises RuntimeError, and drops the coroutine, after close()."""
        if self._closed:
            coro.close()
            raise RuntimeError(f"{self._name} is closed: {name} can't be started")
        task = asyncio.get_running_loop().create_task(coro, name=f"{self._name}/{name}")
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        exc = task.exception()
        if exc is None:
            return
        log.error("task %s failed", task.get_name(), exc_info=exc)
        if self._on_error is not None:
            self._on_error(task.get_name(), exc)

    async def join(self, timeout: float) -> bool:
        """Waits for all tasks to end by themselves; False when some still run after `timeout` seconds."""
        if not self._tasks:
            return True
        _, pending = await asyncio.wait(set(self._tasks), timeout=timeout)
        return not pending

    async def close(self, timeout: float = 5.0) -> None:
        """Cancels all tasks and waits up to `timeout` seconds for them; names those that stay."""
        self._closed = True
        current = asyncio.current_task()
        tasks = {task for task in self._tasks if task is not current}
        for task in tasks:
            task.cancel()
        if tasks:
            _, pending = await asyncio.wait(tasks, timeout=timeout)
            for task in pending:
                log.error("task %s did not end within %.1f s of its cancel", task.get_name(), timeout)


class Backoff:
    """Waits that double from 0.1 s to `limit`, each between half and the whole of its length."""

    FIRST = 0.1

    def __init__(self, rng: random.Random, limit: float = 2.0) -> None:
        self._rng, self._limit, self._next = rng, limit, self.FIRST

    def reset(self) -> None:
        """Starts over after a success."""
        self._next = self.FIRST

    def next(self) -> float:
        """Seconds to wait before the next try."""
        wait = self._next * (0.5 + 0.5 * self._rng.random())
        self._next = min(self._next * 2, self._limit)
        return wait


class Stop:
    """The stop of a process in two stages, both asyncio.Event: `draining`, then `now`."""

    def __init__(self) -> None:
        self.draining = asyncio.Event()
        self.now = asyncio.Event()

    def request(self) -> None:
        """First call: drain. Second call: end now."""
        if self.draining.is_set():
            self.now.set()
        self.draining.set()

    def request_now(self) -> None:
        """Both stages at once."""
        self.draining.set()
        self.now.set()


async def run_until_signalled(main: Callable[[Stop], Awaitable[T]]) -> T:
    """Runs `main(stop)` with SIGINT and SIGTERM bound to `stop`. After the second signal `main` has two
    seconds before it is cancelled; then CancelledError is raised here."""
    loop = asyncio.get_running_loop()
    stop = Stop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.request)
    owner = TaskOwner("process")

    async def call() -> T:
        return await main(stop)

    task = loop.create_task(call(), name="main")
    watcher = owner.spawn(stop.now.wait(), "second signal")
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            await asyncio.wait({task}, timeout=_GRACE_AFTER_NOW)
        if not task.done():
            task.cancel()
        return await task
    finally:
        await owner.close()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def run(main: Callable[[Stop], Awaitable[T]]) -> T:
    """The one place that starts an event loop: uvloop where there is one. Returns what `main` returns."""
    try:
        import uvloop
    except ImportError:  # no wheel for this system
        return asyncio.run(run_until_signalled(main))
    return uvloop.run(run_until_signalled(main))
