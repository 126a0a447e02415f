"""What the router adds to a request, and what 32 streams cost it.

    this process: client, Bootstrap, a scripted decode worker     child: `pdmesh router`

1. Latency: a completion of one token, over HTTP through the router and over gRPC straight to the worker,
   in turns on kept connections; the difference of the medians is what the router adds.
2. Cost: N streams get one token each per step, as a decode worker sends them; CPU seconds of the router's
   process per second of wall time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import grpc
import psutil
import uvloop

from engine_core.types.digest import tokenizer_digest
from engine_core.types.ids import SessionId, mint_room
from engine_core.types.request import Finish, FinishReason, GenerateSpec, Role
from engine_core.types.sampling import SamplingParams
from pdmesh.decode.v1 import decode_service_pb2, decode_service_pb2_grpc
from services.runtime.channels import channel_options
from services.wire.generation import spec_to_proto
from tests.support.fake_decode import FakeDecode, Step, register, running_bootstrap, tokens

WORD = 70
"""A token id with text in every model's vocabulary."""


class Ticker:
    """One event per step, shared by all streams."""

    def __init__(self) -> None:
        self.step = asyncio.Event()

    async def run(self, period: float) -> None:
        """Ticks until cancelled."""
        due = time.monotonic()
        while True:
            due += period
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            step, self.step = self.step, asyncio.Event()
            step.set()


def script(ticker: Ticker, request: decode_service_pb2.GenerateRequest) -> Iterable[Step]:
    """One token at once when one is asked for, else one per step."""
    limit = request.request.sampling.max_tokens
    for i in range(limit):
        if limit > 1:
            yield ticker.step
        yield tokens(i, [WORD], Finish(FinishReason.LENGTH) if i + 1 == limit else None)


@asynccontextmanager
async def router(model: str, bootstrap: str) -> AsyncIterator[tuple[psutil.Process, str, int]]:
    """Yields the router's process, host and port."""
    read_fd, write_fd = os.pipe()
    command = [sys.executable, "-m", "services.cli.main", "router", "--model", model, "--bootstrap", bootstrap]
    command += ["--port", "0", "--log-level", "warning", "--ready-fd", str(write_fd)]
    process = subprocess.Popen(command, pass_fds=(write_fd,))  # noqa: ASYNC220  (once, before anything is timed)
    os.close(write_fd)
    try:
        with os.fdopen(read_fd) as events:
            while True:
                line = await asyncio.wait_for(asyncio.to_thread(events.readline), 60)
                if not line:
                    raise SystemExit("the router did not start")
                event = json.loads(line)
                if event["event"] == "ready":
                    break
            host, port = event["endpoint"].rsplit(":", 1)
            yield psutil.Process(process.pid), host, int(port)
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, 30)


class Connection:
    """A kept HTTP connection that costs the client as little as can be."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def post(self, body: dict[str, Any]) -> bytes:
        """Sends a completion request; returns the whole body of the reply."""
        data = json.dumps(body).encode()
        self._writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        if not head.startswith(b"http/1.1 200"):
            raise SystemExit(f"the router answers {head.decode()}")
        if b"content-length:" in head:
            return await self._reader.readexactly(int(head.split(b"content-length:")[1].split()[0]))
        parts = []
        while size := int(await self._reader.readline(), 16):
            parts.append((await self._reader.readexactly(size + 2))[:-2])
        await self._reader.readline()
        return b"".join(parts)


async def latency(host: str, port: int, worker: FakeDecode, prompt: list[int], rounds: int) -> dict[str, float]:
    """Milliseconds at the median, through the router and without it."""
    connection = Connection(*await asyncio.open_connection(host, port))
    body = {"model": "default", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    through, direct = [], []
    async with grpc.aio.insecure_channel(worker.endpoint, options=channel_options(2.0)) as channel:
        stub = decode_service_pb2_grpc.DecodeServiceStub(channel)
        for i in range(rounds + 20):
            started = time.perf_counter()
            await connection.post(body)
            between = time.perf_counter()
            async for _ in stub.Generate(_request(worker, prompt), timeout=10):
                pass
            if i >= 20:
                through.append(between - started)
                direct.append(time.perf_counter() - between)
    added = (statistics.median(through) - statistics.median(direct)) * 1e3
    return {
        "through_p50_ms": statistics.median(through) * 1e3,
        "direct_p50_ms": statistics.median(direct) * 1e3,
        "added_p50_ms": added,
    }


def _request(worker: FakeDecode, prompt: list[int]) -> decode_service_pb2.GenerateRequest:
    spec = GenerateSpec(SessionId(mint_room()), "bench", tuple(prompt), SamplingParams(max_tokens=1), 1, 0.0)
    return decode_service_pb2.GenerateRequest(request=spec_to_proto(spec), decode_incarnation=worker.incarnation)


async def cost(process: psutil.Process, host: str, port: int, streams: int, count: int) -> dict[str, float]:
    """CPU share of the router while `streams` streams of `count` tokens run."""
    connections = [Connection(*await asyncio.open_connection(host, port)) for _ in range(streams)]
    body = {"model": "default", "prompt": [WORD] * 128, "max_tokens": count, "stream": True}
    before, started = process.cpu_times(), time.monotonic()
    replies = await asyncio.gather(*(c.post(body) for c in connections))
    after, wall = process.cpu_times(), time.monotonic() - started
    cpu = after.user + after.system - before.user - before.system
    if any(reply.count(b'"text"') < count for reply in replies):
        raise SystemExit("a stream is too short")
    total = streams * count
    return {
        "streams": streams,
        "tokens_per_second": total / wall,
        "cpu_share": cpu / wall,
        "cpu_us_per_token": cpu / total * 1e6,
    }


async def main(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs both parts."""
    with tempfile.TemporaryDirectory() as directory:
        model = arguments.model or directory
        if not arguments.model:
            from models.tiny import make_tiny

            make_tiny(directory)
        ticker = Ticker()
        worker = FakeDecode(lambda request: script(ticker, request), role=Role.MIXED)
        async with running_bootstrap() as bootstrap, asyncio.TaskGroup() as group:
            await worker.start()
            await register(bootstrap, worker, tokenizer_digest(model))
            ticks = group.create_task(ticker.run(arguments.step))
            async with router(model, bootstrap) as (process, host, port):
                times = await latency(host, port, worker, [WORD] * 128, arguments.rounds)
                await cost(process, host, port, arguments.streams, 10)  # warm up
                spent = await cost(process, host, port, arguments.streams, arguments.tokens)
            ticks.cancel()
            await worker.stop()
    ratios = {
        "added latency p50 / 5 ms": times["added_p50_ms"] / 5,
        "cpu share at 32 streams / 0.5": spent["cpu_share"] / 0.5,
    }
    return {"ratios": ratios, "latency": times, "cost": spent}


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--model", help="directory whose tokenizer the router uses; a tiny one by default")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=150, help="per stream")
    parser.add_argument("--step", type=float, default=0.04, help="seconds between two tokens of a stream")
    return parser.parse_args()


if __name__ == "__main__":
    options = parse()
    result = uvloop.run(main(options))
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result))
