"""Log lines carry the fields of the request that their task works for, and of no other."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator

import pytest

from services.runtime.telemetry import JsonFormatter, TextFormatter, bind_log_fields, log_fields

log = logging.getLogger("tests.log_fields")


class Lines(logging.Handler):
    """Formats as it is told, in the task that logs."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def handlers() -> Iterator[tuple[Lines, Lines]]:
    made = (Lines(JsonFormatter("router")), Lines(TextFormatter("router")))
    log.setLevel(logging.INFO)
    for handler in made:
        log.addHandler(handler)
    yield made
    for handler in made:
        log.removeHandler(handler)


async def test_fields_follow_a_task_and_the_tasks_that_it_starts(handlers: tuple[Lines, Lines]) -> None:
    async def serve(request_id: str, room: int) -> None:
        bind_log_fields(request_id=request_id)
        await asyncio.sleep(0)
        bind_log_fields(room=room, attempt=0)
        log.info("placed")
        await asyncio.create_task(inner())

    async def inner() -> None:
        log.info("inner")

    log.info("before")
    await asyncio.gather(asyncio.create_task(serve("a", 255)), asyncio.create_task(serve("b", 1)))
    log.info("after")
    lines = [json.loads(line) for line in handlers[0].lines]
    seen = {(e["message"], e.get("request_id"), e.get("room"), e.get("attempt")) for e in lines}
    assert seen == {
        ("before", None, None, None), ("after", None, None, None),
        ("placed", "a", "00000000000000ff", 0), ("inner", "a", "00000000000000ff", 0),
        ("placed", "b", "0000000000000001", 0), ("inner", "b", "0000000000000001", 0),
    }  # fmt: skip


def test_a_block_ends_and_a_calls_own_fields_go_first(handlers: tuple[Lines, Lines]) -> None:
    with log_fields(request_id="r", room=16, attempt=2, trace_id=""):
        log.info("in", extra={"attempt": 3, "fields": {"tokens": 7, "ttft": 0.123456}})
    log.info("out")
    inside, outside = (json.loads(line) for line in handlers[0].lines)
    assert {n: inside[n] for n in ("tokens", "ttft", "request_id", "room", "attempt")} == {
        "tokens": 7, "ttft": 0.123456, "request_id": "r", "room": "0000000000000010", "attempt": 3,
    }  # fmt: skip
    assert "trace_id" not in inside and "request_id" not in outside
    ending = "I router tests.log_fields: in tokens=7 ttft=0.1235 request_id=r room=0000000000000010 attempt=3"
    assert handlers[1].lines[0].endswith(ending) and handlers[1].lines[1].endswith("tests.log_fields: out")
