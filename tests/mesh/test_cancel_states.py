"""A client goes away, in every state that a request can be in: within 2 s nothing of it is left anywhere.

The 2 s are those of the processes' own timelines; this test, which asks all of them again and again, may take longer
to see it. Where a state is passed in milliseconds, the engine is stopped in it. It may have gone on by the time that
it stands still, or finish a step before it hears of the cancel: what it was cancelled in then is a later state, which
must leave nothing either, and the test tries again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import pytest

from tests.mesh.conftest import SMALL_POOL, Scripted, assert_right
from tests.support.asking import TIMEOUT, Asking, random_prompt, until_async

pytestmark = pytest.mark.asyncio(loop_scope="session")

WITHIN = 2.0
"""Seconds from the disconnect until both workers and the router have let go of everything."""
TRIES = 20
PROCESSES = {"router_request": "router", "decode_request": "decode-0", "prefill_request": "prefill-0"}
ORDER = {
    "prefill_request": ("QUEUED", "COMPUTING", "COMPUTED", "PUSHING", "FINISHED"),
    "decode_request": ("QUEUED", "AWAITING_START", "AWAITING_KV", "READY", "DECODING", "FINISHED"),
}


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


async def start(scripted: Scripted, case: Case, *, stream: bool, engine: int) -> Asking:
    """A request that is in the state; if need be with the process `engine` stopped."""
    asker = scripted.asker
    for attempt in range(TRIES):
        prompt = random_prompt(case.prompt, 1000 + attempt)
        asking = asker.start(prompt, max_tokens=800, ignore_eos=True, stream=stream)
        if not case.freeze:
            await asker.until_state(asking.request_id, case.machine, case.state)
            if case.prefill:
                await asker.until_state(asking.request_id, "prefill_request", case.prefill)
            return asking
        await until_seen(scripted, asking, case)
        os.kill(engine, signal.SIGSTOP)
        await asyncio.sleep(0.1)  # what it said last arrives
        if await now_in(scripted, asking, case):
            return asking
        os.kill(engine, signal.SIGCONT)
        await asking.disconnect()
    raise AssertionError(f"{case.state} was always over before the engine stopped")


async def until_seen(scripted: Scripted, asking: Asking, case: Case) -> None:
    """Waits until the request is, or has been, in the state."""
    moves: list[dict[str, Any]] = []

    async def seen() -> bool:
        moves[:] = await scripted.asker.moves(asking.request_id)
        return any((m["machine"], m["to"]) == (case.machine, case.state) for m in moves)

    await until_async(seen, TIMEOUT, lambda: f"{asking.answer} {moves}")


async def now_in(scripted: Scripted, asking: Asking, case: Case) -> bool:
    """True when the request is in the state, as far as its processes have said."""
    last = {m["machine"]: m["to"] for m in await scripted.asker.moves(asking.request_id)}
    return last.get(case.machine) == case.state and last.get("prefill_request") == case.prefill


async def thaw(scripted: Scripted, engine: int) -> None:
    """Lets the stopped engine go on once its service process has told it of the cancel."""

    async def told() -> bool:
        ranks = (await scripted.mesh.status())["ranks"]
        return not any(rank["streams"] or rank["tasks"] for rank in ranks)

    try:
        await until_async(told, TIMEOUT, lambda: "streams are open")
    finally:
        os.kill(engine, signal.SIGCONT)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("name", CASES)
async def test_cancel(scripted: Scripted, name: str, *, stream: bool) -> None:
    case = CASES[name]
    if case.switch:
        scripted.script.on(case.switch)
    fillers = await fill(scripted, case.fillers)
    for _ in range(TRIES):
        if await cancel_in(scripted, case, stream=stream, tokens=int(name == "token-1" and stream)):
            break
    else:
        raise AssertionError(f"the cancel never found {case.state}")

    # The others never noticed.
    scripted.script.release()
    answers = [await filler.whole() for filler in fillers]
    assert_right(scripted, answers)
    await scripted.mesh.quiet()
    await scripted.asker.router_idle()


async def cancel_in(scripted: Scripted, case: Case, *, stream: bool, tokens: int) -> bool:
    """Cancels one request, and checks that nothing is left of it. True when it was in the state; False when the
    engine that was stopped in it had gone on."""
    asker = scripted.asker
    engine = int((await scripted.mesh.rank(case.freeze))["engine_pid"]) if case.freeze else 0
    asking = await start(scripted, case, stream=stream, engine=engine)
    await asking.tokens(tokens)
    gone_at = time.time()
    await asking.disconnect()
    if engine:
        await thaw(scripted, engine)
        gone_at = time.time()
    if not case.fillers:
        await scripted.mesh.quiet()
        await asker.router_idle()
    moves = await until_gone(scripted, asking.request_id, gone_at)

    found = {}
    for machine, process in PROCESSES.items():
        states = [m for m in moves if (m["machine"], m["process"]) == (machine, process)]
        cut = [m["from"] for m in states if m["to"] in ("CANCELLED", "FAILED")]
        assert len(cut) <= 1 and (cut or not states or states[-1]["to"] == "FINISHED"), moves
        found[machine] = cut[0] if cut else "FINISHED" if states else ""
    wanted = {"prefill_request": case.prefill}
    if case.machine in ("router_request", "decode_request"):
        wanted[case.machine] = case.state
    if all(found[machine] == state for machine, state in wanted.items()):
        return True
    assert engine, (found, moves)
    for machine, state in wanted.items():
        order = ORDER[machine]
        assert order.index(found[machine]) >= order.index(state), (found, moves)
    return False


async def until_gone(scripted: Scripted, request_id: str, gone_at: float) -> list[dict[str, Any]]:
    """Waits until every machine of a request is in a state that it never leaves; its moves, the last of which came
    in time after `gone_at`, in Unix seconds."""
    final = {"FINISHED", "CANCELLED", "FAILED", "RELEASED", "QUIET"}
    last: dict[tuple[str, str], str] = {}
    moves: list[dict[str, Any]] = []

    async def over() -> bool:
        moves[:] = await scripted.asker.moves(request_id)
        last.update({(move["process"], move["machine"]): move["to"] for move in moves})
        return set(last.values()) <= final

    await until_async(over, TIMEOUT, lambda: str(last))
    assert moves[-1]["unix_seconds"] - gone_at < WITHIN, (gone_at, moves)
    return moves


async def test_all_at_once(scripted: Scripted) -> None:
    """Five requests in five states; all go away in the same moment."""
    scripted.script.on("hold")
    asker = scripted.asker
    fillers = await fill(scripted, 4)
    waiting = asker.start(random_prompt(30, 7), max_tokens=4)
    await asker.until_state(waiting.request_id, "router_request", "QUEUED")
    rank = await scripted.mesh.rank("decode-0")
    assert rank["kv"]["total"] == SMALL_POOL and rank["streams"] == 4
    gone_at = time.time()
    for asking in (*fillers, waiting):
        await asking.disconnect()
    await scripted.mesh.quiet()
    await asker.router_idle()
    for asking in (*fillers, waiting):
        await until_gone(scripted, asking.request_id, gone_at)
    scripted.script.release()
    answer = await asker.generate(random_prompt(900, 8), max_tokens=20)
    assert_right(scripted, [answer])
