"""The result of a run as data: what a JSON file of `pdmesh bench` holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from engine_core.types.errors import ConfigError
from services.bench.outcome import Objectives

FORMAT = "pdmesh-bench/1"

CURVE_AT = tuple(range(101))
"""The percentiles of a curve."""


class Spread(msgspec.Struct, frozen=True):
    """A measure over all requests (or gaps), in milliseconds; `curve` holds the percentiles 0 to 100."""

    count: int = 0
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None
    curve: tuple[float, ...] = ()


class Rejections(msgspec.Struct, frozen=True):
    """Answers 429."""

    answers: int = 0
    """All of them, those included that a retry followed."""
    requests: int = 0
    """Requests that ended so."""
    without_retry_after: int = 0
    retry_after_min_s: float | None = None
    retry_after_p50_s: float | None = None
    retry_after_max_s: float | None = None


class TokenCheck(msgspec.Struct, frozen=True):
    """What was asked for against what the server's usage says, over whole requests."""

    with_usage: int = 0
    without_usage: int = 0
    prompt_exact: int = 0
    prompt_off_by_max: int = 0
    output_exact: int = 0
    output_short: int = 0
    """Fewer than asked: the model ended by itself, or the server's limit is lower."""
    output_long: int = 0
    """More than asked: a fault of the server."""
    more_chunks_than_tokens: int = 0
    """Streams with more chunks of text than tokens in the usage: a fault of the server's count."""


class Goodput(msgspec.Struct, frozen=True):
    """What met the objectives. The share is of all requests that ended, failed and rejected ones included."""

    requests: int = 0
    share: float = 0.0
    requests_per_s: float = 0.0
    output_tokens_per_s: float = 0.0
    missed: dict[str, int] = {}
    """Whole requests that missed an objective, by its name."""


class Moment(msgspec.Struct, frozen=True):
    """One bin of the course of a level."""

    at_s: float
    output_tokens_per_s: float
    in_flight: float
    """Mean."""
    completed: int
    failed: int
    """Errors and 429."""


class Slow(msgspec.Struct, frozen=True):
    """One of the slowest requests."""

    request_id: str
    ttft_ms: float | None
    latency_ms: float
    prompt_tokens: int
    output_tokens: int


class RequestRow(msgspec.Struct, frozen=True):
    """One request, when rows were asked for."""

    request_id: str
    due_s: float
    sent_s: float
    ttft_ms: float | None
    tpot_ms: float | None
    latency_ms: float
    prompt_tokens: int
    output_tokens: int
    failure: str
    met: bool


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a sweep."""

    name: str
    load: float
    """Requests in flight of a closed loop; requests per second asked for of an open loop."""
    requests: int
    completed: int
    errors: int
    error_kinds: dict[str, int]
    error_examples: dict[str, str]
    rejections: Rejections
    interrupted: int
    """Requests cut off by Ctrl-C; in no other figure."""
    wall_s: float
    """From the start to the end of the last request, ramp-up and tail included."""
    offered_per_s: float
    """Requests sent or due per second of the time in which they arrived."""
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float | None
    prompt_tokens_mean: float | None
    output_tokens_mean: float | None
    cached_share: float | None
    """Of the prompt tokens, those that the server found in its prefix cache."""
    in_flight_mean: float
    in_flight_max: int
    ttft_ms: Spread
    itl_ms: Spread
    tpot_ms: Spread
    e2e_ms: Spread
    send_lag_ms: Spread
    """How late requests left the client: it is part of TTFT and e2e."""
    client_cpu: float
    """Share of one core that the load client used; near 1 it is the bottleneck."""
    tokens: TokenCheck
    goodput: Goodput | None
    timeline: tuple[Moment, ...] = ()
    slowest: tuple[Slow, ...] = ()
    rows: tuple[RequestRow, ...] = ()


class Target(msgspec.Struct, frozen=True):
    """What was asked."""

    url: str
    model: str
    endpoint: str
    sent: tuple[str, ...]
    """Fields of the request body beyond the usual that the server took."""
    refused: tuple[str, ...] = ()
    """Those that it refused, so that they were left out."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A run."""

    format: str = FORMAT
    label: str
    started: str
    """UTC, ISO 8601."""
    version: str
    """Of pdmesh, which made the load."""
    command: str
    """Without the API key."""
    loop: str
    """closed, open or trace."""
    load_name: str
    load_unit: str
    target: Target
    workload: dict[str, Any]
    objectives: Objectives
    levels: tuple[Level, ...]
    interrupted: bool = False

    @property
    def best(self) -> Level | None:
        """The level with the most output tokens per second."""
        return max(self.levels, key=lambda level: level.output_tokens_per_s, default=None)

    @property
    def carried(self) -> Level | None:
        """The highest load that met the objectives for the share asked for; None when no level did."""
        share = self.objectives.share
        met = [level for level in self.levels if level.goodput is not None and level.goodput.share >= share]
        return max(met, key=lambda level: level.load, default=None)

    @property
    def failed(self) -> int:
        """Errors in all levels; 429 are none."""
        return sum(level.errors for level in self.levels)


def to_json(report: Report) -> bytes:
    """As a file holds it."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def read_report(path: Path) -> Report:
    """A file of `pdmesh bench --json`. Raises ConfigError, which names the field that is wrong."""
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"{path} can't be read: {exc.strerror}") from exc
    try:
        report = msgspec.json.decode(data, type=Report)
    except msgspec.DecodeError as exc:
        raise ConfigError(f"{path} is no result of pdmesh bench --json: {exc}") from None
    if report.format != FORMAT:
        raise ConfigError(f"{path} has the format {report.format!r}; this version reads {FORMAT!r}")
    return report


MEASURES: tuple[tuple[str, str, str, bool], ...] = (
    ("output_tokens_per_s", "output tokens/s", "", True),
    ("requests_per_s", "requests/s", "", True),
    ("ttft_ms", "TTFT p50", "p50", False),
    ("ttft_ms", "TTFT p99", "p99", False),
    ("itl_ms", "ITL p50", "p50", False),
    ("itl_ms", "ITL p99", "p99", False),
    ("e2e_ms", "e2e p50", "p50", False),
    ("e2e_ms", "e2e p99", "p99", False),
)
"""What two runs are compared by: field, name, percentile, whether more is better."""


class Change(msgspec.Struct, frozen=True):
    """One measure at one load in two runs."""

    measure: str
    load: float
    before: float
    after: float
    more_is_better: bool

    @property
    def ratio(self) -> float | None:
        """after / before."""
        return self.after / self.before if self.before else None

    @property
    def better(self) -> bool | None:
        """None within 2 %, which any two runs differ by."""
        ratio = self.ratio
        if ratio is None or abs(ratio - 1) <= 0.02:
            return None
        return (ratio > 1) == self.more_is_better


def compare(before: Report, after: Report) -> list[Change]:
    """Every measure at every load that both runs have. Raises ConfigError for runs of different loops."""
    if before.load_name != after.load_name:
        raise ConfigError(
            f"a run over {before.load_name} can't be compared with one over {after.load_name}: run both the same way"
        )
    theirs = {level.load: level for level in after.levels}
    changes = []
    for level in before.levels:
        other = theirs.get(level.load)
        if other is None:
            continue
        for field, name, part, more in MEASURES:
            values = [getattr(x, field) for x in (level, other)]
            numbers = [getattr(v, part) if part else v for v in values]
            if None not in numbers:
                changes.append(Change(name, level.load, numbers[0], numbers[1], more))
    return changes


def differences(before: Report, after: Report) -> list[str]:
    """What else differs between two runs than the figures, one line each: such runs say less about each other."""
    lines = []
    for name in ("model", "endpoint"):
        ours, theirs = getattr(before.target, name), getattr(after.target, name)
        if ours != theirs:
            lines.append(f"{name}: {ours} against {theirs}")
    for name in sorted(before.workload.keys() | after.workload.keys()):
        ours, theirs = before.workload.get(name), after.workload.get(name)
        if ours != theirs:
            lines.append(f"{name.replace('_', ' ')}: {_shown(ours)} against {_shown(theirs)}")
    only = sorted({x.load for x in before.levels} ^ {x.load for x in after.levels})
    if only:
        lines.append(f"{before.load_name} that only one run has: {', '.join(f'{x:g}' for x in only)}")
    return lines


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)
