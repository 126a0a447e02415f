"""Runs a submission and answers with it, whole or as a stream; how the replies look is the reply's."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from fastapi import Request
from starlette.responses import Response

from engine_core.types.errors import DeadlineError, InvalidRequestError, PdmeshError
from services.router.edge.http import (
    EventResponse,
    EventStream,
    RequestTimeoutError,
    client_of,
    error_event,
    json_response,
    request_id_of,
    traceparent_of,
    until_disconnect,
    wants_timings,
)
from services.router.edge.json_body import short
from services.router.front import Front, SinkOf, Submission
from services.router.journey import Delta, SampleResult, Sink
from services.router.options import GenerationOptions
from services.router.sampling_schema import MAX_TIMEOUT, SamplingRequest

TIMEOUT_HEADER = "x-request-timeout"


class ReplyWriter(Protocol):
    """Writes the replies to one request: `take` and `end` those of a stream, `collect` and `complete` a whole one."""

    def take(self, index: int, delta: Delta) -> bytes:
        """The events of a delta of choice `index`; none when there is nothing to show."""

    def end(self, results: Sequence[SampleResult]) -> bytes:
        """The last events, when all choices have ended."""

    def collect(self, index: int, delta: Delta) -> None:
        """Keeps a delta of choice `index`."""

    def complete(self, results: Sequence[SampleResult]) -> dict[str, Any]:
        """The body."""


def submission_of(
    request: Request,
    asked: SamplingRequest,
    prompts: Sequence[tuple[int, ...]],
    options: GenerationOptions,
    arrival: float,
) -> Submission:
    """The request, ready to run. Raises InvalidRequestError for a timeout that is none."""
    return Submission(
        request_id=request_id_of(request.scope),
        path=request.url.path,
        prompts=tuple(prompts),
        options=options,
        arrival=arrival,
        traceparent=traceparent_of(request),
        client=client_of(request, asked.user),
        timings=wants_timings(request),
        timeout=timeout_of(request, asked.timeout),
    )


def timeout_of(request: Request, asked: float | None) -> float:
    """Seconds that the client allows, by the header x-request-timeout and the body's timeout: the shorter one counts;
    infinite when it says nothing."""
    given = request.headers.get(TIMEOUT_HEADER)
    allowed = math.inf if asked is None else asked
    if given is None:
        return allowed
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT:
        message = f"{TIMEOUT_HEADER}: {short(given)} is no number of seconds above 0, up to {MAX_TIMEOUT:g}"
        raise InvalidRequestError(message, field=TIMEOUT_HEADER)
    return min(allowed, seconds)


async def answer(
    front: Front,
    request: Request,
    submission: Submission,
    reply: ReplyWriter,
    failed: Callable[[PdmeshError], bytes] = error_event,
) -> Response:
    """Runs it; `failed` says how a stream that has begun tells of a failure. Raises PdmeshError before anything was
    sent."""
    front.check_samples(submission)
    if not submission.options.stream:
        body = await until_disconnect(request.receive, _whole(front, submission, reply), front.tasks)
        front.count_end(submission.path, None)
        return json_response(body)

    async def produce(stream: EventStream) -> None:
        def sink_of(index: int) -> Sink:
            async def sink(delta: Delta) -> None:
                data = reply.take(index, delta)
                if data:
                    await stream.write(data)

            return sink

        await stream.write(reply.end(await _run(front, submission, sink_of)))

    def on_end(failure: BaseException | None, started: bool) -> None:  # noqa: FBT001
        front.count_end(submission.path, failure, started=started)

    return EventResponse(
        produce,
        front.tasks,
        front.config.sse_comment_after,
        on_end,
        stall=front.config.client_stall_timeout,
        failed=failed,
    )


async def _whole(front: Front, submission: Submission, reply: ReplyWriter) -> dict[str, Any]:
    def sink_of(index: int) -> Sink:
        async def sink(delta: Delta) -> None:
            reply.collect(index, delta)

        return sink

    results = await _run(front, submission, sink_of)
    options = submission.options
    if options.logprobs is None and options.prompt_logprobs is None:
        return reply.complete(results)
    # A thousand positions with twenty tokens each take tens of milliseconds to write: others go on meanwhile.
    return await asyncio.to_thread(reply.complete, results)


async def _run(front: Front, submission: Submission, sink_of: SinkOf) -> list[SampleResult]:
    try:
        return await front.run(submission, sink_of)
    except DeadlineError as exc:
        own = submission.timeout < front.config.request_timeout and exc.reason == DeadlineError.reason
        if not own:
            raise
        raise RequestTimeoutError(f"the {submission.timeout:g} s that the client allows are over") from exc
