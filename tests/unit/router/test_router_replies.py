"""What clients get: whole replies and streams, through the openai SDK, HTTP and gRPC, from a scripted worker."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from engine_core.types.request import Role
from tests.support.fake_decode import EOS, FakeDecode, Harness, register, running_router, says, stream, tokens
from tests.support.models import tiny_model

TEXT = "the user asks in the system: naïve 🦜 日本, and so on"
USER: Any = [{"role": "user", "content": "hello"}]


def speak(router: Harness, fake: FakeDecode, text: str = TEXT, per_message: int = 1) -> list[int]:
    ids = router.ids(text)
    fake.script = says(ids, per_message=per_message)
    return ids


async def events(router: Harness, path: str, body: dict[str, Any]) -> list[Any]:
    """Data of the server-sent events, [DONE] included."""
    response = await router.http.post(path, json=body)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-1] == ""
    data = [b.removeprefix("data: ") for b in blocks[:-1]]
    return [d if d == "[DONE]" else json.loads(d) for d in data]


async def test_whole_replies() -> None:
    fake = FakeDecode(says([]))
    async with running_router(tiny_model(), fake, served_model_name=("tiny", "alias")) as router:
        ids = speak(router, fake)
        done = await router.client.completions.create(model="tiny", prompt="hello", max_tokens=100)
        assert (done.choices[0].text, done.choices[0].finish_reason, done.model) == (TEXT, "stop", "tiny")
        assert done.usage is not None and done.usage.prompt_tokens_details is not None
        assert done.usage.prompt_tokens == len(router.ids("hello"))
        assert done.usage.completion_tokens == len(ids) + 1
        assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
        assert done.usage.prompt_tokens_details.cached_tokens == 3
        cut = await router.client.completions.create(model="alias", prompt="hello", max_tokens=4)
        assert (cut.choices[0].text, cut.choices[0].finish_reason) == (router.tokenizer.decode(ids[:4]), "length")
        chat = await router.client.chat.completions.create(model="default", messages=USER, max_completion_tokens=100)
        assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == (TEXT, "stop")
        assert chat.choices[0].message.role == "assistant"
        rendered = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        assert list(fake.requests[-1].request.prompt_token_ids) == router.ids(rendered)
        assert [m.id for m in (await router.client.models.list()).data] == ["tiny", "alias"]
        assert (await router.client.models.retrieve("alias")).id == "alias"


@pytest.mark.parametrize("per_message", [1, 3, 50])
async def test_streams(per_message: int) -> None:
    fake = FakeDecode(says([]))
    async with running_router(tiny_model(), fake) as router:
        ids = speak(router, fake, per_message=per_message)
        options: Any = {"include_usage": True}
        parts = [
            part
            async for part in await router.client.chat.completions.create(
                model="default", messages=USER, stream=True, stream_options=options
            )
        ]
        assert parts[0].choices[0].delta.role == "assistant"
        assert "".join(p.choices[0].delta.content or "" for p in parts[:-1]) == TEXT
        assert all("\ufffd" not in (p.choices[0].delta.content or "") for p in parts[:-1])
        assert [p.choices[0].finish_reason for p in parts[:-1]] == [None] * (len(parts) - 2) + ["stop"]
        assert parts[-1].choices == [] and parts[-1].usage is not None
        assert parts[-1].usage.completion_tokens == len(ids) + 1
        assert all(p.usage is None for p in parts[:-1])

        plain = await events(
            router, "/v1/completions", {"model": "default", "prompt": "hello", "stream": True, "max_tokens": 99}
        )
        assert plain[-1] == "[DONE]"
        assert all(len(p["choices"]) == 1 and "usage" not in p for p in plain[:-1])
        assert "".join(p["choices"][0]["text"] for p in plain[:-1]) == TEXT


async def test_usage_with_every_chunk() -> None:
    fake = FakeDecode(says([]))
    async with running_router(tiny_model(), fake) as router:
        speak(router, fake, "the user")
        body = {
            "model": "default",
            "prompt": "hello",
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        parts = await events(router, "/v1/completions", body)
        counts = [p["usage"]["completion_tokens"] for p in parts[:-1]]
        assert counts == sorted(counts) and counts[0] == 1
        assert counts[-1] == counts[-2] == len(router.ids("the user")) + 1
        assert parts[-2]["choices"] == []


async def test_token_ids_on_request() -> None:
    fake = FakeDecode(says([]))
    async with running_router(tiny_model(), fake) as router:
        ids = [*speak(router, fake, "the 🦜"), EOS]
        prompt = router.ids("hello")
        body = {"model": "default", "prompt": "hello", "return_token_ids": True}
        whole = (await router.http.post("/v1/completions", json=body)).json()["choices"][0]
        assert (whole["token_ids"], whole["prompt_token_ids"]) == (ids, prompt)
        parts = (await events(router, "/v1/completions", {**body, "stream": True}))[:-1]
        choices = [p["choices"][0] for p in parts]
        assert sum((c["token_ids"] for c in choices), []) == ids
        assert choices[0]["prompt_token_ids"] == prompt
        chat = {"model": "default", "messages": USER, "return_token_ids": True}
        reply = (await router.http.post("/v1/chat/completions", json=chat)).json()
        assert reply["choices"][0]["token_ids"] == ids
        assert reply["prompt_token_ids"] == list(fake.requests[-1].request.prompt_token_ids)
        parts = (await events(router, "/v1/chat/completions", {**chat, "stream": True}))[:-1]
        assert parts[0]["prompt_token_ids"] == reply["prompt_token_ids"]
        assert sum((p["choices"][0].get("token_ids", []) for p in parts), []) == ids


@pytest.mark.parametrize("streaming", [False, True])
async def test_stop_strings_end_the_call(streaming: bool) -> None:
    fake = FakeDecode(says([]))
    async with running_router(tiny_model(), fake) as router:
        ids = router.ids("one two STOP three")
        never = asyncio.Event()

        def script(request: Any) -> Any:
            for i, token_id in enumerate(ids):
                yield tokens(i, [token_id])
            yield never

        fake.script = script
        body = {
            "model": "default",
            "prompt": "hello",
            "stop": ["nowhere", "o STOP"],
            "max_tokens": 99,
            "return_token_ids": True,
        }
        if streaming:
            parts = await events(router, "/v1/completions", {**body, "stream": True})
            choices = [p["choices"][0] for p in parts[:-1]]
            text, last = "".join(c["text"] for c in choices), choices[-1]
        else:
            last = (await router.http.post("/v1/completions", json=body)).json()["choices"][0]
            text = last["text"]
        assert (text, last["finish_reason"], last["stop_reason"]) == ("one tw", "stop", "o STOP")
        await asyncio.wait_for(fake.cancelled.wait(), 5)


async def test_a_stop_token_is_no_text() -> None:
    fake = FakeDecode(says([]))
    async with running_router(tiny_model(), fake) as router:
        the, end = router.ids("the")[0], router.ids("z")[0]
        fake.script = lambda request: stream([the, end], 2)
        body = {"model": "default", "prompt": "hello", "stop_token_ids": [end], "return_token_ids": True}
        choice = (await router.http.post("/v1/completions", json=body)).json()["choices"][0]
        assert (choice["text"], choice["token_ids"]) == ("the", [the, end])
        assert list(fake.requests[0].request.sampling.stop_token_ids) == [end]


async def test_batches_and_samples() -> None:
    fake = FakeDecode(says([]))
    async with running_router(tiny_model(), fake) as router:

        def script(request: Any) -> Any:
            return stream(request.request.prompt_token_ids, 100)

        fake.script = script
        prompts = ["the", "hello 🦜", "user"]
        done = await router.client.completions.create(model="default", prompt=prompts, n=2, seed=7)
        assert [c.index for c in done.choices] == list(range(6))
        assert [c.text for c in done.choices] == [p for p in prompts for _ in range(2)]
        assert done.usage is not None
        assert done.usage.prompt_tokens == sum(len(router.ids(p)) for p in prompts)
        seeds = {tuple(r.request.prompt_token_ids): set[int]() for r in fake.requests}
        for r in fake.requests:
            seeds[tuple(r.request.prompt_token_ids)].add(r.request.sampling.seed)
        assert len({frozenset(s) for s in seeds.values()}) == 1  # prompts of one request share the seeds
        (shared,) = {frozenset(s) for s in seeds.values()}
        assert 7 in shared and len(shared) == 2
        assert len({r.request.session.room for r in fake.requests}) == 6

        ids = [router.ids(p) for p in prompts]
        parts = await events(router, "/v1/completions", {"model": "default", "prompt": ids, "stream": True})
        texts = ["", "", ""]
        for part in parts[:-1]:
            texts[part["choices"][0]["index"]] += part["choices"][0]["text"]
        assert texts == prompts


async def test_further_samples_follow_the_firsts_token() -> None:
    fake = FakeDecode(says([]))
    async with running_router(tiny_model(), fake) as router:
        go = asyncio.Event()

        def script(request: Any) -> Any:
            yield go
            yield from stream(router.ids("the"), 5)

        fake.script = script
        asked = asyncio.ensure_future(
            router.client.chat.completions.create(model="default", messages=USER, n=3, seed=1)
        )
        await asyncio.wait_for(fake.arrived.wait(), 5)
        assert [r.request.sampling.seed for r in fake.requests] == [1]
        go.set()
        done = await asked
        assert [c.message.content for c in done.choices] == ["the"] * 3
        assert len({r.request.sampling.seed for r in fake.requests}) == 3


async def test_sampling_reaches_the_worker_and_max_tokens_is_clamped() -> None:
    fake = FakeDecode(says([5]), max_model_len=200, kv_capacity_tokens=150)
    async with running_router(tiny_model(), fake) as router:
        body = {
            "model": "default",
            "prompt": [5] * 10,
            "max_tokens": 65535,
            "temperature": 0.5,
            "top_p": 0.25,
            "top_k": 7,
            "min_p": 0.125,
            "seed": -1,
            "min_tokens": 3,
            "ignore_eos": True,
            "stop_token_ids": [9],
            "cache_salt": "me",
        }
        reply = await router.http.post("/v1/completions", json=body, headers={"x-request-id": "req-1"})
        assert reply.status_code == 200
        assert reply.headers["x-request-id"] == "req-1"
        assert reply.json()["id"] == "cmpl-req-1"
        request = fake.requests[0].request
        sampling = request.sampling
        assert sampling.max_tokens == 140
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 7, 0.125)
        assert (sampling.seed, sampling.min_tokens, sampling.ignore_eos) == (2**64 - 1, 3, True)
        assert (list(sampling.stop_token_ids), request.cache_salt, request.request_id) == ([9], "me", "req-1")
        assert fake.requests[0].decode_incarnation == fake.incarnation
        assert fake.requests[0].prefill.endpoint == "127.0.0.1:1"
        assert fake.metadata[0]["x-request-id"] == "req-1"
        await router.http.post("/v1/chat/completions", json={"model": "default", "messages": USER})
        asked = fake.requests[1].request
        assert asked.sampling.max_tokens == 150 - len(asked.prompt_token_ids)


async def test_what_a_router_is_told_to_trust_and_to_refuse() -> None:
    fake = FakeDecode(says([5]), max_model_len=200)
    told = {"trust_request_chat_template": True, "strict_max_tokens": True}
    async with running_router(tiny_model(), fake, **told) as router:
        chat = {
            "model": "default",
            "messages": USER,
            "chat_template": "so {{ messages[0].content }}",
            "max_tokens": 190,
        }
        assert (await router.http.post("/v1/chat/completions", json=chat)).status_code == 200
        assert list(fake.requests[0].request.prompt_token_ids) == router.ids("so hello")
        for path, body in (
            ("/v1/chat/completions", chat | {"max_tokens": 65535}),
            ("/v1/completions", {"model": "default", "prompt": [[5], [5] * 60], "max_tokens": 141}),
        ):
            response = await router.http.post(path, json=body)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, "max_tokens")
            assert error["code"] == "context_length_exceeded" and "200" in error["message"]
        fits = {"model": "default", "prompt": [5] * 60, "max_tokens": 140}
        assert (await router.http.post("/v1/completions", json=fits)).status_code == 200
        assert [r.request.sampling.max_tokens for r in fake.requests] == [190, 140]


async def test_generate_and_explain() -> None:
    fake = FakeDecode(says([]), role=Role.MIXED, name="mixed-0")
    async with running_router(tiny_model(), fake) as router:
        ids = [*speak(router, fake, "the user"), EOS]
        reply = await router.http.post("/generate", json={"input_ids": [5, 6]}, headers={"x-request-id": "g1"})
        got = reply.json()
        assert (got["request_id"], got["text"], got["output_ids"]) == ("g1", "the user", ids)
        assert (got["finish_reason"], got["path"], got["decode_instance"]) == ("stop", "pd", "mixed-0")
        assert got["timings"]["decode_decoding"] == 0.5 and got["timings"]["e2e"] >= got["timings"]["ttft"] > 0
        assert not fake.requests[0].HasField("prefill")
        assert got["bootstrap_room"] == fake.requests[0].request.session.room
        parts = await events(router, "/generate", {"text": "hello", "stream": True})
        assert "".join(p["text"] for p in parts[:-1]) == "the user"
        assert parts[-2]["finish_reason"] == "stop"
        told = (await router.http.get("/explain/g1")).json()
        assert told["rooms"] == [got["bootstrap_room"]]
        assert [m["to_state"] for m in told["moves"]] == ["QUEUED", "PLACED", "SENT", "FIRST_TOKEN", "FINISHED"]
        assert (await router.http.get("/explain/cmpl-g1")).json() == told
        assert (await router.http.get("/explain/other")).status_code == 404


async def test_tokenize_and_back() -> None:
    async with running_router(tiny_model(), FakeDecode(says([]))) as router:
        got = (await router.http.post("/tokenize", json={"prompt": "hello 🦜"})).json()
        assert got["tokens"] == router.ids("hello 🦜") and got["count"] == len(got["tokens"])
        back = (await router.http.post("/detokenize", json={"tokens": got["tokens"]})).json()
        assert back == {"prompt": "hello 🦜"}
        chat = (await router.http.post("/tokenize", json={"messages": USER})).json()
        assert router.tokenizer.decode(chat["tokens"], skip_special_tokens=False).endswith("<|im_start|>assistant\n")


async def test_operators_see_the_mesh() -> None:
    fake = FakeDecode(says([]))
    async with running_router(tiny_model(), fake) as router:
        speak(router, fake, "the user")
        await router.client.completions.create(model="default", prompt="hello")
        rows = (await router.http.get("/workers")).json()["workers"]
        assert [(r["instance"], r["role"], r["state"]) for r in rows] == [
            ("decode-0", "DECODE", "READY"),
            ("prefill-0", "PREFILL", "READY"),
        ]
        metrics = (await router.http.get("/metrics")).text
        for line in (
            'pdmesh_router_requests_total{end="ok",path="/v1/completions"} 1.0',
            'pdmesh_router_samples_total{finish_reason="stop",path="pd"} 1.0',
            f"pdmesh_router_output_tokens_total {len(router.ids('the user')) + 1}.0",
            "pdmesh_router_time_to_first_token_seconds_count 1.0",
            "pdmesh_router_in_flight 0.0",
            'pdmesh_kv_blocks{dp="0",role="DECODE",state="free",worker="decode-0"} 6.0',
            'pdmesh_worker_up{dp="0",role="PREFILL",worker="prefill-0"} 0.0',
            'pdmesh_transfer_bytes_total{peer="prefill-0",transport="shm",worker="decode-0"} 4096.0',
        ):
            assert line in metrics.splitlines(), line
        for path in ("/health", "/liveness", "/readiness", "/version"):
            assert (await router.http.get(path)).status_code == 200
        described = (await router.http.get("/openapi.json")).json()
        assert {"/v1/completions", "/generate", "/workers"} <= described["paths"].keys()
        assert "ChatMessage" in described["components"]["schemas"]


async def test_a_worker_that_comes_later_is_used() -> None:
    from engine_core.types.digest import tokenizer_digest

    late = FakeDecode(says([]), role=Role.MIXED)
    async with running_router(tiny_model(), peer_wait=10.0) as router:
        assert (await router.http.get("/readiness")).status_code == 503
        assert (await router.http.get("/health")).status_code == 200
        speak(router, late, "the")
        await late.start()
        asked = asyncio.ensure_future(router.client.completions.create(model="default", prompt="hello"))
        await register(router.bootstrap, late, tokenizer_digest(tiny_model()))
        assert (await asked).choices[0].text == "the"
        await late.stop()
