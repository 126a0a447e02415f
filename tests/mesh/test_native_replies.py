"""What /generate says beside text, and token ids as vLLM returns them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.mesh.conftest import Served
from tests.support.asking import random_prompt

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def http(llama: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=llama.mesh.url, timeout=60.0, trust_env=False) as client:
        yield client


async def test_generate_says_all_that_it_knows(llama: Served, http: httpx.AsyncClient) -> None:
    prompt = random_prompt(60, 11)
    body = {"token_ids": prompt, "max_tokens": 5, "temperature": 0, "ignore_eos": True, "seed": 1}
    response = await http.post("/generate", json=body, headers={"x-request-id": "native-1"})
    data = response.json()
    assert set(data) == {
        "request_id", "bootstrap_room", "text", "output_ids", "finish_reason", "stop_reason", "usage", "timings",
        "attempts", "path", "transport", "prefill_instance", "decode_instance",
    }  # fmt: skip
    assert (data["request_id"], response.headers["x-request-id"]) == ("native-1", "native-1")
    assert data["bootstrap_room"] == (await llama.mesh.explain("native-1"))["rooms"][0]
    assert (data["finish_reason"], data["stop_reason"], data["attempts"]) == ("length", None, 1)
    assert (data["path"], data["decode_instance"]) == ("pd", "decode-0")
    assert (data["prefill_instance"], data["transport"]) in (("prefill-0", "shm"), ("prefill-1", "tcp"))
    assert data["usage"] == {"prompt_tokens": 60, "completion_tokens": 5, "cached_tokens": 0}
    text = (await llama.asker.post("/detokenize", {"tokens": data["output_ids"]}))["prompt"]
    assert len(data["output_ids"]) == 5 and data["text"] == text
    timings = data["timings"]
    stages = ("queued", "computing", "transferring", "decoding", "starting", "first_token")
    assert set(timings) == {
        "placed",
        "ttft",
        "e2e",
        *(f"{leg}_{stage}" for leg in ("prefill", "decode") for stage in stages),
    }
    assert 0 <= timings["placed"] <= timings["ttft"] <= timings["e2e"]
    assert timings["prefill_computing"] > 0 and timings["decode_decoding"] > 0
    assert all(0 <= seconds <= timings["e2e"] for seconds in timings.values())


async def test_token_ids_as_vllm_returns_them(llama: Served, http: httpx.AsyncClient) -> None:
    async def events(path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        text = (await http.post(path, json={**body, "stream": True})).text
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    prompts = [list(random_prompt(20, seed)) for seed in (1, 2)]
    common = {"model": "default", "max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body = {**common, "prompt": prompts}
    whole = (await http.post("/v1/completions", json=body)).json()["choices"]
    assert [choice["prompt_token_ids"] for choice in whole] == prompts
    assert [len(choice["token_ids"]) for choice in whole] == [4, 4]
    parts = [event["choices"][0] for event in await events("/v1/completions", body)]
    for i, choice in enumerate(whole):
        mine = [part for part in parts if part["index"] == i]
        assert mine[0]["prompt_token_ids"] == prompts[i] and not any("prompt_token_ids" in p for p in mine[1:])
        assert [t for part in mine for t in part["token_ids"]] == choice["token_ids"]

    chat = {**common, "messages": [{"role": "user", "content": "hello"}]}
    rendered = (await llama.asker.post("/tokenize", {"messages": chat["messages"]}))["tokens"]
    data = (await http.post("/v1/chat/completions", json=chat)).json()
    assert data["prompt_token_ids"] == rendered and len(data["choices"][0]["token_ids"]) == 4
    first, *rest = await events("/v1/chat/completions", chat)
    assert first["prompt_token_ids"] == rendered and not any("prompt_token_ids" in event for event in rest)
    streamed = [t for event in rest for t in event["choices"][0].get("token_ids", [])]
    assert streamed == data["choices"][0]["token_ids"]
    plain = (await http.post("/v1/chat/completions", json={**chat, "return_token_ids": False})).json()
    assert "prompt_token_ids" not in plain and "token_ids" not in plain["choices"][0]
