"""x-pdmesh-timings: where the time of a request went, whole and streamed; stages follow each other and add up."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from services.router.timings import STAGES
from tests.mesh.conftest import Scripted, Served
from tests.support.asking import random_prompt

pytestmark = pytest.mark.asyncio(loop_scope="session")

ASKED = {"x-pdmesh-timings": "1"}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def http(llama: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=llama.mesh.url, timeout=60.0, trust_env=False) as client:
        yield client


def check(timings: dict[str, Any]) -> dict[str, float]:
    """The stages, when they are in order, not negative, and make up the whole to the microsecond."""
    stages: dict[str, float] = timings["stages_ms"]
    assert tuple(stages) == STAGES and all(value >= 0 for value in stages.values()), timings
    assert round(sum(stages.values()) * 1000) == round(timings["total_ms"] * 1000), timings
    until_first = sum(stages[name] for name in STAGES[:8])
    if timings["attempts"] == 1:
        assert round(until_first * 1000) == round(timings["ttft_ms"] * 1000), timings
    return stages


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def body(seed: int, **more: Any) -> dict[str, Any]:
    fixed = {"model": "default", "max_tokens": 12, "ignore_eos": True, "temperature": 0}
    return {**fixed, "prompt": list(random_prompt(120, seed)), **more}


async def test_a_whole_reply(http: httpx.AsyncClient) -> None:
    answer = (await http.post("/v1/completions", json=body(61), headers=ASKED)).json()
    (timings,) = answer["pdmesh_timings"]
    stages = check(timings)
    assert (timings["index"], timings["attempts"]) == (0, 1)
    for name in ("tokenize", "prefill_compute", "decode"):  # the others may take less than a microsecond
        assert stages[name] > 0, stages
    assert stages["earlier_attempts"] == 0 < timings["transfer_total_ms"]
    assert "pdmesh_timings" not in (await http.post("/v1/completions", json=body(62))).json(), "only when asked for"


async def test_a_stream_tells_with_its_last_text(http: httpx.AsyncClient) -> None:
    for more in ({}, {"stream_options": {"include_usage": True}}):
        reply = await http.post("/v1/completions", json=body(63, stream=True, **more), headers=ASKED)
        told = [event for event in events_of(reply.text) if "pdmesh_timings" in event]
        (event,) = told
        assert event["choices"][0]["finish_reason"] == "length"
        (timings,) = event["pdmesh_timings"]
        check(timings)
        assert reply.text.endswith("data: [DONE]\n\n")
    plain = await http.post("/v1/completions", json=body(64, stream=True))
    assert "pdmesh" not in plain.text


async def test_several_choices_and_a_chat(http: httpx.AsyncClient) -> None:
    answer = (await http.post("/v1/completions", json=body(65, n=3, temperature=1.0), headers=ASKED)).json()
    assert [check(t) and t["index"] for t in answer["pdmesh_timings"]] == [0, 1, 2]
    reply = await http.post("/v1/completions", json=body(66, n=2, stream=True), headers=ASKED)
    told = [t for event in events_of(reply.text) for t in event.get("pdmesh_timings", ())]
    assert sorted(t["index"] for t in told) == [0, 1] and all(check(t) for t in told)
    native = {"input_ids": list(random_prompt(40, 67)), "max_tokens": 4}
    answer = (await http.post("/generate", json=native, headers=ASKED)).json()
    (timings,) = answer["pdmesh_timings"]
    check(timings)
    assert abs(timings["total_ms"] / 1000 - answer["timings"]["e2e"]) < 0.1


async def test_a_slow_transfer_is_told_as_one(scripted: Scripted) -> None:
    scripted.script.on("delay")  # 0.3 s for each push
    async with httpx.AsyncClient(base_url=scripted.mesh.url, timeout=60.0, trust_env=False) as client:
        prompt = list(random_prompt(24, 68))
        asked = {
            "model": "default",
            "prompt": prompt,
            "max_tokens": 4,
            "ignore_eos": True,
            "cache_salt": scripted.asker.salt(),
        }
        answer = (await client.post("/v1/completions", json=asked, headers=ASKED)).json()
    scripted.script.release()
    (timings,) = answer["pdmesh_timings"]
    stages = check(timings)
    assert stages["transfer"] > 200, "token 1 left ahead of a push of 300 ms"
    assert timings["transfer_total_ms"] > 280
