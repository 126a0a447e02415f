"""What stands between the routes and the journeys: one object per router.

prompt or chat ─▶ token ids, checked against vocabulary and context ─▶ admission ─▶ a journey per sample
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from fastapi import Request

from engine_core.types.errors import (
    CancelledSessionError,
    ContextLengthError,
    InvalidRequestError,
    Leg,
    NotFoundError,
    PdmeshError,
    QueueFullError,
    UnavailableError,
)
from engine_core.types.sampling import Grammar
from services.config import RouterConfig
from services.router.chat.schema import Chat
from services.router.edge.access import log_access
from services.router.edge.fields import Prompt
from services.router.edge.http import RequestTimeoutError, as_pdmesh_error, error_status, read_body
from services.router.edge.request_body import BodyT, parse_request
from services.router.grammar.check import GrammarCheck
from services.router.grammar.forced import grammar_of, named_grammars
from services.router.journey import Delta, Journey, SampleResult, SampleSpec, Sink, derive_seed
from services.router.metrics import RouterMetrics, WorkerFigures
from services.router.options import GenerationOptions, SamplingDefaults, options_of
from services.router.parsers.choice import OutputFormat, choose_format
from services.router.prompt_log import log_answers, log_prompts
from services.router.routing.admission import NO_LIMIT, Admission, Demand, Room, Ticket, room_of
from services.router.routing.mesh import Mesh
from services.router.routing.placement import largest_limit, only_fingerprint
from services.router.sampling_schema import SamplingRequest
from services.router.text.tokenizer import RouterTokenizer, read_json
from services.router.trace import Trace, TraceRing
from services.runtime.tasks import TaskOwner

_FIRST_GUESS = 128.0
"""Tokens of a usual output, before any has been seen."""


class ModelInfo(msgspec.Struct, frozen=True):
    """What the router knows of the model from its directory."""

    names: tuple[str, ...]
    directory: str
    context: int
    vocab_size: int
    defaults: SamplingDefaults
    created: int
    format: OutputFormat = OutputFormat()
    """How the model writes calls of tools and thoughts."""

    @classmethod
    def read(cls, config: RouterConfig, tokenizer: RouterTokenizer) -> ModelInfo:
        """Raises ConfigError when a file is damaged."""
        root = Path(config.model)
        model = read_json(root / "config.json")
        context = model.get("max_position_embeddings")
        vocab = model.get("vocab_size")
        return cls(
            names=config.served_model_name or (root.resolve().name,),
            directory=str(root),
            context=context if isinstance(context, int) else 0,
            vocab_size=max(tokenizer.vocab_size, vocab if isinstance(vocab, int) else 0),
            defaults=SamplingDefaults.read(read_json(root / "generation_config.json")),
            created=int(time.time()),
            format=choose_format(
                config.tool_call_parser, config.reasoning_parser, tokenizer.template_source, tokenizer
            ),
        )


class Submission(msgspec.Struct, frozen=True):
    """One request, ready to run: `options.n` samples per prompt. `arrival` is on CLOCK_MONOTONIC."""

    request_id: str
    path: str
    prompts: tuple[tuple[int, ...], ...]
    options: GenerationOptions
    arrival: float
    traceparent: str = ""
    client: str = ""
    """Whom it is from, for fair queueing."""
    timings: bool = False
    """True when the client asks where the time goes."""
    timeout: float = math.inf
    """Seconds that the client allows; the router's own limit holds too."""

    @property
    def samples(self) -> int:
        """Samples in all."""
        return len(self.prompts) * self.options.n


SinkOf = Callable[[int], Sink]
"""The sink of choice i."""


class Front:
    """Prepares and runs requests, and counts how they end."""

    def __init__(
        self, config: RouterConfig, tokenizer: RouterTokenizer, model: ModelInfo, mesh: Mesh, figures: WorkerFigures
    ) -> None:
        self.config, self.tokenizer, self.model, self.mesh, self.figures = config, tokenizer, model, mesh, figures
        self.metrics: RouterMetrics = mesh.metrics
        self._room: Room = NO_LIMIT
        self._fingerprint = ""
        self.admission = Admission(
            config.max_in_flight,
            config.max_queued,
            room=lambda: self._room,
            max_wait=config.queue_timeout,
            prompts_ahead=config.prompts_ahead or math.inf,
        )
        self._typical_output = _FIRST_GUESS
        self.grammars = GrammarCheck(model.directory)
        mesh.table.on_change(self._on_table)
        self._on_table()
        self.metrics.watch_admission(lambda: self.admission.in_flight, lambda: self.admission.queued)
        self.traces = TraceRing()
        self.traces.observe = self.metrics.left_state
        self.tasks = TaskOwner("http")
        self.draining = False

    def _on_table(self) -> None:
        rows = self.mesh.table.rows()
        self._room = room_of(rows, self.mesh.digest, self.config.pool_headroom)
        self._fingerprint = only_fingerprint(rows, self.mesh.digest)
        self.admission.pump()

    # ---- checking ---------------------------------------------------------------------------------

    async def read(self, request: Request, kind: type[BodyT]) -> BodyT:
        """The body of a request. Raises InvalidRequestError with the field at fault, and what read_body does."""
        return parse_request(kind, await read_body(request, self.config.max_body_bytes), self.model.names)

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises NotFoundError for a model that is not served here."""
        if name is None or name == "default":
            return self.model.names[0]
        if name not in self.model.names:
            raise NotFoundError(
                f"the model {name[:80]!r} is not served here; there is {', '.join(self.model.names)}",
                field="model",
                reason="MODEL_NOT_FOUND",
            )
        return name

    @property
    def system_fingerprint(self) -> str | None:
        """What replies say of model and arithmetic: the same name, the same draws from the same seed. None while ready
        workers differ in that, or there are none."""
        return f"fp_{self._fingerprint[:12]}" if self._fingerprint else None

    @property
    def token_limit(self) -> int:
        """Tokens, prompt and output, that one request may have; by the model alone while no worker is known."""
        known = largest_limit(self.mesh.table.rows(), self.mesh.digest)
        return min(known or self.model.context or 2**31, 2**31)

    async def encode_prompt(self, prompt: Prompt, *, add_special_tokens: bool | None, field: str) -> tuple[int, ...]:
        """Token ids of a prompt. Raises InvalidRequestError or ContextLengthError."""
        if isinstance(prompt, str):
            special = add_special_tokens is not False
            return await self.encode_text(prompt, add_special_tokens=special, field=field)
        highest = max(prompt)
        if highest >= self.model.vocab_size:
            message = f"{field}: token id {highest} is out of the vocabulary of {self.model.vocab_size}"
            raise InvalidRequestError(message, field=field)
        self._check_length(len(prompt), field)
        return prompt

    async def encode_text(self, text: str, *, add_special_tokens: bool, field: str) -> tuple[int, ...]:
        """Token ids of text. Raises InvalidRequestError when there are none, ContextLengthError when too many."""
        at_least = self.tokenizer.fewest_tokens(text)
        if at_least >= self.token_limit:  # too long for certain: not worth a second of tokenising
            self._check_length(at_least, field)
        ids = await self.tokenizer.encode_async(text, add_special_tokens=add_special_tokens)
        if not ids:
            raise InvalidRequestError(f"{field}: is empty; at least one token is needed", field=field)
        self._check_length(len(ids), field)
        return tuple(ids)

    async def render_chat(self, chat: Chat) -> str:
        """The chat as text with all special tokens: encode it without adding any.

        Raises InvalidRequestError when the template refuses it, or the client brings a template of its own where
        that is not trusted.
        """
        if chat.template is not None and not self.config.trust_request_chat_template:
            raise InvalidRequestError(
                "chat_template: this router takes no templates from clients (--trust-request-chat-template)",
                field="chat_template",
            )
        return await self.tokenizer.render_chat_async(
            chat.messages,
            add_generation_prompt=chat.add_generation_prompt,
            template_kwargs=chat.kwargs,
            tools=chat.tools,
            documents=chat.documents,
            continue_final_message=chat.continue_final_message,
            template=chat.template,
        )

    def options(
        self, asked: SamplingRequest, max_tokens_default: int | None, grammar: Grammar | None = None
    ) -> GenerationOptions:
        """A request's wishes with this model's defaults; `grammar` goes before the one that the request names.

        Raises InvalidRequestError.
        """
        if grammar is None:
            grammar = grammar_of(asked)
        elif asked.ignore_eos:
            raise InvalidRequestError("ignore_eos: not together with calls that are forced", field="ignore_eos")
        field = (named_grammars(asked) or ["tools"])[0]
        options = options_of(asked, self.model.defaults, max_tokens_default, grammar, field)
        for token_id, _ in options.logit_bias:
            if token_id >= self.model.vocab_size:
                message = f"logit_bias: token id {token_id} is out of the vocabulary of {self.model.vocab_size}"
                raise InvalidRequestError(message, field="logit_bias")
        return options

    def _check_length(self, tokens: int, field: str) -> None:
        limit = self.token_limit
        if tokens >= limit:
            raise ContextLengthError(
                f"this model's maximum context length is {limit} tokens; the prompt has at least {tokens}, "
                "which leaves no room for one token",
                field=field,
                leg=Leg.ROUTER,
            )

    def check_samples(self, submission: Submission) -> None:
        """Raises InvalidRequestError when one request asks for too much."""
        prompts, most = len(submission.prompts), self.config.max_prompts
        if prompts > most:
            raise InvalidRequestError(f"prompt: holds {prompts} prompts; there may be {most}", field="prompt")
        if submission.samples > most:
            message = f"n: {submission.options.n} samples of {prompts} prompts are above the limit of {most}"
            raise InvalidRequestError(message, field="n")
        wanted, longest = submission.options.max_tokens, max(map(len, submission.prompts))
        if self.config.strict_max_tokens and wanted is not None and longest + wanted > self.token_limit:
            raise ContextLengthError(
                f"max_tokens: {wanted} after a prompt of {longest} tokens is above the {self.token_limit} that fit",
                field="max_tokens",
                leg=Leg.ROUTER,
            )

    # ---- running ----------------------------------------------------------------------------------

    async def run(self, submission: Submission, sink_of: SinkOf) -> list[SampleResult]:
        """Runs all samples; returns their results by choice. Raises PdmeshError when any fails.

        A prompt's first sample goes first; its others follow when token 1 is there, so that they find its
        prefix in the workers' caches.
        """
        self.check_samples(submission)
        with self.traces.follow(
            submission.request_id, submission.arrival, submission.traceparent, submission.path
        ) as trace:
            if submission.options.grammar is not None:
                await self.grammars.check(submission.options.grammar, submission.options.grammar_field)
            if self.config.log_prompts:
                log_prompts(self.tokenizer, submission.request_id, submission.prompts)
            trace.results = results = await self._run(submission, sink_of, trace)
            if self.config.log_prompts:
                log_answers(self.tokenizer, submission.request_id, [result.token_ids for result in results])
            return results

    async def _run(self, submission: Submission, sink_of: SinkOf, trace: Trace) -> list[SampleResult]:
        arrival_ms = int((time.time() - (time.monotonic() - submission.arrival)) * 1000)
        seed = submission.options.seed
        priority = max(submission.options.priority, self.config.priority_floor)
        ticket = self.admission.admit(submission.samples, submission.client, priority)
        try:
            runs = []
            for p, prompt in enumerate(submission.prompts):
                self.metrics.prompt_tokens.inc(len(prompt))
                base = secrets.randbits(63) if seed is None else seed
                begun = asyncio.Event()
                first: Journey | None = None
                options = submission.options
                others = msgspec.structs.replace(options, prompt_logprobs=None)  # the prompt is the same
                for i in range(submission.options.n):
                    spec = SampleSpec(
                        request_id=submission.request_id,
                        index=p * submission.options.n + i,
                        prompt_token_ids=prompt,
                        options=options,
                        seed=derive_seed(base, i),
                        arrival_ms=arrival_ms,
                        arrival=submission.arrival,
                        deadline=submission.arrival + min(self.config.request_timeout, submission.timeout),
                        traceparent=submission.traceparent,
                        priority=priority,
                    )
                    journey = Journey(self.mesh, spec, trace, first)
                    first = first or journey
                    runs.append(self._one(journey, spec, ticket, sink_of, begun, leads=i == 0))
                    options = others
            if len(runs) == 1:
                return [await runs[0]]
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(run) for run in runs]
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None  # the first to fail; the others were cancelled for it
            return [task.result() for task in tasks]
        finally:
            ticket.close()

    async def _one(
        self,
        journey: Journey,
        spec: SampleSpec,
        ticket: Ticket,
        sink_of: SinkOf,
        begun: asyncio.Event,
        *,
        leads: bool,
    ) -> SampleResult:
        own = sink_of(spec.index)
        if not leads:
            await begun.wait()  # ends with the first sample: its failure cancels the group
        left = spec.deadline - time.monotonic()
        slot = ticket.slot(min(self.config.queue_timeout, left), self._demand(spec), longest=left)

        drops = spec.options.scores_only

        async def sink(delta: Delta) -> None:
            if delta.token_ids or delta.result is not None:  # log probabilities of the prompt come before
                begun.set()
                slot.first_token()
            await own(_without_output(delta) if drops else delta)

        result = await journey.run(sink, slot)
        self._typical_output += (len(result.token_ids) - self._typical_output) / 16
        metrics = self.metrics
        metrics.samples.labels(result.finish_reason, "pd" if result.prefill_instance else "local").inc()
        metrics.output_tokens.inc(len(result.token_ids))
        metrics.cached_tokens.inc(result.cached_tokens)
        metrics.e2e.observe(result.timings["e2e"])
        return _empty(result) if drops else result

    def _demand(self, spec: SampleSpec) -> Demand:
        """An output may be as long as its limit, but few are: beyond twice the usual it is not counted."""
        likely = math.ceil(2 * self._typical_output)
        limit = spec.options.max_tokens
        return Demand(len(spec.prompt_token_ids), likely if limit is None else min(limit, likely))

    def count_end(self, path: str, failure: BaseException | None, *, started: bool = False) -> None:
        """Counts one HTTP request by how it ended."""
        how = _end_of(failure, started=started)
        self.metrics.requests.labels(path, how).inc()
        self.mesh.history.end(how)
        log_access(path, _status_of(failure, how, path, started=started), how)


def _empty(result: SampleResult) -> SampleResult:
    """As if no token had been drawn."""
    return msgspec.structs.replace(result, token_ids=[], logprobs=[], finish_reason="length", stop_reason=None)


def _without_output(delta: Delta) -> Delta:
    result = None if delta.result is None else _empty(delta.result)
    return Delta("", [], result, prompt_logprobs=delta.prompt_logprobs)


def _status_of(failure: BaseException | None, how: str, path: str, *, started: bool) -> int:
    """The HTTP status that was sent; 499 when there was nobody to send it to."""
    if failure is None or started:
        return 200
    return 499 if how == "cancelled" else error_status(as_pdmesh_error(failure), path)


def _end_of(failure: BaseException | None, *, started: bool) -> str:
    if failure is None:
        return "ok"
    if isinstance(failure, CancelledSessionError | asyncio.CancelledError):
        return "cancelled"
    if started:
        return "broken"
    exc: PdmeshError = as_pdmesh_error(failure)
    if isinstance(exc, QueueFullError):
        return "rejected"
    if isinstance(exc, UnavailableError):
        return "unavailable"
    status = error_status(exc)
    if status == 504 or isinstance(exc, RequestTimeoutError):
        return "timeout"
    return "invalid" if status < 500 else "error"
