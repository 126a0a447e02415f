"""A body is read within limits of size and patience."""

from __future__ import annotations

import asyncio

import pytest
from starlette.requests import Request
from starlette.types import Message

from engine_core.types.errors import CancelledSessionError, DeadlineError
from services.router.edge.http import BodyTooLargeError, read_body


def request(*messages: Message) -> Request:
    """A request whose body comes in these messages, and then stalls."""
    left = list(messages)

    async def receive() -> Message:
        if left:
            return left.pop(0)
        await asyncio.Event().wait()
        raise AssertionError("never")

    return Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)


def part(body: bytes, more: bool) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


async def test_a_body_in_parts() -> None:
    assert await read_body(request(part(b'{"a"', True), part(b": 1}", False)), 100) == b'{"a": 1}'


async def test_a_body_that_stalls_is_given_up() -> None:
    with pytest.raises(DeadlineError, match="stalled") as caught:
        await read_body(request(part(b"{", True)), 100, stall=0.01)
    assert caught.value.reason == "BODY_STALLED"


async def test_a_body_above_the_limit_and_one_that_breaks_off() -> None:
    with pytest.raises(BodyTooLargeError):
        await read_body(request(part(b"x" * 11, False)), 10)
    with pytest.raises(CancelledSessionError):
        await read_body(request(part(b"x", True), {"type": "http.disconnect"}), 10)
