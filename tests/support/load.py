"""Load on a mesh: some requests always in flight, each recorded from its first byte to its end.

    asks = [Ask(prompt, 64) for prompt in prompts]
    calm = await run_all(url, asks)                      # nothing breaks: what each ask gives
    async with Load(url, asks, width=8) as load:
        await load.until(lambda: load.streaming() >= 4, "streams run")
        ...                                              # break something
        await load.until(lambda: load.finished_since(mark) >= 8, "the others go on")
    check_ends(load.answers, calm)                       # right, or a clear error

A request never waits longer than `limit` seconds: its end is then recorded as an error of the client's own
(`timed_out`), which check_ends never accepts.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import httpx

from services.runtime.tasks import TaskOwner

LIMIT = 60.0


@dataclass(frozen=True)
class Ask:
    """One request; for greedy tokens unless it has a temperature."""

    prompt: tuple[int, ...]
    max_tokens: int
    stream: bool = True
    temperature: float = 0.0
    seed: int = 0


@dataclass
class Answer:
    """What came of one request. `error` is the body's or the event's `error` object."""

    ask: Ask
    request_id: str
    began: float
    status: int = 0
    token_ids: list[int] = field(default_factory=list)
    token_at: float = 0.0
    finish_reason: str | None = None
    done: bool = False
    error: dict[str, Any] | None = None
    broken: str = ""
    """How the connection broke, when the server said nothing more."""
    timed_out: bool = False
    ended: float = 0.0

    @property
    def over(self) -> bool:
        """True when it has ended, in whatever way."""
        return self.ended > 0.0

    @property
    def ok(self) -> bool:
        """True when the whole output came."""
        return self.over and self.finish_reason is not None and self.error is None and not self.broken

    @property
    def seconds(self) -> float:
        """From sending to the end."""
        return self.ended - self.began

    def __str__(self) -> str:
        how = self.finish_reason or self.broken or json.dumps(self.error)
        return (
            f"{self.request_id}: status {self.status}, {len(self.token_ids)} of {self.ask.max_tokens} tokens "
            f"after {self.seconds:.2f} s: {how}"
        )


async def send(
    client: httpx.AsyncClient,
    url: str,
    ask: Ask,
    request_id: str = "",
    on_event: Callable[[Answer], None] | None = None,
) -> Answer:
    """Sends one request to /v1/completions and reads it to its end; `url` is without /v1. Never raises for
    what a server does."""
    return await _fill(client, url, Answer(ask, request_id, time.monotonic()), on_event or (lambda _answer: None))


async def _fill(client: httpx.AsyncClient, url: str, answer: Answer, on_event: Callable[[Answer], None]) -> Answer:
    ask = answer.ask
    body = {
        "model": "default",
        "prompt": list(ask.prompt),
        "max_tokens": ask.max_tokens,
        "temperature": ask.temperature,
        "seed": ask.seed,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": ask.stream,
    }
    headers = {"x-request-id": answer.request_id} if answer.request_id else {}
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as response:
            answer.status = response.status_code
            answer.request_id = response.headers.get("x-request-id", answer.request_id)
            if response.headers.get("content-type", "").startswith("text/event-stream"):
                async for line in response.aiter_lines():
                    _take_line(answer, line)
                    on_event(answer)
            else:
                _take_body(answer, await response.aread())
    except httpx.TimeoutException as exc:
        answer.timed_out, answer.broken = True, type(exc).__name__
    except httpx.HTTPError as exc:
        answer.broken = f"{type(exc).__name__}: {exc}"
    answer.ended = time.monotonic()
    on_event(answer)
    return answer


def _take_line(answer: Answer, line: str) -> None:
    if not line.startswith("data: "):
        return
    if line == "data: [DONE]":
        answer.done = True
        return
    data = json.loads(line.removeprefix("data: "))
    if "error" in data:
        answer.error = data["error"]
        return
    for choice in data["choices"]:
        _take_choice(answer, choice)


def _take_body(answer: Answer, body: bytes) -> None:
    data = json.loads(body)
    if "error" in data:
        answer.error = data["error"]
        return
    _take_choice(answer, data["choices"][0])
    answer.done = True


def _take_choice(answer: Answer, choice: Mapping[str, Any]) -> None:
    ids = choice.get("token_ids") or []
    if ids and not answer.token_ids:
        answer.token_at = time.monotonic()
    answer.token_ids.extend(ids)
    answer.finish_reason = choice.get("finish_reason") or answer.finish_reason


def _client(limit: float) -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=limit, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))


async def run_all(url: str, asks: Sequence[Ask], *, width: int = 4, limit: float = LIMIT) -> dict[Ask, list[int]]:
    """Runs each ask once and returns its tokens. Raises AssertionError when one does not succeed."""
    slots = asyncio.Semaphore(width)
    async with _client(limit) as client:

        async def one(ask: Ask) -> Answer:
            async with slots:
                return await send(client, url, ask)

        answers = await asyncio.gather(*(one(ask) for ask in asks))
    for answer in answers:
        assert answer.ok and answer.done and answer.status == 200, str(answer)
        assert len(answer.token_ids) == answer.ask.max_tokens, str(answer)
    return {answer.ask: answer.token_ids for answer in answers}


class Load:
    """Keeps `width` requests in flight, taking the asks in turn, until the block is left: no new ones begin
    then, and those in flight are waited for."""

    def __init__(self, url: str, asks: Sequence[Ask], *, width: int, limit: float = LIMIT, name: str = "load") -> None:
        self.answers: list[Answer] = []
        """All that were begun, in order."""
        self._url, self._width, self._limit, self._name = url, width, limit, name
        self._asks = itertools.cycle(asks)
        self._stopping = False
        self._changed = asyncio.Event()
        self._tasks = TaskOwner("load")
        self._client = _client(limit)

    async def __aenter__(self) -> Load:
        for _ in range(self._width):
            self._tasks.spawn(self._lane(), "lane")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = True
        ended = exc is not None or await self._tasks.join(self._limit + 5.0)
        await self._tasks.close()
        await self._client.aclose()
        assert ended, f"requests did not end: {[str(a) for a in self.answers if not a.over]}"

    def stop(self) -> None:
        """Begins no new requests."""
        self._stopping = True

    async def until(self, reached: Callable[[], bool], what: str, within: float = LIMIT) -> None:
        """Waits, event by event, until `reached()`. Raises AssertionError after `within` seconds."""
        try:
            async with asyncio.timeout(within):
                while not reached():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            last = "\n".join(map(str, self.answers[-2 * self._width :]))
            raise AssertionError(f"not reached within {within:g} s: {what}\n{last}") from None

    def streaming(self, at_least: int = 1) -> int:
        """Requests that have `at_least` tokens and are not over."""
        return sum(not a.over and len(a.token_ids) >= at_least for a in self.answers)

    def waiting(self) -> int:
        """Requests without a token that are not over."""
        return sum(not a.over and not a.token_ids for a in self.answers)

    def begun_since(self, moment: float) -> list[Answer]:
        """Requests that were sent after a time.monotonic()."""
        return [a for a in self.answers if a.began > moment]

    def right_since(self, moment: float) -> int:
        """How many of those have ended whole."""
        return sum(a.ok for a in self.begun_since(moment))

    async def _lane(self) -> None:
        while not self._stopping:
            answer = Answer(next(self._asks), f"{self._name}-{len(self.answers)}", time.monotonic())
            self.answers.append(answer)
            await _fill(self._client, self._url, answer, lambda _answer: self._changed.set())
            if not answer.ok:
                await asyncio.sleep(0.05)  # a mesh that refuses is not to be hammered


def check_ends(
    answers: Sequence[Answer],
    calm: Mapping[Ask, Sequence[int]],
    *,
    within: float = LIMIT,
    statuses: Collection[int] = (503,),
    legs: Collection[str] = (),
    may_break: bool = False,
    judge: Callable[[Sequence[Answer]], None] | None = None,
) -> list[Answer]:
    """Each request has ended within `within` seconds, either right (the tokens of the calm run, to the last)
    or with an OpenAI error of its own: an HTTP status of `statuses` and an error body, or after its first
    event an error event. What came before an error is a true beginning. Errors name one of `legs` when given.
    Only with `may_break` a connection may break without a word. What differs from the calm run goes to `judge`,
    who raises when it is wrong: a resume computes KV anew, which rounds differently. Returns those that failed."""
    failed: list[Answer] = []
    doubtful: list[Answer] = []
    for answer in answers:
        told = str(answer)
        assert answer.over and not answer.timed_out, told
        assert answer.seconds <= within, told
        expected = list(calm[answer.ask])
        if answer.token_ids != expected[: len(answer.token_ids)]:
            assert judge is not None, f"{told}\nwrong text: {answer.token_ids}"
            doubtful.append(answer)
        if answer.ok:
            assert answer.status == 200 and answer.done and len(answer.token_ids) == len(expected), told
            continue
        failed.append(answer)
        if answer.broken:
            assert may_break, told
            continue
        assert answer.error is not None, told
        assert answer.error["message"] and answer.error["type"] == "server_error" and answer.error["code"], told
        if answer.status == 200:
            assert answer.ask.stream and not answer.done, told
        else:
            assert answer.status in statuses and not answer.token_ids, told
        if legs:
            assert any(leg in answer.error["message"] for leg in legs), f"names none of {legs}: {told}"
    if judge is not None and doubtful:
        judge(doubtful)
    return failed
