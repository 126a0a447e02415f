"""Speeds by the difference of two counts, and links as the two ends tell of them."""

from __future__ import annotations

from typing import Any

from services.worker.flows import Flows


def pair(
    peer: str, incarnation: int, *, moved: float = 0, busy: float = 0.0, up: bool = True, **more: Any
) -> dict[str, Any]:
    return {
        "peer_instance": peer, "peer_incarnation": incarnation, "transport": "shm", "reason": "same host", "up": up,
        "bytes": moved, "seconds": busy, "failures": 0, **more,
    }  # fmt: skip


def rank(name: str, role: str, incarnation: int, *pairs: dict[str, Any], **counters: float) -> dict[str, Any]:
    return {"instance": name, "role": role, "incarnation": incarnation, "pairs": list(pairs), "counters": counters}


def test_the_rate_is_per_second_of_the_clock_and_the_speed_per_second_of_moving() -> None:
    flows = Flows()
    flows.update(rank("p", "PREFILL", 1, pair("d", 2, moved=1000, busy=0.5)), 10.0)
    decode = rank("d", "DECODE", 2, pair("p", 1))
    (link,) = flows.links([rank("p", "PREFILL", 1, pair("d", 2, moved=1000, busy=0.5)), decode])
    assert (link["rate"], link["speed"]) == (0.0, 2000.0)  # nothing to compare with; an average so far
    now = rank("p", "PREFILL", 1, pair("d", 2, moved=5000, busy=0.6))
    flows.update(now, 12.0)
    (link,) = flows.links([now, decode])
    assert (link["from"], link["to"], link["transport"], link["bytes"]) == ("p", "d", "shm", 5000)
    assert link["rate"] == 2000.0 and abs(link["speed"] - 40000.0) < 1e-6
    flows.update(now, 14.0)  # the window of three seconds reaches back to before it moved
    (link,) = flows.links([now, decode])
    assert link["rate"] == 1000.0
    flows.update(now, 16.0)
    (link,) = flows.links([now, decode])
    assert link["rate"] == 0.0 and abs(link["speed"] - 40000.0) < 1e-6  # the speed is that of the last move


def test_counters_have_rates_too() -> None:
    flows = Flows()
    assert flows.rates(1) == {}
    flows.update(rank("d", "DECODE", 1, output_tokens=100.0, steps=5.0), 10.0)
    flows.update(rank("d", "DECODE", 1, output_tokens=150.0, steps=9.0), 12.0)
    assert flows.rates(1) == {"output_tokens": 25.0}
    flows.still(1)
    assert flows.rates(1) == {"output_tokens": 0.0}
    flows.keep([2])
    assert flows.rates(1) == {}


def test_a_count_that_went_back_starts_anew() -> None:
    flows = Flows()
    flows.update(rank("d", "DECODE", 1, output_tokens=100.0), 10.0)
    flows.update(rank("d", "DECODE", 1, output_tokens=3.0), 11.0)
    assert flows.rates(1) == {"output_tokens": 0.0}


def test_the_readers_word_counts_where_the_writer_says_nothing() -> None:
    flows = Flows()
    reader = rank("d", "DECODE", 2, pair("p", 1), pair("", 3))
    silent, mute = rank("p", "PREFILL", 1), rank("q", "PREFILL", 3)
    links = flows.links([silent, mute, reader])
    assert [(link["from"], link["to"]) for link in links] == [("p", "d"), ("q", "d")]


def test_a_restarted_peer_is_one_link_and_a_gone_one_none() -> None:
    flows = Flows()
    writer = rank(
        "p", "PREFILL", 1,
        pair("d", 2, moved=100, up=False, failures=1), pair("d", 9, moved=50), pair("gone", 7, moved=70, up=False),
    )  # fmt: skip
    flows.update(writer, 10.0)
    writer["pairs"][1]["bytes"] = 80
    flows.update(writer, 11.0)
    links = flows.links([writer, rank("d", "DECODE", 9)])
    assert [(link["from"], link["to"], link["up"], link["rate"]) for link in links] == [("p", "d", True, 30.0)]
    assert links[0]["bytes"] == 80
