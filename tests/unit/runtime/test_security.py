"""Token and mTLS over real gRPC: who gets in, what the others are told, and changes without a restart."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine_core.types.errors import ConfigError, Leg, UnauthenticatedError
from services.runtime.channels import ChannelPool
from services.runtime.errors import from_rpc_error
from services.runtime.security import Complaints, Security
from services.runtime.server import GrpcServer
from tests.support.certificates import Authority, Files

OLD, NEW, OTHER = "the-token-of-yesterday", "the-token-of-today", "somebody-elses-token"
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class Options(NamedTuple):
    mesh_token_file: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    tls_name: str = ""
    insecure: bool = False


def secured(**options: Any) -> Security:
    return Security.of(Options(**options))


class Echo:
    """One method of each kind; each answers with the bytes that came."""

    async def one(self, request: bytes, context: Any) -> bytes:
        return request

    async def many(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield request

    async def from_stream(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        return b"".join([request async for request in requests])

    async def through(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    def add_to(self, server: grpc.aio.Server) -> None:
        handlers = {
            "unary_unary": grpc.unary_unary_rpc_method_handler(self.one),
            "unary_stream": grpc.unary_stream_rpc_method_handler(self.many),
            "stream_unary": grpc.stream_unary_rpc_method_handler(self.from_stream),
            "stream_stream": grpc.stream_stream_rpc_method_handler(self.through),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.Echo", handlers),))


async def one() -> AsyncIterator[bytes]:
    yield b"x"


async def call(channel: grpc.aio.Channel, kind: str = "unary_unary") -> bytes:
    method: Any = getattr(channel, kind)(f"/t.Echo/{kind}")
    made = method(b"x" if kind.startswith("unary") else one(), timeout=20, metadata=(("k", "v"),))
    return await made if kind.endswith("unary") else b"".join([part async for part in made])


async def refusal(security: Security | None, endpoint: str, kind: str = "unary_unary") -> Any:
    """How a call by a caller with this security fails."""
    pool = ChannelPool(security=security)
    try:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(pool.get(endpoint), kind)
    finally:
        await pool.close()
    return from_rpc_error(caught.value, Leg.DECODE)


@asynccontextmanager
async def serving(security: Security) -> AsyncIterator[str]:
    server = await GrpcServer.start("127.0.0.1:0", Echo().add_to, ["t.Echo"], leg=Leg.DECODE, security=security)
    try:
        yield server.endpoint
    finally:
        await server.stop(0)


async def passes(security: Security, endpoint: str) -> None:
    """Calls of all kinds get through."""
    pool = ChannelPool(security=security)
    assert [await call(pool.get(endpoint), kind) for kind in KINDS] == [b"x"] * 4
    await pool.close()


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not reached():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "server")


# ---- the token --------------------------------------------------------------------------------------


async def test_calls_without_the_token_are_refused_and_told(
    files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files.tokens(OLD)
    server = secured(**files.token_options)
    wrong = Files(tmp_path / "wrong")
    wrong.tokens(OTHER)
    async with serving(server) as endpoint:
        await passes(secured(**files.token_options), endpoint)
        assert not caplog.records
        for kind in KINDS:
            error = await refusal(None, endpoint, kind)
            assert isinstance(error, UnauthenticatedError) and error.reason == "TOKEN_MISSING"
            assert error.message == (
                "the call came without a mesh token; look at --mesh-token-file of the caller: "
                "it must hold a token of this mesh"
            )
        error = await refusal(secured(**wrong.token_options), endpoint)
        assert (type(error), error.reason, error.leg) == (UnauthenticatedError, "TOKEN_REFUSED", Leg.DECODE)
        assert "the mesh token that came is wrong" in error.message
        old = secured(**files.token_options)
        files.tokens(NEW)
        assert server.refresh()
        assert "has expired" in (await refusal(old, endpoint)).message
        await passes(secured(**files.token_options), endpoint)
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    said = [f"refused /t.Echo/{kind}: the call came without a mesh token" for kind in KINDS]
    said += ["refused /t.Echo/unary_unary: the mesh token that came is wrong"]
    said += ["refused /t.Echo/unary_unary: the mesh token that came has expired: it was removed from the file"]
    assert len(lines) == len(said)
    for line, text in zip(lines, said, strict=True):
        assert line.startswith("peer ipv4:127.0.0.1:") and line.endswith(text)
    assert not [line for line in caplog.text.splitlines() if OLD in line or NEW in line or OTHER in line]


async def test_health_is_open_and_reflection_is_not(files: Files) -> None:
    files.tokens(OLD)
    async with serving(secured(**files.token_options)) as endpoint, grpc.aio.insecure_channel(endpoint) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        for path in ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "/no.Such/Method", "/x"):
            method: Any = channel.stream_stream(path)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                assert [part async for part in method(one(), timeout=20)] == []
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_token_changes_under_load_without_a_refusal(tmp_path: Path) -> None:
    """Both ends follow their own files, which change one after the other."""
    ends = [Files(tmp_path / name) for name in ("server", "client")]
    for end in ends:
        end.tokens(OLD)
    server, client = (secured(**end.token_options) for end in ends)
    pool, done, calls = ChannelPool(security=client), asyncio.Event(), 0

    async def load(endpoint: str) -> None:
        nonlocal calls
        while not done.is_set():
            assert await call(pool.get(endpoint)) == b"x"
            calls += 1

    async with serving(server) as endpoint:
        stream: Any = pool.get(endpoint).stream_stream("/t.Echo/stream_stream")(timeout=60)
        await stream.write(b"before")
        assert await stream.read() == b"before"
        running = asyncio.gather(*(load(endpoint) for _ in range(4)))
        for tokens in ((OLD, NEW), (NEW, OLD), (NEW,)):
            for end, security in zip(ends, (server, client), strict=True):
                end.tokens(*tokens)
                assert security.refresh()
                before = calls
                await until(lambda before=before: calls > before + 20 or running.done())
        done.set()
        await running
        await stream.write(b"after")  # a stream that is open goes on: it was asked when it began
        assert await stream.read() == b"after"
        stream.cancel()
    await pool.close()
    assert client.token is not None and client.token.first == NEW


async def test_files_are_watched_by_a_task(files: Files) -> None:
    files.tokens(OLD)
    security, changed = secured(**files.token_options), asyncio.Event()
    security.on_change(changed.set)
    watch = asyncio.ensure_future(security.watch())
    files.tokens(NEW)
    async with asyncio.timeout(20):
        await changed.wait()
    assert security.link_secrets == (NEW.encode(),)
    watch.cancel()
    await asyncio.wait_for(secured().watch(), 5)  # nothing to watch


# ---- mTLS -------------------------------------------------------------------------------------------


async def test_callers_without_a_good_certificate_are_refused_at_both_ends(
    files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority, stranger = Authority(), Authority()
    files.certify(authority)
    server = secured(**files.tls_options)
    other = Files(tmp_path / "other")
    other.certify(stranger, trusted=authority.pem + stranger.pem)
    async with serving(server) as endpoint:
        await passes(secured(**files.tls_options), endpoint)
        hung_up = "the peer hung up: it wants TLS, or refuses this process's certificate; look at --tls-cert, --tls-key"
        wrong = await refusal(secured(**other.tls_options), endpoint)
        assert hung_up in wrong.message and wrong.retryable
        assert hung_up in (await refusal(None, endpoint)).message
        expired = with_expired_certificate(tmp_path / "expired", authority)
        assert hung_up in (await refusal(expired, endpoint)).message
        unbelieving = Files(tmp_path / "unbelieving")
        unbelieving.certify(stranger)
        error = await refusal(secured(**unbelieving.tls_options), endpoint)
        assert (
            "CERTIFICATE_VERIFY_FAILED" in error.message
            and "look at --tls-cert, --tls-key and --tls-ca" in error.message
        )
        await passes(secured(**files.tls_options), endpoint)
        assert not caplog.records
        async with asyncio.timeout(60):
            while not caplog.records:  # who is gone before the server looks at its connections is seen the next time
                await refusal(secured(**other.tls_options), endpoint)
                server.tell_refused()
    line = caplog.records[0].getMessage()
    assert line.startswith("peer 127.0.0.1:") and "refused by TLS" in line and "--tls-ca" in line


def with_expired_certificate(folder: Path, authority: Authority) -> Security:
    """A process whose certificate expired while it ran: none starts with one."""
    files = Files(folder)
    files.certify(authority)
    security = secured(**files.tls_options)
    assert security.tls is not None
    cert, key = authority.issue(expired=True)
    security.tls._files.value = security.tls._files.value._replace(cert=cert, key=key)
    return security


async def test_an_expired_server_is_refused_by_name(files: Files, tmp_path: Path) -> None:
    authority = Authority()
    files.certify(authority)
    expired = with_expired_certificate(tmp_path / "expired", authority)
    async with serving(expired) as endpoint:
        error = await refusal(secured(**files.tls_options), endpoint)
        assert "certificate has expired" in error.message and "--tls-ca" in error.message
    async with serving(Security()) as endpoint:  # one that has no TLS at all
        assert "WRONG_VERSION_NUMBER" in (await refusal(secured(**files.tls_options), endpoint)).message


async def test_a_certificate_must_be_of_the_host_or_of_the_name(files: Files, tmp_path: Path) -> None:
    authority = Authority()
    files.certify(authority, "pdmesh.internal")
    async with serving(secured(**files.tls_options)) as endpoint:
        await passes(secured(**files.tls_options, tls_name="pdmesh.internal"), endpoint)
        for name in ("", "another.internal"):
            error = await refusal(secured(**files.tls_options, tls_name=name), endpoint)
            assert "does not name the host that was dialled; look at --tls-name" in error.message


async def test_authorities_change_under_load_without_a_refusal(tmp_path: Path) -> None:
    """Trust both, then show the new certificate, then trust the new one alone."""
    before, after = Authority(), Authority()
    ends = [Files(tmp_path / name) for name in ("server", "client")]
    for end in ends:
        end.certify(before)
    server, client = (secured(**end.tls_options) for end in ends)
    pool = ChannelPool(security=client)
    async with serving(server) as endpoint:
        channels = {id(pool.get(endpoint))}
        stream: Any = pool.get(endpoint).stream_stream("/t.Echo/stream_stream")(timeout=60)
        await stream.write(b"before")
        assert await stream.read() == b"before"
        for issuer, trusted in ((before, before.pem + after.pem), (after, before.pem + after.pem), (after, after.pem)):
            for end, security in zip(ends, (server, client), strict=True):
                end.certify(issuer, trusted=trusted)
                assert security.refresh()
                assert await call(pool.get(endpoint)) == b"x"
                fresh = ChannelPool(security=client)
                assert await call(fresh.get(endpoint)) == b"x"
                await fresh.close()
            channels.add(id(pool.get(endpoint)))
        assert len(channels) == 4 and pool.endpoints == {endpoint}
        await stream.write(b"after")
        assert await stream.read() == b"after"
        stream.cancel()
        old = Files(tmp_path / "old")
        old.certify(before)
        assert "handshake failed" in (await refusal(secured(**old.tls_options), endpoint)).message
    await pool.close()


async def test_both_are_asked_for_where_both_are_set(files: Files) -> None:
    files.certify(Authority())
    files.tokens(OLD)
    async with serving(secured(**files.tls_options, **files.token_options)) as endpoint:
        await passes(secured(**files.tls_options, **files.token_options), endpoint)
        assert (await refusal(secured(**files.tls_options), endpoint)).reason == "TOKEN_MISSING"
        assert (await refusal(secured(**files.token_options), endpoint)).reason != "TOKEN_MISSING"


# ---- options ----------------------------------------------------------------------------------------


async def test_nothing_listens_beyond_this_machine_unprotected(files: Files) -> None:
    files.certify(Authority())
    files.tokens(OLD)
    for host in ("0.0.0.0", "[::]", "", "10.0.0.1", "worker-1"):
        with pytest.raises(ConfigError) as caught:
            await GrpcServer.start(f"{host}:0", Echo().add_to, [], security=secured())
        for option in ("--host", "--mesh-token-file", "--tls-cert", "--tls-key", "--tls-ca", "--insecure"):
            assert option in caught.value.message
        assert caught.value.field == "host"
        for protected in (secured(**files.token_options), secured(**files.tls_options), secured(insecure=True)):
            protected.check_host(host)
    with pytest.raises(ConfigError, match="--transfer-host 10.0.0.1 can be reached") as caught:
        secured().check_host("10.0.0.1", "--transfer-host")
    assert caught.value.field == "transfer_host"
    for host in ("127.0.0.1", "localhost", "[::1]", "::1", "127.8.8.8"):
        secured().check_host(host)
    server = await GrpcServer.start("0.0.0.0:0", Echo().add_to, [], security=secured(insecure=True))
    await server.stop(0)


@pytest.mark.parametrize("left_out", ["tls_cert", "tls_key", "tls_ca"])
def test_mtls_needs_all_three(files: Files, left_out: str) -> None:
    files.certify(Authority())
    options = {name: value for name, value in files.tls_options.items() if name != left_out}
    with pytest.raises(ConfigError, match=f"there is no --{left_out.replace('_', '-')}"):
        secured(**options)


def test_complaints_are_told_once_in_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    complaints = Complaints(lambda: now)
    for port in range(5):
        complaints.say(f"ipv4:10.0.0.1:{port}", "did this")
    complaints.say("ipv4:10.0.0.2:1", "did this")
    complaints.say("ipv4:10.0.0.1:1", "did that")
    now = 11.0
    complaints.say("ipv4:10.0.0.1:9", "did this")
    assert [record.getMessage() for record in caplog.records] == [
        "peer ipv4:10.0.0.1:0: did this",
        "peer ipv4:10.0.0.2:1: did this",
        "peer ipv4:10.0.0.1:1: did that",
        "peer ipv4:10.0.0.1:9: did this (4 times more since the last such line)",
    ]
