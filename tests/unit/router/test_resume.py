"""A sample that goes on elsewhere: what the next attempt is asked, and that the client can't tell."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from engine_core.types.errors import (
    DeadlineError,
    FencedError,
    Leg,
    PdmeshError,
    PeerFailedError,
    QueueFullError,
    UnavailableError,
)
from engine_core.types.request import Finish, FinishReason, Role
from pdmesh.decode.v1 import decode_service_pb2 as decode_pb2
from tests.support.fake_decode import (
    EOS,
    PARTS,
    FakeDecode,
    Script,
    Step,
    prefill_row,
    register,
    running_router,
    tokens,
)
from tests.support.models import tiny_model

BROKE = PeerFailedError("the connection broke", leg=Leg.DECODE)
DIED = UnavailableError("decode: engine ended with signal 9", leg=Leg.DECODE, reason="ENGINE_DIED")


def going_on(ids: list[int], breaks: dict[int, PdmeshError], *, per_message: int = 1, cached: int = 0) -> Script:
    """A worker that knows the whole output: it begins behind what is emitted, ends at EOS or max_tokens, and
    breaks once, when `breaks` has the number of tokens that are out by then."""
    left = dict(breaks)
    whole = [*ids, EOS]

    def script(request: decode_pb2.GenerateRequest) -> Iterator[Step]:
        emitted, limit = list(request.request.emitted_token_ids), request.request.sampling.max_tokens
        assert emitted == whole[: len(emitted)]
        out = whole[:limit]
        at = len(emitted)
        while at < len(out):
            if at in left:
                yield left.pop(at)
            some = out[at : min([at + per_message, *(b for b in left if b > at)])]
            at += len(some)
            stop = EOS if some[-1] == EOS else None
            finish = Finish(FinishReason.STOP if stop else FinishReason.LENGTH, stop, cached_tokens=cached)
            yield tokens(at - len(some), some, finish if at >= len(out) else None)

    return script


async def events(response: Any) -> list[dict[str, Any]]:
    blocks = [b.removeprefix("data: ") for b in response.text.strip().split("\n\n") if b.startswith("data: ")]
    assert blocks[-1] == "[DONE]"
    return [json.loads(b) for b in blocks[:-1]]


TEXT = "the cat sat on the mat and the dog ran to the sea"


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("per_message", [1, 3])
async def test_a_death_at_any_token_is_not_seen(streaming: bool, per_message: int) -> None:
    fake = FakeDecode(lambda request: [])
    async with running_router(tiny_model(), fake) as router:
        ids = router.ids(TEXT)
        body = {"model": "default",
            "prompt": "hello", "max_tokens": 99, "seed": 7, "temperature": 0.5, "return_token_ids": True,
            "stream": streaming,
        }  # fmt: skip
        if streaming:
            body["stream_options"] = {"include_usage": True}
        for at in range(len(ids) + 1):
            fake.requests.clear()
            fake.script = going_on(ids, {at: BROKE}, per_message=per_message)
            response = await router.http.post("/v1/completions", json=body)
            assert response.status_code == 200
            parts = await events(response) if streaming else [response.json()]
            choices = [c for part in parts for c in part["choices"]]
            assert "".join(c["text"] for c in choices) == TEXT
            assert [t for c in choices for t in c["token_ids"]] == [*ids, EOS]
            assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["stop"]
            assert parts[-1]["usage"]["completion_tokens"] == len(ids) + 1

            first, second = (r.request for r in fake.requests)
            assert (first.session.attempt, second.session.attempt) == (0, 1)
            assert list(first.emitted_token_ids) == [] and list(second.emitted_token_ids) == ids[:at]
            same = (
                "request_id", "prompt_token_ids", "sampling", "arrival_unix_ms", "fingerprint", "cache_salt",
            )  # fmt: skip
            assert all(getattr(first, name) == getattr(second, name) for name in same)
            assert first.session.room == second.session.room and second.sampling.seed == 7


@pytest.mark.parametrize("limit", [1, 4, 5, 6])
async def test_limits_count_from_the_first_attempt(limit: int) -> None:
    fake = FakeDecode(lambda request: [])
    async with running_router(tiny_model(), fake) as router:
        ids = router.ids(TEXT)
        for at in range(limit):
            fake.script = going_on(ids, {at: BROKE})
            reply = await router.client.completions.create(model="default", prompt="hello", max_tokens=limit)
            assert (reply.choices[0].finish_reason, reply.usage and reply.usage.completion_tokens) == ("length", limit)
            assert reply.choices[0].text == router.tokenizer.decode(ids[:limit])


async def test_a_stop_string_is_found_across_the_break() -> None:
    fake = FakeDecode(lambda request: [])
    async with running_router(tiny_model(), fake) as router:
        ids = router.ids(TEXT)
        for at in range(1, len(ids)):
            fake.script = going_on(ids, {at: BROKE})
            body = {"model": "default", "prompt": "hello", "max_tokens": 99, "stop": ["mat and"], "stream": True}
            found = await events(await router.http.post("/v1/completions", json=body))
            choices = [c for part in found for c in part["choices"]]
            assert "".join(c["text"] for c in choices) == "the cat sat on the "
            assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "mat and")


async def test_a_character_that_is_cut_by_the_break_comes_whole() -> None:
    fake = FakeDecode(lambda request: [])
    async with running_router(tiny_model(), fake) as router:
        text = "a€b𝄞c"
        ids = router.ids(text)
        assert len(ids) > 5  # the characters are several tokens each
        for at in range(1, len(ids)):
            fake.script = going_on(ids, {at: BROKE})
            body = {"model": "default", "prompt": "hello", "max_tokens": 99, "stream": True}
            found = await events(await router.http.post("/v1/completions", json=body))
            assert "".join(c["text"] for part in found for c in part["choices"]) == text


async def test_every_second_token_may_cost_a_connection() -> None:
    """max_attempts counts attempts in a row without a token: any number with one is no matter."""
    fake = FakeDecode(lambda request: [])
    async with running_router(tiny_model(), fake, max_attempts=1) as router:
        ids = router.ids(TEXT)
        fake.script = going_on(ids, {at: BROKE for at in range(2, len(ids) + 1, 2)})
        reply = await router.http.post("/generate", json={"text": "hello", "sampling_params": {"max_new_tokens": 99}})
        assert reply.status_code == 200, reply.text
        assert (reply.json()["text"], reply.json()["attempts"]) == (TEXT, 1 + len(ids) // 2)


@pytest.mark.parametrize(
    "refusal",
    [
        QueueFullError("full", leg=Leg.DECODE),
        FencedError("another incarnation", leg=Leg.DECODE, reason="INCARNATION_MISMATCH"),
        UnavailableError("draining", leg=Leg.DECODE, reason="DRAINING"),
        UnavailableError("handed over", leg=Leg.DECODE, reason="HANDOVER"),
        UnavailableError("given back", leg=Leg.DECODE, reason="PREEMPTED"),
        DeadlineError("waited", leg=Leg.DECODE, reason="QUEUE_TIMEOUT", retryable=True),
    ],
)
async def test_refusals_cost_an_open_stream_no_attempt(refusal: PdmeshError) -> None:
    fake = FakeDecode(lambda request: [])
    async with running_router(tiny_model(), fake, max_attempts=1) as router:
        ids = router.ids(TEXT)
        on = going_on(ids, {3: BROKE})
        fake.script = lambda request: [refusal] if 1 < len(fake.requests) < 5 else on(request)
        reply = await router.client.completions.create(model="default", prompt="hello", max_tokens=99)
        assert reply.choices[0].text == TEXT
        assert [r.request.session.attempt for r in fake.requests] == [0, 1, 2, 3, 4]


async def test_an_open_stream_waits_for_a_worker_of_its_fingerprint() -> None:
    """The only one is gone for good. Comments keep the client awake until another registers."""
    fake = FakeDecode(lambda request: [])
    other = FakeDecode(lambda request: [], name="other", parts={**PARTS, "dtype": "bfloat16"}, max_model_len=8)
    rows = [fake, other, prefill_row(), prefill_row(name="prefill-b", parts=other.parts)]
    async with running_router(tiny_model(), *rows, sse_comment_after=0.05) as router:
        ids = router.ids(TEXT)
        fake.script = lambda request: [tokens(0, ids[:3]), asyncio.Event()]
        body = {
            "model": "default",
            "prompt": "a cat is here and there and everywhere",
            "max_tokens": 99,
            "stream": True,
        }
        async with router.http.stream("POST", "/v1/completions", json={**body, "return_token_ids": True}) as response:
            lines = response.aiter_lines()
            seen = [json.loads(x) for x in [(await anext(lines)).removeprefix("data: ") for _ in range(4)] if x]
            assert seen[1]["choices"][0]["token_ids"] == ids[:3]
            await fake.stop()  # its streams are cut, and nobody answers there any more
            async for line in lines:
                if line == ": wait":
                    break
            fresh = FakeDecode(going_on(ids, {}), name="fresh")
            await fresh.start()
            await register(router.bootstrap, fresh, router.digest)
            rest = [json.loads(x.removeprefix("data: ")) async for x in lines if x.startswith("data: {")]
        await fresh.stop()
    assert [t for part in rest for c in part["choices"] for t in c["token_ids"]] == [*ids[3:], EOS]
    assert list(fresh.requests[0].request.emitted_token_ids) == ids[:3]
    assert other.requests == []


async def test_without_a_worker_an_open_stream_ends_at_its_deadline() -> None:
    fake = FakeDecode(lambda request: [])
    async with running_router(tiny_model(), fake, request_timeout=1.0) as router:
        broken = asyncio.Event()
        fake.script = lambda request: [tokens(0, [70]), broken, DIED]
        body = {"model": "default", "prompt": "hello", "max_tokens": 99, "stream": True}
        async with router.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            await anext(lines)
            await fake.stop()
            rest = [line async for line in lines if line.startswith("data: ")]
        error = json.loads(rest[-1].removeprefix("data: "))["error"]
        assert error["type"] == "server_error" and error["code"] in ("breaker_open", "deadline", "connect_failed"), (
            error
        )
        # Before token 1 it is a status, at once.
        response = await router.http.post("/v1/completions", json=body)
        assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1


async def test_counts_and_times_of_a_resumed_sample() -> None:
    first, second = FakeDecode(lambda request: []), FakeDecode(lambda request: [], name="decode-1")
    async with running_router(tiny_model(), first, second) as router:
        ids = router.ids(TEXT)
        script = going_on(ids, {4: DIED})
        first.script = second.script = script
        response = await router.http.post(
            "/v1/completions", json={"model": "default", "prompt": "hello", "max_tokens": 99}
        )
        assert response.status_code == 200
        assert len(first.requests) == len(second.requests) == 1, "the next attempt went to the worker that died"
        text = (await router.http.get("/metrics")).text
        assert 'pdmesh_router_replans_total{leg="decode",reason="ENGINE_DIED"} 1.0' in text
        assert "pdmesh_router_time_to_first_token_seconds_count 1.0" in text
        assert f"pdmesh_router_inter_token_latency_seconds_count {float(len(ids))}" in text
        workers = (await router.http.get("/workers")).json()["workers"]
        assert [w["in_flight"] for w in workers] == [0, 0, 0]
        moves = (await router.http.get(f"/explain/{response.headers['x-request-id']}")).json()["moves"]
        states = [m["to_state"] for m in moves]
        assert states == [
            "QUEUED",
            "PLACED",
            "SENT",
            "FIRST_TOKEN",
            "RESUMING",
            "PLACED",
            "SENT",
            "RESUMED",
            "FINISHED",
        ]


async def test_a_mixed_worker_goes_on_for_itself() -> None:
    fake = FakeDecode(lambda request: [], role=Role.MIXED)
    async with running_router(tiny_model(), fake) as router:
        ids = router.ids(TEXT)
        fake.script = going_on(ids, {2: PeerFailedError("the connection broke", leg=Leg.DECODE)})
        reply = await router.client.completions.create(model="default", prompt="hello", max_tokens=99)
        assert reply.choices[0].text == TEXT
