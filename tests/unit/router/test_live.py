"""The register of samples under way: what it tells of each, and what is slow."""

from __future__ import annotations

import msgspec
import pytest

from services.router.routing.live import SLOW_FIRST_TOKEN, SLOW_TOKEN, LiveRequests, Outcome, Progress, is_slow
from tests.support.clock import VirtualClock


class Spec(msgspec.Struct):
    request_id: str = "r"
    index: int = 0
    arrival: float = 100.0
    prompt_token_ids: tuple[int, ...] = (5, 6, 7)


class Sample:
    def __init__(self, room: int) -> None:
        self.room = room
        self.now = Progress("QUEUED", 0.0, 0, 0, 0.0, 0.0)

    def progress(self) -> Progress:
        return self.now


def test_a_sample_is_told_as_it_is_now() -> None:
    clock = VirtualClock(101.0)
    live = LiveRequests(clock)
    sample = Sample(0x1F)
    with live.track(sample, Spec()):
        (row,) = live.rows(10)
        assert row == {
            "id": "r", "index": 0, "room": "000000000000001f", "state": "QUEUED", "age": 1.0, "attempt": 0,
            "prompt_tokens": 3, "tokens": 0, "ttft": None, "quiet": None, "prefill": "", "decode": "", "slow": False,
        }  # fmt: skip
        sample.now = Progress("FIRST_TOKEN", 0.0, 1, 4, 102.5, 103.0, "p", "d")
        clock.advance_to(104.0)
        (row,) = live.rows(10)
        assert (row["age"], row["ttft"], row["quiet"], row["tokens"], row["attempt"]) == (4.0, 2.5, 1.0, 4, 1)
        assert (row["prefill"], row["decode"], row["state"]) == ("p", "d", "FIRST_TOKEN")
        assert len(live) == 1 and live.recent(10) == []
    assert len(live) == 0 and live.rows(10) == []


def test_what_ended_is_kept_for_a_while_the_latest_first() -> None:
    live = LiveRequests(VirtualClock(100.0))
    for room in range(130):
        with live.track(Sample(room), Spec(request_id=f"r{room}")) as entry:
            entry.outcome = Outcome("stop", {"e2e": 1.5}, cached_tokens=2, transport="shm")
    with pytest.raises(RuntimeError), live.track(Sample(999), Spec(request_id="broken")):
        raise RuntimeError
    recent = live.recent(3)
    assert [row["id"] for row in recent] == ["broken", "r129", "r128"]
    assert (recent[0]["finish_reason"], recent[0]["timings"]) == ("", {})
    assert (recent[1]["finish_reason"], recent[1]["timings"]) == ("stop", {"e2e": 1.5})
    assert (recent[1]["cached_tokens"], recent[1]["transport"]) == (2, "shm")
    assert len(live.recent(1000)) == 100 and len(live) == 0


def test_the_oldest_are_told_first_and_no_more_than_asked_for() -> None:
    live = LiveRequests(VirtualClock(100.0))
    samples = [live.track(Sample(room), Spec(request_id=f"r{room}")) for room in range(5)]
    for sample in samples:
        sample.__enter__()
    assert [row["id"] for row in live.rows(2)] == ["r0", "r1"] and len(live) == 5


@pytest.mark.parametrize(
    ("tokens", "last", "now", "slow"),
    [
        (0, 0.0, SLOW_FIRST_TOKEN, False),
        (0, 0.0, SLOW_FIRST_TOKEN + 0.01, True),
        (1, 7.0, 7.0 + SLOW_TOKEN, False),
        (1, 7.0, 7.01 + SLOW_TOKEN, True),
        (500, 99.9, 100.0, False),
    ],
)
def test_slow_is_who_waits_for_a_token(tokens: int, last: float, now: float, slow: bool) -> None:
    assert is_slow(Progress("SENT", 0.0, 0, tokens, last, last), 0.0, now) is slow
