"""What clients send wrong: each is a 4xx that names the field, and no worker hears of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.support.bad_requests import (
    ABSURD,
    BODIES,
    CHAT,
    COMPLETIONS,
    GENERATE,
    GENERATES,
    GOOD,
    MESSAGES,
    PROMPTS,
    ROUTES,
    VOCABULARY,
    Wire,
    head,
)
from tests.support.mesh import Mesh
from tests.support.raw import TIMEOUT, unharmed

pytestmark = pytest.mark.asyncio(loop_scope="session")

POOL_TOKENS = 256
"""Of small_mesh."""
INNER = {
    '{"include_usage": "yes"}': ".include_usage",
    '{"type": "xml"}': ".type",
    '{"choice": []}': ".choice",
}
"""Where a value of an object is at fault, by the object."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def http(small_mesh: Mesh) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=small_mesh.url, timeout=60.0, trust_env=False) as client:
        yield client


def told(response: httpx.Response) -> tuple[int, str | None, str]:
    """Status, param and code; the body must be OpenAI's, and its message name the param."""
    body = response.json()
    assert list(body) == ["error"] and set(body["error"]) == {"message", "type", "param", "code"}, body
    error = body["error"]
    assert error["type"] == "invalid_request_error", body
    if error["code"] == "invalid_request":
        assert (error["param"] or "") in error["message"], body
    return response.status_code, error["param"], error["code"]


async def post(http: httpx.AsyncClient, path: str, body: dict[str, Any] | bytes) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await http.post(path, content=content, headers={"content-type": "application/json"})


# ---- fields -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ROUTES)
async def test_absurd_values_are_refused_by_name(small_mesh: Mesh, http: httpx.AsyncClient, path: str) -> None:
    wrong = []
    async with unharmed(small_mesh, untouched=True):
        for i, (name, value) in enumerate((name, value) for name, values in ABSURD.items() for value in values):
            stream = i % 2 == 1
            answer = told(await post(http, path, {**ROUTES[path], "stream": stream, name: value}))
            inner = INNER.get(json.dumps(value), "")
            if answer != (400, name + inner, "invalid_request"):
                wrong.append((name, value, stream, answer))
        for value in ("yes", 1, []):
            assert told(await post(http, path, {**ROUTES[path], "stream": value}))[:2] == (400, "stream")
        answer = told(await post(http, path, {**ROUTES[path], "model": "gpt-9"}))
        assert answer == (404, "model", "model_not_found")
        usage = {**ROUTES[path], "stream_options": {"include_usage": True}}
        assert told(await post(http, path, usage)) == (400, "stream_options", "invalid_request")
        least = {**ROUTES[path], "max_tokens": 2, "min_tokens": 3}
        assert told(await post(http, path, least)) == (400, "min_tokens", "invalid_request")
    assert not wrong


async def test_prompts_that_are_none(small_mesh: Mesh, http: httpx.AsyncClient) -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        (COMPLETIONS, {"model": "default", "prompt": prompt}, "prompt") for prompt in PROMPTS
    ]
    cases += [(COMPLETIONS, {"model": "default"}, "prompt"), (CHAT, {"model": "default"}, "messages")]
    cases += [(COMPLETIONS, {"model": "default", "prompt": ["a"] * 100, "n": 100}, "n")]
    cases += [(CHAT, {"model": "default", "messages": messages}, field) for messages, field in MESSAGES]
    cases += [(CHAT, {**ROUTES[CHAT], "chat_template_kwargs": [1]}, "chat_template_kwargs")]
    cases += [(CHAT, {**ROUTES[CHAT], "max_completion_tokens": 0}, "max_completion_tokens")]
    cases += [(GENERATE, body, field) for body, field in GENERATES]
    cases += [("/tokenize", {}, "prompt"), ("/tokenize", {"messages": []}, "messages")]
    cases += [("/detokenize", {"tokens": [-1]}, "tokens"), ("/detokenize", {"tokens": [VOCABULARY]}, "tokens")]
    wrong = []
    async with unharmed(small_mesh, untouched=True):
        for path, body, field in cases:
            for stream in (False, True):
                answer = told(await post(http, path, {**body, "stream": stream}))
                if answer != (400, field, "invalid_request"):
                    wrong.append((path, body, stream, answer))
    assert not wrong


async def test_prompts_that_are_too_long(small_mesh: Mesh, http: httpx.AsyncClient) -> None:
    long: list[tuple[str, dict[str, Any], str]] = [
        (COMPLETIONS, {"model": "default", "prompt": [5] * POOL_TOKENS}, "prompt"),
        (COMPLETIONS, {"model": "default", "prompt": "word " * POOL_TOKENS}, "prompt"),
        (COMPLETIONS, {"model": "default", "prompt": ["fits", [5] * 100_000]}, "prompt"),
        (CHAT, {"model": "default", "messages": [{"role": "user", "content": "word " * POOL_TOKENS}]}, "messages"),
        (GENERATE, {"token_ids": [5] * POOL_TOKENS}, "token_ids"),
        (COMPLETIONS, {"model": "default", "prompt": "a " * 3_500_000}, "prompt"),
    ]
    async with unharmed(small_mesh, untouched=True):
        for path, body, field in long:
            response = await post(http, path, body)
            assert told(response) == (400, field, "context_length_exceeded")
            assert f"maximum context length is {POOL_TOKENS} tokens" in response.json()["error"]["message"]


# ---- bodies -------------------------------------------------------------------------------------------


async def test_bodies_that_are_no_requests(small_mesh: Mesh, http: httpx.AsyncClient) -> None:
    async with unharmed(small_mesh, untouched=True):
        for body, field in BODIES:
            response = await post(http, COMPLETIONS, body)
            assert told(response) == (400, field, "invalid_request"), body[:80]
        chat = b'{"model": "default", "messages": [{"role": "user", "content": "a\\udfff"}]}'
        assert told(await post(http, CHAT, chat)) == (400, "messages[0].content", "invalid_request")
        for path in ROUTES:
            response = await post(http, path, b'{"model": "default", "prompt": "' + b"a" * 10_000_000 + b'"}')
            assert told(response) == (413, None, "body_too_large")
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "x"):
            response = await http.post(
                COMPLETIONS, content=b'{"model": "default", "prompt": "hi"}', headers={"content-type": kind}
            )
            assert told(response) == (415, "content-type", "unsupported_media_type")


async def test_routes_and_methods(small_mesh: Mesh, http: httpx.AsyncClient) -> None:
    async with unharmed(small_mesh, untouched=True):
        for path in (*ROUTES, "/tokenize", "/detokenize"):
            for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS"):
                response = await http.request(method, path)
                assert told(response) == (405, None, "method_not_allowed")
                assert response.headers["allow"] == "POST"
            assert (await http.head(path)).status_code == 405
        for path in ("/v1/models", "/health", "/readiness", "/metrics", "/workers", "/version"):
            assert told(await http.post(path, json={})) == (405, None, "method_not_allowed")
        for path in ("/", "/nope", "/v1/", "/v1/embeddings", "/v2/completions", "/%ff%00", "/../etc/passwd"):
            for method in ("GET", "POST"):
                assert told(await http.request(method, path)) == (404, None, "not_found")
        assert told(await http.get("/v1/models/gpt-9")) == (404, "model", "model_not_found")
        assert told(await http.get("/explain/nobody")) == (404, "request_id", "not_found")
        odd = await http.post(
            COMPLETIONS, json={"model": "default", "prompt": []}, headers={"x-request-id": "a b\tc" * 100}
        )
        assert told(odd)[0] == 400 and len(odd.headers["x-request-id"]) == 32  # a new one
        own = await http.post(COMPLETIONS, json={"model": "default", "prompt": []}, headers={"x-request-id": "mine-1"})
        assert own.headers["x-request-id"] == "mine-1"


# ---- limits that are no errors ------------------------------------------------------------------------


async def test_token_limits(small_mesh: Mesh, http: httpx.AsyncClient) -> None:
    async with unharmed(small_mesh):
        for path, body in ROUTES.items():
            data = (await post(http, path, {**body, "max_tokens": 65535, "ignore_eos": True, "temperature": 0})).json()
            one = data if path == GENERATE else data["choices"][0]
            assert one["finish_reason"] == "length"
            assert data["usage"]["prompt_tokens"] + data["usage"]["completion_tokens"] == POOL_TOKENS
            data = (await post(http, path, {**body, "max_tokens": 1, "ignore_eos": True})).json()
            one = data if path == GENERATE else data["choices"][0]
            assert (one["finish_reason"], data["usage"]["completion_tokens"]) == ("length", 1)
        twice = (
            b'{"model": "default", "prompt": "hi", "max_tokens": 0, "max_tokens": 1, "unknown": '
            + b"[" * 900
            + b"]" * 900
            + b"}"
        )
        assert (await post(http, COMPLETIONS, twice)).json()["usage"]["completion_tokens"] == 1
        full = {"model": "default", "prompt": [5] * (POOL_TOKENS - 1), "max_tokens": 9}
        data = (await post(http, COMPLETIONS, full)).json()
        assert (data["choices"][0]["finish_reason"], data["usage"]["completion_tokens"]) in (("length", 1), ("stop", 1))


# ---- HTTP by hand -------------------------------------------------------------------------------------


async def test_one_connection_survives_errors_and_slow_bodies(small_mesh: Mesh) -> None:
    async with unharmed(small_mesh), Wire(small_mesh) as wire:
        await wire.send(head(length=5), b"hello")
        status, _, body = await wire.answer()
        assert (status, json.loads(body)["error"]["code"]) == (400, "invalid_request")
        await wire.send(head(length=len(GOOD)), *(GOOD[i : i + 7] for i in range(0, len(GOOD), 7)))
        assert (await wire.answer())[0] == 200
        chunks = [b"%x\r\n%s\r\n" % (len(GOOD[i : i + 9]), GOOD[i : i + 9]) for i in range(0, len(GOOD), 9)]
        await wire.send(head("Transfer-Encoding: chunked"), *chunks, b"0\r\n\r\n")
        assert (await wire.answer())[0] == 200
        await wire.send(head("Expect: 100-continue", length=len(GOOD)))
        assert (await wire.answer())[0] == 100
        await wire.send(GOOD)
        status, _, body = await wire.answer()
        assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 1)
        await wire.send(b"GET /nope HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await wire.answer())[0] == 404
        await wire.send(head(length=9_000_000), b"a" * 9_000_000)
        status, headers, body = await wire.answer()
        assert (status, headers["connection"], json.loads(body)["error"]["code"]) == (413, "close", "body_too_large")


async def test_clients_that_go_away_early_start_nothing(small_mesh: Mesh, http: httpx.AsyncClient) -> None:
    async def cancelled() -> float:
        lines = (await http.get("/metrics")).text.splitlines()
        wanted = f'pdmesh_router_requests_total{{end="cancelled",path="{COMPLETIONS}"}} '
        return sum(float(line.removeprefix(wanted)) for line in lines if line.startswith(wanted))

    begun = await cancelled()
    async with unharmed(small_mesh, untouched=True):
        for parts in (
            [head(length=100), GOOD],
            [head("Transfer-Encoding: chunked"), b"5\r\nhel"],
            [head(length=5)[:40]],
            [],
        ):
            async with Wire(small_mesh) as wire:
                await wire.send(*parts)
        async with asyncio.timeout(TIMEOUT):
            while await cancelled() < begun + 2:  # noqa: ASYNC110  # the router has no event for us
                await asyncio.sleep(0.02)
        for garbage in (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
            b"HELO x\r\n\r\n",
            head(length=-5),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        ):
            async with Wire(small_mesh) as wire:
                await wire.send(garbage)
                assert (await wire.answer())[0] == 400
