"""Lines of the log, as text or JSON, with the fields of the request that they are about.

A task that works for a request says so once, with log_fields() or bind_log_fields(); whatever it, or a task that
it starts, logs after that carries the fields. A log call may add its own: `extra={"room": …}` for one of FIELDS,
`extra={"fields": {…}}` for any others.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType

FIELDS = ("request_id", "room", "attempt", "trace_id")
"""What says which request a line is about."""

_NONE: Mapping[str, object] = MappingProxyType({})
_bound: ContextVar[Mapping[str, object]] = ContextVar("pdmesh_log_fields", default=_NONE)


def bind_log_fields(
    *, request_id: str | None = None, room: int | None = None, attempt: int | None = None, trace_id: str | None = None
) -> None:
    """Adds fields to every later line of the present task and of the tasks that it starts."""
    _bound.set(_merged(request_id, room, attempt, trace_id))


@contextmanager
def log_fields(
    *, request_id: str | None = None, room: int | None = None, attempt: int | None = None, trace_id: str | None = None
) -> Iterator[None]:
    """As bind_log_fields, for the lines of a block."""
    token = _bound.set(_merged(request_id, room, attempt, trace_id))
    try:
        yield
    finally:
        _bound.reset(token)


def bound_log_fields() -> Mapping[str, object]:
    """The fields of the present task."""
    return _bound.get()


def _merged(
    request_id: str | None, room: int | None, attempt: int | None, trace_id: str | None
) -> Mapping[str, object]:
    given = {
        "request_id": request_id,
        "room": None if room is None else f"{room:016x}",  # as `pdmesh explain` writes it
        "attempt": attempt,
        "trace_id": trace_id or None,
    }
    return {**_bound.get(), **{name: value for name, value in given.items() if value is not None}}


class TextFormatter(logging.Formatter):
    """`12:34:56.789 I decode services.decode.worker: message request_id=… room=…`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """One line, plus the traceback if there is one."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        head = f"{clock}.{int(record.msecs):03d} {record.levelname[0]} {self._process} {record.name}:"
        fields = "".join(f" {key}={_short(value)}" for key, value in _fields(record).items())
        line = f"{head} {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """time (Unix seconds), level, process, logger, message, the fields, exception."""
        entry: dict[str, object] = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """A call's own fields go before those of its task."""
    bound, given = _bound.get(), record.__dict__
    found = {key: given.get(key, bound.get(key)) for key in FIELDS if key in given or key in bound}
    more = given.get("fields")
    return {**more, **found} if isinstance(more, Mapping) else found


def _short(value: object) -> object:
    return f"{value:.4g}" if isinstance(value, float) else value


def setup_logging(level: str, log_format: str, process: str) -> None:
    """Sends all logs of this process to stderr, as `text` or `json`; replaces earlier handlers."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else TextFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("httpx", "httpcore", "asyncio", "uvicorn", "opentelemetry"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))
