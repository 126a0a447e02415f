"""Figures of a level from the outcomes of its requests: pure.

Throughput is over the wall time of the level, ramp-up and tail included. TTFT, ITL, TPOT and e2e are of whole
requests; errors and 429 are counted apart and are in none of them.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence

from services.bench.outcome import Failure, Objectives, Outcome, percentile_sorted
from services.bench.report import (
    CURVE_AT,
    Goodput,
    Level,
    Moment,
    Rejections,
    RequestRow,
    Slow,
    Spread,
    TokenCheck,
)

MOMENTS = 60
"""At most so many bins in the course of a level."""
SLOWEST = 5


def summarize(
    name: str,
    load: float,
    outcomes: Sequence[Outcome],
    *,
    wall: float,
    objectives: Objectives,
    interrupted: int = 0,
    client_cpu: float = 0.0,
    rows: bool = False,
) -> Level:
    """The figures of one level that took `wall` seconds."""
    whole = [o for o in outcomes if o.ok]
    failed = [o for o in outcomes if o.failure is not None and o.failure is not Failure.REJECTED]
    tokens = sum(o.tokens for o in whole)
    prompts = [o.prompt_tokens for o in whole if o.prompt_tokens is not None]
    cached = [(o.cached_tokens, o.prompt_tokens or 0) for o in whole if o.cached_tokens is not None]
    in_cache, of_prompt = (sum(part) for part in zip(*cached, strict=True)) if cached else (0, 0)
    dues = sorted(o.due for o in outcomes)
    mean, peak = in_flight(outcomes, wall)
    return Level(
        name=name,
        load=load,
        requests=len(outcomes),
        completed=len(whole),
        errors=len(failed),
        error_kinds=dict(Counter(_kind(o) for o in failed).most_common()),
        error_examples={_kind(o): o.detail for o in reversed(failed)},
        rejections=rejections(outcomes),
        interrupted=interrupted,
        wall_s=round(wall, 4),
        offered_per_s=_rate(len(dues) - 1, dues[-1] - dues[0]) if len(dues) > 1 else 0.0,
        requests_per_s=_rate(len(whole), wall),
        output_tokens_per_s=_rate(tokens, wall),
        total_tokens_per_s=_rate(tokens + sum(prompts), wall) if prompts else None,
        prompt_tokens_mean=round(sum(prompts) / len(prompts), 2) if prompts else None,
        output_tokens_mean=round(tokens / len(whole), 2) if whole else None,
        cached_share=round(in_cache / of_prompt, 4) if of_prompt else None,
        in_flight_mean=round(mean, 2),
        in_flight_max=peak,
        ttft_ms=spread([o.ttft for o in whole if o.ttft is not None]),
        itl_ms=spread([gap for o in whole for gap in o.gaps]),
        tpot_ms=spread([o.tpot for o in whole if o.tpot is not None]),
        e2e_ms=spread([o.latency for o in whole]),
        send_lag_ms=spread([o.sent - o.due for o in outcomes]),
        client_cpu=round(client_cpu, 3),
        tokens=check_tokens(whole),
        goodput=goodput(outcomes, objectives, wall) if objectives.any else None,
        timeline=timeline(outcomes, wall),
        slowest=_slowest(whole),
        rows=tuple(_row(o, objectives) for o in sorted(outcomes, key=lambda o: o.due)) if rows else (),
    )


def spread(seconds: Sequence[float]) -> Spread:
    """Percentiles, mean and curve in milliseconds."""
    if not seconds:
        return Spread()
    ordered = sorted(value * 1e3 for value in seconds)
    at = {q: round(percentile_sorted(ordered, q), 3) for q in CURVE_AT}
    mean = round(math.fsum(ordered) / len(ordered), 3)
    return Spread(len(ordered), mean, at[50], at[90], at[95], at[99], at[100], tuple(at.values()))


def rejections(outcomes: Sequence[Outcome]) -> Rejections:
    """All 429 and their Retry-After."""
    waits = [wait for o in outcomes for wait in o.retry_afters]
    told = sorted(wait for wait in waits if wait is not None)
    return Rejections(
        answers=len(waits),
        requests=sum(o.failure is Failure.REJECTED for o in outcomes),
        without_retry_after=len(waits) - len(told),
        retry_after_min_s=told[0] if told else None,
        retry_after_p50_s=percentile_sorted(told, 50) if told else None,
        retry_after_max_s=told[-1] if told else None,
    )


def check_tokens(whole: Sequence[Outcome]) -> TokenCheck:
    """What whole requests asked for against the server's usage."""
    counted = [o for o in whole if o.output_tokens is not None]
    prompts = [o.prompt_tokens - o.prompt_asked for o in counted if o.prompt_tokens is not None]
    outputs = [o.tokens - o.output_asked for o in counted]
    return TokenCheck(
        with_usage=len(counted),
        without_usage=len(whole) - len(counted),
        prompt_exact=prompts.count(0),
        prompt_off_by_max=max(map(abs, prompts), default=0),
        output_exact=outputs.count(0),
        output_short=sum(off < 0 for off in outputs),
        output_long=sum(off > 0 for off in outputs),
        more_chunks_than_tokens=sum(o.chunks > o.tokens for o in counted),
    )


def goodput(outcomes: Sequence[Outcome], objectives: Objectives, wall: float) -> Goodput:
    """Requests that met every objective."""
    met = [o for o in outcomes if objectives.met(o)]
    missed = Counter(name for o in outcomes if o.ok for name in objectives.missed(o))
    return Goodput(
        requests=len(met),
        share=round(len(met) / len(outcomes), 4) if outcomes else 0.0,
        requests_per_s=_rate(len(met), wall),
        output_tokens_per_s=_rate(sum(o.tokens for o in met), wall),
        missed=dict(missed.most_common()),
    )


def in_flight(outcomes: Sequence[Outcome], wall: float) -> tuple[float, int]:
    """Mean and most requests between their due time and their end."""
    moves = sorted([(o.due, 1) for o in outcomes] + [(o.end, -1) for o in outcomes])
    now = most = 0
    for _, step in moves:
        now += step
        most = max(most, now)
    return (sum(o.latency for o in outcomes) / wall if wall > 0 else 0.0), most


def timeline(outcomes: Sequence[Outcome], wall: float) -> tuple[Moment, ...]:
    """The course of a level in equal bins, whole seconds or tenths wide; the last one takes a short rest along."""
    if wall <= 0:
        return ()
    width = next((w for w in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0) if wall / w <= MOMENTS), float(math.ceil(wall / 60)))
    count = max(1, round(wall / width))
    edges = [*(i * width for i in range(count)), wall]
    tokens, busy, completed, failed = ([0.0] * count for _ in range(4))

    def bin_of(at: float) -> int:
        return min(max(int(at / width), 0), count - 1)

    for o in outcomes:
        (completed if o.ok else failed)[bin_of(o.end)] += 1
        for i in range(bin_of(o.due), bin_of(o.end) + 1):
            busy[i] += max(0.0, min(o.end, edges[i + 1]) - max(o.due, edges[i]))
        if o.first is None:
            continue
        each, at = max(o.tokens, 1) / o.chunks, o.first
        tokens[bin_of(at)] += each
        for gap in o.gaps:
            at += gap
            tokens[bin_of(at)] += each
    moments = []
    for i in range(count):
        span = edges[i + 1] - edges[i]
        moments.append(
            Moment(
                round(edges[i], 3),
                round(tokens[i] / span, 2),
                round(busy[i] / span, 2),
                int(completed[i]),
                int(failed[i]),
            )
        )
    return tuple(moments)


def _rate(count: float, seconds: float) -> float:
    return round(count / seconds, 4) if seconds > 0 else 0.0


def _kind(outcome: Outcome) -> str:
    """An error's kind, with the status where there is one."""
    assert outcome.failure is not None
    failed_answer = outcome.failure in (Failure.BAD_REQUEST, Failure.SERVER_ERROR)
    return f"{outcome.failure}_{outcome.status}" if failed_answer else str(outcome.failure)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def _slowest(whole: Sequence[Outcome]) -> tuple[Slow, ...]:
    found = heapq.nlargest(SLOWEST, whole, key=lambda o: o.latency)
    return tuple(
        Slow(o.request_id, _ms(o.ttft), round(o.latency * 1e3, 3), o.prompt_tokens or o.prompt_asked, o.tokens)
        for o in found
    )


def _row(o: Outcome, objectives: Objectives) -> RequestRow:
    return RequestRow(
        request_id=o.request_id,
        due_s=round(o.due, 5),
        sent_s=round(o.sent, 5),
        ttft_ms=_ms(o.ttft),
        tpot_ms=_ms(o.tpot),
        latency_ms=round(o.latency * 1e3, 3),
        prompt_tokens=o.prompt_asked if o.prompt_tokens is None else o.prompt_tokens,
        output_tokens=o.tokens,
        failure="" if o.failure is None else str(o.failure),
        met=objectives.met(o),
    )
