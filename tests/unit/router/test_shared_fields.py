"""What every API takes alike: request ids, the client's own time, whom a request is from, and what has no effect."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from tests.support.asking import until_async
from tests.support.fake_decode import FakeDecode, Harness, running_router, says, until
from tests.support.models import tiny_model

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/generate")
ID_IN_REPLY = {
    "/v1/completions": ("id", "cmpl-"),
    "/v1/chat/completions": ("id", "chatcmpl-"),
    "/v1/responses": ("id", "resp_"),
    "/v1/messages": ("id", "msg_"),
    "/generate": ("request_id", ""),
}


def asked(path: str, words: str = "hello", **more: Any) -> dict[str, Any]:
    """A request for a few tokens."""
    chat = {"messages": [{"role": "user", "content": words}]}
    body: dict[str, Any] = {
        "/v1/completions": {"prompt": words, "max_tokens": 4},
        "/v1/chat/completions": {**chat, "max_tokens": 4},
        "/v1/responses": {"input": words, "max_output_tokens": 4},
        "/v1/messages": {**chat, "max_tokens": 4},
        "/generate": {"text": words, "max_tokens": 4},
    }[path]
    return {"model": "default", **body, **more}


def said_by(path: str, name: str) -> dict[str, Any]:
    """How each API's clients say whom a request is from."""
    others: dict[str, dict[str, Any]] = {
        "/v1/responses": {"safety_identifier": name, "user": "nobody"},
        "/v1/messages": {"metadata": {"user_id": name}},
    }
    return others.get(path, {"user": name})


def kind_of(path: str, response: httpx.Response) -> str:
    """The type of an error, in the form of its API."""
    body = response.json()
    assert (body.get("type") == "error") is (path == "/v1/messages")
    return str(body["error"]["type"])


async def test_request_ids_come_back_and_are_part_of_the_reply() -> None:
    async with running_router(tiny_model(), FakeDecode(says([5, 6]))) as router:
        for path in PATHS:
            name, prefix = ID_IN_REPLY[path]
            for given, taken in (("trace:7/a_b.c+d=@e-f", True), ("a" * 128, True), ("a b", False), ("a" * 129, False)):
                reply = await router.http.post(path, json=asked(path), headers={"x-request-id": given})
                own = reply.headers["x-request-id"]
                assert reply.status_code == 200 and (own == given) is taken
                assert reply.json()[name] == prefix + own
            stream = await router.http.post(path, json=asked(path, stream=True), headers={"x-request-id": "s1"})
            assert stream.headers["x-request-id"] == "s1" and f'"{prefix}s1"' in stream.text
            refused = await router.http.post(path, json=asked(path, temperature=9), headers={"x-request-id": "r1"})
            assert (refused.status_code, refused.headers["x-request-id"]) == (400, "r1")


async def test_the_clients_own_time_ends_the_request() -> None:
    never = asyncio.Event()
    fake = FakeDecode(lambda _request: iter([never]))
    async with running_router(tiny_model(), fake) as router:
        for path in PATHS:
            for body, headers in (
                (asked(path, timeout=0.05), {}),
                (asked(path, timeout=50), {"x-request-timeout": "0.05"}),
                (asked(path, timeout=0.05, stream=True), {}),
            ):
                reply = await router.http.post(path, json=body, headers=headers)
                kind = "timeout_error" if path == "/v1/messages" else "invalid_request_error"
                assert (reply.status_code, kind_of(path, reply)) == (408, kind)
                assert "0.05 s that the client allows" in reply.json()["error"]["message"]
            for wrong in ("0", "-1", "soon", "86401"):
                reply = await router.http.post(path, json=asked(path), headers={"x-request-timeout": wrong})
                assert reply.status_code == 400 and reply.json()["error"]["message"].startswith("x-request-timeout: ")
            reply = await router.http.post(path, json=asked(path, timeout=0))
            assert reply.status_code == 400 and reply.json()["error"]["message"].startswith("timeout: ")
        await until(lambda: fake.open == 0)


async def test_queues_are_fair_between_users() -> None:
    fake = FakeDecode(says([]))
    words = ["one", "two", "three", "four"]
    async with running_router(tiny_model(), fake, max_in_flight=1) as router:
        answer = says(router.ids("so"))
        for path in PATHS:
            go, asking = asyncio.Event(), []
            fake.requests.clear()
            fake.script = lambda request, go=go: iter([go, *answer(request)])  # type: ignore[misc]
            for i, (word, user) in enumerate(zip(words, "aaab", strict=True)):
                body = asked(path, word, **said_by(path, user))
                asking.append(asyncio.ensure_future(router.http.post(path, json=body)))
                await until_async(lambda i=i: waits(router, i), 30.0)  # type: ignore[misc]
            go.set()
            assert [(await one).status_code for one in asking] == [200] * 4
            served = [router.tokenizer.decode(list(request.request.prompt_token_ids)) for request in fake.requests]
            order = [next(word for word in words if word in text) for text in served]
            assert order[0] == "one" and order.index("four") < order.index("three"), (path, order)


async def waits(router: Harness, count: int) -> bool:
    """Whether so many requests wait in the router, and one runs."""
    lines = (await router.http.get("/metrics")).text.splitlines()
    return {f"pdmesh_router_queued {count}.0", "pdmesh_router_in_flight 1.0"} <= set(lines)


async def test_what_is_taken_without_an_effect() -> None:
    """Clients send these by themselves, the SDKs' headers among them."""
    ignored: dict[str, Any] = {"store": True, "service_tier": "flex", "metadata": {"user_id": "u"}, "unknown": {"a": 1}}
    headers = {"x-stainless-read-timeout": "0.001", "x-stainless-timeout": "1", "x-stainless-retry-count": "2",
               "anthropic-version": "2023-06-01", "anthropic-beta": "x", "openai-organization": "o"}  # fmt: skip
    fake = FakeDecode(says([5, 6]))
    async with running_router(tiny_model(), fake) as router:
        for path in PATHS:
            plain, more = asked(path, seed=3, temperature=1.0), asked(path, seed=3, temperature=1.0, **ignored)
            assert (await router.http.post(path, json=plain)).status_code == 200
            reply = await router.http.post(path, json=more, headers=headers)
            assert reply.status_code == 200, reply.text
            first, second = fake.requests[-2:]
            assert first.request.sampling == second.request.sampling
            assert list(first.request.prompt_token_ids) == list(second.request.prompt_token_ids)
            said = reply.json()
            if path == "/v1/responses":
                assert (said["store"], said["service_tier"], said["metadata"]) == (False, "default", {"user_id": "u"})
            elif path == "/v1/chat/completions":
                assert said["service_tier"] == "default"
            refused: dict[str, Any] = {"store": "x", "service_tier": 5, "metadata": "x"}
            for name, wrong in refused.items():
                reply = await router.http.post(path, json=asked(path) | {name: wrong})
                assert reply.status_code == 400 and reply.json()["error"]["message"].startswith(f"{name}: ")
