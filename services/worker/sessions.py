"""Which attempts of which rooms run in this service process.

A lower or equal attempt than one seen is refused; a higher one aborts the lower. Rooms whose streams
have ended are remembered, the last ROOMS_KEPT of them, so that a late duplicate is refused too.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from types import TracebackType

from engine_core.types.errors import FencedError, Leg, PdmeshError, UnavailableError
from engine_core.types.ids import SessionId

ROOMS_KEPT = 100_000


class SessionScope:
    """One running stream, as a context manager around all that it does.

    abort() cancels the stream's task and makes the block end in the error given, whatever the task was
    waiting for; a cancel from elsewhere (the caller went away) passes through.
    """

    def __init__(self, table: SessionTable, session: SessionId) -> None:
        self.session = session
        self._table = table
        self._task = asyncio.current_task()
        self._error: PdmeshError | None = None

    def abort(self, error: PdmeshError) -> None:
        """Ends the stream with `error`; the first call counts."""
        if self._error is None and self._task is not None:
            self._error = error
            self._task.cancel()

    def __enter__(self) -> SessionScope:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._table.leave(self)
        if self._error is None or self._task is None:
            return
        # Our own cancel is taken back; one from elsewhere that came on top still counts.
        if self._task.uncancel() == 0 and isinstance(exc, asyncio.CancelledError):
            raise self._error from None


class SessionTable:
    """Open streams and seen attempts of one worker."""

    def __init__(self, leg: Leg, incarnation: int) -> None:
        self._leg, self._incarnation = leg, incarnation
        self._newest: dict[int, SessionScope] = {}
        self._live: set[SessionScope] = set()
        """Open streams; a superseded one stays until it has ended."""
        self._seen: OrderedDict[int, int] = OrderedDict()
        self._draining = ""
        self._idle = asyncio.Event()
        self._idle.set()
        self.idle_since = time.monotonic()
        """time.monotonic() at which the last stream ended."""
        self.opened = self.fenced = self.refused = 0

    def __len__(self) -> int:
        return len(self._live)

    def enter(self, session: SessionId) -> SessionScope:
        """Admits a session to the current task; use as `with table.enter(session):`.

        Raises UnavailableError (DRAINING) while draining, FencedError (STALE_ATTEMPT) when this or a
        higher attempt was seen. A running lower attempt ends in FencedError (SUPERSEDED).
        """
        if self._draining:
            self.refused += 1
            raise UnavailableError(
                self._draining, leg=self._leg, reason="DRAINING", peer_incarnation=self._incarnation, retryable=True
            )
        lower = self._newest.get(session.room)
        seen = lower.session.attempt if lower is not None else self._seen.get(session.room, -1)
        if session.attempt <= seen:
            self.fenced += 1
            raise FencedError(
                f"session {session}: attempt {seen} was seen",
                leg=self._leg,
                reason="STALE_ATTEMPT",
                peer_incarnation=self._incarnation,
            )
        if lower is not None:
            lower.abort(
                FencedError(
                    f"session {lower.session} gave way to attempt {session.attempt}",
                    leg=self._leg,
                    reason="SUPERSEDED",
                    peer_incarnation=self._incarnation,
                )
            )
        self._remember(session)
        scope = SessionScope(self, session)
        self._newest[session.room] = scope
        self._live.add(scope)
        self._idle.clear()
        self.opened += 1
        return scope

    def leave(self, scope: SessionScope) -> None:
        """A stream ended; called by its scope."""
        self._live.discard(scope)
        if self._newest.get(scope.session.room) is scope:
            del self._newest[scope.session.room]
        if not self._live:
            self._idle.set()
            self.idle_since = time.monotonic()

    def drain(self, why: str) -> None:
        """Refuses new sessions from now on."""
        self._draining = self._draining or why

    @property
    def draining(self) -> bool:
        """True after drain()."""
        return bool(self._draining)

    def cut(self, why: str, reason: str) -> None:
        """Ends every open stream with UnavailableError. HANDOVER says that nothing has failed."""
        for scope in list(self._live):
            scope.abort(UnavailableError(why, leg=self._leg, reason=reason, peer_incarnation=self._incarnation))

    async def wait_idle(self, timeout: float) -> bool:
        """Waits for the last stream to end; False when `timeout` seconds were not enough."""
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def _remember(self, session: SessionId) -> None:
        self._seen[session.room] = session.attempt
        self._seen.move_to_end(session.room)
        while len(self._seen) > ROOMS_KEPT:
            self._seen.popitem(last=False)
