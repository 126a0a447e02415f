"""A router that is told to stop, and requests that outlast the drain."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.asking import until_async
from tests.support.fake_decode import FakeDecode, running_router, says, stream
from tests.support.models import tiny_model


async def test_requests_that_outlast_a_drain_are_told_and_leave_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    never, fake = asyncio.Event(), FakeDecode(says([]))
    async with running_router(tiny_model(), fake, drain_timeout=1.0) as router:
        first, *_ = stream(router.ids("every word of it"), 99, per_message=1)
        fake.script = lambda _: iter([first, never])
        body = {"model": "default", "prompt": "hello", "max_tokens": 99}
        async with router.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as running:
            whole = asyncio.ensure_future(router.http.post("/v1/completions", json=body))

            async def both_run() -> bool:
                return len(fake.requests) == 2

            await until_async(both_run, 30.0, lambda: f"{len(fake.requests)} requests")
            router.stop_router.request()
            text = (await running.aread()).decode()
            answer = await whole
    told = '"message":"this router is shutting down"'
    assert text.count("data: ") == 2 and told in text and "[DONE]" not in text
    assert answer.status_code == 503 and told in answer.text
    assert [r.getMessage() for r in caplog.records if r.exc_info] == []
