"""The socket to the service process: a reading and a writing thread, so that no step ever waits for it.

Reading hands frames to the loop. End-of-file means that the service process is gone: the engine exits at
once, in whatever it is doing (its mappings go before its sockets, so peers see a valid proof of quiet).
Writing is bounded: while the service process is slow, outputs of several steps are joined into one frame, as are
log probabilities of one session's prompt; a service process that does not read at all is treated as gone.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import NoReturn

import msgspec

from engine_core.host.frames import FrameSplitter, encode, to_engine_decoder
from engine_core.scheduler.messages import Frame, Outputs, PromptLogprobs, SessionOutput
from engine_core.types.ids import SessionId

MAX_PENDING_FRAMES = 4096
_JOIN_ABOVE = 64
_JOINED_POSITIONS = 8192
"""Prompt positions of one joined frame at most: some 3 MB with 20 best tokens each."""


def leave(code: int, why: str) -> NoReturn:
    """Ends the process at once."""
    print(f"engine: {why}", file=sys.stderr, flush=True)
    os._exit(code)


def join_outputs(first: Outputs, second: Outputs) -> Outputs:
    """One frame that says what two said, in order per session."""
    joined: dict[SessionId, SessionOutput] = {}
    for output in (*first.outputs, *second.outputs):
        before = joined.get(output.session)
        joined[output.session] = output if before is None else before.joined(output)
    return Outputs(tuple(joined.values()))


def join_scores(first: PromptLogprobs, second: PromptLogprobs) -> PromptLogprobs | None:
    """One frame of one session that says what two said; None when the second does not follow, or that were too much."""
    count = len(first.positions)
    if second.first_position != first.first_position + count or count + len(second.positions) > _JOINED_POSITIONS:
        return None
    return PromptLogprobs(first.session, first.first_position, first.positions + second.positions)


class FrameChannel:
    """Both directions of the engine's end of the socket pair."""

    def __init__(self, sock: socket.socket, wake: Callable[[], None]) -> None:
        self._sock = sock
        self._wake = wake
        self._inbox: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._outbox: deque[Frame] = deque()
        self._scored: dict[SessionId, int] = {}
        """Where in the outbox a session's last prompt log probabilities are."""
        self._writable = threading.Condition()
        self._closing = False
        self._reader = threading.Thread(target=self._read, name="frames-in", daemon=True)
        self._writer = threading.Thread(target=self._write, name="frames-out", daemon=True)
        self._reader.start()
        self._writer.start()

    def receive(self, timeout: float | None = 0.0) -> Frame | None:
        """The next frame, or None when none comes within `timeout` seconds (None waits for ever)."""
        try:
            return self._inbox.get(block=timeout != 0.0, timeout=timeout)
        except queue.Empty:
            return None

    def drain(self) -> list[Frame]:
        """All frames that are here."""
        frames = []
        while (frame := self.receive()) is not None:
            frames.append(frame)
        return frames

    def send(self, frame: Frame) -> None:
        """Queues a frame; never blocks."""
        with self._writable:
            pending = self._outbox
            if len(pending) >= MAX_PENDING_FRAMES:
                leave(4, "the service process does not read its frames")
            if len(pending) > _JOIN_ABOVE and isinstance(frame, Outputs) and isinstance(pending[-1], Outputs):
                pending[-1] = join_outputs(pending[-1], frame)
            elif isinstance(frame, PromptLogprobs):
                self._add_scores(frame)
            else:
                pending.append(frame)
            self._writable.notify()

    def _add_scores(self, frame: PromptLogprobs) -> None:
        """They may go ahead of other sessions' frames; in their own they precede all that waits for them."""
        pending, at = self._outbox, self._scored.get(frame.session)
        before = pending[at] if at is not None and len(pending) > _JOIN_ABOVE else None
        joined = join_scores(before, frame) if isinstance(before, PromptLogprobs) else None
        if joined is not None and at is not None:
            pending[at] = joined
        else:
            self._scored[frame.session] = len(pending)
            pending.append(frame)

    def close(self, timeout: float = 2.0) -> None:
        """Sends what is queued, at most for `timeout` seconds, then closes."""
        with self._writable:
            self._closing = True
            self._writable.notify()
        self._writer.join(timeout)
        self._sock.close()

    def _read(self) -> None:
        splitter = FrameSplitter()
        while True:
            try:
                data = self._sock.recv(1 << 20)
            except OSError:
                data = b""
            if not data:
                if not self._closing:
                    leave(0, "the service process is gone")
                return
            try:
                for body in splitter.feed(data):
                    self._inbox.put(to_engine_decoder.decode(body))
            except (ValueError, msgspec.DecodeError) as exc:
                leave(4, f"unreadable frame: {exc}")
            self._wake()

    def _write(self) -> None:
        while True:
            with self._writable:
                while not self._outbox and not self._closing:
                    self._writable.wait()
                if not self._outbox:
                    return
                frames = list(self._outbox)
                self._outbox.clear()
                self._scored.clear()
            try:
                self._sock.sendall(b"".join(encode(f) for f in frames))
            except OSError:
                if not self._closing:
                    leave(0, "the service process is gone")
                return
