"""The event loop's end of an engine process: spawn, typed frames both ways, liveness.

The life of an engine, as seen from here:

    start()      spawns `python -m engine_core.host.main --fd N` with one end of a socket pair, sends
                 Configure, awaits Ready (StartupFailed: ConfigError with its one line)
    open()       queues an Open frame and returns the session's SessionHandle; frames of the session are
                 routed to it; handle.end() queues EndSession exactly once, without await
    death        end-of-file, a broken frame, or a silent engine (watchdog): every session and link waiter
                 fails at once with UnavailableError, `dead` is set; nothing is restarted here. Sessions of the
                 step that the engine ended in by its own doing fail as ENGINE_CRASHED, others as ENGINE_DIED

Nothing here blocks the loop: reads come from the transport's callback, writes go into its buffer. The
buffer is bounded: above SOFT_WRITE_LIMIT new sessions are refused, above HARD_WRITE_LIMIT the engine
counts as hung and is killed. What waits on a slow stream is merged, not queued: see SessionHandle.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from engine_core.host import frames
from engine_core.host.frames import FromEngine, LinkUp, Ready, Stats, ToEngine
from engine_core.host.step_page import StepPage, create_page
from engine_core.lifecycle.machine import Move
from engine_core.types.errors import ConfigError, FencedError, InternalError, Leg, QueueFullError, UnavailableError
from engine_core.types.ids import Incarnation, SessionId
from services.config import engine_environment
from services.worker.engine_death import is_stopped, out_of_memory_kills, own_doing
from services.worker.link_book import LinkBook, LinkListener
from services.worker.session_handle import SessionHandle

logger = logging.getLogger(__name__)

SOFT_WRITE_LIMIT = 32 * 1024 * 1024
HARD_WRITE_LIMIT = 256 * 1024 * 1024
REAP_SECONDS = 5.0
EXIT_SECONDS = 0.5
"""How long the exit code may come after the end of the socket."""
_EXIT_LOOK = 0.005
HEARTBEATS_MISSED = 2.0
"""Seconds without a heartbeat, which comes each second, that are nothing to speak of."""

MovesListener = Callable[[tuple[Move, ...]], None]


def engine_command() -> tuple[str, ...]:
    """The program that is the engine; `--fd N` is added."""
    return (sys.executable, "-m", "engine_core.host.main")


class EngineClient:
    """One engine process and its sessions.

    `leg` is blamed in errors; `tokens` are the mesh's. `on_moves` gets the engine's state moves, `add_link_listener`
    link events.
    """

    def __init__(
        self,
        config: dict[str, Any],
        incarnation: Incarnation,
        instance: str,
        *,
        leg: Leg,
        tokens: tuple[bytes, ...] = (),
        command: Sequence[str] | None = None,
        ready_timeout: float = 600.0,
        watchdog_timeout: float = 30.0,
        on_moves: MovesListener | None = None,
    ) -> None:
        self._configure = frames.Configure(config=config, incarnation=incarnation, instance=instance, tokens=tokens)
        self._leg = leg
        self._command = tuple(command) if command is not None else engine_command()
        self._ready_timeout, self._watchdog_timeout = ready_timeout, watchdog_timeout
        self._on_moves = on_moves
        self._sessions: dict[SessionId, SessionHandle] = {}
        self._links = LinkBook()
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._ready: asyncio.Future[Ready] | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._page: StepPage | None = None
        self._out_of_memory_kills = 0
        self._death: str | None = None
        self._ending = False
        self._closing = False
        self._frames_seen = 0
        self._outputs_seen = 0
        self._silent = self._stuck = 0.0
        """Seconds without a frame; with work pending and without a step."""
        self._dropped_frames = 0
        self.dead = asyncio.Event()
        self._stats_waiters: list[asyncio.Future[None]] = []
        self.stats: Stats | None = None
        self.stats_at = 0.0
        """time.monotonic() at which `stats` came."""

    # ---- life ---------------------------------------------------------------------------------------

    async def start(self) -> Ready:
        """Spawns the engine and awaits Ready.

        Raises ConfigError with the engine's own line when it cannot start, UnavailableError when it died
        or took longer than ready_timeout. On an error no process is left.
        """
        loop = asyncio.get_running_loop()
        self._out_of_memory_kills = out_of_memory_kills()
        ours, theirs = frames.frame_socketpair()
        self._ready = loop.create_future()
        self._ready.add_done_callback(_retrieve)
        page_fd = -1
        try:
            page_fd = create_page()
            self._page = StepPage(page_fd)
            self._process = self._spawn(theirs.fileno(), page_fd)
        except OSError as exc:
            ours.close()
            raise ConfigError(f"engine process could not be started: {exc}") from exc
        finally:
            theirs.close()
            if page_fd >= 0:
                os.close(page_fd)
        ours.setblocking(False)
        transport, _ = await loop.create_unix_connection(lambda: _EngineProtocol(self), sock=ours)
        self._transport = transport
        self._write(self._configure)
        try:
            async with asyncio.timeout(self._ready_timeout):
                ready = await asyncio.shield(self._ready)
        except TimeoutError:
            await self.close()
            raise UnavailableError(
                f"engine was not ready within {self._ready_timeout:g} s", leg=self._leg, reason="ENGINE_START"
            ) from None
        except BaseException:
            await self.close()
            raise
        self._watchdog = loop.create_task(self._watch(), name="engine-watchdog")
        return ready

    def _spawn(self, fd: int, page_fd: int) -> subprocess.Popen[bytes]:
        # Its own session: a Ctrl-C in the terminal drains the service process; the engine follows that.
        return subprocess.Popen(
            [*self._command, "--fd", str(fd), "--page-fd", str(page_fd)],
            pass_fds=(fd, page_fd),
            stdin=subprocess.DEVNULL,
            env=engine_environment(),
            start_new_session=True,
        )

    async def close(self, grace: float = 5.0) -> None:
        """Ends the engine: Shutdown, then SIGKILL after `grace` seconds. Idempotent; leaves no process."""
        self._closing = True
        if self._watchdog is not None:
            self._watchdog.cancel()
            await asyncio.gather(self._watchdog, return_exceptions=True)
        if self._death is None:
            self._write(frames.Shutdown())
        self._die("engine closed")
        if self._process is not None:
            await asyncio.to_thread(_wait, self._process, grace)
            if self._process.poll() is None:
                self._process.kill()
            await asyncio.to_thread(_wait, self._process, REAP_SECONDS)
        if self._transport is not None:
            self._transport.abort()
        if self._page is not None:
            self._page.close()
            self._page = None

    async def _watch(self) -> None:
        """Kills an engine that sends no frame, or has work and makes no step. Counts its own ticks: when this
        loop itself was held up or stopped, one long tick says nothing about the engine."""
        tick = min(1.0, self._watchdog_timeout / 5)
        seen, progress = self._frames_seen, self.progress
        while self._death is None:
            await asyncio.sleep(tick)
            self._silent = 0.0 if self._frames_seen != seen else self._silent + tick
            busy = self.stats is not None and self.stats.busy
            self._stuck = self._stuck + tick if busy and self.progress == progress else 0.0
            seen, progress = self._frames_seen, self.progress
            if self._process is not None and self._process.poll() is not None:
                self._ended_by_itself(self._process.returncode)
            elif self._silent >= self._watchdog_timeout:
                self._die(f"engine sent no frame for {self._watchdog_timeout:g} s", crashed=not is_stopped(self.pid))
            elif self._stuck >= self._watchdog_timeout:
                self._die(f"engine had work and made no step for {self._watchdog_timeout:g} s", crashed=True)

    def _ended_by_itself(self, returncode: int) -> None:
        kills = out_of_memory_kills()
        oom = kills > self._out_of_memory_kills
        why = f"engine ended with {_exit_text(returncode)}"
        if oom and returncode == -signal.SIGKILL:
            why += " (the kernel is out of memory)"
        self._die(why, crashed=own_doing(returncode, out_of_memory=oom))

    def _die(self, why: str, *, crashed: bool = False) -> None:
        """Fails everything at once. The process is killed: an engine that nobody hears must not push KV. `crashed`:
        it was its own doing, and the step's that was executing."""
        if self._death is not None:
            return
        self._death = why
        if self._process is not None and not self._closing:
            if self._process.poll() is None:
                self._process.kill()
            logger.error("engine pid %d: %s", self._process.pid, why)
        for handle in list(self._sessions.values()):
            in_step = crashed and self._page is not None and self._page.busy_with(handle.session)
            handle.fail(self._dead_error("ENGINE_CRASHED" if in_step else "ENGINE_DIED"))
        self._sessions.clear()
        self._links.fail(self._dead_error)
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(self._dead_error())
        self.dead.set()

    def _dead_error(self, reason: str = "ENGINE_DIED") -> UnavailableError:
        return UnavailableError(
            f"{self._leg.value}: {self._death or 'engine is gone'}",
            leg=self._leg,
            reason=reason,
            peer_incarnation=self._configure.incarnation,
        )

    @property
    def progress(self) -> int:
        """A number that grows while the engine steps: with every output, and with every second's figures."""
        return self._outputs_seen + (self.stats.steps if self.stats is not None else 0)

    # ---- what it is -----------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """Process id of the engine; 0 before start."""
        return self._process.pid if self._process is not None else 0

    @property
    def leg(self) -> Leg:
        """Which leg of a request runs in this engine."""
        return self._leg

    @property
    def death(self) -> str | None:
        """Why the engine is gone, or None while it lives."""
        return self._death

    @property
    def open_sessions(self) -> int:
        """Sessions opened here and not ended."""
        return len(self._sessions)

    @property
    def dropped_frames(self) -> int:
        """Frames for sessions that had ended; normal after an abort."""
        return self._dropped_frames

    @property
    def stalled_seconds(self) -> float:
        """Seconds for which the engine has said nothing, or made no step though there is work; 0 while all is well."""
        stalled = max(self._silent, self._stuck)
        return stalled if stalled > HEARTBEATS_MISSED else 0.0

    def progressing(self) -> bool:
        """True while a lease may be renewed: the engine lives, and is not half-way to being killed by the watchdog."""
        return self._death is None and self.stalled_seconds < self._watchdog_timeout / 2

    # ---- sessions ---------------------------------------------------------------------------------------

    def open(self, frame: frames.Open | frames.OpenPrefill) -> SessionHandle:
        """Opens a session. Its frames come from handle.next(); handle.end() must be called in a finally.

        Raises UnavailableError when the engine is gone, QueueFullError when it does not keep up with
        reading, FencedError when the session is open already.
        """
        session = frame.spec.session
        if self._death is not None or self._transport is None:
            raise self._dead_error()
        if session in self._sessions:
            raise FencedError(f"session {session} is already open", leg=self._leg, reason="SESSION_OPEN")
        if self._transport.get_write_buffer_size() > SOFT_WRITE_LIMIT:
            raise QueueFullError("the engine does not keep up", leg=self._leg, retry_after=1.0)
        try:
            self._write(frame)
        except ValueError as exc:
            raise InternalError(str(exc), leg=self._leg) from exc
        handle = SessionHandle(session, self._leg, self._send_of_session, self._ended)
        self._sessions[session] = handle
        return handle

    def _send_of_session(self, frame: ToEngine) -> None:
        if self._death is None:
            self._write(frame)

    def _ended(self, handle: SessionHandle, reason: str) -> None:
        if self._sessions.pop(handle.session, None) is not None and self._death is None:
            self._write(frames.EndSession(session=handle.session, reason=reason))

    # ---- figures ----------------------------------------------------------------------------------------

    async def fresh_stats(self, timeout: float) -> Stats | None:
        """Asks for figures and awaits them; the last ones when a long step keeps the engine from answering
        within `timeout` seconds. None before the first."""
        if self._death is None and self._transport is not None:
            fresh = asyncio.get_running_loop().create_future()
            self._stats_waiters.append(fresh)
            self._write(frames.ReportStats())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await fresh
        return self.stats

    def start_profile(self, path: str, steps: int) -> None:
        """Records the next `steps` steps into `path`. Raises UnavailableError when the engine is gone."""
        if self._death is not None:
            raise self._dead_error()
        self._write(frames.StartProfile(path=path, steps=steps))

    def stop_profile(self) -> None:
        """Ends a recording early. Raises UnavailableError when the engine is gone."""
        if self._death is not None:
            raise self._dead_error()
        self._write(frames.StopProfile())

    # ---- links ------------------------------------------------------------------------------------------

    def add_link_listener(self, listener: LinkListener) -> None:
        """Calls `listener` on each LinkUp and LinkDown, on the loop. Not called for engine death."""
        self._links.add_listener(listener)

    def link(self, link_id: int) -> LinkUp | None:
        """The link's LinkUp while it is up."""
        return self._links.get(link_id)

    async def connect_link(self, frame: frames.ConnectLink, timeout: float) -> LinkUp:
        """Asks the engine to open a link, and awaits it.

        Raises UnavailableError (leg transfer) when it cannot be opened within `timeout` seconds.
        """
        if self._death is not None:
            raise self._dead_error()
        waiter = self._links.expect(frame.link_id)
        self._write(frame)
        return await self._links.wait(frame.link_id, waiter, timeout)

    async def wait_link(self, link_id: int, timeout: float) -> LinkUp:
        """Awaits a link that the other end opens. Raises as connect_link does."""
        if self._death is not None:
            raise self._dead_error()
        if (up := self._links.get(link_id)) is not None:
            return up
        return await self._links.wait(link_id, self._links.expect(link_id), timeout)

    def expect_peer(self, incarnation: Incarnation, secret: bytes) -> None:
        """Links of this peer may come, proved by the secret of the pair."""
        if self._death is None:
            self._write(frames.ExpectPeer(incarnation, secret))

    def set_tokens(self, tokens: tuple[bytes, ...]) -> None:
        """The mesh's tokens, for links that are opened from now on; also for the engine's start."""
        self._configure = msgspec.structs.replace(self._configure, tokens=tokens)
        if self._death is None:
            self._write(frames.Tokens(tokens))

    # ---- frames -------------------------------------------------------------------------------------------

    def _write(self, frame: ToEngine) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(frames.encode(frame))
        if self._transport.get_write_buffer_size() > HARD_WRITE_LIMIT:
            self._die("engine reads nothing")

    def on_bodies(self, bodies: list[bytes]) -> None:
        """Takes complete frames from the protocol. Any error in them is the engine's end."""
        for body in bodies:
            if self._death is not None:
                return
            try:
                self._route(frames.from_engine_decoder.decode(body))
            except msgspec.DecodeError as exc:
                self._die(f"engine sent a broken frame: {exc}")

    def on_end(self, why: str) -> None:
        """The socket is gone, mostly a moment before the exit code is there, which says how."""
        if self._ending or self._death is not None:
            return
        self._ending = True
        loop = asyncio.get_running_loop()
        self._bury(why, loop, loop.time() + EXIT_SECONDS)

    def on_broken(self, why: str) -> None:
        """What comes over the socket can't be read."""
        self._die(f"engine {why}")

    def _bury(self, why: str, loop: asyncio.AbstractEventLoop, until: float) -> None:
        if self._process is not None and self._process.poll() is not None:
            self._ended_by_itself(self._process.returncode)
        elif self._process is None or self._closing or loop.time() >= until:
            self._die(f"engine {why}")
        elif self._death is None:
            loop.call_later(_EXIT_LOOK, self._bury, why, loop, until)

    def _route(self, frame: FromEngine) -> None:
        self._frames_seen += 1
        match frame:
            case frames.Outputs():
                self._outputs_seen += 1
                for output in frame.outputs:
                    self._give(output.session, output)
            case (
                frames.OpenLeg()
                | frames.SendTicket()
                | frames.Started()
                | frames.PromptLogprobs()
                | frames.FirstToken()
                | frames.Delivered()
                | frames.SessionFailed()
            ):
                self._give(frame.session, frame)
            case frames.Stats():
                self.stats, self.stats_at = frame, time.monotonic()
                self._out_of_memory_kills = out_of_memory_kills()
                waiters, self._stats_waiters = self._stats_waiters, []
                for waiter in waiters:
                    if not waiter.done():
                        waiter.set_result(None)
            case frames.Moves():
                if self._on_moves is not None:
                    self._on_moves(frame.moves)
            case frames.LinkUp() | frames.LinkDown():
                self._links.take(frame)
            case frames.Ready():
                self.stats_at = time.monotonic()
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(frame)
            case frames.StartupFailed():
                if self._ready is not None and not self._ready.done():
                    self._ready.set_exception(ConfigError(frame.message, leg=self._leg))

    def _give(self, session: SessionId, item: Any) -> None:
        handle = self._sessions.get(session)
        if handle is None:
            self._dropped_frames += 1
        else:
            handle.give(item)


class _EngineProtocol(asyncio.Protocol):
    """Cuts the byte stream into frames."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._splitter = frames.FrameSplitter()

    def data_received(self, data: bytes) -> None:
        try:
            bodies = self._splitter.feed(data)
        except ValueError as exc:
            self._client.on_broken(f"sent a broken stream: {exc}")
            return
        self._client.on_bodies(bodies)

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.on_end(f"closed its socket ({exc})" if exc else "closed its socket")


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Marks a failure as seen: with no waiter left, nobody is owed it."""
    if not future.cancelled():
        future.exception()


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def _exit_text(code: int | None) -> str:
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
