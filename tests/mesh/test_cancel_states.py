"""A client goes away, in every state that a request can be in: within 2 s nothing of it is left anywhere."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass
from typing import Any

import pytest

from tests.mesh.conftest import SMALL_POOL, Scripted, assert_right
from tests.support.asking import Asking, random_prompt, until_async

pytestmark = pytest.mark.asyncio(loop_scope="session")

WITHIN = 2.0
"""Seconds from the disconnect until both workers and the router have let go of everything."""


@dataclass
class Case:
    """One state: how to get there, and what the machines must say that the cancel found.

    `freeze` names the worker whose engine is stopped in that state until the others have heard of the cancel:
    it is passed in milliseconds. Its prompts fill less than half of decode's pool, all of which may be quarantined.
    """

    prompt: int
    machine: str
    state: str
    prefill: str
    switch: str = ""
    fillers: int = 0
    freeze: str = ""


CASES = {
    # Four requests hold all slots of the router.
    "queued-at-router": Case(20, "router_request", "QUEUED", "", switch="hold", fillers=4),
    # Two held requests fill decode's pool; a third waits for its blocks, so that no further leg is opened.
    "queued-in-decode": Case(150, "decode_request", "QUEUED", "", switch="hold", fillers=3),
    "awaiting-start": Case(150, "decode_request", "AWAITING_START", "COMPUTED", switch="hold", fillers=2),
    "computing": Case(420, "prefill_request", "COMPUTING", "COMPUTING", freeze="prefill-0"),
    "pushing": Case(420, "transfer_session", "PUSHING", "COMPUTING", switch="hold", freeze="prefill-0"),
    "token-1": Case(100, "prefill_request", "PUSHING", "PUSHING", switch="hold"),
    "decoding": Case(100, "decode_request", "DECODING", "FINISHED", freeze="decode-0"),
}


async def fill(scripted: Scripted, count: int) -> list[Asking]:
    """Requests that hold what the one under test will wait for."""
    fillers = []
    for index in range(count):
        prompt = random_prompt(400 if index < 2 else 150, index)
        asking = scripted.asker.start(prompt, max_tokens=48, ignore_eos=True)
        state = {0: "AWAITING_KV", 1: "AWAITING_KV", 2: "AWAITING_START", 3: "QUEUED"}[index]
        await scripted.asker.until_state(asking.request_id, "decode_request", state)
        fillers.append(asking)
    return fillers


async def start(scripted: Scripted, case: Case, *, stream: bool) -> Asking:
    """A request that is in the state."""
    asker = scripted.asker
    for attempt in range(20):
        prompt = random_prompt(case.prompt, 1000 + attempt)
        asking = asker.start(prompt, max_tokens=800, ignore_eos=True, stream=stream)
        if not case.freeze:
            await asker.until_state(asking.request_id, case.machine, case.state)
            if case.prefill:
                await asker.until_state(asking.request_id, "prefill_request", case.prefill)
            return asking
        await until_seen(scripted, asking, case)
        await scripted.mesh.kill_engine(case.freeze, signal.SIGSTOP)
        await asyncio.sleep(0.1)  # what it said last arrives
        if await now_in(scripted, asking, case):
            return asking
        await scripted.mesh.kill_engine(case.freeze, signal.SIGCONT)
        await asking.disconnect()
    raise AssertionError(f"{case.state} was always over before the engine stopped")


async def until_seen(scripted: Scripted, asking: Asking, case: Case) -> None:
    """Waits until the request is, or has been, in the state."""
    moves: list[dict[str, Any]] = []

    async def seen() -> bool:
        moves[:] = await scripted.asker.moves(asking.request_id)
        return any((m["machine"], m["to"]) == (case.machine, case.state) for m in moves)

    await until_async(seen, 20.0, lambda: f"{asking.answer} {moves}")


async def now_in(scripted: Scripted, asking: Asking, case: Case) -> bool:
    """True when the request is in the state."""
    last = {m["machine"]: m["to"] for m in await scripted.asker.moves(asking.request_id)}
    return last.get(case.machine) == case.state and last.get("prefill_request") == case.prefill


async def thaw(scripted: Scripted, case: Case) -> None:
    """Lets the stopped engine go on once its service process has told it of the cancel."""

    async def told() -> bool:
        ranks = (await scripted.mesh.status())["ranks"]
        return not any(rank["streams"] or rank["tasks"] for rank in ranks)

    try:
        await until_async(told, WITHIN, lambda: "streams are open")
    finally:
        await scripted.mesh.kill_engine(case.freeze, signal.SIGCONT)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("name", CASES)
async def test_cancel(scripted: Scripted, name: str, *, stream: bool) -> None:
    case, asker = CASES[name], scripted.asker
    if case.switch:
        scripted.script.on(case.switch)
    fillers = await fill(scripted, case.fillers)
    asking = await start(scripted, case, stream=stream)
    if name == "token-1" and stream:
        await asking.tokens(1)

    await asking.disconnect()
    if case.freeze:
        await thaw(scripted, case)
    if not fillers:
        await scripted.mesh.quiet(WITHIN)
        await asker.router_idle(WITHIN)
    await until_gone(scripted, asking.request_id)
    moves = await asker.moves(asking.request_id)
    ends = {m["machine"]: m["from"] for m in moves if m["to"] in ("CANCELLED", "FAILED")}
    if case.machine in ("router_request", "decode_request"):
        assert ends[case.machine] == case.state
    found = {m["from"] for m in moves if m["machine"] == "prefill_request" and m["to"] in ("CANCELLED", "FAILED")}
    assert found == ({case.prefill} if case.prefill not in ("", "FINISHED") else set()), moves

    # The others never noticed.
    scripted.script.release()
    answers = [await filler.whole() for filler in fillers]
    assert_right(scripted, answers)
    await scripted.mesh.quiet(WITHIN)
    await asker.router_idle(WITHIN)


async def until_gone(scripted: Scripted, request_id: str) -> None:
    """Waits until every machine of a request is in a state that it never leaves."""
    final = {"FINISHED", "CANCELLED", "FAILED", "RELEASED", "QUIET"}
    last: dict[tuple[str, str], str] = {}

    async def over() -> bool:
        for move in await scripted.asker.moves(request_id):
            last[move["process"], move["machine"]] = move["to"]
        return set(last.values()) <= final

    await until_async(over, WITHIN, lambda: str(last))


async def test_all_at_once(scripted: Scripted) -> None:
    """Five requests in five states; all go away in the same moment."""
    scripted.script.on("hold")
    asker = scripted.asker
    fillers = await fill(scripted, 4)
    waiting = asker.start(random_prompt(30, 7), max_tokens=4)
    await asker.until_state(waiting.request_id, "router_request", "QUEUED")
    rank = await scripted.mesh.rank("decode-0")
    assert rank["kv"]["total"] == SMALL_POOL and rank["streams"] == 4
    for asking in (*fillers, waiting):
        await asking.disconnect()
    await scripted.mesh.quiet(WITHIN)
    await asker.router_idle(WITHIN)
    scripted.script.release()
    answer = await asker.generate(random_prompt(900, 8), max_tokens=20)
    assert_right(scripted, [answer])
