"""A sequence: known tokens, and how many of them have KV. Computed tokens chase known tokens."""

from __future__ import annotations

from dataclasses import dataclass

from engine_core.scheduler.context import SchedulerContext
from engine_core.scheduler.step import ScheduledSequence
from engine_core.types.errors import ContextLengthError, InvalidRequestError
from engine_core.types.request import FinishReason, GenerateSpec
from engine_core.types.sampling import SamplingParams


@dataclass(slots=True)
class Sequence:
    """Tokens of one session. `limit` is the number of output tokens after clamping.

    `scored_to` is the first prompt position whose log probabilities are still to be reported here; positions are
    reported in order, each once, also when the KV is computed anew.
    """

    spec: GenerateSpec
    tokens: list[int]
    limit: int
    computed: int = 0
    scored_to: int = 1

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.spec.prompt_token_ids)

    @property
    def output_len(self) -> int:
        """Output tokens so far, earlier attempts included."""
        return len(self.tokens) - self.prompt_len

    @property
    def missing(self) -> int:
        """Known tokens without KV."""
        return len(self.tokens) - self.computed

    @property
    def max_kv_tokens(self) -> int:
        """Tokens whose KV may have to be held: the last output token's never is."""
        return max(len(self.tokens), self.prompt_len + self.limit - 1)

    @property
    def scores_left(self) -> bool:
        """True when log probabilities of the prompt are asked for and some are still to be reported."""
        return self.spec.sampling.prompt_logprobs is not None and self.scored_to < self.prompt_len

    @property
    def most_cached(self) -> int | None:
        """Leading tokens that the prefix cache may give: what is to be scored has to be computed. None: all."""
        return self.scored_to - 1 if self.scores_left else None

    def scored_elsewhere(self) -> None:
        """The prompt's log probabilities are somebody else's to report."""
        self.scored_to = self.prompt_len

    def reset(self) -> None:
        """Forgets the KV, not the tokens."""
        self.computed = 0

    def append(self, token_id: int, eos_token_ids: frozenset[int]) -> tuple[FinishReason, int | None] | None:
        """Adds an output token; returns why the output ends with it, or None."""
        self.tokens.append(token_id)
        sampling = self.spec.sampling
        enough = self.output_len > sampling.min_tokens
        if enough and token_id in sampling.stop_token_ids:
            return FinishReason.STOP, token_id
        # Below min_tokens the end is drawn only where a grammar allows nothing else.
        if token_id in eos_token_ids and not sampling.ignore_eos and (enough or sampling.grammar is not None):
            return FinishReason.STOP, token_id
        if self.output_len >= self.limit:
            return FinishReason.LENGTH, None
        return None

    def schedule(
        self, count: int, block_ids: tuple[list[int], ...], eos_token_ids: frozenset[int]
    ) -> ScheduledSequence:
        """The next `count` tokens as part of a step; samples when they reach the last known token."""
        sampling = self.spec.sampling
        end = self.computed + count
        sample = end == len(self.tokens)
        banned: tuple[int, ...] = ()
        if sample and self.output_len < sampling.min_tokens:
            banned = tuple(sorted(stop_ids(sampling, eos_token_ids)))
        return ScheduledSequence(
            session=self.spec.session,
            token_ids=self.tokens[self.computed : end],
            start=self.computed,
            block_ids=block_ids,
            sample=sample,
            sampling=sampling,
            banned_token_ids=banned,
            known=self.tokens,
            prompt_len=self.prompt_len,
            scored=self._scored(end) if self.scores_left else (0, 0),
        )

    def _scored(self, end: int) -> tuple[int, int]:
        """Prompt positions that a chunk up to `end` scores first; the last one's logits come out of the row before."""
        to = min(end + 1, self.prompt_len)
        return (self.scored_to, to) if to > self.scored_to else (0, 0)

    def settle(self, part: ScheduledSequence) -> None:
        """A step has computed the part."""
        self.computed += len(part.token_ids)
        self.scored_to = max(self.scored_to, part.scored[1])


def stop_ids(sampling: SamplingParams, eos_token_ids: frozenset[int]) -> set[int]:
    """Tokens that end the output, from min_tokens on; before, they must not be drawn."""
    return set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else eos_token_ids)


def new_sequence(spec: GenerateSpec, context: SchedulerContext) -> Sequence:
    """Checks what can never work, before any work, and clamps max_tokens to what fits.

    Raises InvalidRequestError or ContextLengthError naming the field.
    """
    prompt, emitted = len(spec.prompt_token_ids), len(spec.emitted_token_ids)
    if prompt < 1:
        raise InvalidRequestError("the prompt is empty; it needs at least one token", field="prompt_token_ids")
    if spec.sampling.max_tokens < 1:
        raise InvalidRequestError(f"max_tokens is {spec.sampling.max_tokens}; at least 1 is needed", field="max_tokens")
    _check_vocabulary(spec, context)
    # Of prompt + output tokens, all but the last one need KV.
    room = min(context.max_model_len, context.pool_tokens + 1)
    if prompt + 1 > room:
        raise ContextLengthError(
            f"the prompt has {prompt} tokens; with one token of output this worker holds {room} at most",
            field="prompt_token_ids",
        )
    limit = min(spec.sampling.max_tokens, room - prompt)
    if emitted >= limit:
        raise InvalidRequestError(
            f"{emitted} tokens were already emitted; the limit is {limit}", field="emitted_token_ids"
        )
    return Sequence(spec, list(spec.known_token_ids), limit)


def _check_vocabulary(spec: GenerateSpec, context: SchedulerContext) -> None:
    """Refuses what a step could only end the engine with: unknown tokens, and nothing left to draw."""
    vocab, sampling = context.vocab_size, spec.sampling
    if not vocab:
        return
    for name in ("prompt_token_ids", "emitted_token_ids"):
        highest = max(getattr(spec, name), default=0)
        if highest >= vocab:
            raise InvalidRequestError(f"token {highest} is outside the vocabulary of {vocab}", field=name)
    biased = max((token for token, _ in sampling.logit_bias), default=0)
    if biased >= vocab:
        raise InvalidRequestError(
            f"logit_bias holds token {biased}, which is outside the vocabulary of {vocab}", field="logit_bias"
        )
    if sampling.min_tokens and len(sampling.stop_token_ids) + len(context.eos_token_ids) >= vocab:
        stops = stop_ids(sampling, context.eos_token_ids)
        if sum(0 <= token < vocab for token in stops) >= vocab:
            raise InvalidRequestError(
                f"all {vocab} tokens are stop tokens: with min_tokens {sampling.min_tokens} none may be drawn",
                field="stop_token_ids",
            )
