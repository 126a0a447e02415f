"""The client against a server that answers by script: every way to fail has its name, and what counts is counted."""

from __future__ import annotations

import argparse
import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
import trustme

from benchmarks import bench_openai
from engine_core.types.errors import ConfigError, UnavailableError
from services.bench.client import Client, Connection, Reply, base_url, has_text, retry_after
from services.bench.outcome import Failure
from services.bench.workload import Calibration
from tests.support.scripted_http import Exchange, ScriptedServer

Answer = Callable[[Exchange], Awaitable[None]]


async def good(exchange: Exchange) -> None:
    await exchange.start()
    await exchange.event({"choices": [{"index": 0, "text": "", "finish_reason": None}], "usage": None})
    for text in ("one", " two", " three"):
        await exchange.text(text)
    await exchange.text("", finish_reason="length")
    await exchange.done(7, 4)


async def one_reply(answer: Answer, timeout: float = 20.0) -> Reply:
    """What the client makes of one answer."""
    async with ScriptedServer(answer) as server, Client(Connection(server.url, "m", timeout=timeout)) as client:
        return await client.stream(client.body("hello", 4), "id-1")


async def test_a_whole_stream_is_timed_by_its_chunks_of_text() -> None:
    seen: list[int] = []
    async with ScriptedServer(good) as server, Client(Connection(server.url, "m", api_key="secret")) as client:
        reply = await client.stream(client.body("hello", 4), "id-1", lambda r: seen.append(len(r.gaps)))
        asked = server.requests[0]
    assert reply.failure is None and reply.status == 200 and reply.detail == ""
    assert reply.first is not None and reply.sent < reply.first <= reply.first + sum(reply.gaps) <= reply.end
    assert (len(reply.gaps), seen) == (2, [0, 1, 2])
    assert (reply.prompt_tokens, reply.output_tokens, reply.cached_tokens) == (7, 4, 1)
    assert asked.path == "/v1/completions" and asked.header("authorization") == "Bearer secret"
    assert asked.header("x-request-id") == "id-1"
    assert asked.body == {
        "model": "m", "max_tokens": 4, "temperature": 0.0, "prompt": "hello", "stream": True,
        "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip


async def test_both_load_clients_count_a_stream_alike() -> None:
    args = argparse.Namespace(
        base_url="", api="completions", model="m", no_ignore_eos=False, temperature=0.0, extra_body={}, timeout=20.0
    )
    async with ScriptedServer(good) as server, aiohttp.ClientSession() as session:
        args.base_url = server.url + "/v1"
        theirs = await bench_openai.Client(session, args).stream("hello", 4)
    ours = await one_reply(good)
    assert theirs.ok and ours.failure is None
    assert theirs.chunks == 3 == len(ours.gaps) + 1
    assert (theirs.prompt_tokens, theirs.output_tokens) == (ours.prompt_tokens, ours.output_tokens)


async def refused_429(exchange: Exchange) -> None:
    await exchange.reply(429, {"error": {"message": "all queues\nare full"}}, retry_after="3")


async def invalid(exchange: Exchange) -> None:
    await exchange.reply(400, {"error": {"message": "no such model", "code": "x"}})


async def unavailable(exchange: Exchange) -> None:
    await exchange.reply(503, {"detail": "nobody"})


async def error_event(exchange: Exchange) -> None:
    await exchange.start()
    await exchange.text("one")
    await exchange.event({"error": {"message": "decode-0 is gone"}})


async def cut_short(exchange: Exchange) -> None:
    await exchange.start()
    await exchange.text("one")


async def empty(exchange: Exchange) -> None:
    await exchange.start()
    await exchange.raw(b"data: [DONE]\n\n")


async def garbage(exchange: Exchange) -> None:
    await exchange.start()
    await exchange.raw(b"data: {nonsense\n\n")


async def wrong_types(exchange: Exchange) -> None:
    await exchange.start()
    await exchange.event({"choices": ["what"]})


async def no_object(exchange: Exchange) -> None:
    await exchange.start()
    await exchange.event([1])


async def reset(exchange: Exchange) -> None:
    exchange.reset()


@pytest.mark.parametrize(
    ("answer", "failure", "detail"),
    (
        (refused_429, Failure.REJECTED, "HTTP 429: all queues are full"),
        (invalid, Failure.BAD_REQUEST, "HTTP 400: no such model"),
        (unavailable, Failure.SERVER_ERROR, 'HTTP 503: {"detail": "nobody"}'),
        (error_event, Failure.STREAM_ERROR, "decode-0 is gone"),
        (cut_short, Failure.CUT_SHORT, "the stream ended without [DONE] and without a finish reason"),
        (empty, Failure.NO_TOKENS, "the stream ended without a token"),
        (garbage, Failure.MALFORMED, "no JSON: b'{nonsense'"),
        (wrong_types, Failure.MALFORMED, "AttributeError: 'str' object has no attribute 'get'"),
        (no_object, Failure.MALFORMED, "no object: b'[1]'"),
        (reset, Failure.CONNECTION, ""),
    ),
)
async def test_every_failure_has_its_name(answer: Answer, failure: Failure, detail: str) -> None:
    reply = await one_reply(answer)
    assert reply.failure is failure and detail in reply.detail
    assert reply.end >= reply.sent
    assert (reply.first is not None) == (failure in (Failure.STREAM_ERROR, Failure.CUT_SHORT))
    assert reply.retry_after == (3.0 if failure is Failure.REJECTED else None)


async def test_a_request_that_gets_no_answer_is_given_up() -> None:
    async def silent(exchange: Exchange) -> None:
        await asyncio.sleep(5.0)

    reply = await one_reply(silent, timeout=0.2)
    assert reply.failure is Failure.TIMEOUT and reply.detail == "not whole after 0.2 s"


async def test_a_certificate_of_an_unknown_authority() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, Client(Connection(url, "m", timeout=20.0)) as client:
        reply = await client.stream(client.body("hello", 4), "")
    assert reply.failure is Failure.CONNECTION
    assert reply.detail.startswith("can't connect: [SSL: CERTIFICATE_VERIFY_FAILED]")
    assert reply.detail.endswith("; name the authority of the server's certificate with --ca")


async def test_a_port_where_nobody_listens() -> None:
    async with Client(Connection("http://127.0.0.1:9", "m", timeout=20.0)) as client:
        reply = await client.stream(client.body("hello", 4), "")
        assert reply.failure is Failure.CONNECTION and (reply.status, reply.first) == (0, None)
        assert reply.detail == "can't connect: Connection refused"
        with pytest.raises(UnavailableError, match=r"http://127\.0\.0\.1:9/v1 does not answer"):
            await client.prepare()


def counting(per_word: int, fixed: int, refuse: tuple[str, ...] = ()) -> Answer:
    """A server that counts its prompts' words and refuses some fields."""

    async def answer(exchange: Exchange) -> None:
        if exchange.path == "/v1/models":
            await exchange.reply(200, {"data": [{"id": "small"}, {"id": "large"}]})
            return
        for name in refuse:
            if name in exchange.body:
                await exchange.reply(400, {"error": {"message": f"unknown field {name}"}})
                return
        if exchange.body["stream"]:
            await good(exchange)
            return
        words = len((exchange.body.get("prompt") or exchange.body["messages"][0]["content"]).split())
        await exchange.reply(200, {"usage": {"prompt_tokens": fixed + per_word * words}})

    return answer


@pytest.mark.parametrize(
    ("refuse", "left"),
    (
        ((), ("ignore_eos", "stream_options")),
        (("ignore_eos",), ("stream_options",)),
        (("stream_options",), ("ignore_eos",)),
        (("ignore_eos", "stream_options"), ()),
    ),
)
async def test_fields_that_a_server_refuses_are_left_out(refuse: tuple[str, ...], left: tuple[str, ...]) -> None:
    async with ScriptedServer(counting(2, 5, refuse)) as server:
        async with Client(Connection(server.url, endpoint="chat", extra_body={"top_k": 1})) as client:
            calibration = await client.prepare()
            target = client.target
        assert {r.path for r in server.requests} == {"/v1/models", "/v1/chat/completions"}
    assert calibration == Calibration(5.0, 2.0, True)
    assert (target.model, target.sent, target.refused) == ("small", tuple(sorted((*left, "top_k"))), refuse)


async def test_a_server_that_takes_no_plain_request_says_why() -> None:
    async def forbidden(exchange: Exchange) -> None:
        await exchange.reply(401, {"error": {"message": "no key"}})

    for answer, said in ((forbidden, r"HTTP 401: no key \(give --api-key or --api-key-file\)"), (invalid, "no such m")):
        async with ScriptedServer(answer) as server, Client(Connection(server.url, "m")) as client:
            with pytest.raises(UnavailableError, match=said):
                await client.prepare()


async def test_a_server_that_counts_no_tokens_gets_a_word_for_a_token() -> None:
    async def answer(exchange: Exchange) -> None:
        await (good(exchange) if exchange.body["stream"] else exchange.reply(200, {}))

    async with ScriptedServer(answer) as server, Client(Connection(server.url, "m")) as client:
        assert await client.prepare() == Calibration()


@pytest.mark.parametrize(
    ("url", "base"),
    (
        ("http://h:8000", "http://h:8000/v1"),
        ("http://h:8000/", "http://h:8000/v1"),
        ("https://h/v1/", "https://h/v1"),
        ("https://h/openai/v1", "https://h/openai/v1"),
    ),
)
def test_addresses_with_and_without_v1(url: str, base: str) -> None:
    assert base_url(url) == base


@pytest.mark.parametrize("url", ("h:8000", "ftp://h", "http://", ""))
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="write it like http://127"):
        base_url(url)


def test_retry_after_in_seconds_or_as_a_date() -> None:
    now = 784_111_777.0  # Sun, 06 Nov 1994 08:49:37 GMT
    assert [retry_after(v, now) for v in ("2", "0.5", "-1", None, "soon", "nan")] == [2.0, 0.5, 0.0, None, None, None]
    assert retry_after("Sun, 06 Nov 1994 08:49:47 GMT", now) == 10.0


@pytest.mark.parametrize(
    ("event", "yes"),
    (
        ({"choices": [{"text": "a"}]}, True),
        ({"choices": [{"delta": {"content": "a"}}]}, True),
        ({"choices": [{"delta": {"reasoning_content": "a"}}]}, True),
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, False),
        ({"choices": [{"text": "", "finish_reason": "length"}]}, False),
        ({"choices": [], "usage": {}}, False),
    ),
)
def test_what_counts_as_text(event: dict[str, Any], yes: bool) -> None:
    assert has_text(event) is yes and bench_openai.has_text(event) is yes
