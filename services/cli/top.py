"""`pdmesh top`: the mesh in a terminal, live.

Bootstrap says who is there, every worker is asked for its figures, every router for its requests and its history
(what its console shows; a router without a console is said to have none). What does not answer is shown as it was
last known: the view goes on without Bootstrap, and without workers or routers that die.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.live import Live

from engine_core.types.errors import UnavailableError
from pdmesh.bootstrap.v1 import rank_table_pb2
from services.cli.options import add_command, query_fields
from services.cli.routers import http_client, refusal, trouble
from services.cli.status import get_table
from services.cli.top_view import SORTS, Frame, RouterLook, render
from services.config import QueryConfig, load
from services.runtime.api_keys import key_to_send
from services.runtime.channels import ChannelPool
from services.runtime.security import Security
from services.runtime.tasks import Stop, TaskOwner, run
from services.wire.bootstrap import http_url
from services.worker.surveyor import Surveyor

_KEPT = 120
"""Seconds of history that are kept of each router."""
_ROUTER_TIMEOUT = 1.0
_ALL = 10_000
"""Lines where there is no terminal to fit."""


def add_command_to(app: typer.Typer) -> None:
    """Adds `top`."""
    extras = {
        "once": (Annotated[bool, typer.Option("--once", help="Print one frame and end")], False),
        "interval": (Annotated[float, typer.Option("--interval", min=0.2, max=60.0, metavar="SECONDS")], 1.0),
    }
    doc = "Watch the mesh: workers, KV pools, transfers, requests in flight, latencies."
    add_command(app, "top", query_fields(), _command, doc=doc, extras=extras)


def _command(file: Path | None, flags: dict[str, Any], extra: dict[str, Any]) -> int:
    config = load(QueryConfig, file=file, flags=flags)
    live = sys.stdin.isatty() and sys.stdout.isatty() and not extra["once"]
    return run(lambda stop: _watch(config, stop, extra["interval"]) if live else _once(config))


async def _once(config: QueryConfig) -> int:
    """One frame with rates, which take two looks. Raises UnavailableError when no Bootstrap answers the first."""
    source = Source(config)
    try:
        await source.look(must=True)
        await asyncio.sleep(1.0)
        frame = await source.look()
    finally:
        await source.close()
    console = Console(highlight=False)
    height = console.height if console.is_terminal else _ALL
    console.print(render(frame, console.width, height, keys=False))
    return 0


async def _watch(config: QueryConfig, stop: Stop, interval: float) -> int:
    """The live view, until `q` or a signal."""
    source = Source(config)
    console = Console(highlight=False)
    sort, frame = 0, await _first_look(source)
    with Live(console=console, screen=True, auto_refresh=False) as live, _keys() as keys, _resizes() as resized:

        def show() -> None:
            live.update(render(frame, console.width, console.height, SORTS[sort]), refresh=True)

        try:
            while not stop.draining.is_set():
                show()
                due = time.monotonic() + interval
                while (left := due - time.monotonic()) > 0 and not stop.draining.is_set():
                    key = await _key_within(keys, resized, min(left, 0.2))
                    if key in ("q", "Q", "\x03", "\x1b"):
                        return 0
                    if key in ("s", "S"):
                        sort = (sort + 1) % len(SORTS)
                    if key:
                        show()
                frame = await source.look()
        finally:
            await source.close()
    return 0


async def _first_look(source: Source) -> Frame:
    try:
        return await source.look(must=True)
    except BaseException:
        await source.close()
        raise


@contextmanager
def _keys() -> Iterator[asyncio.Queue[str]]:
    """Keys of the terminal as they are pressed; the terminal is put back in the end."""
    queue: asyncio.Queue[str] = asyncio.Queue(maxsize=64)
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    loop = asyncio.get_running_loop()

    def read() -> None:
        text = sys.stdin.read(1)
        if not text:  # the terminal is gone
            loop.remove_reader(number)
        elif not queue.full():
            queue.put_nowait(text)

    tty.setcbreak(number)
    loop.add_reader(number, read)
    try:
        yield queue
    finally:
        loop.remove_reader(number)
        termios.tcsetattr(number, termios.TCSADRAIN, before)


@contextmanager
def _resizes() -> Iterator[asyncio.Event]:
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    loop.add_signal_handler(signal.SIGWINCH, event.set)
    try:
        yield event
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)


async def _key_within(keys: asyncio.Queue[str], resized: asyncio.Event, timeout: float) -> str:
    """The next key; " " after a change of size; nothing when the time is up."""
    if resized.is_set():
        resized.clear()
        return " "
    try:
        async with asyncio.timeout(timeout):
            return await keys.get()
    except TimeoutError:
        return ""


class Source:
    """Where frames come from. One look at a time; close() it."""

    def __init__(self, config: QueryConfig) -> None:
        self._config = config
        self._pool = ChannelPool(config.query_timeout, security=Security.of(config))
        self._tasks = TaskOwner("top")
        self._surveyor = Surveyor(self._pool, self._tasks, timeout=config.query_timeout)
        key = key_to_send(config.api_key, config.api_key_file)
        self._http = http_client(_ROUTER_TIMEOUT, config.http_ca, key)
        self._rows: Sequence[rank_table_pb2.RankRow] = ()
        self._routers: Sequence[str] = ()
        self._histories: dict[str, dict[str, list[Any]]] = {}

    async def close(self) -> None:
        """Ends what is being asked."""
        await self._tasks.close()
        await self._http.aclose()
        await self._pool.close()

    async def look(self, *, must: bool = False) -> Frame:
        """Asks everybody. Without a Bootstrap that answers, those are asked that were known last; with `must`,
        UnavailableError is raised then."""
        bootstrap, note = await self._read_table(must)
        ranks, routers = await asyncio.gather(
            self._surveyor.survey(self._rows), asyncio.gather(*(self._router(e) for e in self._routers))
        )
        return Frame(time.time(), bootstrap, note, ranks, self._surveyor.links(ranks), routers)

    async def _read_table(self, must: bool) -> tuple[str, str]:  # noqa: FBT001
        last: UnavailableError | None = None
        for address in self._config.bootstrap:
            try:
                table = await get_table(self._pool, address, self._config.query_timeout)
            except UnavailableError as exc:
                last = exc
                continue
            # One that has just started knows nobody yet; those known before are worth more.
            if table.rows or not self._rows:
                self._rows = list(table.rows)
            found = sorted({s.http_endpoint for s in table.services if s.name == "router" and s.http_endpoint})
            self._routers = found or self._routers
            return address, ""
        if must and last is not None:
            raise last
        return "", f"{last.message if last is not None else 'no Bootstrap'}; showing who was known last"

    async def _router(self, endpoint: str) -> RouterLook:
        history = self._histories.setdefault(endpoint, {})
        since = history["time"][-1] if history.get("time") else time.time() - _KEPT
        try:
            answer = await self._http.get(f"{http_url(endpoint)}/console/api/mesh", params={"since": since})
            if answer.status_code == 404:
                return RouterLook(endpoint, None, "serves no console, so its requests are not shown", {})
            if (refused := refusal(answer)) is not None:
                return RouterLook(endpoint, None, refused.in_short, {})
            answer.raise_for_status()
            data = answer.json()
        except (httpx.HTTPError, ValueError) as exc:
            return RouterLook(endpoint, None, trouble(exc).in_short, history)
        _extend(history, data["history"])
        return RouterLook(endpoint, data["mesh"], "", history)


def _extend(history: dict[str, list[Any]], new: Mapping[str, Sequence[Any]]) -> None:
    for name, values in new.items():
        history[name] = [*history.get(name, ()), *values][-_KEPT:]
