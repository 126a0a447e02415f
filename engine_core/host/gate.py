"""Sessions with a grammar wait here until it is compiled; the core never hears of one that isn't.

    Open | OpenPrefill with a grammar ─▶ known: passes
                                      ─▶ not yet: waits; later frames of its session queue behind it
                                             compiled ─▶ all of them pass, in order
                                             refused  ─▶ the answer that the core would give; they are dropped
                                             EndSession ─▶ they are dropped

Frames of other sessions pass meanwhile. A session that has passed keeps its compiled grammar until EndSession.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine_core.grammar.cache import Compiled, GrammarCache
from engine_core.scheduler.messages import (
    EndSession,
    Frame,
    Open,
    OpenPrefill,
    Outputs,
    SessionFailed,
    SessionOutput,
    error_info,
)
from engine_core.types.errors import PdmeshError, QueueFullError
from engine_core.types.ids import SessionId


class GrammarGate:
    """Used by the loop's thread alone."""

    def __init__(self, grammars: GrammarCache, max_waiting: int) -> None:
        """At most `max_waiting` sessions wait; further ones are refused as a full queue does."""
        self._grammars, self._max_waiting = grammars, max_waiting
        self._waiting: dict[SessionId, list[Frame]] = {}
        self._held: dict[SessionId, Compiled] = {}

    @property
    def waiting(self) -> int:
        """Sessions that wait."""
        return len(self._waiting)

    @property
    def held(self) -> int:
        """Sessions that hold a grammar."""
        return len(self._held)

    def pass_on(self, frames: Sequence[Frame], now: float) -> tuple[list[Frame], list[Frame]]:
        """Takes what has arrived. Returns what the core may have now, in order per session, and answers to the
        service process."""
        passed: list[Frame] = []
        answers: list[Frame] = []
        for session, queued in list(self._waiting.items()):
            first = queued[0]
            assert isinstance(first, Open | OpenPrefill)
            if self._admit(first, answers, now):
                passed += queued
            elif session in self._waiting:
                continue
            self._waiting.pop(session, None)
        for frame in frames:
            self._take(frame, passed, answers, now)
        return passed, answers

    def _take(self, frame: Frame, passed: list[Frame], answers: list[Frame], now: float) -> None:
        if isinstance(frame, Open | OpenPrefill):
            before = self._waiting.get(frame.spec.session)
            if before is not None:
                before.append(frame)
            elif frame.spec.sampling.grammar is None or self._admit(frame, answers, now):
                passed.append(frame)
            return
        session: SessionId | None = getattr(frame, "session", None)
        if isinstance(frame, EndSession):
            self._held.pop(frame.session, None)
            if self._waiting.pop(frame.session, None) is not None:
                return
        queued = self._waiting.get(session) if session is not None else None
        (passed if queued is None else queued).append(frame)

    def _admit(self, frame: Open | OpenPrefill, answers: list[Frame], now: float) -> bool:
        """True when the session may pass. False when it waits or, with an answer, is refused."""
        session, grammar = frame.spec.session, frame.spec.sampling.grammar
        assert grammar is not None
        try:
            compiled = self._grammars.want(grammar, now)
            if compiled is None and session not in self._waiting and len(self._waiting) >= self._max_waiting:
                raise QueueFullError(f"{self._max_waiting} sessions wait for their grammars")
        except PdmeshError as exc:
            self._waiting.pop(session, None)
            answers.append(_refusal(frame, exc))
            return False
        if compiled is None:
            self._waiting.setdefault(session, [frame])
            return False
        self._held[session] = compiled
        return True


def _refusal(frame: Open | OpenPrefill, error: PdmeshError) -> Frame:
    spec = frame.spec
    if isinstance(frame, OpenPrefill):
        return SessionFailed(spec.session, error_info(error))
    return Outputs((SessionOutput(spec.session, len(spec.emitted_token_ids), (), error=error_info(error)),))
