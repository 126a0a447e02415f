"""Who is convicted of crashing engines, and who only was there."""

from __future__ import annotations

import itertools
import random

import pytest

from engine_core.types.errors import Leg, PdmeshError, UnavailableError
from services.router.routing.poison import REMEMBERED, REMEMBERED_SECONDS, Convicted, Evidence, PoisonError, SuspectGate


def crash(reason: str = "ENGINE_CRASHED") -> PdmeshError:
    return UnavailableError("engine ended with signal 11", leg=Leg.DECODE, reason=reason)


def test_two_crashes_without_two_tokens_between_convict() -> None:
    evidence = Evidence()
    evidence.failed(crash(), 100, "decode-0")
    assert evidence.suspect and not evidence.guilty
    evidence.failed(crash(), 1, "decode-1")  # that one was prefill's: decode has computed nothing
    assert evidence.guilty
    verdict = evidence.verdict(Leg.DECODE)
    assert (verdict.reason, verdict.retryable) == ("POISON", False)
    assert "decode-0, decode-1" in verdict.message


@pytest.mark.parametrize("reason", ["ENGINE_DIED", "PEER_FAILED", "LINK_DOWN", "HANDOVER"])
def test_kills_from_outside_convict_nobody(reason: str) -> None:
    evidence = Evidence()
    for _ in range(50):
        evidence.failed(crash(reason), 0, "decode-0")
    assert not evidence.suspect
    evidence.failed(crash(), 0, "decode-0")
    evidence.failed(crash(reason), 0, "decode-1")
    assert evidence.suspect and not evidence.guilty


def test_tokens_clear_a_suspect() -> None:
    evidence = Evidence()
    for worker in "abc":
        evidence.failed(crash(), 2, worker)
        assert evidence.suspect and not evidence.guilty
    evidence.failed(crash("ENGINE_DIED"), 2, "g")
    assert not evidence.suspect


def test_tokens_before_each_crash_save_nobody() -> None:
    evidence = Evidence()
    for worker in "abcd":
        assert not evidence.guilty
        evidence.failed(crash(), 10, worker)
    assert evidence.guilty and "crashed 4 engines (a, b, c, d)" in evidence.verdict(Leg.DECODE).message


def test_a_gate_counts() -> None:
    gate = SuspectGate()
    gate.enter([1, 2])
    gate.enter([2])
    gate.leave([1, 2])
    assert set(gate.held) == {2}
    gate.leave([2])
    assert not gate.held


def test_the_convicted_are_refused_for_a_while() -> None:
    convicted, prompt = Convicted(), (5, 6, 7)
    convicted.check(prompt, 3, 0.0)
    convicted.add(prompt, None, 0.0)
    convicted.add((1, 2), 77, 0.0)
    for seed in (0, 3, 2**64 - 1):
        with pytest.raises(PoisonError, match="590 s more"):
            convicted.check(prompt, seed, 10.0)
    with pytest.raises(PoisonError):
        convicted.check((1, 2), 77, 10.0)
    convicted.check((1, 2), 78, 10.0)
    convicted.check((5, 6), 3, 10.0)
    convicted.check(prompt, 3, REMEMBERED_SECONDS)
    for i in range(REMEMBERED):
        convicted.add((9, i), None, 0.0)
    convicted.check((1, 2), 77, 1.0)  # forgotten for others


@pytest.mark.parametrize("seed", range(20))
def test_a_poison_among_many_costs_two_engines_and_no_innocent(seed: int) -> None:
    """A fleet where a step with the poison in it crashes the engine. Suspects are kept apart by the gate."""
    rng = random.Random(seed)
    evidence = [Evidence() for _ in range(24)]
    waiting, gate, crashes = list(range(24)), SuspectGate(), 0
    workers = itertools.count()
    fleet = [next(workers) for _ in range(3)]
    done: set[int] = set()
    poison = rng.randrange(24)
    while waiting:
        rng.shuffle(waiting)
        # Place all that may be placed now, then run one step on each engine.
        steps: dict[int, list[int]] = {w: [] for w in fleet}
        for i in list(waiting):
            free = [w for w in fleet if not (evidence[i].suspect and w in gate.held)]
            if free:
                worker = rng.choice(free)
                steps[worker].append(i)
                waiting.remove(i)
                if evidence[i].suspect:
                    gate.enter([worker])
        for worker, members in steps.items():
            if poison in members:
                crashes += 1
                fleet[fleet.index(worker)] = next(workers)
            for i in members:
                if evidence[i].suspect:
                    gate.leave([worker])
                if poison in members:
                    evidence[i].failed(crash(), 0, f"w{worker}")
                    if not evidence[i].guilty:
                        waiting.append(i)
                else:
                    done.add(i)
    assert crashes == 2
    assert [i for i, e in enumerate(evidence) if e.guilty] == [poison]
    assert done == set(range(24)) - {poison}
