"""Pushes that are late, lost, cut short or corrupt never give wrong text, and blocks that a writer may still
write are nobody else's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine_core.scheduler.decode import QUARANTINE_GRACE
from tests.mesh.conftest import (
    TRANSPORTS,
    Script,
    Scripted,
    assert_right,
    prompt_that_ends_at_once,
    serve_scripted,
)
from tests.support.asking import TIMEOUT, Asking, random_prompt, until, until_async

pytestmark = pytest.mark.asyncio(loop_scope="session")

TRIES = 10
A_PROMPT, A_TOKENS = 176, 64
A_BLOCKS = 15
"""What the request that is cancelled holds: less than the quarter of the pool above which its peer is refused."""

REASONS = {
    "delay": "",
    "fail": "PUSH_FAILED",
    "short": "KV_INCOMPLETE",
    "short_silent": "KV_CORRUPT",
    "corrupt": "KV_CORRUPT",
    "lose": "TRANSFER_STUCK",
}
"""What a fault is called where it is found out."""


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("fault", [f for f in REASONS if f != "lose"])
async def test_a_bad_push_costs_an_attempt(scripted: Scripted, fault: str, *, stream: bool) -> None:
    await suffer(scripted, fault, stream=stream)


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_lost_push_costs_an_attempt_in_time(tmp_path: Path, transport: str) -> None:
    async with serve_scripted(Script(tmp_path, transport), 4.0) as served:
        await suffer(served, "lose", stream=True)


async def suffer(scripted: Scripted, fault: str, *, stream: bool) -> None:
    """One request meets the fault while another decodes; afterwards the same prompt is asked again."""
    asker, salt, prompt = scripted.asker, scripted.asker.salt(), random_prompt(40, 3)
    bystander = asker.start(random_prompt(50, 4), max_tokens=700, ignore_eos=True)
    await bystander.tokens(2)  # its own pushes are over

    scripted.script.on(fault)
    asking = asker.start(prompt, max_tokens=12, ignore_eos=True, cache_salt=salt, stream=stream)
    if REASONS[fault]:
        await until_async(lambda: met(scripted, asking, fault), TIMEOUT, lambda: str(asking.answer))
        scripted.script.release()
    answer = await asking.whole()
    assert_right(scripted, [answer], attempts=answer.attempts)
    assert (answer.attempts > 1) == bool(REASONS[fault]), answer

    scripted.script.release()
    again = await asker.generate(prompt, max_tokens=12, ignore_eos=True, cache_salt=salt)
    longer = await asker.generate((*prompt, *again.ids), max_tokens=12, ignore_eos=True, cache_salt=salt)
    assert_right(scripted, [again, longer, await bystander.whole()])


async def met(scripted: Scripted, asking: Asking, fault: str) -> bool:
    """True when the router has given up an attempt; the reason must be that of the fault."""
    moves = [m for m in await scripted.asker.moves(asking.request_id) if m["to"] in ("RESUMING", "REPLANNED")]
    assert all(f" {REASONS[fault]}: " in move["reason"] for move in moves), moves
    return bool(moves)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_pushes_that_always_fail_give_an_error_or_the_right_text(scripted: Scripted, *, stream: bool) -> None:
    """Token 1 may be faster than its push: each attempt may bring one. When none has for long, there is an error.

    Two tokens: more of them mean more attempts, each after the pair's breaker has held for up to 8 s.
    """
    scripted.script.on("fail")
    answer = await scripted.asker.start(random_prompt(40, 5), max_tokens=2, ignore_eos=True, stream=stream).whole()
    if answer.error is None:
        assert_right(scripted, [answer], attempts=answer.attempts)
        assert answer.attempts > 1
    else:
        assert answer.error["code"] == "push_failed" and len(answer.ids) < 2, answer
        assert answer.status == (200 if stream and answer.ids else 503), answer
        scripted.oracle.assert_right([answer.claim()])


# ---- blocks wait for the proof of quiet -------------------------------------------------------------


def by_shm(scripted: Scripted) -> bool:
    """Otherwise by tcp."""
    return scripted.script.transport == "shm"


async def cancel_while_a_writer_is_stuck(scripted: Scripted, prompt: int = A_PROMPT, blocks: int = A_BLOCKS) -> None:
    """A request is cancelled in the middle of a push that no cancel can stop."""
    scripted.script.on("stubborn")
    asking = scripted.asker.start(random_prompt(prompt, 21), max_tokens=A_TOKENS, ignore_eos=True)
    await until(lambda: scripted.script.held, TIMEOUT, lambda: "no push")
    await asking.disconnect()
    scripted.script.off("stubborn")
    await until_quarantined(scripted, blocks)
    assert (await scripted.mesh.rank("prefill-0"))["kv"]["pinned"] == prompt // 16


async def until_quarantined(scripted: Scripted, blocks: int) -> None:
    """Waits until so many blocks of the decode worker are in quarantine: by tcp none for long, since the reader
    has dropped the session and proves it quiet, whatever the writer does."""
    kv: dict[str, int] = {}
    blocks = blocks if by_shm(scripted) else 0

    async def there() -> bool:
        kv.update((await scripted.mesh.rank("decode-0"))["kv"])
        return kv["quarantined"] == blocks and kv["used"] + kv["free"] + kv["cached"] + blocks == kv["total"]

    await until_async(there, TIMEOUT, lambda: f"{blocks} quarantined: {kv}")


async def test_a_running_request_does_not_grow_into_blocks_that_may_still_be_written(scripted: Scripted) -> None:
    """B wants the whole pool. When nothing is free but what A's writer may still write, B is preempted, and goes
    on after the proof of quiet. Were A's blocks free at its cancel, B would take them and not be preempted.
    """
    asker = scripted.asker
    growing = asker.start(random_prompt(100, 20), max_tokens=920, ignore_eos=True)
    await growing.tokens(2)
    await cancel_while_a_writer_is_stuck(scripted)
    if by_shm(scripted):
        await asker.until_state(growing.request_id, "decode_request", "PREEMPTED")
        held = await scripted.mesh.rank("decode-0")
        assert held["kv"]["quarantined"] == A_BLOCKS and held["kv"]["used"] == 0
        assert not growing.done
    else:
        await growing.tokens(900)

    scripted.script.release()
    answer = await growing.whole()
    assert_right(scripted, [answer])
    assert len(answer.ids) == 920


async def test_a_new_request_waits_for_blocks_that_may_still_be_written(scripted: Scripted) -> None:
    """B fits only with A's blocks: it is computed, but gets no ticket before the proof. (By tcp, that is there; B's
    pushes queue behind the one that is stuck.)"""
    await cancel_while_a_writer_is_stuck(scripted)
    waiting = scripted.asker.start(random_prompt(860, 22), max_tokens=40, ignore_eos=True)
    state = "COMPUTED" if by_shm(scripted) else "PUSHING"
    await scripted.asker.until_state(waiting.request_id, "prefill_request", state)
    state = "AWAITING_START" if by_shm(scripted) else "AWAITING_KV"
    await scripted.asker.until_state(waiting.request_id, "decode_request", state)
    await until_quarantined(scripted, A_BLOCKS)
    assert len(waiting.answer.ids) == (0 if by_shm(scripted) else 1)

    scripted.script.release()
    assert_right(scripted, [await waiting.whole()])


async def test_a_peer_that_quarantines_too_much_is_refused_until_it_is_quiet(scripted: Scripted) -> None:
    """More than a quarter of the pool, for longer than a living writer needs to answer."""
    await cancel_while_a_writer_is_stuck(scripted, 256, 20)
    await asyncio.sleep(QUARANTINE_GRACE + 0.1)
    if by_shm(scripted):
        refused = await scripted.asker.start(random_prompt(20, 23), stream=False).whole()
        assert refused.status == 503 and refused.error is not None and refused.error["code"] == "quarantine", refused
        assert "31% of the KV cache is quarantined by prefill-0" in refused.error["message"]

    scripted.script.release()
    await scripted.mesh.quiet()
    assert_right(scripted, [await scripted.asker.generate(random_prompt(20, 23))])


# ---- token 1 is the last ----------------------------------------------------------------------------


@pytest.mark.parametrize("hold", ["hold", "stubborn"])
@pytest.mark.parametrize("end", ["eos", "stop-id", "stop-string"])
async def test_token_1_ends_the_request_while_its_push_is_in_flight(scripted: Scripted, end: str, hold: str) -> None:
    asker = scripted.asker
    prompt = prompt_that_ends_at_once(scripted.oracle) if end == "eos" else random_prompt(120, 31)
    first = await asker.generate(prompt, max_tokens=1)
    while end == "stop-string" and not first.text.isascii():
        prompt = prompt[1:]
        first = await asker.generate(prompt, max_tokens=1)
    options: dict[str, object] = {}
    if end == "stop-id":
        options["stop_token_ids"] = (first.ids[0],)
    elif end == "stop-string":
        options["stop"] = [first.text]

    scripted.script.on(hold)
    for _ in range(TRIES):
        answer = await asker.generate(prompt, max_tokens=30, stream=end != "eos", **options)
        assert (answer.ids, answer.finish_reason, answer.text) == (first.ids, "stop", "")
        if scripted.script.held:
            break  # else the end was faster than the thread that pushes
    assert scripted.script.held
    scripted.script.off(hold)
    if hold == "stubborn":
        # All blocks that the ticket named, and those for growth.
        await until_quarantined(scripted, -(-(len(prompt) + 29) // 16))
    else:
        await scripted.mesh.quiet()
    # The next one takes the whole pool, and with it the blocks of the one that ended.
    large = asker.start(random_prompt(1000, 32), max_tokens=24, ignore_eos=True)
    state = "FINISHED" if hold == "hold" else "COMPUTED" if by_shm(scripted) else "PUSHING"
    await asker.until_state(large.request_id, "prefill_request", state)
    scripted.script.release()
    assert_right(scripted, [await large.whole()])


async def test_max_tokens_1_pushes_nothing(scripted: Scripted) -> None:
    scripted.script.on("hold")
    answer = await scripted.asker.generate(random_prompt(60, 33), max_tokens=1)
    assert answer.finish_reason == "length" and not scripted.script.held
    assert_right(scripted, [answer])


# ---- who goes next ----------------------------------------------------------------------------------


async def test_the_urgent_request_takes_the_slot_that_comes_free(scripted: Scripted) -> None:
    """The mesh is full, and three wait: the slot goes to the one that came last and doesn't step back."""
    asker = scripted.asker
    scripted.script.on("hold")
    full = [asker.start(random_prompt(30 + i, 40 + i), max_tokens=8, ignore_eos=True) for i in range(4)]
    for asking in full:
        await asker.until_state(asking.request_id, "decode_request", "AWAITING_KV")
    waiting = []
    for i, wish in enumerate(({"priority": 5}, {"priority": 2}, {})):
        waiting.append(asker.start(random_prompt(40 + i, 50 + i), max_tokens=8, ignore_eos=True, **wish))
        await asker.until_state(waiting[-1].request_id, "router_request", "QUEUED")

    for left in (waiting[:2], waiting[:1], []):
        await full.pop().disconnect()
        next_one = waiting[len(left)]
        await asker.until_state(next_one.request_id, "decode_request", "AWAITING_KV")
        for asking in left:
            assert [m["to"] for m in await asker.moves(asking.request_id)] == ["QUEUED"]
    scripted.script.release()
    assert_right(scripted, [await asking.whole() for asking in (*full, *waiting)])
