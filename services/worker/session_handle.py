"""One session's end of the engine client: what the engine said and the stream has not taken yet.

The queue is bounded by merging: outputs with contiguous indexes become one, as do log probabilities of the prompt,
so a stream that reads slowly costs its tokens and positions and no more, and the engine is never held up by it.
Control frames come at most a few times per session; more than MAX_ITEMS waiting is a broken promise and fails the
session.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import msgspec

from engine_core.host import frames
from engine_core.host.frames import PromptLogprobs, SessionOutput, ToEngine
from engine_core.types.errors import InternalError, Leg, PdmeshError
from engine_core.types.ids import SessionId
from engine_core.types.sampling import TokenLogprobs

MAX_ITEMS = 64

Control = frames.OpenLeg | frames.SendTicket | frames.Started | frames.FirstToken | frames.Delivered
"""Frames of one session that are no outputs."""

Item = Control | frames.SessionFailed | SessionOutput | PromptLogprobs


class SessionHandle:
    """Reads and writes the frames of one session. One reader at a time."""

    def __init__(
        self,
        session: SessionId,
        leg: Leg,
        send: Callable[[ToEngine], None],
        on_end: Callable[[SessionHandle, str], None],
    ) -> None:
        self.session = session
        self._leg, self._send, self._on_end = leg, send, on_end
        self._items: deque[Item] = deque()
        self._tail: list[int] = []
        """Tokens that come after the last item, an open SessionOutput; joined when it is taken."""
        self._tail_logprobs: list[TokenLogprobs] = []
        """Theirs, or positions that come after the last item, which is PromptLogprobs."""
        self._wake = asyncio.Event()
        self._error: PdmeshError | None = None
        self._ended = False
        self.merged = 0
        """Outputs, and log probabilities of the prompt, that were merged into one that waited."""

    def send(self, frame: ToEngine) -> None:
        """Queues a frame to the engine; a no-op after end()."""
        if not self._ended:
            self._send(frame)

    def end(self, reason: str) -> None:
        """Queues EndSession, once; later calls do nothing. Never awaits, never raises."""
        if not self._ended:
            self._ended = True
            self._on_end(self, reason)

    def fail(self, error: PdmeshError) -> None:
        """Makes next() raise `error` once the output that is already here is taken."""
        if self._error is None:
            self._close_tail()
            self._items = deque(item for item in self._items if isinstance(item, SessionOutput | PromptLogprobs))
            self._error = error
            self._wake.set()

    def give(self, item: Item) -> None:
        """Adds what the engine sent."""
        if self._error is not None:
            return
        last = self._items[-1] if self._items else None
        if isinstance(item, SessionOutput) and isinstance(last, SessionOutput) and self._follows(last, item):
            self._tail.extend(item.token_ids)
            self._tail_logprobs.extend(item.logprobs)
            self.merged += 1
            if item.finish is not None or item.error is not None:
                self._close_tail(item)
        elif isinstance(item, PromptLogprobs) and isinstance(last, PromptLogprobs) and self._goes_on(last, item):
            self._tail_logprobs.extend(item.positions)
            self.merged += 1
        elif len(self._items) >= MAX_ITEMS:
            self.fail(InternalError(f"session {self.session}: {MAX_ITEMS} frames wait", leg=self._leg))
        else:
            self._close_tail()
            self._items.append(item)
        self._wake.set()

    def _follows(self, last: SessionOutput, item: SessionOutput) -> bool:
        end = last.first_index + len(last.token_ids) + len(self._tail)
        return last.finish is None and last.error is None and item.first_index == end

    def _goes_on(self, last: PromptLogprobs, item: PromptLogprobs) -> bool:
        return item.first_position == last.first_position + len(last.positions) + len(self._tail_logprobs)

    def _close_tail(self, end: SessionOutput | None = None) -> None:
        """Joins the tail, and an end, into the last item."""
        if not self._tail and not self._tail_logprobs and end is None:
            return
        last, logprobs = self._items[-1], tuple(self._tail_logprobs)
        if isinstance(last, PromptLogprobs):
            self._items[-1] = msgspec.structs.replace(last, positions=last.positions + logprobs)
        else:
            assert isinstance(last, SessionOutput)
            self._items[-1] = msgspec.structs.replace(
                last,
                token_ids=last.token_ids + tuple(self._tail),
                logprobs=last.logprobs + logprobs,
                finish=end.finish if end else None,
                error=end.error if end else None,
            )
        self._tail, self._tail_logprobs = [], []

    async def next(self) -> Item:
        """The next frame or merged output, in order. Raises what fail() was given. The caller sets the
        deadline (asyncio.timeout)."""
        while not self._items:
            if self._error is not None:
                raise self._error
            self._wake.clear()
            await self._wake.wait()
        if len(self._items) == 1:
            self._close_tail()
        return self._items.popleft()
