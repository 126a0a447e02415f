"""What clients get when something is wrong: with the request, with the workers, or with themselves."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from engine_core.types.errors import (
    DeadlineError,
    FencedError,
    InternalError,
    InvalidRequestError,
    Leg,
    PdmeshError,
    PeerFailedError,
    QueueFullError,
)
from engine_core.types.request import Finish, FinishReason, Role
from tests.support.fake_decode import (
    EOS,
    PARTS,
    FakeDecode,
    Harness,
    Script,
    error_of,
    prefill_row,
    running_router,
    says,
    tokens,
    until,
)
from tests.support.models import tiny_model

USER: Any = [{"role": "user", "content": "hello"}]
COMPLETION = {"model": "default", "prompt": "hello", "max_tokens": 50}


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        ({"model": "gpt-9", "prompt": "x"}, 404, "model", "model_not_found"),
        ({"model": "default", "prompt": "x", "temperature": -1}, 400, "temperature", "invalid_request"),
        ({"model": "default", "prompt": "x", "logprobs": 21}, 400, "logprobs", "invalid_request"),
        ({"model": "default", "prompt": [999_999]}, 400, "prompt", "invalid_request"),
        ({"model": "default", "prompt": ["x"] * 300}, 400, "prompt", "invalid_request"),
        ({"model": "default", "prompt": ["x"] * 200, "n": 2}, 400, "n", "invalid_request"),
        ({"model": "default", "prompt": [5] * 4096}, 400, "prompt", "context_length_exceeded"),
        ({"model": "default", "prompt": "x y " * 400_000}, 400, "prompt", "context_length_exceeded"),
        ({"model": "default"}, 400, "prompt", "invalid_request"),
        ({"prompt": "x"}, 400, "model", "invalid_request"),
        ({"model": "", "prompt": "x"}, 400, "model", "invalid_request"),
        ({"model": None, "prompt": "x"}, 400, "model", "invalid_request"),
    ],
)
async def test_bad_completions_start_nothing(body: dict[str, Any], status: int, param: str, code: str) -> None:
    fake = FakeDecode(says([5]))
    async with running_router(tiny_model(), fake) as router:
        for streaming in (False, True):
            response = await router.http.post("/v1/completions", json={**body, "stream": streaming})
            error = error_of(response)
            assert (response.status_code, error["param"], error["code"]) == (status, param, code)
            assert error["type"] == "invalid_request_error"
        assert fake.requests == []
        assert (await router.http.post("/v1/completions", json=COMPLETION)).status_code == 200


async def test_bad_chats_and_bodies() -> None:
    fake = FakeDecode(says([5]))
    async with running_router(tiny_model(), fake, max_body_bytes=100_000) as router:
        post = router.http.post
        error = error_of(await post("/v1/chat/completions", json={"model": "default", "messages": []}))
        assert error["param"] == "messages"
        error = error_of(await post("/v1/chat/completions", json={"messages": USER}))
        assert error["message"].endswith(f"this server has '{Path(router.model).name}' ('default' works for any)")
        long = [{"role": "user", "content": "x " * 20_000}]
        error = error_of(await post("/v1/chat/completions", json={"model": "default", "messages": long}))
        assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
        response = await post("/v1/completions", content=b'{"model": "default", "prompt": "\xff"}')
        assert (response.status_code, error_of(response)["param"]) == (400, "prompt")
        assert (await post("/v1/completions", content=b"nonsense")).status_code == 400
        response = await post(
            "/v1/completions", content=b'{"model": "default", "prompt": "' + b"a" * 10_000_000 + b'"}'
        )
        assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")
        for kind, status in (
            ("text/plain", 415),
            ("application/x-www-form-urlencoded", 415),
            ("APPLICATION/JSON;charset=utf-8", 200),
        ):
            response = await post(
                "/v1/completions", content=b'{"model": "default", "prompt": "a"}', headers={"content-type": kind}
            )
            assert response.status_code == status
            if status == 415:
                error = error_of(response)
                assert (error["param"], error["code"]) == ("content-type", "unsupported_media_type")
        packed = {"content-encoding": "gzip"}
        response = await post("/v1/completions", content=b'{"model": "default", "prompt": "a"}', headers=packed)
        assert (response.status_code, error_of(response)["param"]) == (415, "content-encoding")
        fake.requests.clear()
        assert error_of(await post("/nowhere"))["code"] == "not_found"
        assert error_of(await router.http.get("/v1/completions"))["code"] == "method_not_allowed"
        assert (await router.http.get("/v1/models/other")).status_code == 404
        with pytest.raises(openai.NotFoundError, match="other"):
            await router.client.chat.completions.create(model="other", messages=USER)
        assert fake.requests == []


async def test_a_model_without_a_chat_template(tmp_path: Any) -> None:
    source = tiny_model()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    async with running_router(tmp_path, FakeDecode(says([5]))) as router:
        error = error_of(await router.http.post("/v1/chat/completions", json={"model": "default", "messages": USER}))
        assert error["param"] == "messages" and "chat template" in error["message"]


@pytest.mark.parametrize(
    "failure",
    [
        PeerFailedError("prefill is gone", leg=Leg.PREFILL),
        QueueFullError("full", leg=Leg.DECODE),
        FencedError("another incarnation", leg=Leg.DECODE),
        DeadlineError("waited", leg=Leg.DECODE, reason="QUEUE_TIMEOUT", retryable=True),
        DeadlineError("waited", leg=Leg.PREFILL, reason="QUEUE_TIMEOUT", retryable=True),
    ],
)
async def test_a_failure_before_token_1_is_planned_again_elsewhere(failure: PdmeshError) -> None:
    bad = FakeDecode(lambda request: [failure], name="decode-a")
    good = FakeDecode(says([]), name="decode-b")
    rows = [bad, good, prefill_row(name="prefill-a"), prefill_row(name="prefill-b")]
    async with running_router(tiny_model(), *rows, policy="round_robin") as router:
        good.script = says(router.ids("the"))
        seen: list[tuple[str, str]] = []
        answers = bad, good
        if failure.leg is Leg.PREFILL:  # decode is not blamed: only the prefill must differ
            bad.script = lambda r: says(router.ids("the"))(r) if len(bad.requests) > 1 else [failure]
        reply = await router.client.completions.create(model="default", prompt="hello")
        assert reply.choices[0].text == "the"
        for fake in answers:
            seen += [(fake.name, r.prefill.endpoint) for r in fake.requests]
        attempts = {r.request.session.attempt: r for fake in answers for r in fake.requests}
        assert sorted(attempts) == [0, 1]
        first, second = attempts[0], attempts[1]
        assert first.request.session.room == second.request.session.room
        assert first.request.sampling.seed == second.request.sampling.seed
        assert first.request.arrival_unix_ms == second.request.arrival_unix_ms
        if failure.leg is Leg.PREFILL:
            assert first.prefill.incarnation != second.prefill.incarnation
        else:
            assert len(bad.requests) == len(good.requests) == 1
        text = (await router.http.get("/metrics")).text
        assert f'pdmesh_router_replans_total{{leg="{failure.leg.value}",reason="{failure.reason}"}} 1.0' in text


@pytest.mark.parametrize(
    ("failure", "status", "code", "attempts"),
    [
        (PeerFailedError("prefill is gone", leg=Leg.PREFILL), 503, "peer_failed", 3),
        (QueueFullError("full", leg=Leg.DECODE, retry_after=7), 429, "queue_full", 3),
        (InternalError("a bug", leg=Leg.DECODE), 500, "internal", 1),
        (InvalidRequestError("bad", field="request.sampling.top_k"), 400, "invalid_request", 1),
    ],
)
async def test_when_no_attempt_helps(failure: PdmeshError, status: int, code: str, attempts: int) -> None:
    fake = FakeDecode(lambda request: [failure])
    async with running_router(tiny_model(), fake, max_attempts=3) as router:
        for streaming in (False, True):
            fake.requests.clear()
            body = {**COMPLETION, "stream": streaming}
            response = await router.http.post("/v1/completions", json=body, headers={"x-request-id": "r"})
            error = error_of(response)
            assert (response.status_code, error["code"]) == (status, code)
            assert len(fake.requests) == attempts
            assert error["param"] == ("top_k" if status == 400 else None)
            assert ("retry-after" in response.headers) == (status in (429, 503))
            if failure.retry_after:
                assert response.headers["retry-after"] == "7"
        moves = (await router.http.get("/explain/r")).json()["moves"]
        assert moves[-1]["to_state"] == "FAILED" and failure.message in moves[-1]["reason"]


async def test_preempted_requests_cost_no_attempt() -> None:
    fake = FakeDecode(says([5]))
    async with running_router(tiny_model(), fake, max_attempts=1) as router:
        preempted = tokens(0, [], Finish(FinishReason.PREEMPTED))
        fake.script = lambda r: [preempted] if len(fake.requests) < 3 else says(router.ids("the"))(r)
        reply = await router.client.completions.create(model="default", prompt="hello")
        assert reply.choices[0].text == "the"
        assert [r.request.session.attempt for r in fake.requests] == [0, 1, 2]


def breaks_after(ids: list[int]) -> Script:
    """Gives these tokens to a new request, and nothing to one that goes on from them."""
    failure = PeerFailedError("prefill is gone", leg=Leg.PREFILL)
    return lambda request: [failure] if request.request.emitted_token_ids else [tokens(0, ids), failure]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
async def test_an_output_that_cannot_go_on_ends_in_an_error_event(path: str) -> None:
    fake = FakeDecode(says([5]))
    async with running_router(tiny_model(), fake, max_attempts=1) as router:
        fake.script = breaks_after(router.ids("the"))
        chat = {"model": "default", "messages": USER}
        body = chat if "chat" in path else {"text": "x"} if path == "/generate" else COMPLETION
        response = await router.http.post(path, json={**body, "stream": True})
        assert response.status_code == 200
        blocks = response.text.strip().split("\n\n")
        error = json.loads(blocks[-1].removeprefix("data: "))["error"]
        assert (error["code"], error["message"]) == ("peer_failed", "prefill is gone")
        assert "the" in response.text
        assert [len(r.request.emitted_token_ids) for r in fake.requests] == [0, len(router.ids("the"))]
        assert (await router.http.post(path, json=body)).status_code == 503
        metrics = (await router.http.get("/metrics")).text
        assert f'pdmesh_router_requests_total{{end="broken",path="{path}"}} 1.0' in metrics
        assert f'pdmesh_router_requests_total{{end="unavailable",path="{path}"}} 1.0' in metrics


async def test_the_sdk_raises_on_an_error_event() -> None:
    async with running_router(tiny_model(), FakeDecode(breaks_after([70])), max_attempts=1) as router:
        stream = await router.client.chat.completions.create(model="default", messages=USER, stream=True)
        with pytest.raises(openai.APIError, match="prefill is gone"):
            async for _ in stream:
                pass


@pytest.mark.parametrize(("second", "code"), [(2, "token_gap"), (0, "token_overlap")])
async def test_gaps_and_overlaps_are_caught(second: int, code: str) -> None:
    fake = FakeDecode(lambda request: [tokens(0, [70]), tokens(second, [71, EOS], Finish(FinishReason.STOP))])
    async with running_router(tiny_model(), fake) as router:
        response = await router.http.post("/v1/completions", json=COMPLETION)
        assert (response.status_code, error_of(response)["code"]) == (500, code)


async def test_a_stream_that_ends_without_an_end_is_no_output() -> None:
    fake = FakeDecode(lambda request: [] if request.request.emitted_token_ids else [tokens(0, [70])])
    async with running_router(tiny_model(), fake, max_attempts=1) as router:
        assert (await router.http.post("/v1/completions", json=COMPLETION)).status_code == 503
        assert len(fake.requests) == 2


async def _open(router: Harness, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = router.endpoint.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("tokens_first", [0, 2])
async def test_a_client_that_goes_away_cancels_the_call(streaming: bool, tokens_first: int) -> None:
    never = asyncio.Event()
    fake = FakeDecode(lambda request: [*(tokens(i, [70]) for i in range(tokens_first)), never])
    async with running_router(tiny_model(), fake) as router:
        _, writer = await _open(router, {**COMPLETION, "stream": streaming})
        await asyncio.wait_for(fake.arrived.wait(), 10)
        writer.close()
        await asyncio.wait_for(fake.cancelled.wait(), 10)
        await until(lambda: fake.open == 0)
        text = (await router.http.get("/metrics")).text
        assert "pdmesh_router_in_flight 0.0" in text
        assert 'pdmesh_router_requests_total{end="cancelled",path="/v1/completions"} 1.0' in text
        rows = (await router.http.get("/workers")).json()["workers"]
        assert [r["in_flight"] for r in rows] == [0, 0]


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        (b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", True),
        (b"00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01", False),
        (b"\xff\xfe", False),
        (b"x" * 500, False),
    ],
)
async def test_a_trace_context_is_passed_on_if_it_is_one(given: bytes, passed: bool) -> None:
    fake = FakeDecode(says([70]))
    async with running_router(tiny_model(), fake) as router:
        response = await router.http.post("/v1/completions", json=COMPLETION, headers={b"traceparent": given})
        assert response.status_code == 200
        assert ("traceparent" in fake.metadata[0]) is passed


async def test_a_client_that_never_reads_gives_its_place_back() -> None:
    fake = FakeDecode(lambda request: (tokens(4000 * i, [70] * 4000) for i in itertools.count()))
    async with running_router(tiny_model(), fake, client_stall_timeout=0.5) as router:
        _, writer = await _open(router, {**COMPLETION, "stream": True, "return_token_ids": True})
        await asyncio.wait_for(fake.arrived.wait(), 10)
        await asyncio.wait_for(fake.cancelled.wait(), 20)
        text = (await router.http.get("/metrics")).text
        assert "pdmesh_router_in_flight 0.0" in text
        assert 'pdmesh_router_requests_total{end="cancelled",path="/v1/completions"} 1.0' in text
        writer.close()


async def test_a_router_ends_though_a_client_never_reads() -> None:
    fake = FakeDecode(lambda request: (tokens(4000 * i, [70] * 4000) for i in itertools.count()))
    async with running_router(tiny_model(), fake, drain_timeout=0.5) as router:
        _, writer = await _open(router, {**COMPLETION, "stream": True, "return_token_ids": True})
        await asyncio.wait_for(fake.arrived.wait(), 10)
    await asyncio.wait_for(fake.cancelled.wait(), 10)
    writer.close()


async def test_queues_are_bounded_and_a_queued_client_may_leave() -> None:
    go = asyncio.Event()
    fake = FakeDecode(lambda request: [go, *says([70])(request)])
    async with running_router(tiny_model(), fake, max_in_flight=1, max_queued=1) as router:
        first = asyncio.ensure_future(router.http.post("/v1/completions", json=COMPLETION))
        await asyncio.wait_for(fake.arrived.wait(), 10)
        _, waiting = await _open(router, COMPLETION)

        async def queued() -> str:
            return (await router.http.get("/metrics")).text

        async with asyncio.timeout(10):
            while "pdmesh_router_queued 1.0" not in await queued():
                pass
        for streaming in (False, True):
            response = await router.http.post("/v1/completions", json={**COMPLETION, "stream": streaming})
            assert (response.status_code, error_of(response)["code"]) == (429, "queue_full")
            assert error_of(response)["type"] == "rate_limit_error"
            assert int(response.headers["retry-after"]) >= 1
        waiting.close()
        async with asyncio.timeout(10):
            while "pdmesh_router_queued 0.0" not in await queued():
                pass
        go.set()
        assert (await first).status_code == 200
        assert len(fake.requests) == 1


async def test_comments_keep_a_waiting_stream_awake() -> None:
    go = asyncio.Event()
    fake = FakeDecode(lambda request: [go, *says([70])(request)])
    async with running_router(tiny_model(), fake, sse_comment_after=0.02) as router:
        async with router.http.stream("POST", "/v1/completions", json={**COMPLETION, "stream": True}) as response:
            assert response.status_code == 200
            lines = response.aiter_lines()
            assert await anext(lines) == ": wait"
            go.set()
            rest = [line async for line in lines if line and line != ": wait"]
        assert rest[-1] == "data: [DONE]"
        # A failure after the comment can only be an event.
        go.clear()
        fake.script = lambda request: [go, InternalError("a bug")]
        async with router.http.stream("POST", "/v1/completions", json={**COMPLETION, "stream": True}) as response:
            lines = response.aiter_lines()
            assert await anext(lines) == ": wait"
            go.set()
            rest = [line async for line in lines if line and line != ": wait"]
        assert '"code":"internal"' in rest[0] and rest[1:] == []


async def test_mismatched_workers_are_named() -> None:
    other = {**PARTS, "dtype": "bfloat16"}
    async with running_router(tiny_model(), FakeDecode(says([5]), parts=other)) as router:
        response = await router.http.post("/v1/completions", json=COMPLETION)
        error = error_of(response)
        assert (response.status_code, error["param"], error["code"]) == (503, "dtype", "fingerprint_mismatch")
        assert "float32 at prefill-0 and bfloat16 at decode-0" in error["message"]
        assert "retry-after" in response.headers
        assert (await router.http.get("/readiness")).status_code == 503


async def test_workers_of_another_tokenizer_are_not_used() -> None:
    fake = FakeDecode(says([5]), role=Role.MIXED, digest="another")
    async with running_router(tiny_model(), fake) as router:
        error = error_of(await router.http.post("/v1/completions", json=COMPLETION))
        assert (error["param"], error["code"]) == ("tokenizer", "fingerprint_mismatch")
        assert fake.requests == []


async def test_without_workers() -> None:
    async with running_router(tiny_model()) as router:
        response = await router.http.post("/v1/completions", json={**COMPLETION, "stream": True})
        assert (response.status_code, error_of(response)["code"]) == (503, "no_worker")
        assert (
            await router.http.post("/v1/completions", json={"model": "default", "prompt": [5] * 5000})
        ).status_code == 400


async def test_the_deadline_ends_a_request() -> None:
    fake = FakeDecode(lambda request: [asyncio.Event()])
    async with running_router(tiny_model(), fake, request_timeout=0.3) as router:
        response = await router.http.post("/v1/completions", json=COMPLETION)
        assert (response.status_code, error_of(response)["code"]) == (504, "deadline")
        await asyncio.wait_for(fake.cancelled.wait(), 10)


async def test_draining_lets_streams_end() -> None:
    go = asyncio.Event()
    fake = FakeDecode(lambda request: [tokens(0, [70]), go, tokens(1, [EOS], Finish(FinishReason.STOP))])
    async with running_router(tiny_model(), fake) as router:
        async with router.http.stream("POST", "/v1/completions", json={**COMPLETION, "stream": True}) as response:
            lines = response.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            router.stop_router.draining.set()
            host, port = router.endpoint.split(":")

            async def refused() -> bool:
                try:
                    _, writer = await asyncio.open_connection(host, int(port))
                except OSError:
                    return True
                writer.close()
                return False

            async with asyncio.timeout(10):
                while not await refused():  # noqa: ASYNC110  (the kernel tells nobody)
                    await asyncio.sleep(0.01)
            go.set()
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
