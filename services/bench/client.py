"""The client of a server under load: finds out what it takes, sends streaming requests and times them.

Every request has a connection of its own unless `keep_alive` is set, as that of a new user would: one kept open
may be closed by the server just as it is used again, which would count as an error.
"""

from __future__ import annotations

import math
import os
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
import orjson

from engine_core.types.errors import ConfigError, UnavailableError
from services.bench.outcome import Failure
from services.bench.report import Target
from services.bench.workload import Calibration, calibrate, some_words

CALIBRATE_WORDS = (8, 64)
_LONGEST_LINE = 1 << 20
_DETAIL = 300


@dataclass(frozen=True)
class Connection:
    """How to reach the server."""

    url: str
    """With or without /v1."""
    model: str = ""
    """Empty: the first one that the server lists."""
    endpoint: str = "completions"
    """completions or chat."""
    api_key: str = field(default="", repr=False)
    ca: Path | None = None
    """PEM file with the authorities that the server's certificate may come from; None: those of the system."""
    timeout: float = 600.0
    """Seconds for one request."""
    keep_alive: bool = False
    temperature: float = 0.0
    ignore_eos: bool = True
    extra_body: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Reply:
    """What came back of one attempt; times as time.perf_counter() has them."""

    sent: float = 0.0
    end: float = 0.0
    first: float | None = None
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    status: int = 0
    failure: Failure | None = None
    detail: str = ""
    retry_after: float | None = None


def _ignore(_reply: Reply) -> None:
    pass


class _StreamFailed(Exception):
    def __init__(self, failure: Failure, detail: str) -> None:
        super().__init__(detail)
        self.failure = failure


class Client:
    """One server; use it as an async context manager, then call prepare()."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.base = base_url(connection.url)
        path = "/chat/completions" if connection.endpoint == "chat" else "/completions"
        self._url = self.base + path
        self.model = connection.model
        self._optional: dict[str, Any] = {"stream_options": {"include_usage": True}}
        if connection.ignore_eos:
            self._optional["ignore_eos"] = True
        self._refused: tuple[str, ...] = ()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        c = self._connection
        tls = ssl.create_default_context(cafile=c.ca) if c.ca else True
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {c.api_key}"} if c.api_key else {},
            timeout=aiohttp.ClientTimeout(total=c.timeout),
            connector=aiohttp.TCPConnector(limit=0, force_close=not c.keep_alive, ssl=tls),
            read_bufsize=_LONGEST_LINE,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def _http(self) -> aiohttp.ClientSession:
        assert self._session is not None, "use it as a context manager"
        return self._session

    @property
    def target(self) -> Target:
        """What is asked, after prepare()."""
        sent = (*self._optional, *self._connection.extra_body)
        return Target(self.base, self.model, self._connection.endpoint, tuple(sorted(sent)), self._refused)

    # ---- before the load ----------------------------------------------------------------------------

    async def prepare(self) -> Calibration:
        """Finds the model, the optional fields that the server takes, and its tokens per word.

        Raises UnavailableError when the server does not answer a plain request.
        """
        try:
            if not self.model:
                self.model = await self._first_model()
            await self._probe()
            few, many = [(words, await self._count_tokens(words)) for words in CALIBRATE_WORDS]
        except (aiohttp.ClientError, OSError) as exc:
            raise UnavailableError(f"{self.base} does not answer: {_described(exc)}") from exc
        except TimeoutError as exc:
            raise UnavailableError(f"{self.base} did not answer within {self._connection.timeout:g} s") from exc
        return calibrate(few, many) if few[1] and many[1] else Calibration()

    async def _first_model(self) -> str:
        async with self._http.get(self.base + "/models") as answer:
            text = await answer.read()
            if answer.status != 200:
                raise UnavailableError(f"{self.base}/models: {_http_error(answer.status, text)}")
        try:
            return str(orjson.loads(text)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise UnavailableError(f"{self.base}/models lists no model: name one by --model") from None

    async def _probe(self) -> None:
        """Leaves out the optional fields that the server refuses."""
        full = dict(self._optional)
        without = ((), ("ignore_eos",), ("stream_options",), ("ignore_eos", "stream_options"))
        reply = Reply()
        for names in without:
            if not all(name in full for name in names):
                continue
            self._optional = {name: value for name, value in full.items() if name not in names}
            self._refused = names
            reply = await self.stream(self.body(some_words(4, "probe"), 2), "bench-probe")
            if reply.failure is None:
                return
            if reply.status not in (400, 422):
                break
        if not reply.status:
            raise UnavailableError(f"{self.base} does not answer: {reply.detail}")
        hint = " (give --api-key or --api-key-file)" if reply.status in (401, 403) else ""
        raise UnavailableError(f"{self._url} does not answer a plain request: {reply.detail}{hint}")

    async def _count_tokens(self, words: int) -> int:
        """The server's count of a prompt; 0 when it does not say."""
        body = self._fields(some_words(words, f"calibrate {words}"), 1) | {"stream": False}
        body.pop("stream_options", None)
        async with self._http.post(self._url, data=orjson.dumps(body), headers=_headers("")) as answer:
            text = await answer.read()
            if answer.status != 200:
                return 0
        try:
            return int((orjson.loads(text).get("usage") or {}).get("prompt_tokens") or 0)
        except (ValueError, AttributeError):
            return 0

    # ---- under load ---------------------------------------------------------------------------------

    def body(self, prompt: str, max_tokens: int) -> bytes:
        """The body of a streaming request."""
        return orjson.dumps(self._fields(prompt, max_tokens))

    def _fields(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        c = self._connection
        fields: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens, "temperature": c.temperature}
        if c.endpoint == "chat":
            fields["messages"] = [{"role": "user", "content": prompt}]
        else:
            fields["prompt"] = prompt
        return {**fields, "stream": True, **self._optional, **c.extra_body}

    async def stream(self, body: bytes, request_id: str, on_text: Callable[[Reply], None] = _ignore) -> Reply:
        """One attempt, timed; `on_text` is called at every chunk with text.

        Failures of the server and the network are in the reply; none is raised.
        """
        reply = Reply(sent=time.perf_counter())
        try:
            async with self._http.post(self._url, data=body, headers=_headers(request_id)) as answer:
                reply.status = answer.status
                if answer.status != 200:
                    text = await answer.read()
                    reply.retry_after = retry_after(answer.headers.get("Retry-After"), time.time())
                    raise _StreamFailed(failure_of(answer.status), _http_error(answer.status, text))
                await _read(answer.content, reply, on_text)
        except _StreamFailed as exc:
            reply.failure, reply.detail = exc.failure, str(exc)
        except aiohttp.ClientConnectorError as exc:  # first: that of a bad certificate is a ValueError too
            reply.failure, reply.detail = Failure.CONNECTION, _described(exc)
        except (ValueError, TypeError, AttributeError) as exc:  # a line beyond all measure, or fields of other types
            reply.failure, reply.detail = Failure.MALFORMED, _described(exc)
        except TimeoutError:
            reply.failure = Failure.TIMEOUT
            reply.detail = f"not whole after {self._connection.timeout:g} s"
        except (aiohttp.ClientError, OSError) as exc:
            reply.failure, reply.detail = Failure.CONNECTION, _described(exc)
        reply.end = time.perf_counter()
        return reply


async def _read(content: aiohttp.StreamReader, reply: Reply, on_text: Callable[[Reply], None]) -> None:
    """The events of a stream, each timed as it arrives."""
    last, done = 0.0, False
    async for raw in content:
        if not raw.startswith(b"data:"):
            continue
        payload = raw[5:].strip()
        if payload == b"[DONE]":
            done = True
            continue
        now = time.perf_counter()
        try:
            event = orjson.loads(payload)
        except ValueError:
            raise _StreamFailed(Failure.MALFORMED, f"no JSON: {payload[:_DETAIL]!r}") from None
        if not isinstance(event, dict):
            raise _StreamFailed(Failure.MALFORMED, f"no object: {payload[:_DETAIL]!r}")
        if event.get("error"):
            raise _StreamFailed(Failure.STREAM_ERROR, _message(event))
        done = done or any(choice.get("finish_reason") for choice in event.get("choices") or ())
        if usage := event.get("usage"):
            reply.prompt_tokens = usage.get("prompt_tokens")
            reply.output_tokens = usage.get("completion_tokens")
            reply.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if not has_text(event):
            continue
        if reply.first is None:
            reply.first = now
        else:
            reply.gaps.append(now - last)
        last = now
        on_text(reply)
    if not done:
        raise _StreamFailed(Failure.CUT_SHORT, "the stream ended without [DONE] and without a finish reason")
    if reply.first is None and not reply.output_tokens:
        raise _StreamFailed(Failure.NO_TOKENS, "the stream ended without a token")


def has_text(event: Mapping[str, Any]) -> bool:
    """Whether an event of a stream carries generated text."""
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"):
            return True
    return False


def base_url(url: str) -> str:
    """The address with its /v1: added to one that names no path. Raises ConfigError."""
    text = url.strip().rstrip("/")
    scheme, slashes, rest = text.partition("://")
    if not slashes or scheme not in ("http", "https") or not rest:
        raise ConfigError(f"--url {url!r} is no address: write it like http://127.0.0.1:8000")
    return text if "/" in rest else f"{text}/v1"


def failure_of(status: int) -> Failure:
    """The kind of failure of an answer that is not 200."""
    if status == 429:
        return Failure.REJECTED
    return Failure.BAD_REQUEST if 400 <= status < 500 else Failure.SERVER_ERROR


def retry_after(value: str | None, now: float) -> float | None:
    """Seconds of a Retry-After header, which may be a date; None when it is missing or neither."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - now
        except ValueError:
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _headers(request_id: str) -> dict[str, str]:
    named = {"x-request-id": request_id} if request_id else {}
    return {"Content-Type": "application/json", **named}


def _message(event: Mapping[str, Any]) -> str:
    error = event["error"]
    return str(error.get("message", error) if isinstance(error, dict) else error)[:_DETAIL]


def _http_error(status: int, text: bytes) -> str:
    try:
        message = _message(orjson.loads(text))
    except (ValueError, LookupError, TypeError):
        message = text.decode(errors="replace")[:_DETAIL]
    return f"HTTP {status}: {' '.join(message.split())}"


def _described(exc: BaseException) -> str:
    if isinstance(exc, aiohttp.ClientConnectorCertificateError):  # its errno would read as "Operation not permitted"
        return f"can't connect: {exc.certificate_error}; name the authority of the server's certificate with --ca"
    if isinstance(exc, aiohttp.ClientConnectorError) and exc.os_error.errno:
        return f"can't connect: {os.strerror(exc.os_error.errno)}"
    return f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
