"""Commands and routers that speak HTTPS or ask for keys: each command works, or says which option is missing."""

from __future__ import annotations

import asyncio
import io
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from rich.console import Console

from services.cli import explain, status
from services.cli.doctor import mesh as doctor
from services.cli.doctor.findings import Finding
from services.cli.routers import Trouble, http_client, trouble
from services.cli.top import Source
from services.config import QueryConfig
from tests.support.asking import until_async
from tests.support.certificates import Authority, Files
from tests.support.fake_decode import FakeDecode, running_router, says
from tests.support.models import tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

UNKNOWN = "its certificate can't be verified (unable to get local issuer certificate)"
CA = "give --http-ca, the file of its authority"
NO_KEY = "it wants an API key: give --api-key-file"
WRONG_KEY = "it does not know the API key that it was shown: look at --api-key-file or --api-key"


@dataclass
class Secured:
    """A router with HTTPS and a key, which has served one request."""

    url: str
    ca: str
    options: QueryConfig

    def with_(self, **options: str) -> QueryConfig:
        return self.options.model_copy(update=options)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def secured(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Secured]:
    files, authority = Files(tmp_path_factory.mktemp("keys")), Authority()
    files.certify(authority)
    fake = FakeDecode(says([]))
    options = {"http_tls_cert": str(files.cert), "http_tls_key": str(files.key), "api_key": ("right",)}
    async with running_router(tiny_model(), fake, **options) as router:
        fake.script = says(router.ids("hello"))
        url = router.url.replace("http://", "https://")
        async with http_client(30.0, str(files.ca), "right") as client:
            body = {"model": "default", "prompt": "hi"}
            answer = await client.post(f"{url}/v1/completions", json=body, headers={"x-request-id": "one"})
        assert answer.status_code == 200

        async def bootstrap_knows() -> bool:
            return bool((await explain.collect(router.bootstrap, "one", 20.0, None, str(files.ca), "right"))["routes"])

        await until_async(bootstrap_knows, 60.0, lambda: "Bootstrap has not been told of the request")
        yield Secured(url, str(files.ca), QueryConfig(bootstrap=(router.bootstrap,), query_timeout=20.0))


def shown(found: dict[str, object]) -> list[str]:
    out = io.StringIO()
    status.show(found, Console(file=out, width=250, highlight=False))
    return out.getvalue().splitlines()


async def test_status(secured: Secured) -> None:
    """It asks for what needs no key."""
    found = await status.collect_any(secured.options)
    (router,) = [service for service in found["services"] if service["name"] == "router"]
    assert (router["endpoint"], router["answers"], router["error"]) == (secured.url, False, f"{UNKNOWN}: {CA}")
    assert f"router {secured.url} does not answer: {UNKNOWN}: {CA}" in shown(found)
    found = await status.collect_any(secured.with_(http_ca=secured.ca))
    assert {(service["answers"], service["error"]) for service in found["services"]} == {(True, "")}
    (row,) = [line.split() for line in shown(found) if line.startswith(" router")]
    assert row[-1] == "yes"
    assert not any("does not answer" in line for line in shown(found) if line.startswith("router"))


async def test_top(secured: Secured) -> None:
    async def look(config: QueryConfig) -> str:
        source = Source(config)
        try:
            (router,) = (await source.look(must=True)).routers
        finally:
            await source.close()
        assert router.error or (router.mesh is not None and router.mesh["recent"][0]["id"] == "one")
        return router.error

    # What to do comes first: lines are cut at the terminal's width.
    assert await look(secured.options) == f"{CA} ({UNKNOWN})"
    assert await look(secured.with_(http_ca=secured.ca)) == "give --api-key-file (it wants an API key)"
    wrong = await look(secured.with_(http_ca=secured.ca, api_key="x"))
    assert wrong == "look at --api-key-file or --api-key (it does not know the API key that it was shown)"
    assert await look(secured.with_(http_ca=secured.ca, api_key="right")) == ""


async def test_explain(secured: Secured) -> None:
    async def ask(config: QueryConfig) -> str:
        found = await explain.collect(
            config.bootstrap[0], "one", config.query_timeout, None, config.http_ca, config.api_key
        )
        silent = [gone["error"] for gone in found["silent"] if gone["process"] == f"router {secured.url}"]
        assert bool(silent) != ("router" in {move["process"] for move in found["moves"]})
        return silent[0] if silent else ""

    assert await ask(secured.options) == f"{UNKNOWN}: {CA}"
    assert await ask(secured.with_(http_ca=secured.ca)) == NO_KEY
    assert await ask(secured.with_(http_ca=secured.ca, api_key="x")) == WRONG_KEY
    assert await ask(secured.with_(http_ca=secured.ca, api_key="right")) == ""


async def test_doctor(secured: Secured) -> None:
    """It asks for what needs no key."""

    async def examine(config: QueryConfig) -> Finding:
        (finding,) = [f for f in doctor.judge(await doctor.gather(config), "1") if f.area == "router"]
        return finding

    finding = await examine(secured.options)
    assert (finding.what, finding.advice) == (f"{secured.url} does not answer: {UNKNOWN}", CA)
    assert (await examine(secured.with_(http_ca=secured.ca))).what == f"{secured.url} is ready"


@pytest.mark.parametrize(
    ("names", "expired", "what", "advice"),
    [
        (
            ("elsewhere.example",),
            False,
            "IP address mismatch, certificate is not valid for '127.0.0.1'",
            "certify that name",
        ),
        ((), True, "certificate has expired", "renew it"),
    ],
)
async def test_what_is_wrong_with_a_certificate(
    names: tuple[str, ...], expired: bool, what: str, advice: str, tmp_path: Path
) -> None:
    files, authority = Files(tmp_path), Authority()
    files.certify(authority, *names, expired=expired)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert, files.key)
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    async with server, http_client(20.0, str(files.ca)) as client:
        with pytest.raises(httpx.ConnectError) as caught:
            await client.get(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/")
    found = trouble(caught.value)
    assert found.what == f"its certificate can't be verified ({what})" and found.advice.startswith(advice)


async def test_other_reasons() -> None:
    async with http_client(20.0) as client:
        with pytest.raises(httpx.ConnectError) as caught:
            await client.get("http://127.0.0.1:1/")
    assert trouble(caught.value) == Trouble("ConnectError: All connection attempts failed")
    assert str(trouble(httpx.ReadTimeout(""))) == "nothing came in time"
    assert trouble(httpx.ReadTimeout("")).in_short == "no answer: nothing came in time"
    assert str(trouble(httpx.RemoteProtocolError("Server disconnected"))) == "RemoteProtocolError: Server disconnected"
