"""Sessions with grammars wait for them, each session's frames in order; all others pass."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from engine_core.grammar.cache import GrammarCache
from engine_core.host.gate import GrammarGate
from engine_core.scheduler.messages import (
    EndSession,
    Frame,
    LegStarted,
    Open,
    OpenPrefill,
    Outputs,
    ReportStats,
    SessionFailed,
)
from engine_core.types.sampling import Grammar, GrammarKind
from tests.support.builders import spec
from tests.support.models import tiny_model

LIMIT = 60.0
GOOD = Grammar(GrammarKind.REGEX, "[a-z]{3}")
OTHER = Grammar(GrammarKind.LARK, 'start: "yes" | "no"')
BAD = Grammar(GrammarKind.REGEX, "(")


def opened(room: int, grammar: Grammar | None, *, prefill: bool = False, emitted: Sequence[int] = ()) -> Any:
    plain = spec(tuple(range(5)), room=room)
    sampling = msgspec.structs.replace(plain.sampling, grammar=grammar)
    made = msgspec.structs.replace(plain, sampling=sampling, emitted_token_ids=tuple(emitted))
    return OpenPrefill(made, link_id=1) if prefill else Open(made, remote=False)


class Gate:
    """A gate whose grammars are compiled while `compiling` is set."""

    def __init__(self, max_waiting: int = 8) -> None:
        self.woken = threading.Semaphore(0)
        self.cache = GrammarCache(tiny_model(), (0, 2), 325, self.woken.release)
        self.gate = GrammarGate(self.cache, max_waiting)

    def take(self, *frames: Frame) -> tuple[list[Frame], list[Frame]]:
        """What passes and what is answered, of frames that come now."""
        return self.gate.pass_on(frames, time.monotonic())

    def until_empty(self) -> tuple[list[Frame], list[Frame]]:
        """What passes and what is answered until nobody waits; only a wake is waited for."""
        passed, answers = self.take()
        while self.gate.waiting:
            assert self.woken.acquire(timeout=LIMIT)
            more, said = self.take()
            passed, answers = passed + more, answers + said
        return passed, answers


def test_what_has_no_grammar_passes_in_order() -> None:
    gate, frames = Gate(), [opened(1, None), ReportStats(), EndSession(opened(1, None).spec.session)]
    assert gate.take(*frames) == (frames, [])


@pytest.mark.parametrize("prefill", [False, True])
def test_a_session_waits_with_all_its_frames_and_holds_up_nobody(*, prefill: bool) -> None:
    gate = Gate()
    waits, free = opened(1, GOOD, prefill=prefill), opened(2, None, prefill=prefill)
    later = LegStarted(waits.spec.session)
    assert gate.take(waits, later, free) == ([free], [])
    passed, answers = gate.until_empty()
    assert passed == [waits, later] and not answers
    assert gate.gate.held == 1


def test_a_known_grammar_passes_at_once() -> None:
    gate = Gate()
    gate.take(opened(1, GOOD))
    gate.until_empty()
    assert gate.take(opened(2, GOOD)) == ([opened(2, GOOD)], [])
    assert gate.gate.held == 2
    ends = [EndSession(opened(room, GOOD).spec.session) for room in (1, 2)]
    assert gate.take(*ends) == (ends, [])
    assert gate.gate.held == 0


def test_the_end_of_a_session_that_waits_drops_it() -> None:
    gate = Gate()
    waits, stays = opened(1, GOOD), opened(2, GOOD)
    gate.take(waits, stays, LegStarted(waits.spec.session))
    assert gate.take(EndSession(waits.spec.session)) in (([], []), ([stays], []))
    passed, answers = gate.until_empty()
    assert waits not in passed and not answers
    assert gate.take(EndSession(stays.spec.session))[0] == [EndSession(stays.spec.session)]
    assert (gate.gate.waiting, gate.gate.held) == (0, 0)


def test_a_refusal_is_answered_as_the_core_would() -> None:
    gate = Gate()
    gate.take(opened(1, BAD, emitted=(7, 8)), opened(2, BAD, prefill=True), opened(3, OTHER))
    passed, answers = gate.until_empty()
    assert passed == [opened(3, OTHER)]
    failed = {type(answer): answer for answer in answers}
    assert len(answers) == 2
    outputs, lost = failed[Outputs], failed[SessionFailed]
    assert isinstance(outputs, Outputs) and isinstance(lost, SessionFailed)
    (output,) = outputs.outputs
    assert (output.session, output.first_index, output.token_ids) == (opened(1, BAD).spec.session, 2, ())
    assert lost.session == opened(2, BAD).spec.session
    for error in (output.error, lost.error):
        assert error is not None and (error.kind, error.field) == ("InvalidRequestError", "grammar")
        assert "unclosed group" in error.message
    # The service process ends what it opened; the core ignores sessions that it does not know.
    end = EndSession(opened(1, BAD).spec.session)
    assert gate.take(end) == ([end], [])
    assert (gate.gate.waiting, gate.gate.held) == (0, 1)


def test_too_many_that_wait_are_refused_as_by_a_full_queue() -> None:
    gate = Gate(max_waiting=1)
    with gate.cache._loading:  # nothing is compiled meanwhile
        assert gate.take(opened(1, GOOD), opened(2, OTHER))[0] == []
        passed, answers = gate.take(opened(3, GOOD), opened(4, None))
    assert passed == [opened(4, None)]
    assert isinstance(answers[0], Outputs) and answers[0].outputs[0].error is not None
    assert answers[0].outputs[0].error.kind == "QueueFullError"
    gate.until_empty()
    assert gate.gate.held == 1


def test_attempts_of_one_room_stay_in_order() -> None:
    gate = Gate()
    frames = [opened(room, GOOD) for room in (5, 3, 4, 1)]
    gate.take(*frames)
    passed, _ = gate.until_empty()
    assert passed == frames
