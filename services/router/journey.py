"""One sample, end to end.

    1. wait for a slot (admission)                       QUEUED
    2. choose a pair; wait briefly when there is none    PLACED
    3. open DecodeService.Generate with the deadline     SENT
    4. token 1                                           FIRST_TOKEN
    5. tokens → text → the client                        (STREAMING is FIRST_TOKEN going on)
    6. stop, length                                      FINISHED; or FAILED, CANCELLED

A failure that may succeed elsewhere goes back to 2 as the next attempt, away from whom it is blamed on,
within the deadline:

    before token 1   REPLANNED: the same request once more
    after it         RESUMING: prompt and emitted tokens, the same seed, age and limits, under the fingerprint
                     that token 1 came from; its first new token is RESUMED. What was taken stays taken: text,
                     stop strings and counts live here, and a new attempt only adds to them.

Attempts are fenced by construction: the old call is cancelled and never read again before the next one is
made; a worker refuses an attempt that is not above all it has seen. Cancelling the task cancels the call at
once, in any state; the worker aborts its session by that.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import msgspec

from engine_core.types.errors import (
    CancelledSessionError,
    ContextLengthError,
    DeadlineError,
    FencedError,
    InternalError,
    InvalidRequestError,
    Leg,
    PdmeshError,
    PeerFailedError,
    UnavailableError,
)
from engine_core.types.ids import SessionId, mint_room
from engine_core.types.request import Finish, FinishReason, GenerateSpec
from engine_core.types.sampling import SamplingParams, TokenLogprobs
from pdmesh.decode.v1 import decode_service_pb2, decode_service_pb2_grpc
from services.router.options import GenerationOptions
from services.router.routing.breaker import faults_of
from services.router.routing.live import Outcome, Progress
from services.router.routing.mesh import Mesh, breaker_keys
from services.router.routing.placement import Placement
from services.router.routing.poison import CLEARED_AFTER, GREEDY, Evidence
from services.router.routing.priority import order_ms
from services.router.routing.retry import Attempts, backoff, charged, handed_back
from services.router.routing.rooms import route_of
from services.router.scores import Scores
from services.router.text.output_text import OutputText
from services.router.trace import Trace
from services.runtime.errors import from_rpc_error
from services.wire.bootstrap import RankRow, peer_to_proto
from services.wire.generation import finish_from_proto, spec_to_proto


class SampleSpec(msgspec.Struct, frozen=True):
    """One sample: choice `index` of request `request_id`. `arrival` and `deadline` are on CLOCK_MONOTONIC."""

    request_id: str
    index: int
    prompt_token_ids: Sequence[int]
    options: GenerationOptions
    seed: int
    arrival_ms: int
    arrival: float
    deadline: float
    traceparent: str = ""
    priority: int = 0


class SampleResult(msgspec.Struct, frozen=True):
    """How a sample ended. Timings are in seconds; `ttft` and `e2e` count from the request's arrival."""

    room: int
    attempts: int
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None
    cached_tokens: int
    timings: dict[str, float]
    path: str = ""
    transport: str = ""
    prefill_instance: str = ""
    decode_instance: str = ""
    logprobs: list[TokenLogprobs] = []
    """One per token id, when asked for."""
    prompt_logprobs: list[TokenLogprobs] = []
    """One per token of the prompt but the first, when asked for."""


class Delta(msgspec.Struct):
    """New output: text that may be shown, the tokens taken since the last delta, and on the last one how the
    sample ended."""

    text: str
    token_ids: list[int]
    result: SampleResult | None = None
    logprobs: list[TokenLogprobs] = []
    """One per token id, when asked for."""
    prompt_logprobs: list[TokenLogprobs] = []
    """Of the next prompt positions, when asked for: all come before the first token."""


_RETRY_AFTER = 1.0

Sink = Callable[[Delta], Awaitable[None]]
_Call = Any
"""grpc.aio.UnaryStreamCall, which is generic in its stubs alone."""


def derive_seed(seed: int, index: int) -> int:
    """The seed of sample `index`: the first one's is the request's own."""
    if index == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}:{index}".encode()).digest()[:8], "little")


class Journey:
    """Runs one sample. Make one per sample; run() once."""

    def __init__(self, mesh: Mesh, spec: SampleSpec, trace: Trace, first: Journey | None = None) -> None:
        """`first` is the prompt's first sample, which has its blocks computed."""
        self._first = first
        self._mesh, self._spec, self._trace = mesh, spec, trace
        self.room = mint_room()
        self._output: OutputText | None = None
        options = spec.options
        self._scores = Scores(
            spec.prompt_token_ids, options.logprobs, options.prompt_logprobs, mesh.tokenizer.vocab_size
        )
        self._received = 0
        self._attempt = 0
        self._since = 0
        """Tokens that were there when the present attempt began."""
        self._limit = 0
        self._first_at = 0.0
        self._last_at = 0.0
        self._placed_at = 0.0
        self._fingerprint = ""
        self._placement: Placement | None = None
        self._cached: int | None = None
        """What the client's prompt found in caches: a resumed attempt finds its own output there too."""
        self._evidence = Evidence()
        self._gated: list[int] = []
        """Workers that this sample, a suspect, keeps other suspects away from."""
        self._move("QUEUED", f"priority {spec.priority}" if spec.priority else "")

    def progress(self) -> Progress:
        """Where this sample is now, for those who watch."""
        state, since = self._trace.state_of(self.room)
        placement = self._placement
        prefill = "" if placement is None or placement.prefill is None else placement.prefill.instance.name
        decode = "" if placement is None else placement.decode.instance.name
        times = self._first_at, self._last_at
        return Progress(state, since, self._attempt, self._received, *times, prefill, decode)

    async def run(self, sink: Sink, slot: AbstractAsyncContextManager[None]) -> SampleResult:
        """Waits for the slot, then gives every delta to `sink`, the last one with the result; returns it.

        Raises PdmeshError when no attempt succeeded, or the output broke off after it began.
        """
        with self._mesh.live.track(self, self._spec) as entry:
            try:
                async with slot:
                    self._trace.admitted(self.room, self._attempt)
                    result = await self._run(sink)
            except asyncio.CancelledError:
                self._move("CANCELLED")
                raise
            except PdmeshError as exc:
                went_away = isinstance(exc, CancelledSessionError)  # it took nothing any more
                self._move("CANCELLED" if went_away else "FAILED", f"{exc.leg.value} {exc.reason}: {exc.message}")
                raise
            entry.outcome = Outcome(result.finish_reason, result.timings, result.cached_tokens, result.transport)
            return result

    async def _run(self, sink: Sink) -> SampleResult:
        mesh, spec = self._mesh, self._spec
        mesh.convicted.check(spec.prompt_token_ids, self._draws, time.monotonic())
        mesh.budget.request()
        avoid: set[int] = set()
        attempts = Attempts(mesh.max_attempts)
        while True:
            placement = await self._place(avoid)
            self._since = self._received
            try:
                return await self._try(placement, sink)
            except PdmeshError as exc:
                avoid |= self._blame(placement, exc)
                attempts.failed(exc, self._received - self._since, open_stream=self._received > 0)
                refusal = self._refusal(exc, attempts)
                if refusal is not None:
                    refusal = _for_client(refusal)
                    raise refusal from (None if refusal is exc else exc)
                self._note_retry(exc)
            finally:
                mesh.end_trials(placement)
                self._leave_gate(self._gated)
            self._attempt += 1
            left = spec.deadline - time.monotonic()
            await asyncio.sleep(min(backoff(attempts.fruitless, mesh.rng), max(left, 0.0)))

    @property
    def _draws(self) -> int:
        """What the output depends on beside the prompt."""
        return self._spec.seed if self._spec.options.temperature > 0 else GREEDY

    def _refusal(self, exc: PdmeshError, attempts: Attempts) -> PdmeshError | None:
        """What the sample ends with; None when it is tried again."""
        mesh, spec, now = self._mesh, self._spec, time.monotonic()
        if not exc.retryable or now >= spec.deadline:
            return exc
        if self._evidence.guilty:
            mesh.convicted.add(spec.prompt_token_ids, self._draws if self._received else None, now)
            mesh.retry_metrics.refused.labels("poison").inc()
            return self._evidence.verdict(exc.leg)
        if attempts.exhausted:
            mesh.retry_metrics.refused.labels("attempts").inc()
            return exc
        if not self._received and charged(exc) and not mesh.budget.take(now):
            mesh.retry_metrics.refused.labels("budget").inc()
            return exc
        return None

    def _note_retry(self, exc: PdmeshError) -> None:
        self._mesh.metrics.replans.labels(exc.leg.value, exc.reason).inc()
        kind = "handover" if handed_back(exc) else "resume" if self._received else "replan"
        self._mesh.retry_metrics.retries.labels(kind).inc()
        self._move("RESUMING" if self._received else "REPLANNED", f"{exc.leg.value} {exc.reason}: {exc.message}")

    async def _place(self, avoid: set[int]) -> Placement:
        """Waits for a pair: an open stream until its deadline, as does a suspect for one without another; others
        up to peer_wait."""
        prompt, open_stream, suspect = len(self._spec.prompt_token_ids), self._received > 0, self._evidence.suspect
        deadline = self._spec.deadline
        give_up = deadline if open_stream else min(time.monotonic() + self._mesh.peer_wait, deadline)
        while True:
            try:
                placement = self._mesh.place(
                    self.room,
                    prompt + self._received,
                    avoid,
                    self._fingerprint,
                    whole_tokens=prompt + self._limit,
                    patient=open_stream,
                    alone=suspect,
                    near=None if self._first is None else self._first._placement,
                )
                break
            except (UnavailableError, ContextLengthError) as exc:
                left = (deadline if exc.reason == "SUSPECT" else give_up) - time.monotonic()
                hopeless = exc.reason in ("FINGERPRINT_MISMATCH", ContextLengthError.reason) and not open_stream
                if left > 0 and not hopeless and await self._mesh.table.wait_change(left):
                    continue
                if open_stream and isinstance(exc, ContextLengthError):  # the client's request was well once
                    raise UnavailableError(exc.message, leg=Leg.ROUTER, reason="NO_ROOM") from None
                raise
        if suspect:
            self._gated = [row.incarnation for row in placement.rows]
            self._mesh.gate.enter(self._gated)
        if not open_stream:
            # An open stream keeps its limit: a worker that holds less than that ends it by its own.
            limit = placement.token_limit - prompt
            wanted = self._spec.options.max_tokens
            fits = limit if wanted is None else min(limit, wanted)
            self._limit = min(self._limit, fits) if self._limit else fits
            self._placed_at = time.monotonic()
        self._placement = placement
        names = " + ".join(row.instance.name for row in placement.rows)
        self._move("PLACED", names)
        return placement

    async def _try(self, placement: Placement, sink: Sink) -> SampleResult:
        """One attempt. Raises PdmeshError."""
        mesh = self._mesh
        request = self._request(placement)
        timeout = self._spec.deadline - time.monotonic()
        if timeout <= 0:
            raise DeadlineError("the request's deadline passed before it could be sent", leg=Leg.ROUTER)
        mesh.recorder.record(route_of(self.room, self._attempt, self._spec.request_id, placement))
        # Those that count this sample as theirs; the prefill only until the attempt's first token.
        held = list(placement.rows)
        for row in held:
            mesh.enter(row)
        try:
            with mesh.pool.use(placement.decode.endpoint) as channel:
                stub = decode_service_pb2_grpc.DecodeServiceStub(channel)
                call = stub.Generate(request, timeout=timeout, metadata=self._metadata())
                self._move("SENT")
                try:
                    return await self._read(call, placement, held, sink)
                except grpc.aio.AioRpcError as exc:
                    raise _of_the_call(exc) from exc
                finally:
                    call.cancel()  # nothing when it has ended
        finally:
            for row in held:
                mesh.leave(row)

    def _leave_gate(self, incarnations: list[int]) -> None:
        """Lets other suspects to these workers again."""
        leaving = [i for i in incarnations if i in self._gated]
        if leaving:
            self._gated = [i for i in self._gated if i not in leaving]
            self._mesh.release_suspect(leaving)

    def _request(self, placement: Placement) -> decode_service_pb2.GenerateRequest:
        options = self._spec.options
        sampling = SamplingParams(
            max_tokens=self._limit,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            min_p=options.min_p,
            seed=self._spec.seed,
            min_tokens=min(options.min_tokens, self._limit),
            stop_token_ids=options.stop_token_ids,
            ignore_eos=options.ignore_eos,
            frequency_penalty=options.frequency_penalty,
            presence_penalty=options.presence_penalty,
            repetition_penalty=options.repetition_penalty,
            logit_bias=options.logit_bias,
            logprobs=options.logprobs,
            prompt_logprobs=self._scores.begin_attempt(),
            grammar=options.grammar,
        )
        spec = GenerateSpec(
            session=SessionId(self.room, self._attempt),
            request_id=self._spec.request_id,
            prompt_token_ids=tuple(self._spec.prompt_token_ids),
            emitted_token_ids=tuple(self._output.token_ids) if self._output else (),
            sampling=sampling,
            arrival_ms=order_ms(self._spec.arrival_ms, self._spec.priority),
            deadline=self._spec.deadline,
            cache_salt=options.cache_salt,
        )
        return decode_service_pb2.GenerateRequest(
            request=spec_to_proto(spec, placement.decode.instance.fingerprint),
            decode_incarnation=placement.decode.incarnation,
            prefill=None if placement.prefill is None else peer_to_proto(placement.prefill),
        )

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        base = (("x-request-id", self._spec.request_id),)
        traceparent = self._trace.traceparent(self.room, self._spec.traceparent)
        return (*base, ("traceparent", traceparent)) if traceparent else base

    async def _read(self, call: _Call, placement: Placement, held: list[RankRow], sink: Sink) -> SampleResult:
        output = self._output
        if output is None:
            options, eos = self._spec.options, placement.decode.instance.eos_token_ids
            stop_ids = (*options.stop_token_ids, *(() if options.ignore_eos else eos))
            detokenizer = self._mesh.tokenizer.detokenizer(
                skip_special_tokens=options.skip_special_tokens,
                kept_ids=options.kept_special_ids,
                goes_on=options.goes_on,
            )
            output = OutputText(
                detokenizer, options.stop, stop_ids, options.min_tokens, include_stop=options.include_stop
            )
            self._output = output
        while True:
            message = await call.read()
            if message is grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
                raise PeerFailedError("the decode worker ended the stream without an end of the output", leg=Leg.DECODE)
            if message.prompt_logprobs:
                self._scores.take_prompt(message.prompt_first_position, message.prompt_logprobs)
            ids = message.token_ids
            finish = finish_from_proto(message.finished) if message.HasField("finished") else None
            if not ids and finish is None:
                continue
            text, logprobs = "", list[TokenLogprobs]()
            before = len(output.token_ids)
            if ids:
                logprobs = self._scores.read(ids, message.logprobs)
                self._take(message.first_index, len(ids), placement, held)
                if self._cached is None and message.HasField("cached_tokens"):
                    self._cached = message.cached_tokens
                if prompt := self._scores.show_prompt():
                    await sink(Delta("", [], prompt_logprobs=prompt))
                text = output.add(ids, None if finish is None else finish.stop_token_id)
                logprobs = logprobs[: len(output.token_ids) - before]  # nothing behind a stop
                self._scores.keep(logprobs)
            given_back = finish is not None and finish.reason in (FinishReason.CANCELLED, FinishReason.PREEMPTED)
            if finish is not None and given_back and output.stop_string is None:
                if ids:  # merged with the hand-back, since the last message waited for this reader
                    await sink(Delta(text, output.token_ids[before:], logprobs=logprobs))
                raise UnavailableError(
                    f"the decode worker gave the request back ({finish.reason.value})",
                    leg=Leg.DECODE,
                    reason=finish.reason.name,
                )
            ended = finish is not None or output.stop_string is not None
            if not ended:
                await sink(Delta(text, output.token_ids[before:], logprobs=logprobs))
                continue
            text += output.finish()
            result = self._result(output, finish, placement)
            await sink(Delta(text, output.token_ids[before:], result, logprobs))
            return result

    def _take(self, first_index: int, count: int, placement: Placement, held: list[RankRow]) -> None:
        """Checks that the tokens follow those before, and takes the time."""
        if first_index != self._received:
            raise InternalError(
                f"the decode worker sent token {first_index} where {self._received} was due",
                leg=Leg.DECODE,
                reason="TOKEN_GAP" if first_index > self._received else "TOKEN_OVERLAP",
            )
        now = time.monotonic()
        if self._received == self._since:  # the attempt's first token
            if self._received:
                self._move("RESUMED")
            if placement.prefill is not None:
                held.remove(placement.prefill)
                self._mesh.leave(placement.prefill)
                self._mesh.succeeded(placement.prefill.incarnation)
                self._leave_gate([placement.prefill.incarnation])
        elif self._received == self._since + 1:  # decode has computed
            self._mesh.succeeded(*breaker_keys(placement))
        if self._gated and self._received + count - self._since >= CLEARED_AFTER:
            self._leave_gate(self._gated)
        if self._received == 0:
            self._first_at = now
            self._fingerprint = placement.decode.instance.fingerprint
            self._mesh.metrics.ttft.observe(now - self._spec.arrival)
            self._mesh.history.first_token(now - self._spec.arrival, count)
            self._move("FIRST_TOKEN")
            for _ in range(count - 1):  # they came with it
                self._mesh.metrics.itl.observe(0.0)
        else:
            gap = (now - self._last_at) / count
            self._mesh.history.tokens(gap, count)
            for _ in range(count):
                self._mesh.metrics.itl.observe(gap)
        self._last_at = now
        self._received += count

    def _result(self, output: OutputText, finish: Finish | None, placement: Placement) -> SampleResult:
        now = time.monotonic()
        self._mesh.succeeded(*breaker_keys(placement))
        arrival = self._spec.arrival
        timings = {
            "placed": self._placed_at - arrival,
            "ttft": (self._first_at or now) - arrival,
            "e2e": now - arrival,
        }
        if finish is not None:
            for leg, stages in (("prefill", finish.prefill_timings), ("decode", finish.timings)):
                if leg == "decode" or placement.prefill is not None:
                    timings |= {f"{leg}_{name}": getattr(stages, name) for name in stages.__struct_fields__}
        if self._cached is None and finish is not None:
            self._cached = finish.cached_tokens
        stop_reason: str | int | None = output.stop_string
        reason = FinishReason.STOP
        if stop_reason is None and finish is not None:
            reason = finish.reason
            if finish.stop_token_id in self._spec.options.stop_token_ids:
                stop_reason = finish.stop_token_id
        self._move("FINISHED", reason.value)
        prefill = placement.prefill
        return SampleResult(
            room=self.room,
            attempts=self._attempt + 1,
            token_ids=output.token_ids,
            finish_reason=reason.value,
            stop_reason=stop_reason,
            cached_tokens=self._cached or 0,
            timings=timings,
            path=finish.path if finish is not None else "",
            transport=finish.transport if finish is not None else "",
            prefill_instance=prefill.instance.name if prefill is not None else "",
            decode_instance=placement.decode.instance.name,
            logprobs=self._scores.output,
            prompt_logprobs=self._scores.prompt,
        )

    def _blame(self, placement: Placement, exc: PdmeshError) -> set[int]:
        """Notes whom a failure speaks against; returns the incarnation that the next attempt avoids."""
        prefill, decode = placement.prefill, placement.decode
        for fault in faults_of(exc, prefill.incarnation if prefill is not None else 0, decode.incarnation):
            self._mesh.breakers.fault(fault, time.monotonic())
        guilty = decode
        if prefill is not None and exc.leg in (Leg.PREFILL, Leg.TRANSFER):
            guilty = prefill
        for row in placement.rows:
            if row.incarnation == exc.peer_incarnation:
                guilty = row
        self._evidence.failed(exc, self._received - self._since, guilty.instance.name)
        # A deadline that may be tried again was a worker's, not the request's own.
        own = isinstance(exc, DeadlineError | InvalidRequestError) and not exc.retryable
        return set() if own else {guilty.incarnation}

    def _move(self, state: str, reason: str = "") -> None:
        self._trace.move(self.room, self._attempt, state, reason)


def _for_client(exc: PdmeshError) -> PdmeshError:
    """The error in the client's terms. Workers name fields as the protos do, and that nobody is left in the life that
    this router knows of is for clients that nobody is there."""
    if isinstance(exc, FencedError):
        return UnavailableError(exc.message, leg=exc.leg, reason=exc.reason, retry_after=_RETRY_AFTER)
    if isinstance(exc, ContextLengthError):
        exc.field = "prompt"
    exc.field = exc.field.removeprefix("request.").removeprefix("sampling.")
    return exc


def _of_the_call(exc: grpc.aio.AioRpcError) -> PdmeshError:
    """What a failed call means. A cancel that the worker speaks of is not ours: that one never ends up here."""
    error = from_rpc_error(exc, Leg.DECODE)
    if not isinstance(error, CancelledSessionError):
        return error
    return PeerFailedError(error.message, leg=error.leg, peer_incarnation=error.peer_incarnation)
