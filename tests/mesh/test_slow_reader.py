"""A client that stops reading: its request ends at the workers too, and its blocks are free."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from tests.support.mesh import Mesh
from tests.support.models import tiny_model

pytestmark = pytest.mark.slow

LIMIT = 60.0


async def test_a_reader_that_stalls_holds_no_blocks() -> None:
    options = {"kv_tokens": 8192, "client_stall_timeout": 1.0}
    async with Mesh(tiny_model("llama"), options=options) as mesh:
        host, _, port = mesh.endpoint("router").partition(":")
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((host, int(port)))
        try:
            asked = {
                "model": "default",
                "prompt": "hello",
                "max_tokens": 4000,
                "stream": True,
                "ignore_eos": True,
                "logprobs": 20,
            }
            body = json.dumps(asked).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nx-request-id: stalls\r\nContent-Length: %d\r\n\r\n"
            sock.sendall(head % len(body) + body)

            def ended() -> bool:
                return any("request path=/v1/completions" in line for line in mesh.lines("router"))

            async with asyncio.timeout(LIMIT):
                while not ended():  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            moves = {(move["from"], move["to"]) for move in (await mesh.explain("stalls"))["moves"]}
            assert {("FIRST_TOKEN", "CANCELLED"), ("DECODING", "CANCELLED")} <= moves
            rank = next(rank for rank in await mesh.quiet() if rank["instance"] == "decode-0")
            assert rank["sessions"] == 0 and rank["kv"]["used"] == 0
            assert 0 < rank["counters"]["output_tokens"] < 4000, rank["counters"]
        finally:
            sock.close()
