"""Random requests for a mesh: drawn by a seed, asked in every way a client has, compared with the same asked alone.

    asks = draw_asks(random.Random(7), 100, limit=384)
    alone = [await ask_whole(client, aggregated.url, ask) for ask in asks]
    async with Crowd(mesh.url, width=24) as crowd:
        outcomes = await crowd.run(asks)
    assert not [d for a, o, e in zip(asks, outcomes, alone) for d in differences(a, o, e)]

A client may read a stream, or one body; may go away at some point; may read slowly.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

import grpc
import httpx

from engine_core.types.sampling import SamplingParams
from pdmesh.bootstrap.v1 import rank_table_pb2
from pdmesh.common.v1 import generation_pb2, identity_pb2
from pdmesh.decode.v1 import decode_service_pb2, decode_service_pb2_grpc
from services.cli.status import get_table
from services.router.journey import derive_seed
from services.runtime.channels import ChannelPool
from tests.support.asking import random_prompt
from tests.support.mesh import Mesh
from tests.support.oracle import Claim, Oracle

TIMEOUT = 90.0

Way = Literal["whole", "stream", "slow", "leave"]


@dataclass(frozen=True)
class StressAsk:
    """One body for /v1/completions, and how its client behaves. `patience` is when a client leaves: a number of
    events of a stream, or seconds."""

    prompts: tuple[tuple[int, ...], ...]
    options: Mapping[str, Any]
    way: Way = "whole"
    patience: float = 0.0

    def body(self, *, stream: bool) -> dict[str, Any]:
        """The body, for a stream or not."""
        prompt: Any = list(self.prompts[0]) if len(self.prompts) == 1 else [list(p) for p in self.prompts]
        return {"model": "default", "prompt": prompt, **self.options, "return_token_ids": True, "stream": stream}


@dataclass
class Choice:
    """One sample as its client saw it."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    stop_reason: Any = None


@dataclass
class Outcome:
    """What came of one request."""

    status: int = 0
    choices: dict[int, Choice] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    left: bool = False
    broken: str = ""
    done: bool = False

    @property
    def ok(self) -> bool:
        """True when all of it came."""
        return self.done and self.error is None and all(c.finish_reason for c in self.choices.values())

    def take(self, data: dict[str, Any]) -> None:
        """Adds a body or an event."""
        if "error" in data:
            self.error = data["error"]
            return
        for part in data["choices"]:
            choice = self.choices.setdefault(part["index"], Choice())
            choice.ids += part.get("token_ids") or []
            choice.text += part["text"]
            choice.finish_reason = part["finish_reason"] or choice.finish_reason
            choice.stop_reason = part.get("stop_reason") or choice.stop_reason


# ---- drawing ------------------------------------------------------------------------------------------


def draw_asks(draw: random.Random, count: int, *, limit: int, leaving: float = 0.2) -> list[StressAsk]:
    """`count` requests that fit `limit` tokens each, prompt and output, or are cut there. They share a few
    prefixes; a share of `leaving` goes away before the end."""
    prefixes = [random_prompt(draw.choice((16, 32, 47, 64, 96)), draw.randrange(10**6)) for _ in range(5)]
    return [_draw_ask(draw, prefixes, limit, leaving) for _ in range(count)]


def _draw_ask(draw: random.Random, prefixes: Sequence[tuple[int, ...]], limit: int, leaving: float) -> StressAsk:
    kind = draw.random()
    batch = draw.randint(2, 4) if kind < 0.08 else 1
    prompts = tuple(_draw_prompt(draw, prefixes, limit) for _ in range(batch))
    options: dict[str, Any] = {"max_tokens": _draw_length(draw, limit, len(prompts[0])), "temperature": 0.0}
    if draw.random() < 0.5:
        options |= {"temperature": draw.choice((0.4, 0.9, 1.3)), "seed": draw.randrange(2**40)}
        options |= draw.choice(({}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}))
    if 0.08 <= kind < 0.16:
        options |= {"n": 2, "seed": draw.randrange(2**40)}
    if draw.random() < 0.25:
        options["stop_token_ids"] = draw.sample(range(3, 300), 12)
    if draw.random() < 0.2:
        options["stop"] = draw.sample(["e", "a", "th", "in", " t", "s", "zz"], 2)
    if draw.random() < 0.2:
        options["min_tokens"] = draw.randint(0, min(options["max_tokens"], 8))
    if draw.random() < 0.5:
        options["ignore_eos"] = True
    way: Way = "leave" if draw.random() < leaving else draw.choice(("whole", "stream", "stream", "slow"))
    patience = draw.choice((0.0, 1.0, 2.0, 5.0, 12.0)) if draw.random() < 0.5 else -draw.random() * 0.6
    return StressAsk(prompts, options, way, patience)


def _draw_prompt(draw: random.Random, prefixes: Sequence[tuple[int, ...]], limit: int) -> tuple[int, ...]:
    tail = random_prompt(draw.choice((1, 2, 15, 16, 17, 40, 70)), draw.randrange(10**6))
    prompt = (*draw.choice(prefixes), *tail) if draw.random() < 0.7 else tail
    if draw.random() < 0.06:
        prompt += random_prompt(limit, draw.randrange(10**6))
        return prompt[: draw.choice((limit - 1, limit - 2, limit - 17, limit // 2))]
    return prompt[: limit - 1]


def _draw_length(draw: random.Random, limit: int, prompt: int) -> int:
    """Mostly short; some as long as fits, or longer."""
    kind = draw.random()
    if kind < 0.08:
        return 1
    if kind < 0.16:
        return 10 * limit
    return draw.randint(2, 90)


# ---- asking -------------------------------------------------------------------------------------------


async def ask_whole(client: httpx.AsyncClient, url: str, ask: StressAsk) -> Outcome:
    """Asks as one body, whatever the way; never leaves."""
    return await ask_once(client, url, dataclasses.replace(ask, way="whole"))


async def ask_once(client: httpx.AsyncClient, url: str, ask: StressAsk, request_id: str = "") -> Outcome:
    """Asks in the ask's way. Never raises for what a server does."""
    outcome = Outcome()
    seconds = -ask.patience if ask.way == "leave" and ask.patience < 0 else TIMEOUT
    try:
        async with asyncio.timeout(seconds):
            await _ask(client, url, ask, outcome, request_id)
    except TimeoutError:
        outcome.left = ask.way == "leave"
        outcome.broken = "" if outcome.left else f"not over after {TIMEOUT:g} s"
    except httpx.HTTPError as exc:
        outcome.broken = f"{type(exc).__name__}: {exc}"
    return outcome


async def _ask(client: httpx.AsyncClient, url: str, ask: StressAsk, outcome: Outcome, request_id: str) -> None:
    body = ask.body(stream=ask.way != "whole")
    headers = {"x-request-id": request_id} if request_id else {}
    events = 0
    async with client.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as response:
        outcome.status = response.status_code
        if not response.headers["content-type"].startswith("text/event-stream"):
            outcome.take(json.loads(await response.aread()))
            outcome.done = True
            return
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                outcome.done = True
            elif line.startswith("data: "):
                outcome.take(json.loads(line.removeprefix("data: ")))
                events += 1
                if ask.way == "leave" and events > ask.patience:
                    outcome.left = True
                    return
                if ask.way == "slow":
                    await asyncio.sleep(0.01)


class Crowd:
    """Clients that ask at once, `width` at a time."""

    def __init__(self, url: str, *, width: int) -> None:
        self._url, self._slots = url, asyncio.Semaphore(width)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=4)
        self.client = httpx.AsyncClient(timeout=TIMEOUT, trust_env=False, limits=limits)

    async def __aenter__(self) -> Crowd:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.client.aclose()

    async def run(self, asks: Sequence[StressAsk], *, request_id: str = "") -> list[Outcome]:
        """All outcomes, in the order of the asks; with `request_id`, all of them under this one."""

        async def one(ask: StressAsk) -> Outcome:
            async with self._slots:
                return await ask_once(self.client, self._url, ask, request_id)

        return list(await asyncio.gather(*(one(ask) for ask in asks)))


# ---- judging ------------------------------------------------------------------------------------------


def differences(ask: StressAsk, outcome: Outcome, alone: Outcome, oracle: Callable[[], Oracle]) -> list[str]:
    """What is wrong with an outcome; who left or was told of an error has seen a true beginning.

    Recomputed KV rounds differently: where two outputs differ, the oracle says whether both are right.
    """
    assert alone.ok, f"asked alone, it failed: {alone.error or alone.broken}"
    found = []
    if outcome.broken:
        found.append(f"broke: {outcome.broken}")
    whole = outcome.ok and not outcome.left
    if not (whole or outcome.left or outcome.error):
        found.append(f"ended without an end: status {outcome.status}")
    if whole and set(outcome.choices) != set(alone.choices):
        found.append(f"choices {sorted(outcome.choices)}, not {sorted(alone.choices)}")
    for index, choice in outcome.choices.items():
        expected = alone.choices[index]
        if choice.ids != expected.ids[: len(choice.ids)]:
            verdicts = oracle().verify([claim_of(ask, index, choice), claim_of(ask, index, expected)])
            told = zip(("in the crowd", "alone"), verdicts, strict=True)
            found += [f"choice {index} is wrong {where}: {v.message}" for where, v in told if not v.right]
        elif not expected.text.startswith(choice.text):
            found.append(f"choice {index} reads {choice.text!r}, not {expected.text!r}")
        elif whole and choice != expected:
            found.append(f"choice {index} is {choice}, not {expected}")
    return found


def claim_of(ask: StressAsk, index: int, choice: Choice) -> Claim:
    """A choice for the oracle."""
    n = ask.options.get("n", 1)
    known = {name: value for name, value in ask.options.items() if name in SamplingParams.__struct_fields__}
    known["stop_token_ids"] = tuple(known.get("stop_token_ids", ()))
    known["seed"] = derive_seed(known.get("seed", 0), index % n)
    return Claim(ask.prompts[index // n], tuple(choice.ids), SamplingParams(**known))


# ---- around the router --------------------------------------------------------------------------------


class Direct:
    """Calls decode workers as a router would, with sessions and deadlines of the test's own choice."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._pool = mesh, ChannelPool(2.0)
        self._rows: dict[str, rank_table_pb2.RankRow] = {}

    async def __aenter__(self) -> Direct:
        table = await get_table(self._pool, self._mesh.bootstrap, 5.0)
        self._rows = {row.instance.name: row for row in table.rows}
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._pool.close()

    async def generate(
        self,
        pair: tuple[str, str],
        prompt: Sequence[int],
        max_tokens: int,
        *,
        room: int,
        attempt: int = 0,
        emitted: Sequence[int] = (),
        timeout: float = TIMEOUT,
    ) -> tuple[list[int], str]:
        """Greedy tokens that came, and OK or the status that ended them. `pair` names prefill and decode."""
        prefill, decode = (self._rows[name] for name in pair)
        request = decode_service_pb2.GenerateRequest(
            request=generation_pb2.GenerationRequest(
                session=identity_pb2.SessionId(room=room, attempt=attempt),
                request_id=f"direct-{room}",
                prompt_token_ids=prompt,
                emitted_token_ids=emitted,
                sampling=generation_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True),
                fingerprint=decode.instance.fingerprint,
            ),
            decode_incarnation=decode.incarnation,
            prefill=identity_pb2.PeerRef(endpoint=prefill.endpoint, incarnation=prefill.incarnation),
        )
        ids: list[int] = []
        stub = decode_service_pb2_grpc.DecodeServiceStub(self._pool.get(decode.endpoint))
        try:
            async for message in stub.Generate(request, timeout=timeout):
                assert not message.token_ids or message.first_index == len(emitted) + len(ids)
                ids += message.token_ids
        except grpc.aio.AioRpcError as exc:
            return ids, str(exc.code().name)
        return ids, "OK"


def open_without_reading(url: str, ask: StressAsk) -> socket.socket:
    """Sends an ask and reads nothing of what comes; the socket is the caller's to close."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    data = json.dumps(ask.body(stream=True)).encode()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect((host, int(port)))
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
    return sock
