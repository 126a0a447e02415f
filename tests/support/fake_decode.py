"""A decode worker without an engine, and a router over it: real gRPC, real HTTP, a real Bootstrap.

A script says what the worker answers to a request: messages, failures to raise, and events to wait for.
Nothing is timed; a test sets the event when the worker may go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai

from engine_core.types.digest import tokenizer_digest
from engine_core.types.errors import Leg, PdmeshError
from engine_core.types.ids import RankCoord, mint_incarnation
from engine_core.types.kv import KvUsage, fingerprint_of
from engine_core.types.request import Finish, FinishReason, Role, StageTimings
from pdmesh.bootstrap.v1 import bootstrap_service_pb2 as bootstrap_pb2
from pdmesh.bootstrap.v1 import bootstrap_service_pb2_grpc as bootstrap_grpc
from pdmesh.common.v1 import worker_pb2, worker_pb2_grpc
from pdmesh.decode.v1 import decode_service_pb2 as decode_pb2
from pdmesh.decode.v1 import decode_service_pb2_grpc as decode_grpc
from services.bootstrap import main as bootstrap_main
from services.config import BootstrapConfig, RouterConfig
from services.router import main as router_main
from services.router.text.tokenizer import RouterTokenizer
from services.runtime.server import GrpcServer
from services.runtime.tasks import Stop, TaskOwner
from services.wire.bootstrap import InstanceSpec, RankRow, row_to_proto, spec_to_proto
from services.wire.common import Load, load_to_proto
from services.wire.generation import finish_to_proto

Step = decode_pb2.GenerateResponse | PdmeshError | asyncio.Event
Script = Callable[[decode_pb2.GenerateRequest], Iterable[Step]]

PARTS = {"config": "c0", "dtype": "float32", "block_size": "16"}
EOS = 2


def tokens(first_index: int, ids: Sequence[int], finish: Finish | None = None) -> decode_pb2.GenerateResponse:
    """One message of a stream."""
    finished = None if finish is None else finish_to_proto(finish)
    return decode_pb2.GenerateResponse(first_index=first_index, token_ids=ids, finished=finished)


def stream(ids: Sequence[int], limit: int, *, per_message: int = 1) -> Iterable[decode_pb2.GenerateResponse]:
    """The messages of an output that ends with EOS, or at `limit` tokens."""
    out = [*ids, EOS][:limit]
    stopped = out[-1] == EOS
    finish = Finish(
        FinishReason.STOP if stopped else FinishReason.LENGTH,
        stop_token_id=EOS if stopped else None,
        cached_tokens=3,
        path="pd",
        transport="shm",
        timings=StageTimings(decoding=0.5),
        prefill_timings=StageTimings(computing=0.25),
    )
    for at in range(0, len(out), per_message):
        last = at + per_message >= len(out)
        yield tokens(at, out[at : at + per_message], finish if last else None)


def says(ids: Sequence[int], *, per_message: int = 1) -> Script:
    """Answers every request with these tokens, or as many as it asks for."""
    return lambda request: stream(ids, request.request.sampling.max_tokens, per_message=per_message)


class FakeDecode(decode_grpc.DecodeServiceServicer, worker_pb2_grpc.WorkerServiceServicer):
    """A row of the table with a scripted DecodeService behind it."""

    def __init__(
        self,
        script: Script,
        *,
        name: str = "decode-0",
        role: Role = Role.DECODE,
        parts: dict[str, str] | None = None,
        max_model_len: int = 4096,
        kv_capacity_tokens: int = 100_000,
        digest: str = "",
        load: Load | None = None,
    ) -> None:
        self.script = script
        self.name, self.role, self.parts = name, role, PARTS if parts is None else parts
        self.max_model_len, self.kv_capacity_tokens = max_model_len, kv_capacity_tokens
        self.digest, self.load = digest, load or Load()
        self.incarnation = mint_incarnation()
        self.endpoint = "127.0.0.1:1"  # nobody listens there
        self.requests: list[decode_pb2.GenerateRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.arrived = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.open = 0
        self._server: GrpcServer | None = None

    async def start(self) -> None:
        """Listens on a free port of loopback."""
        await self._listen("127.0.0.1:0")

    async def _listen(self, address: str) -> None:
        def add(server: grpc.aio.Server) -> None:
            decode_grpc.add_DecodeServiceServicer_to_server(self, server)
            worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)

        self._server = await GrpcServer.start(address, add, ["pdmesh.decode.v1.DecodeService"], leg=Leg.DECODE)
        await self._server.set_serving(True)
        self.endpoint = self._server.endpoint

    async def start_again(self) -> None:
        """Listens where it did."""
        await self._listen(self.endpoint)

    async def stop(self) -> None:
        """Cuts all streams."""
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    async def Generate(self, request: decode_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Plays the script."""
        self.requests.append(request)
        self.metadata.append({str(k): str(v) for k, v in context.invocation_metadata()})
        self.arrived.set()
        self.open += 1
        try:
            for step in self.script(request):
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, PdmeshError):
                    raise step
                else:
                    yield step
        except (asyncio.CancelledError, GeneratorExit):  # while waiting, or while a message was on its way
            self.cancelled.set()
            raise
        finally:
            self.open -= 1

    async def GetStats(self, request: Any, context: Any) -> worker_pb2.GetStatsResponse:  # noqa: N802
        """Figures for /metrics."""
        load = Load(running=self.open, kv=KvUsage(total=10, free=6, used=3, cached=1))
        pair = worker_pb2.TransferPair(peer_instance="prefill-0", transport="shm", bytes=4096, seconds=0.5, up=True)
        return worker_pb2.GetStatsResponse(instance=self.name, load=load_to_proto(load), pairs=[pair])

    def row(self, digest: str) -> RankRow:
        """What it registers as."""
        spec = InstanceSpec(
            name=self.name,
            role=self.role,
            fingerprint=fingerprint_of(self.parts),
            fingerprint_parts=self.parts,
            max_model_len=self.max_model_len,
            kv_capacity_tokens=self.kv_capacity_tokens,
            tokenizer_digest=self.digest or digest,
            eos_token_ids=(EOS,),
        )
        return RankRow(spec, RankCoord(), self.endpoint, self.incarnation, load=self.load)


def prefill_row(**kwargs: Any) -> FakeDecode:
    """A prefill row that nobody calls: the fake decode worker computes nothing."""
    return FakeDecode(says([]), role=Role.PREFILL, **{"name": "prefill-0", **kwargs})


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


async def until(condition: Callable[[], bool]) -> None:
    """Waits for what must come; the limit only ends a test that has failed."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  (what changes is in the router, not ours to signal)
            await asyncio.sleep(0.005)


class Harness:
    """A running router. `http` and `client` (the openai SDK) talk to it over a real socket."""

    def __init__(self, endpoint: str, bootstrap: str, model: str, stack: AsyncExitStack) -> None:
        self.endpoint, self.bootstrap, self.model = endpoint, bootstrap, model
        self.digest = tokenizer_digest(Path(model))
        self.url = f"http://{endpoint}"
        self.tokenizer = RouterTokenizer.load(model)
        self.http = httpx.AsyncClient(base_url=self.url, timeout=30, trust_env=False)
        self.client = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=30)
        self.stop_router = Stop()
        self._stack = stack

    def ids(self, text: str) -> list[int]:
        """Token ids of text."""
        return self.tokenizer.encode(text, add_special_tokens=False)


@asynccontextmanager
async def running_bootstrap() -> AsyncIterator[str]:
    """A real Bootstrap on a free port; yields its endpoint."""
    stop, owner = Stop(), TaskOwner("bootstrap-for-tests")
    ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    task = owner.spawn(bootstrap_main.run(BootstrapConfig(port=0), stop, ready.set_result), "run")
    try:
        yield (await asyncio.wait_for(ready, 10))["endpoint"]
    finally:
        stop.request_now()
        await asyncio.wait({task}, timeout=10)
        await owner.close()


async def register(bootstrap: str, worker: FakeDecode, digest: str) -> None:
    """Puts a worker into the table."""
    row = worker.row(digest)
    async with grpc.aio.insecure_channel(bootstrap) as channel:
        stub = bootstrap_grpc.BootstrapServiceStub(channel)
        instance = bootstrap_pb2.RegisterInstanceRequest(
            instance=spec_to_proto(row.instance), incarnation=row.incarnation
        )
        await stub.RegisterInstance(instance, timeout=5)
        await stub.RegisterRank(bootstrap_pb2.RegisterRankRequest(row=row_to_proto(row), ttl_seconds=60), timeout=5)


@asynccontextmanager
async def running_router(model: Path, *workers: FakeDecode, **config: Any) -> AsyncIterator[Harness]:
    """Bootstrap, workers and router. DECODE workers listen; a prefill row is added unless one is given, or
    all are MIXED."""
    rows = list(workers)
    if any(w.role is Role.DECODE for w in rows) and not any(w.role is Role.PREFILL for w in rows):
        rows.append(prefill_row())
    async with AsyncExitStack() as stack:
        bootstrap = await stack.enter_async_context(running_bootstrap())
        for worker in rows:
            if worker.role is not Role.PREFILL:
                await worker.start()
                stack.push_async_callback(worker.stop)
            await register(bootstrap, worker, tokenizer_digest(model))
        values: dict[str, Any] = {"port": 0, "peer_wait": 0.0, "drain_timeout": 5.0} | config
        settings = RouterConfig(model=str(model), bootstrap=(bootstrap,), **values)
        stop, owner = Stop(), TaskOwner("router-for-tests")
        ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        task = owner.spawn(router_main.run(settings, stop, ready.set_result), "run")
        await asyncio.wait({task, ready}, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        harness = Harness(ready.result()["endpoint"], bootstrap, str(model), stack)
        harness.stop_router = stop
        try:
            yield harness
        finally:
            await harness.http.aclose()
            await harness.client.close()
            stop.request_now()
            await asyncio.wait({task}, timeout=10)
            await owner.close()
