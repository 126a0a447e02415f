"""Traces and log lines: one request's spans across router, decode, prefill and transfer, and those of a resumed one."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.support.asking import random_prompt, until
from tests.support.collector import Collector, Span, names_below
from tests.support.mesh import Mesh
from tests.support.models import tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLIENT_SPAN = "00f067aa0ba902b7"
ROUTER = ["router.queue", "router.place", "router.attempt"]
DECODE = ["decode.queued", "decode.awaiting_start", "decode.awaiting_kv", "decode.ready", "decode.decoding"]
PREFILL = ["prefill.queued", "prefill.computing", "prefill.computed", "prefill.pushing"]
WHOLE = {"router.request", *ROUTER, "decode", *DECODE, "transfer.receive", "prefill", *PREFILL, "transfer.push"}


@dataclass
class Traced:
    """A mesh whose spans go to a collector."""

    mesh: Mesh
    http: httpx.AsyncClient
    collector: Collector

    async def complete(self, asked: str) -> list[Span]:
        """The spans of a request that needs all stages once, when all are there."""
        return await self.collector.until(asked, lambda spans: {s.name for s in spans} >= WHOLE)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def traced() -> AsyncIterator[Traced]:
    async with Collector() as collector:
        options = {"kv_tokens": 16384, "otlp_endpoint": collector.endpoint, "log_format": "json"}
        async with (
            Mesh(tiny_model("llama"), decode=2, options=options) as mesh,
            httpx.AsyncClient(timeout=60.0, trust_env=False) as http,
        ):
            yield Traced(mesh, http, collector)


async def complete_one(traced: Traced, seed: int, headers: dict[str, str]) -> str:
    """Asks for a completion of 80 tokens' prompt; its request id."""
    request_id = f"traced-{seed}-{uuid.uuid4().hex}"
    prompt = list(random_prompt(80, seed))
    body = {
        "model": "default",
        "prompt": prompt,
        "max_tokens": 6,
        "ignore_eos": True,
        "temperature": 0,
        "cache_salt": uuid.uuid4().hex,
    }
    answer = await traced.http.post(
        f"{traced.mesh.url}/v1/completions", json=body, headers={"x-request-id": request_id, **headers}
    )
    assert answer.status_code == 200, answer.text
    return request_id


def one(spans: Sequence[Span], name: str) -> Span:
    (found,) = [s for s in spans if s.name == name]
    return found


async def test_the_spans_of_one_request(traced: Traced) -> None:
    trace_id = uuid.uuid4().hex
    request_id = await complete_one(traced, 1, {"traceparent": f"00-{trace_id}-{CLIENT_SPAN}-01"})
    spans = await traced.complete(trace_id)
    assert sorted(s.name for s in spans) == sorted(WHOLE), "one span per stage"
    request, attempt, decode, prefill = (
        one(spans, n) for n in ("router.request", "router.attempt", "decode", "prefill")
    )
    assert request.parent_id == CLIENT_SPAN
    assert names_below(spans, request) == ROUTER
    assert names_below(spans, attempt) == ["decode"]
    assert sorted(names_below(spans, decode)) == sorted([*DECODE, "prefill", "transfer.receive"])
    assert sorted(names_below(spans, prefill)) == sorted([*PREFILL, "transfer.push"])
    services = {"router": "pdmesh-router", "decode": "pdmesh-decode", "prefill": "pdmesh-prefill"}
    assert {s.service for s in (request, attempt)} == {services["router"]}
    assert (decode.service, one(spans, "transfer.receive").service) == (services["decode"],) * 2
    assert (prefill.service, one(spans, "transfer.push").service) == (services["prefill"],) * 2

    assert [s.error for s in spans] == [""] * len(spans)
    assert attempt.events == ("first_token",) and attempt.attributes["pdmesh.end"] == "finished"
    assert {s.attributes["pdmesh.request_id"] for s in (request, decode, prefill)} == {request_id}
    rooms = {s.attributes["pdmesh.room"] for s in (attempt, decode, prefill)}
    assert len(rooms) == 1 and {s.attributes["pdmesh.attempt"] for s in (attempt, decode, prefill)} == {0}
    assert request.attributes["pdmesh.output_tokens"] == 6 and decode.attributes["pdmesh.known_tokens"] == 80
    for stages in (DECODE, PREFILL):
        borders = [one(spans, name) for name in stages]
        for before, after in zip(borders, borders[1:], strict=False):
            assert abs(before.end - after.start) < 1e-5, f"{after.name} begins where {before.name} ends"
    assert request.start <= attempt.start <= attempt.end <= request.end + 1e-3
    assert all(s.end >= s.start for s in spans)


async def test_a_trace_of_its_own_and_what_the_client_does_not_want_traced(traced: Traced) -> None:
    unwanted = uuid.uuid4().hex
    await complete_one(traced, 2, {"traceparent": f"00-{unwanted}-{CLIENT_SPAN}-00"})
    request_id = await complete_one(traced, 3, {})
    line = await access_line(traced.mesh, request_id)
    spans = await traced.complete(line["trace_id"])
    assert one(spans, "router.request").parent_id == ""
    # All three processes have sent later spans by now, so they'd have sent these.
    assert traced.collector.of(unwanted) == []


async def access_line(mesh: Mesh, request_id: str) -> dict[str, Any]:
    """What the router logged at a request's end."""

    def lines() -> list[dict[str, Any]]:
        parsed = [json.loads(line) for line in mesh.lines("router") if line.startswith("{")]
        return [e for e in parsed if e["logger"] == "services.router.edge.access" and e.get("request_id") == request_id]

    await until(lambda: bool(lines()), 10.0, lambda: f"an access line of {request_id}")
    (line,) = lines()
    return line


async def test_an_access_line_says_how_it_went(traced: Traced) -> None:
    request_id = await complete_one(traced, 5, {})
    line = await access_line(traced.mesh, request_id)
    assert {n: line[n] for n in ("path", "status", "end", "tokens", "attempts", "finish", "process", "level")} == {
        "path": "/v1/completions", "status": 200, "end": "ok", "tokens": 6, "attempts": 1, "finish": "length",
        "process": "router", "level": "info",
    }  # fmt: skip
    assert 0 < line["ttft"] <= line["e2e"] < 60 and line["pair"] in ("prefill-0+decode-0", "prefill-0+decode-1")
    assert len(line["room"]) == 16 and line["attempt"] == 0
    refused = await traced.http.post(
        f"{traced.mesh.url}/v1/completions",
        json={"model": "default", "prompt": []},
        headers={"x-request-id": "refused-1"},
    )
    assert refused.status_code == 400
    line = await access_line(traced.mesh, "refused-1")
    assert (line["status"], line["end"]) == (400, "invalid") and "tokens" not in line


async def busy_decode(mesh: Mesh) -> str:
    """The decode worker that runs the only request."""
    (name,) = [n for n in ("decode-0", "decode-1") if (await mesh.rank(n))["load"]["running"] == 1]
    return name


async def test_a_resumed_request_has_two_attempts(traced: Traced) -> None:
    trace_id = uuid.uuid4().hex
    request_id = f"resumed-{uuid.uuid4().hex}"
    body = {"input_ids": list(random_prompt(60, 4)), "max_tokens": 1500, "ignore_eos": True, "stream": True}
    headers = {"x-request-id": request_id, "traceparent": f"00-{trace_id}-{CLIENT_SPAN}-01"}
    ids: list[int] = []
    victim = ""
    async with traced.http.stream("POST", f"{traced.mesh.url}/generate", json=body, headers=headers) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                ids += event["output_ids"]
            if len(ids) >= 8 and not victim:
                victim = await busy_decode(traced.mesh)
                await traced.mesh.kill_engine(victim)
    assert len(ids) == 1500
    await traced.mesh.gone(victim)

    def complete(spans: list[Span]) -> bool:
        return any(s.name == "router.request" for s in spans) and sum(s.name == "decode" for s in spans) == 2

    spans = await traced.collector.until(trace_id, complete)
    request = one(spans, "router.request")
    first, second = (s for s in spans if s.name == "router.attempt")
    assert {first.parent_id, second.parent_id} == {request.span_id}
    assert [s.attributes["pdmesh.attempt"] for s in (first, second)] == [0, 1]
    assert first.events == ("first_token",) and second.events == ("resumed",)
    assert "engine" in first.error and first.attributes["pdmesh.end"] == "resuming"
    assert (second.error, second.attributes["pdmesh.end"], request.error) == ("", "finished", "")
    assert first.end <= second.start and first.attributes["pdmesh.room"] == second.attributes["pdmesh.room"]
    dead, alive = (one([s for s in spans if s.parent_id == a.span_id], "decode") for a in (first, second))
    assert dead.attributes["pdmesh.instance"] == victim != alive.attributes["pdmesh.instance"]
    assert "engine" in dead.error and alive.error == ""
    assert alive.attributes["pdmesh.known_tokens"] > 60, "the tokens of the first attempt are known to the second"

    line = await access_line(traced.mesh, request_id)
    assert (line["attempts"], line["tokens"], line["status"], line["trace_id"]) == (2, 1500, 200, trace_id)
    failed = [json.loads(text) for text in traced.mesh.lines(victim) if "session failed" in text]
    room = first.attributes["pdmesh.room"]
    assert [(e["request_id"], e["room"], e["attempt"], e["trace_id"]) for e in failed] == [
        (request_id, room, 0, trace_id)
    ]
