"""Requests as load and evaluation tools write them, field by field, and of the replies what those tools read."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.mesh.conftest import Served
from tests.support.asking import random_prompt

pytestmark = pytest.mark.asyncio(loop_scope="session")

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = "hello the user"
PARTS = [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]
PLAIN = [{"role": "user", "content": TEXT}]
OUTPUT = 6


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def http(llama: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=llama.mesh.url, timeout=60.0, trust_env=False) as client:
        yield client


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm bench serve": (
        COMPLETIONS,
        {
            "prompt": TEXT, "repetition_penalty": 1.0, "temperature": 0.0, "max_tokens": OUTPUT, "logprobs": None,
            "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
        },
    ),
    "vllm bench serve, chat": (
        CHAT,
        {
            "messages": PARTS, "max_completion_tokens": OUTPUT, "temperature": 0.0, "stream": True,
            "stream_options": {"include_usage": True}, "ignore_eos": True,
        },
    ),
    "sglang bench_serving": (
        COMPLETIONS,
        {
            "prompt": TEXT, "temperature": 0.0, "best_of": 1, "max_tokens": OUTPUT, "stream": True,
            "ignore_eos": True,
        },
    ),
    "sglang bench_serving, chat": (
        CHAT,
        {
            "messages": PLAIN, "temperature": 0.0, "max_completion_tokens": OUTPUT, "stream": True,
            "ignore_eos": True,
        },
    ),
    "guidellm": (
        COMPLETIONS,
        {
            "prompt": TEXT, "stream": True, "stop": None, "ignore_eos": True, "max_tokens": OUTPUT,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    "guidellm, chat": (
        CHAT,
        {
            "messages": PARTS, "stream": True, "stop": None, "ignore_eos": True, "max_completion_tokens": OUTPUT,
            "max_tokens": OUTPUT, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    "evalscope perf": (
        COMPLETIONS,
        {
            "prompt": list(random_prompt(20, 3)), "max_tokens": OUTPUT, "min_tokens": OUTPUT, "top_k": 5,
            "top_p": 0.9, "temperature": 0.7, "repetition_penalty": 1.1, "frequency_penalty": 0.1,
            "stop_token_ids": ["7"], "seed": 42, "n": 1, "logprobs": True, "stream": True, "ignore_eos": True,
            "stream_options": {"include_usage": True},
        },
    ),
    "aiperf": (
        CHAT,
        {
            "messages": PLAIN, "max_completion_tokens": OUTPUT, "stream": True, "ignore_eos": True,
            "stream_options": {"include_usage": True},
        },
    ),
}  # fmt: skip


async def chunks(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, read as those tools do: lines that begin with `data: `, and `[DONE]` last."""
    headers = {"x-request-id": "bench-0"}
    response = await http.post(path, json={"model": "default", **body}, headers=headers)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-request-id"] == "bench-0"
    lines = [line for line in response.text.split("\n\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines) and lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("tool", list(SHAPES))
async def test_streams_of_load_tools(http: httpx.AsyncClient, tool: str) -> None:
    path, body = SHAPES[tool]
    events = await chunks(http, path, body)
    with_choices = [event for event in events if event["choices"]]
    assert with_choices, "a tool that saw no choice calls the request failed"
    texts = [
        (choice["text"] if path == COMPLETIONS else choice["delta"].get("content")) or ""
        for event in with_choices
        for choice in event["choices"]
    ]
    assert "".join(texts)
    assert [c["finish_reason"] for e in with_choices for c in e["choices"] if c["finish_reason"]] == ["length"]
    options = body.get("stream_options")
    if options is None:
        assert events == with_choices, "who indexes choices[0] blindly asked for no usage"
        assert not any(event.get("usage") for event in events)
        return
    assert events[-1]["choices"] == [] and events[:-1] == with_choices
    usage = events[-1]["usage"]
    assert usage["completion_tokens"] == OUTPUT
    assert usage["total_tokens"] == usage["prompt_tokens"] + OUTPUT > OUTPUT
    if options.get("continuous_usage_stats"):
        told = [event["usage"]["completion_tokens"] for event in with_choices]
        assert told == sorted(told) and told[-1] == OUTPUT
        assert all(event["usage"]["prompt_tokens"] == usage["prompt_tokens"] for event in with_choices)
    else:
        assert not any(event.get("usage") for event in with_choices), "it is read from the chunk without choices"


async def test_lm_eval(http: httpx.AsyncClient) -> None:
    """loglikelihood takes token_logprobs[context : -1], and of each position's best ones the greatest."""
    prompts = [list(random_prompt(n, n)) for n in (25, 7, 12)]
    body = {
        "model": "default", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234,
        "echo": True,
    }  # fmt: skip
    choices = (await http.post(COMPLETIONS, json=body)).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    for prompt, choice in zip(prompts, choices, strict=True):
        values, tops = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
        tokens = choice["logprobs"]["tokens"]
        assert len(values) == len(tops) == len(tokens) == len(prompt) + 1, "the prompt, and the one new token"
        for token, value, top in zip(tokens[2:-1], values[2:-1], tops[2:-1], strict=True):
            assert top[token] == value <= max(top.values()) <= 0
    body = {
        "model": "default", "messages": PLAIN, "max_tokens": OUTPUT, "temperature": 0, "seed": 1234,
        "stop": ["\n", "Q:", "</s>", "<|im_end|>"],
    }  # fmt: skip
    reply = (await http.post(CHAT, json=body)).json()
    assert isinstance(reply["choices"][0]["message"]["content"], str)
    assert reply["choices"][0]["finish_reason"] in ("stop", "length")


async def test_evalscope_eval(http: httpx.AsyncClient) -> None:
    """max_tokens far beyond the context is cut to what fits."""
    body = {"model": "default", "messages": PLAIN, "max_tokens": 65535, "temperature": 0.0, "stop": ["a", "e", "t"]}
    replies = await asyncio.gather(*(http.post(CHAT, json=body) for _ in range(4)))
    assert [reply.status_code for reply in replies] == [200] * 4
    assert len({reply.json()["choices"][0]["message"]["content"] for reply in replies}) == 1


async def test_what_guidellm_and_aiperf_ask_first(http: httpx.AsyncClient) -> None:
    assert (await http.get("/health")).status_code == 200
    models = (await http.get("/v1/models")).json()
    assert models["object"] == "list" and models["data"][0]["id"] and models["data"][0]["object"] == "model"
    metrics = await http.get("/metrics")
    assert metrics.status_code == 200 and metrics.headers["content-type"].startswith("text/plain")


CURL = (
    "curl -s -X POST http://localhost:8000/v1/chat/completions -H 'Content-Type: application/json' "
    """-d '{"model":"default","messages":[{"role":"user","content":"hello"}],"max_tokens":10}'"""
)


async def test_the_curl_line(llama: Served, tmp_path: Path) -> None:
    """A first request as manuals have it, word for word; curl's own settings lead port 8000 to the mesh."""
    (tmp_path / ".curlrc").write_text(f"connect-to = localhost:8000:{llama.mesh.url.removeprefix('http://')}\n")
    process = await asyncio.create_subprocess_shell(
        CURL, env={"PATH": os.environ["PATH"], "CURL_HOME": str(tmp_path)},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(60.0):
        output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    reply = json.loads(output)
    assert reply["object"] == "chat.completion" and reply["choices"][0]["message"]["role"] == "assistant"
    assert 1 <= reply["usage"]["completion_tokens"] <= 10
