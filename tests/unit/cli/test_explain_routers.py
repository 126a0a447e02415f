"""`pdmesh explain` says which routers it could not ask, and what would help."""

from __future__ import annotations

import asyncio
import ssl

import trustme

from pdmesh.bootstrap.v1 import rank_table_pb2
from services.cli.explain import ask_routers


async def test_a_router_that_can_not_be_asked_is_named() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    stranger, nobody = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}", "127.0.0.1:1"
    async with server:
        services = [
            rank_table_pb2.Service(name="bootstrap"),
            rank_table_pb2.Service(name="router", http_endpoint=stranger),
            rank_table_pb2.Service(name="router", http_endpoint=nobody),
        ]
        first, second = [answer["silent"] for answer in await ask_routers(services, "an-id", 20.0, "")]
    assert first["process"] == f"router {stranger}" and "CERTIFICATE_VERIFY_FAILED" in first["error"]
    assert first["error"].endswith("; name the authority of its certificate with --http-ca")
    assert second["process"] == f"router {nobody}" and second["error"].startswith("ConnectError")
    assert "--http-ca" not in second["error"]
