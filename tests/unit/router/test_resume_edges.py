"""Breaks at awkward moments: tokens that come with the end of an attempt, workers too small to go on, breakers that
nobody tries."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from engine_core.lifecycle.membership import MembershipState
from engine_core.types.errors import Leg, UnavailableError
from engine_core.types.request import Finish, FinishReason, Role
from services.config import PlacementPolicy
from services.router.metrics import RouterMetrics
from services.router.routing.breaker import TRIAL_SECONDS, BreakerState, Fault
from services.router.routing.mesh import Mesh
from services.router.routing.placement import Placement
from services.router.routing.rooms import RoomRecorder
from services.router.routing.table import WatchedTable
from services.router.text.tokenizer import RouterTokenizer
from services.runtime.channels import ChannelPool
from services.runtime.tasks import TaskOwner
from services.wire.bootstrap import Revision, Snapshot
from services.worker.roster import Roster
from tests.support.fake_decode import EOS, FakeDecode, Harness, register, running_router, says, tokens
from tests.support.models import tiny_model
from tests.support.rows import rank_row
from tests.unit.router.test_resume import TEXT, events, going_on

GIVEN_BACK = Finish(FinishReason.PREEMPTED)


@pytest.mark.parametrize("streaming", [True, False])
async def test_tokens_that_come_with_a_request_given_back_are_not_lost(streaming: bool) -> None:
    """A worker merges what a slow reader has not taken: tokens and the hand-back come as one message."""
    fake = FakeDecode(lambda request: [])
    async with running_router(tiny_model(), fake) as router:
        ids = router.ids(TEXT)
        on = going_on(ids, {})
        body = {"model": "default", "prompt": "hello", "max_tokens": 99, "stream": streaming, "return_token_ids": True}
        for first in (0, 2):
            fake.requests.clear()
            fake.script = lambda request, first=first: (
                [*([tokens(0, ids[:first])] if first else []), tokens(first, ids[first:5], GIVEN_BACK)]
                if request.request.session.attempt == 0
                else on(request)
            )
            response = await router.http.post("/v1/completions", json=body)
            parts = await events(response) if streaming else [response.json()]
            choices = [c for part in parts for c in part["choices"]]
            assert "".join(c["text"] for c in choices) == TEXT
            assert [t for c in choices for t in c["token_ids"]] == [*ids, EOS]
            assert [list(r.request.emitted_token_ids) for r in fake.requests] == [[], ids[:5]]


async def test_a_stop_string_counts_in_tokens_that_come_with_a_hand_back() -> None:
    fake = FakeDecode(lambda request: [])
    async with running_router(tiny_model(), fake) as router:
        ids = router.ids(TEXT)
        fake.script = lambda request: [tokens(0, ids, GIVEN_BACK)]
        reply = await router.client.completions.create(model="default", prompt="hello", max_tokens=99, stop=["mat and"])
        choice = reply.choices[0]
        assert (choice.text, choice.finish_reason) == ("the cat sat on the ", "stop")
        assert len(fake.requests) == 1


async def test_an_open_stream_waits_for_a_worker_that_can_hold_it() -> None:
    """Its own came back with less room: that is no error of the prompt's, since the client has begun to read."""
    large = FakeDecode(lambda request: [])
    async with running_router(tiny_model(), large, sse_comment_after=0.05) as router:
        ids = router.ids(TEXT)
        cut = asyncio.Event()
        large.script = lambda request: [tokens(0, ids[:6]), cut, UnavailableError("gone", leg=Leg.DECODE)]
        body = {"model": "default", "prompt": [70, 71, 72], "max_tokens": 40, "stream": True, "return_token_ids": True}
        async with router.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            async for line in lines:
                if line.startswith("data: ") and json.loads(line[6:])["choices"][0]["token_ids"]:
                    break
            small = FakeDecode(says([5]), max_model_len=8)  # later: incarnations of one millisecond have no order
            await small.start()
            await register(router.bootstrap, small, router.digest)
            await until_row(router, small.endpoint)
            cut.set()
            async for line in lines:
                assert not line.startswith("data: "), line
                if line == ": wait":
                    break
            fresh = FakeDecode(going_on(ids, {}), name="fresh")
            await fresh.start()
            await register(router.bootstrap, fresh, router.digest)
            rest = [json.loads(x[6:]) async for x in lines if x.startswith("data: {")]
        await fresh.stop()
        await small.stop()
    assert [t for part in rest for c in part.get("choices", ()) for t in c["token_ids"]] == [*ids[6:], EOS]
    assert small.requests == []


async def until_row(router: Harness, endpoint: str) -> None:
    async with asyncio.timeout(20):
        while endpoint not in (await router.http.get("/workers")).text:  # noqa: ASYNC110  (the router's table)
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("ends", [True, False])
async def test_who_waits_hears_of_a_trial_that_said_nothing(ends: bool) -> None:
    """The request that tried the only pair was cancelled, or takes long: the next one may, and must hear of it."""
    ready = MembershipState.READY
    rows = [rank_row("p", Role.PREFILL, incarnation=1, state=ready), rank_row("d", incarnation=2, state=ready)]
    roster = Roster(["b"])
    roster.apply("b", Snapshot(Revision(1, 1), tuple(rows)), time.monotonic())
    table, pool, tasks = WatchedTable(roster), ChannelPool(), TaskOwner("test")
    mesh = Mesh(
        table, pool, RouterTokenizer.load(tiny_model()), "", policy=PlacementPolicy.LEAST_LOAD,
        recorder=RoomRecorder(pool, ["b"]), metrics=RouterMetrics(),
    )  # fmt: skip
    tasks.spawn(mesh.prober.run(), "prober")
    try:
        mesh.breakers.fault(Fault((1, 2), no_doubt=True), time.monotonic())
        async with asyncio.timeout(30):
            while mesh.breakers.state((1, 2)) is not BreakerState.HALF_OPEN:
                assert await table.wait_change(30)
        # Its trial has lasted a while already.
        trial = Placement(rows[1], rows[0])
        mesh.breakers.begin_trials([(1, 2)], time.monotonic() - (0 if ends else TRIAL_SECONDS - 1))
        with pytest.raises(UnavailableError, match="breakers"):
            mesh.place(1, 10, set(), "", patient=True)
        waits = asyncio.ensure_future(table.wait_change(30))
        await asyncio.sleep(0)
        if ends:
            mesh.end_trials(trial)
        assert await waits
        assert mesh.place(1, 10, set(), "", patient=True) == trial
    finally:
        await tasks.close()
        await pool.close()
