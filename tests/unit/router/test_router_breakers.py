"""How a router treats workers that fail: breakers, the budget of retries, suspects and poison."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine_core.types.errors import (
    FencedError,
    InvalidRequestError,
    Leg,
    PdmeshError,
    PeerFailedError,
    QueueFullError,
    UnavailableError,
)
from engine_core.types.request import Finish, FinishReason
from tests.support.fake_decode import (
    EOS,
    FakeDecode,
    Harness,
    error_of,
    prefill_row,
    register,
    running_router,
    says,
    tokens,
    until,
)
from tests.support.models import tiny_model

COMPLETION = {"model": "default", "prompt": "hello", "max_tokens": 50}


async def breaker(router: Harness, worker: str) -> float:
    """0 closed, 1 half-open, 2 open."""
    lines = (await router.http.get("/metrics")).text.splitlines()
    found = [x for x in lines if x.startswith(f'pdmesh_router_breaker_state{{dp="0",worker="{worker}"}} ')]
    assert len(found) == 1
    return float(found[0].split()[1])


async def until_breaker(router: Harness, worker: str, value: float) -> None:
    async with asyncio.timeout(20):
        while await breaker(router, worker) != value:  # noqa: ASYNC110  (it changes in the router)
            await asyncio.sleep(0.05)


async def test_a_dead_worker_is_left_for_the_other_one() -> None:
    dead, alive = FakeDecode(says([5])), FakeDecode(says([5]), name="decode-1")
    async with running_router(tiny_model(), dead, alive, policy="round_robin") as router:
        await dead.stop()  # its row stays READY until the lease lapses
        for _ in range(4):
            assert (await router.http.post("/v1/completions", json=COMPLETION)).status_code == 200
        assert len(alive.requests) == 4
        assert await breaker(router, "decode-0") > 0 and await breaker(router, "decode-1") == 0
        text = (await router.http.get("/metrics")).text
        assert 'pdmesh_router_replans_total{leg="decode",reason="CONNECT_FAILED"} 1.0' in text, "one found out for all"
        # Somebody answers there again, as when a connection was only broken: a probe closes the breaker.
        await dead.start_again()
        await until_breaker(router, "decode-0", 0.0)
        for _ in range(2):
            assert (await router.http.post("/v1/completions", json=COMPLETION)).status_code == 200
        assert len(dead.requests) == 1


async def test_faults_in_a_row_keep_a_worker_out_until_a_probe() -> None:
    """It answers health checks but fails what it is asked; the other leg is never blamed for it."""
    bad, good = FakeDecode(says([5])), FakeDecode(says([5]), name="decode-1")
    failure = PeerFailedError("no step", leg=Leg.DECODE)
    bad.script = lambda request: [failure]
    async with running_router(tiny_model(), bad, good, policy="round_robin") as router:
        while len(bad.requests) < 3:
            assert (await router.http.post("/v1/completions", json=COMPLETION)).status_code == 200
        assert await breaker(router, "decode-0") == 2.0
        assert await breaker(router, "prefill-0") == await breaker(router, "decode-1") == 0.0
        await until_breaker(router, "decode-0", 0.0)
        bad.script = says([5])
        for _ in range(2):
            assert (await router.http.post("/v1/completions", json=COMPLETION)).status_code == 200
        assert len(bad.requests) == 4
        workers = (await router.http.get("/workers")).json()["workers"]
        assert {w["instance"]: w["breaker"] for w in workers} == dict.fromkeys(
            ["decode-0", "decode-1", "prefill-0"], "CLOSED"
        )


async def test_an_open_breaker_is_tried_when_there_is_nobody_else() -> None:
    fake = FakeDecode(lambda request: [PeerFailedError("no step", leg=Leg.DECODE)])
    async with running_router(tiny_model(), fake, max_attempts=3) as router:
        assert (await router.http.post("/v1/completions", json=COMPLETION)).status_code == 503
        assert await breaker(router, "decode-0") > 0
        fake.script = says([5])
        assert (await router.http.post("/v1/completions", json=COMPLETION)).status_code == 200
        assert await breaker(router, "decode-0") == 0.0, "its success closes it at once"


@pytest.mark.parametrize(
    "failure",
    [
        InvalidRequestError("bad", leg=Leg.DECODE, field="request.sampling.top_k"),
        QueueFullError("full", leg=Leg.DECODE),
        FencedError("another incarnation", leg=Leg.DECODE),
    ],
)
async def test_what_is_no_fault_opens_no_breaker(failure: PdmeshError) -> None:
    fake = FakeDecode(lambda request: [failure])
    async with running_router(tiny_model(), fake) as router:
        for _ in range(2):
            assert (await router.http.post("/v1/completions", json=COMPLETION)).status_code in (400, 503, 429)
        assert len(fake.requests) >= 2
        assert await breaker(router, "decode-0") == await breaker(router, "prefill-0") == 0.0


async def test_a_life_that_is_over_is_nobody_for_clients() -> None:
    fake = FakeDecode(lambda request: [FencedError("another incarnation", leg=Leg.DECODE)])
    async with running_router(tiny_model(), fake) as router:
        response = await router.http.post("/v1/completions", json=COMPLETION)
        assert (response.status_code, response.headers["retry-after"], error_of(response)["type"]) == (
            503, "1", "server_error",
        )  # fmt: skip


async def test_a_transfer_that_failed_marks_no_pair_for_good() -> None:
    """Faults on the way between two workers speak against that pair, and only until one request has got through."""
    fake = FakeDecode(says([5]))
    rows = [fake, prefill_row(), prefill_row(name="prefill-1")]
    async with running_router(tiny_model(), *rows, policy="round_robin") as router:
        broken: set[str] = set()

        def script(request: Any) -> Any:
            if request.prefill.endpoint in broken:
                return [PeerFailedError("push failed", leg=Leg.TRANSFER, reason="PUSH_FAILED")]
            return says([70])(request)

        fake.script = script
        for row, port in zip(rows[1:], ("1", "2"), strict=True):
            row.endpoint = f"127.0.0.1:{port}"
            await register(router.bootstrap, row, router.digest)
        broken.add("127.0.0.1:1")
        for _ in range(8):
            assert (await router.http.post("/v1/completions", json=COMPLETION)).status_code == 200
        used = [r.prefill.endpoint for r in fake.requests]
        assert used.count("127.0.0.1:1") < 8 <= used.count("127.0.0.1:2")
        states = [await breaker(router, name) for name in ("decode-0", "prefill-0", "prefill-1")]
        assert states == [0.0, 0.0, 0.0], "neither worker is to blame"
        broken.clear()
        fake.requests.clear()
        async with asyncio.timeout(20):
            while "127.0.0.1:1" not in [r.prefill.endpoint for r in fake.requests]:
                assert (await router.http.post("/v1/completions", json=COMPLETION)).status_code == 200


@pytest.mark.parametrize("streaming", [False, True])
async def test_who_crashes_two_engines_is_given_up_and_not_tried_again(streaming: bool) -> None:
    crash = UnavailableError("engine ended with signal 11", leg=Leg.DECODE, reason="ENGINE_CRASHED")
    fakes = [FakeDecode(lambda request: [crash], name=f"decode-{i}") for i in range(4)]
    async with running_router(tiny_model(), *fakes) as router:
        body = {**COMPLETION, "stream": streaming}
        for asked in range(3):
            response = await router.http.post("/v1/completions", json=body)
            assert (response.status_code, error_of(response)["code"]) == (500, "poison"), asked
            assert response.headers["x-should-retry"] == "false"
            assert sum(len(fake.requests) for fake in fakes) == 2
        for fake in fakes:
            fake.script = says([70])
        assert (
            await router.http.post("/v1/completions", json={"model": "default", "prompt": "another"})
        ).status_code == 200
        text = (await router.http.get("/metrics")).text
        assert 'pdmesh_router_retries_refused_total{why="poison"} 1.0' in text


async def test_a_greedy_request_is_known_again_whatever_its_seed() -> None:
    """It crashes behind its first token, so that draws could matter: greedy, there are none."""
    crash = UnavailableError("engine ended with signal 11", leg=Leg.DECODE, reason="ENGINE_CRASHED")
    fakes = [FakeDecode(lambda request: [], name=f"decode-{i}") for i in range(3)]
    for fake in fakes:
        fake.script = lambda request: [tokens(len(request.request.emitted_token_ids), [70]), crash]
    async with running_router(tiny_model(), *fakes) as router:
        for _ in range(2):
            response = await router.http.post("/v1/completions", json={**COMPLETION, "temperature": 0})
            assert (response.status_code, error_of(response)["code"]) == (500, "poison")
            assert sum(len(fake.requests) for fake in fakes) == 2
        for fake in fakes:
            fake.script = says([70])
        sampled = {**COMPLETION, "temperature": 1, "seed": 0}
        assert (await router.http.post("/v1/completions", json=sampled)).status_code == 200, "others are not meant"


async def test_suspects_do_not_share_a_worker() -> None:
    """Four were in the step of a crash. Until each has shown that it is not the one, it is alone on its worker."""
    crash = UnavailableError("engine ended with signal 11", leg=Leg.DECODE, reason="ENGINE_CRASHED")
    together, go = asyncio.Event(), asyncio.Event()
    seen: list[tuple[str, int]] = []
    running = [0]

    def script(request: Any) -> Any:
        attempt = request.request.session.attempt
        seen.append(("open", attempt))
        if attempt == 0:
            if len(seen) == 4:
                together.set()
            return [together, crash]
        running[0] += 1
        assert running[0] == 1, "two suspects at once"
        return watched(request)

    def watched(request: Any) -> Any:
        yield tokens(0, [70])
        yield go
        yield tokens(1, [71])
        running[0] -= 1
        yield tokens(2, [EOS], Finish(FinishReason.STOP, EOS))

    fake = FakeDecode(script)
    async with running_router(tiny_model(), fake) as router:
        asked = [
            asyncio.ensure_future(
                router.http.post("/v1/completions", json={"model": "default", "prompt": f"hello {i}", "max_tokens": 9})
            )
            for i in range(4)
        ]
        await until(lambda: running[0] == 1)
        go.set()
        for reply in await asyncio.gather(*asked):
            assert reply.status_code == 200, reply.text
        assert [attempt for _, attempt in seen] == [0, 0, 0, 0, 1, 1, 1, 1]


async def test_retries_have_a_budget() -> None:
    """A fleet that fails everything gets what the budget allows, not five times its load."""
    fake = FakeDecode(lambda request: [PeerFailedError("no step", leg=Leg.DECODE)])
    async with running_router(tiny_model(), fake, max_in_flight=2, retry_share=0.25, retry_floor=0.0) as router:
        for _ in range(12):
            assert (await router.http.post("/v1/completions", json=COMPLETION)).status_code == 503
        # Four of the burst, and one for each four requests; what the first ones earned the full bucket did not take.
        assert 12 + 4 + 2 <= len(fake.requests) <= 12 + 4 + 3
        text = (await router.http.get("/metrics")).text
        assert f'pdmesh_router_retries_total{{kind="replan"}} {float(len(fake.requests) - 12)}' in text
        assert 'pdmesh_router_retries_refused_total{why="budget"}' in text
