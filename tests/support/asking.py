"""A client of a mesh under test: asks with token ids, gets token ids, goes away when told to.

async with Asker(mesh) as asker:
    answer = await asker.generate(prompt, max_tokens=24)          # /generate: ids, path, transport
    answer = await asker.complete(prompt, stream=True)            # /v1/completions
    asking = asker.start(prompt, stream=True)                     # runs beside
    await asker.until_state(asking.request_id, "decode_request", "AWAITING_KV")
    await asking.disconnect()
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import httpx

from engine_core.types.errors import NotFoundError
from engine_core.types.sampling import SamplingParams, TokenLogprobs
from tests.support.mesh import Mesh
from tests.support.oracle import Claim

TIMEOUT = 60.0
"""Seconds for what comes much sooner on a machine with time."""
_POLL = 0.02
_SPECIALS = 3
"""Leading ids of a tiny vocabulary that no prompt holds."""


def random_prompt(length: int, seed: int, vocab: int = 300) -> tuple[int, ...]:
    """Token ids without special ones; the same arguments give the same prompt."""
    return tuple(random.Random(seed).choices(range(_SPECIALS, vocab), k=length))


@dataclass
class Answer:
    """What came back. `error` is OpenAI's error object, from a failed response or out of a stream."""

    prompt: tuple[int, ...]
    options: dict[str, Any]
    request_id: str
    status: int = 0
    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    stop_reason: Any = None
    cached: int = 0
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    """Per token, as /generate lists them."""
    prompt_logprobs: list[dict[str, Any] | None] = field(default_factory=list)
    path: str = ""
    transport: str = ""
    prefill: str = ""
    attempts: int = 0
    error: dict[str, Any] | None = None

    @property
    def ok(self) -> bool:
        """True when it is whole."""
        return self.status == 200 and self.error is None and bool(self.finish_reason)

    def claim(self) -> Claim:
        """For the oracle."""
        known = {n: v for n, v in self.options.items() if n in SamplingParams.__struct_fields__}
        biases = tuple((int(token), bias) for token, bias in self.options.get("logit_bias", {}).items())
        params = SamplingParams(**{**known, "stop_token_ids": self._stops(), "logit_bias": biases})
        return Claim(self.prompt, tuple(self.ids), params, *self._reports())

    def _reports(self) -> tuple[tuple[TokenLogprobs, ...], tuple[TokenLogprobs, ...]]:
        """Log probabilities as engines give them, of the output and of the prompt."""
        output = [
            TokenLogprobs(r["token_id"], r["logprob"], r["rank"], tuple((t, v) for t, v in r["top"]))
            for r in self.logprobs
        ]
        prompt = []
        positions = list(zip(self.prompt, self.prompt_logprobs, strict=True))[1:] if self.prompt_logprobs else []
        for token, position in positions:
            assert position is not None
            ranked = sorted((v["rank"], int(t), v["logprob"]) for t, v in position.items())
            own = position[str(token)]
            top = tuple((t, v) for _, t, v in ranked[: self.options["prompt_logprobs"]])
            prompt.append(TokenLogprobs(token, own["logprob"], own["rank"], top))
        return tuple(output), tuple(prompt)

    def _stops(self) -> tuple[int, ...]:
        return tuple(self.options.get("stop_token_ids", ()))


class Asking:
    """A request that runs beside the test."""

    def __init__(self, answer: Answer, task: asyncio.Task[None], first: asyncio.Event) -> None:
        self.answer, self._task, self._first = answer, task, first

    @property
    def request_id(self) -> str:
        """Its id in the mesh."""
        return self.answer.request_id

    async def first_token(self, within: float = TIMEOUT) -> None:
        """Waits for the first event of a stream."""
        first = asyncio.ensure_future(self._first.wait())
        await asyncio.wait({first, self._task}, timeout=within, return_when=asyncio.FIRST_COMPLETED)
        first.cancel()
        assert self._first.is_set(), f"no token within {within:g} s: {self.answer}"

    async def tokens(self, count: int, within: float = TIMEOUT) -> None:
        """Waits until so many tokens have come."""
        await until(lambda: len(self.answer.ids) >= count, within, lambda: f"{count} tokens: {self.answer}")

    async def whole(self, within: float = TIMEOUT) -> Answer:
        """Waits for the end. Raises AssertionError when there is none in time."""
        async with asyncio.timeout(within):
            await self._task
        return self.answer

    @property
    def done(self) -> bool:
        """True when it has ended."""
        return self._task.done()

    async def disconnect(self) -> None:
        """Goes away: the connection is closed, whatever state the request is in."""
        self._task.cancel()
        await asyncio.wait({self._task}, timeout=5.0)


async def until(condition: Callable[[], bool], within: float, what: Callable[[], str]) -> None:
    """Waits for what must come true."""
    deadline = asyncio.get_running_loop().time() + within
    while not condition():  # noqa: ASYNC110  # other processes have no events
        assert asyncio.get_running_loop().time() < deadline, f"not within {within:g} s: {what()}"
        await asyncio.sleep(_POLL)


async def until_async(
    condition: Callable[[], Awaitable[bool]], within: float, what: Callable[[], str] = lambda: ""
) -> None:
    """The same for what has to be asked for."""
    deadline = asyncio.get_running_loop().time() + within
    while not await condition():
        assert asyncio.get_running_loop().time() < deadline, f"not within {within:g} s: {what()}"
        await asyncio.sleep(_POLL)


class Asker:
    """One mesh's client."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=8)
        self._http = httpx.AsyncClient(timeout=TIMEOUT, trust_env=False, limits=limits)
        self._serial = itertools.count()
        self._salt = uuid.uuid4().hex

    async def __aenter__(self) -> Asker:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    def salt(self) -> str:
        """A cache salt that nobody has used: what is asked under it is cold."""
        return f"{self._salt}-{next(self._serial)}"

    # ---- asking -------------------------------------------------------------------------------------

    async def generate(self, prompt: Sequence[int], *, stream: bool = False, **options: Any) -> Answer:
        """POST /generate, greedy unless told otherwise. Raises AssertionError unless it succeeds."""
        return await self._ask("/generate", prompt, stream, options)

    async def complete(self, prompt: Sequence[int], *, stream: bool = False, **options: Any) -> Answer:
        """POST /v1/completions; pair and transport are looked up."""
        return await self._ask("/v1/completions", prompt, stream, options)

    async def ask(self, api: str, prompt: Sequence[int], *, stream: bool = False, **options: Any) -> Answer:
        """By the name of the API: generate or completions."""
        return await (self.complete if api == "completions" else self.generate)(prompt, stream=stream, **options)

    def start(self, prompt: Sequence[int], *, stream: bool = True, path: str = "/generate", **options: Any) -> Asking:
        """Asks beside the test; the answer fills up as events come, and may be an error."""
        answer = self._answer(prompt, options)
        first = asyncio.Event()
        task = asyncio.ensure_future(self._run(path, answer, stream, first))
        return Asking(answer, task, first)

    async def _ask(self, path: str, prompt: Sequence[int], stream: bool, options: dict[str, Any]) -> Answer:
        answer = self._answer(prompt, options)
        await self._run(path, answer, stream, asyncio.Event())
        assert answer.ok, f"{path} failed: {answer}"
        if path == "/v1/completions":
            await self._look_up(answer)
        return answer

    def _answer(self, prompt: Sequence[int], options: dict[str, Any]) -> Answer:
        full = {"temperature": 0.0, "max_tokens": 24, "cache_salt": self.salt(), **options}
        return Answer(tuple(prompt), full, full.pop("request_id", "") or f"test-{uuid.uuid4().hex}")

    async def _run(self, path: str, answer: Answer, stream: bool, first: asyncio.Event) -> None:
        name = "token_ids" if path == "/generate" else "prompt"
        body = {**answer.options, name: list(answer.prompt), "stream": stream, "return_token_ids": True}
        if path != "/generate":
            body["model"] = "default"
            if stream:
                body["stream_options"] = {"include_usage": True}
        headers = {"x-request-id": answer.request_id}
        async with self._http.stream("POST", f"{self.mesh.url}{path}", json=body, headers=headers) as response:
            answer.status = response.status_code
            if stream and response.status_code == 200:
                async for event in _events(response):
                    _take(answer, event)
                    first.set()
            else:
                _take(answer, json.loads(await response.aread()))

    async def _look_up(self, answer: Answer) -> None:
        """What /v1/completions does not say: the pair, by the router's trace."""
        moves = (await self._http.get(f"{self.mesh.url}/explain/{answer.request_id}")).json()["moves"]
        placed = [move["reason"] for move in moves if move["to_state"] == "PLACED"]
        answer.attempts = len(placed)
        answer.prefill = placed[-1].partition(" + ")[0] if " + " in placed[-1] else ""
        answer.path = "pd" if answer.prefill else "local"
        pairs = (await self.mesh.rank(answer.prefill))["pairs"] if answer.prefill else []
        answer.transport = pairs[0]["transport"] if pairs else ""

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Any body; the reply's. Raises AssertionError unless it succeeds."""
        response = await self._http.post(f"{self.mesh.url}{path}", json=body)
        assert response.status_code == 200, response.text
        return dict(response.json())

    # ---- looking ------------------------------------------------------------------------------------

    async def moves(self, request_id: str) -> list[dict[str, Any]]:
        """All state moves of a request, in order of time; none before anybody knows it."""
        try:
            return list((await self.mesh.explain(request_id))["moves"])
        except NotFoundError:
            return []

    async def until_state(self, request_id: str, machine: str, state: str, within: float = TIMEOUT) -> None:
        """Waits until the last move of a machine is into `state`."""
        seen: list[Any] = []

        async def there() -> bool:
            seen[:] = [m for m in await self.moves(request_id) if m["machine"] == machine]
            return bool(seen) and seen[-1]["to"] == state

        await until_async(there, within, lambda: f"{machine} {state}: {[(m['from'], m['to']) for m in seen]}")

    async def router_idle(self, within: float = TIMEOUT) -> None:
        """Waits until the router has nothing in flight, and nothing waiting."""
        left: list[str] = []

        async def idle() -> bool:
            workers = (await self._http.get(f"{self.mesh.url}/workers")).json()["workers"]
            metrics = (await self._http.get(f"{self.mesh.url}/metrics")).text.splitlines()
            gauges = [x for x in metrics if x.startswith(("pdmesh_router_in_flight ", "pdmesh_router_queued "))]
            assert len(gauges) == 2
            left[:] = [g for g in gauges if float(g.split()[1])]
            left.extend(f"{w['instance']}: {w['in_flight']} in flight" for w in workers if w["in_flight"])
            return not left

        await until_async(idle, within, lambda: ", ".join(left))

    async def counters(self, name: str) -> dict[str, float]:
        """A worker's counters as they are now."""
        return dict((await self.mesh.rank(name))["counters"])


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    ended = failed = False
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            ended = True
        elif line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            failed = failed or "error" in event
            yield event
    assert ended is not failed, "the stream must end in [DONE] or an error, and not in both"


def _take(answer: Answer, data: dict[str, Any]) -> None:
    """Adds one body or event."""
    if "error" in data:
        answer.error = data["error"]
        return
    part = data["choices"][0] if data.get("choices") else data
    answer.text += part.get("text", "")
    answer.ids += part.get("output_ids", part.get("token_ids", []))
    if isinstance(part.get("logprobs"), list):
        answer.logprobs += part["logprobs"]
    answer.prompt_logprobs = part.get("prompt_logprobs") or answer.prompt_logprobs
    answer.finish_reason = part.get("finish_reason") or answer.finish_reason
    answer.stop_reason = part.get("stop_reason") or answer.stop_reason
    usage = data.get("usage") or {}
    details = usage.get("prompt_tokens_details") or usage
    answer.cached = details.get("cached_tokens", answer.cached)
    answer.path = data.get("path", answer.path)
    answer.transport = data.get("transport", answer.transport)
    answer.prefill = data.get("prefill_instance", answer.prefill)
    answer.attempts = data.get("attempts", answer.attempts)
