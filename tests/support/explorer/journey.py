"""The router's side of one request: plans a pair, tries again before token 1, resumes after it where the
scenario says so, cancels, gives up at the deadline. Each token, and each log probability, is compared with the truth
at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from engine_core.host import frames
from engine_core.types.ids import SessionId
from engine_core.types.request import Finish, FinishReason, GenerateSpec
from services.router.routing.priority import order_ms
from tests.support.explorer.scenario import Ask
from tests.support.explorer.shells import Generate
from tests.support.explorer.symbols import Violation, stop_tokens
from tests.support.explorer.wires import OK, Call

if TYPE_CHECKING:
    from tests.support.explorer.world import World

MAX_ATTEMPTS = 8
ARRIVAL_MS = 10**12
GRACE = 2.0
"""Seconds that the router waits for the workers' own deadline before it gives up itself."""


class Journey:
    """One request of a user."""

    def __init__(self, world: World, room: int, ask: Ask, pair: tuple[int, int] | None = None) -> None:
        self.world, self.room, self.ask, self.pair = world, room, ask, pair
        self.arrival_ms = order_ms(ARRIVAL_MS + room, ask.priority)
        self.deadline = world.clock.now + ask.deadline_after
        self.tokens: list[int] = []
        self.scored = self.due = 1
        """The next prompt position that the user lacks, and the next that this attempt brings."""
        self.asked = False
        """This attempt was asked for the prompt's log probabilities."""
        self.attempt = -1
        self.call: Call | None = None
        self.outcome: str | None = None
        self.asked_at = world.clock.now
        self.took = 0.0
        self.error: frames.ErrorInfo | None = None
        self.retry_at: float | None = world.clock.now

    @property
    def over(self) -> bool:
        """True once the user knows how it ended."""
        return self.outcome is not None

    def start_attempt(self) -> None:
        """Plans a pair and opens the stream."""
        self.retry_at = None
        self.attempt += 1
        world = self.world
        prefill, decode = self.pair or world.place()
        sampling = self.ask.sampling
        self.asked = sampling.prompt_logprobs is not None and self.scored < len(self.ask.prompt)
        self.due = 1
        if not self.asked:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        spec = GenerateSpec(
            session=SessionId(self.room, self.attempt),
            request_id=f"req-{self.room}",
            prompt_token_ids=self.ask.prompt,
            sampling=sampling,
            arrival_ms=self.arrival_ms,
            deadline=self.deadline,
            emitted_token_ids=tuple(self.tokens),
            cache_salt=self.ask.salt,
        )
        target = None if world.scenario.mixed else (prefill, world.known_prefill(prefill))
        self.call = world.call(f"generate {spec.session}", world.router, world.decode_at(decode), self)
        self.call.write(Generate(spec, world.known_decode(decode), target))

    def cancel(self, outcome: str = "cancelled") -> None:
        """The user goes away, or the router gives up."""
        self.outcome = outcome
        self.retry_at = None
        if self.call is not None:
            self.call.cancel()
            self.call = None

    def on_message(self, call: Call, message: Any) -> None:
        """Tokens of one step, or the finish."""
        if call is not self.call:
            return
        if not self.ask.fits:
            raise Violation(f"room {self.room}: a request that can never fit got tokens")
        if isinstance(message, frames.PromptLogprobs):
            self._take_scores(message)
            return
        if self.asked and message.token_ids and self.due < len(self.ask.prompt):
            raise Violation(f"room {self.room}: a token before prompt positions from {self.due} on")
        first = message.first_index
        if first != len(self.tokens):
            raise Violation(f"room {self.room}: tokens from {first}, {len(self.tokens)} are here: a gap or an overlap")
        truth = self.world.truths[self.room].output
        self.tokens += message.token_ids
        if tuple(self.tokens) != truth[: len(self.tokens)]:
            raise Violation(f"room {self.room}: wrong text {self.tokens}, right is {truth}")
        self._check_logprobs(message)
        if message.finish is not None:
            self._finish(message.finish)

    def _take_scores(self, message: frames.PromptLogprobs) -> None:
        first, count = message.first_position, len(message.positions)
        if not self.asked or first != self.due or count < 1 or first + count > len(self.ask.prompt):
            raise Violation(f"room {self.room}: {count} prompt positions from {first} on, {self.due} is due")
        truth = self.world.truths[self.room]
        right = [truth.score(position) for position in range(first, first + count)]
        if list(message.positions) != right:
            raise Violation(f"room {self.room}: scores {message.positions} from {first} on, right is {right}")
        self.due += count
        self.scored = max(self.scored, self.due)

    def _check_logprobs(self, message: frames.SessionOutput) -> None:
        truth = self.world.truths[self.room]
        places = range(len(truth.prompt) + message.first_index, len(truth.prompt) + len(self.tokens))
        right = [truth.score(place) for place in places] if self.ask.sampling.logprobs is not None else []
        if list(message.logprobs) != right:
            raise Violation(f"room {self.room}: log probabilities {message.logprobs}, right is {right}")

    def _finish(self, finish: Finish) -> None:
        truth = self.world.truths[self.room].output
        if finish.reason is FinishReason.PREEMPTED:
            return
        if tuple(self.tokens) != truth:
            raise Violation(f"room {self.room}: {finish.reason} after {self.tokens}, right is {truth}")
        stopped = truth[-1] in stop_tokens(self.ask.sampling) and len(truth) > self.ask.sampling.min_tokens
        right = FinishReason.STOP if stopped else FinishReason.LENGTH
        if finish.reason is not right:
            raise Violation(f"room {self.room}: finish {finish.reason}, right is {right}")
        self.outcome = "done"
        self.took = self.world.clock.now - self.asked_at

    def on_end(self, call: Call, status: str, detail: Any) -> None:
        """The stream is over."""
        if call is not self.call:
            return
        self.call = None
        if self.over:
            return
        if status == OK:
            if not self.world.scenario.resume:
                self.outcome = "preempted"
            else:
                self._again()
            return
        error = detail if isinstance(detail, frames.ErrorInfo) else None
        self.error = error
        if error is not None and error.kind == "InternalError" and not self.world.scenario.damaging:
            raise Violation(f"room {self.room}: {error}")
        if error is not None and error.kind in ("InvalidRequestError", "ContextLengthError"):
            if self.ask.fits or self.tokens:
                raise Violation(f"room {self.room}: a request that fits was refused: {error}")
            self.outcome = "refused"
            return
        retryable = error is None or error.retryable
        if not retryable or (self.tokens and not self.world.scenario.resume):
            self.outcome = "error"
        else:
            self._again()

    def _again(self) -> None:
        if self.attempt + 1 >= MAX_ATTEMPTS:
            self.outcome = "error"
        else:
            self.retry_at = self.world.clock.now + 0.01 * 4**self.attempt

    def expire(self) -> None:
        """Gives up at the deadline."""
        if not self.over and self.world.clock.now >= self.deadline + GRACE:
            self.cancel("deadline")
