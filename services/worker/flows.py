"""How fast things move, by the difference of two counts. Pure: figures of workers in, rates and links out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

_COUNTED = ("output_tokens", "prompt_tokens_computed")
"""Counters of workers whose rate is shown."""


WINDOW_SECONDS = 3.0
"""What rates are taken over: long enough to see transfers that take milliseconds, short enough to be of now."""


class _Count(msgspec.Struct, frozen=True):
    """`past` holds (time, value) of the window and of the last moment before it, oldest first."""

    value: float
    busy: float
    past: tuple[tuple[float, float], ...]
    rate: float = 0.0
    speed: float = 0.0


class Flows:
    """Remembers the last figures of each worker, by incarnation.

    `rate` is per second of the clock in the last WINDOW_SECONDS; `speed` per second of moving, as last seen.
    """

    def __init__(self) -> None:
        self._counts: dict[int, dict[tuple[object, ...], _Count]] = {}

    def update(self, rank: Mapping[str, Any], now: float) -> None:
        """Takes a worker's answer (as survey.rank_as_data gives it) that came at `now`, in seconds."""
        old = self._counts.get(rank["incarnation"], {})
        new: dict[tuple[object, ...], _Count] = {}
        for name in _COUNTED:
            if name in rank["counters"]:
                new[name,] = _next(old.get((name,)), now, rank["counters"][name], 0.0)
        for pair in rank["pairs"]:
            key = (pair["peer_incarnation"], pair["transport"])
            new[key] = _next(old.get(key), now, pair["bytes"], pair["seconds"])
        self._counts[rank["incarnation"]] = new

    def keep(self, incarnations: Iterable[int]) -> None:
        """Forgets all other workers."""
        wanted = set(incarnations)
        self._counts = {i: counts for i, counts in self._counts.items() if i in wanted}

    def still(self, incarnation: int) -> None:
        """A worker gave no answer: as far as is known, nothing moves there."""
        for key, count in self._counts.get(incarnation, {}).items():
            self._counts[incarnation][key] = msgspec.structs.replace(count, rate=0.0)

    def rates(self, incarnation: int) -> dict[str, float]:
        """Rates per second of a worker's counters."""
        counts = self._counts.get(incarnation, {})
        return {name: counts[name,].rate for name in _COUNTED if (name,) in counts}

    def links(self, ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """One entry per (writer, reader, transport) of the workers given: bytes, `rate` and `speed` in bytes per
        second. The writer's own account holds; the reader's only where the writer does not answer. Links of
        former lives of a process are counted in, and none is shown to a worker that is gone."""
        names = {rank["incarnation"]: rank["instance"] for rank in ranks}
        known = set(names.values())
        found: dict[tuple[str, str, str], dict[str, Any]] = {}
        # Readers first, so that writers overrule them.
        for writes in (False, True):
            own: dict[tuple[str, str, str], dict[str, Any]] = {}
            for rank in ranks:
                if (rank["role"] != "DECODE") is not writes:
                    continue
                for pair in rank["pairs"]:
                    peer = pair["peer_instance"] or names.get(pair["peer_incarnation"], "")
                    if peer not in known or not pair["up"] and pair["peer_incarnation"] not in names:
                        continue
                    ends = (rank["instance"], peer) if writes else (peer, rank["instance"])
                    key = (*ends, pair["transport"])
                    counts = self._counts.get(rank["incarnation"], {})
                    count = counts.get((pair["peer_incarnation"], pair["transport"]))
                    own[key] = _merged(own.get(key), key, pair, count)
            found |= own
        return [found[key] for key in sorted(found)]


def _next(old: _Count | None, now: float, value: float, busy: float) -> _Count:
    if old is None or value < old.value or now <= old.past[-1][0]:
        return _Count(value, busy, ((now, value),), speed=value / busy if busy > 0 else 0.0)
    moved, spent = value - old.value, busy - old.busy
    speed = moved / spent if moved > 0 and spent > 0 else old.speed
    begin = max((i for i, (time, _) in enumerate(old.past) if time <= now - WINDOW_SECONDS), default=0)
    since, before = old.past[begin]
    return _Count(value, busy, (*old.past[begin:], (now, value)), (value - before) / (now - since), speed)


def _merged(
    old: dict[str, Any] | None, key: tuple[str, str, str], pair: Mapping[str, Any], count: _Count | None
) -> dict[str, Any]:
    writer, reader, transport = key
    new = {
        "from": writer,
        "to": reader,
        "transport": transport,
        "reason": pair["reason"],
        "up": pair["up"],
        "bytes": pair["bytes"],
        "failures": pair["failures"],
        "rate": count.rate if count is not None else 0.0,
        "speed": count.speed if count is not None else 0.0,
    }
    if old is None:
        return new
    alive, other = (new, old) if new["up"] or not old["up"] else (old, new)
    sums = {name: old[name] + new[name] for name in ("bytes", "failures", "rate")}
    return alive | sums | {"speed": alive["speed"] or other["speed"]}
