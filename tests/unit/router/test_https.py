"""HTTPS on the router's port, and what is logged of prompts where that is asked for."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import httpx
import pytest

from engine_core.types.errors import ConfigError
from services.cli import status
from services.runtime.tls import client_context
from tests.support.certificates import Authority, Files
from tests.support.fake_decode import FakeDecode, running_router, says, stream
from tests.support.models import tiny_model


def client(url: str, ca: str) -> httpx.AsyncClient:
    """One that keeps no connection: each request shakes hands anew."""
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=url, verify=client_context(ca), timeout=30, trust_env=False, limits=limits)


async def test_https_with_a_certificate_that_changes_while_a_stream_runs(tmp_path: Path) -> None:
    files, before, after = Files(tmp_path), Authority(), Authority()
    files.certify(before)
    (tmp_path / "before.pem").write_bytes(before.pem)
    (tmp_path / "after.pem").write_bytes(after.pem)
    go_on, fake = asyncio.Event(), FakeDecode(says([]))
    options = {"http_tls_cert": str(files.cert), "http_tls_key": str(files.key)}
    async with running_router(tiny_model(), fake, **options) as router:
        ids = router.ids("every word of it arrives")
        first, *others = stream(ids, 99, per_message=1)
        fake.script = lambda _: iter([first, go_on, *others])
        url = router.url.replace("http://", "https://")
        async with client(url, str(tmp_path / "before.pem")) as old, client(url, str(tmp_path / "after.pem")) as new:
            body = {"model": "default", "prompt": "hello", "max_tokens": 99, "stream": True}
            async with old.stream("POST", "/v1/completions", json=body) as running:
                assert running.status_code == 200
                with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                    await new.get("/liveness")
                files.certify(after)
                async with asyncio.timeout(30):
                    while True:
                        try:
                            assert (await new.get("/liveness")).status_code == 200
                            break
                        except httpx.ConnectError:
                            await asyncio.sleep(0.05)
                with pytest.raises(httpx.ConnectError):
                    await old.get("/liveness")
                go_on.set()
                assert (await running.aread()).endswith(b"data: [DONE]\n\n")
        with pytest.raises(httpx.HTTPError):
            await router.http.get("/liveness")  # without TLS
        ca = str(tmp_path / "after.pem")
        found = (await status.collect(router.bootstrap, 5.0, None, ca))["services"]
        assert [(s["endpoint"], s["answers"]) for s in found if s["name"] == "router"] == [(url, True)]


async def test_a_certificate_without_its_key_is_refused_at_the_start(tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.certify(Authority())
    with pytest.raises(ConfigError, match="there is no --http-tls-key"):
        async with running_router(tiny_model(), FakeDecode(says([])), http_tls_cert=str(files.cert)):
            pass


@pytest.mark.parametrize("asked_for", [False, True])
async def test_prompts_are_logged_when_asked_for(asked_for: bool, caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeDecode(says([]))
    async with running_router(tiny_model(), fake, log_prompts=asked_for) as router:
        fake.script = says(router.ids("the user asks"))
        with caplog.at_level(logging.DEBUG):
            body = {"model": "default", "prompt": ["hello there", "hello you"], "max_tokens": 50}
            answer = await router.http.post("/v1/completions", json=body, headers={"x-request-id": "asked-1"})
    assert answer.status_code == 200
    told = [r for r in caplog.records if "hello" in r.getMessage() or "the user asks" in r.getMessage()]
    if not asked_for:
        assert told == []
        return
    assert [record.getMessage() for record in told[:2]] == ["prompt 0: 'hello there'", "prompt 1: 'hello you'"]
    assert [record.getMessage().partition(": ")[0] for record in told[2:]] == ["answer 0", "answer 1"]
    assert all("the user asks" in record.getMessage() for record in told[2:])
    assert {record.__dict__["request_id"] for record in told} == {"asked-1"}
