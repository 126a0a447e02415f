"""One matcher per session, brought up to date from the tokens that are known. Implements MaskSource.

    start(plan)   what is new in each session's output goes to a thread: consume it, compute the masks
    collect()     waits for that thread, after the forward

A matcher's state is a function of the output's tokens alone, so that it goes on by itself behind prefill's first
token, a preemption or another worker's tokens: it consumes what it has not seen yet, each token once. Matchers are
forgotten when others need their place, and built anew from the same tokens.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from operator import itemgetter

import llguidance
import numpy as np
import numpy.typing as npt

from engine_core.execution.masks import Masks
from engine_core.grammar.cache import Compiled, GrammarCache
from engine_core.grammar.compiler import UNSPELLED, spelt_out
from engine_core.scheduler.step import ScheduledSequence, StepPlan
from engine_core.types.errors import InvalidRequestError
from engine_core.types.ids import SessionId
from engine_core.types.sampling import Grammar

MASK_SECONDS = 10.0
"""How long a step waits for masks, which take milliseconds; then its sequences with grammars fail."""

_CONSUME_AT_ONCE = 64
"""Consuming holds the GIL: between two pieces others get it."""
_MAX_THREADS = 16


class _State:
    """`consumed` counts the output tokens that were handed to the thread; the rest is the thread's."""

    __slots__ = ("compiled", "consumed", "grammar", "lane", "matcher")

    def __init__(self, grammar: Grammar) -> None:
        self.grammar, self.consumed, self.lane = grammar, 0, 0
        self.compiled: Compiled | None = None
        self.matcher: llguidance.LLMatcher | None = None


_Job = tuple[int, SessionId, _State, tuple[int, ...]]
"""Index in the plan, whose, the state, and the tokens that are new to it."""
_Result = tuple[Masks, dict[int, str], list[SessionId]]
"""Masks, problems, and the sessions that have one."""


class MatcherBook:
    """Both calls come from one thread."""

    def __init__(self, grammars: GrammarCache, vocab_size: int, capacity: int, mask_seconds: float = MASK_SECONDS):
        """Masks have ceil(vocab_size / 32) words; at most `capacity` matchers are kept beyond those of a plan."""
        self._grammars, self._words, self._capacity = grammars, -(-vocab_size // 32), capacity
        self._seconds = mask_seconds
        self._states: OrderedDict[SessionId, _State] = OrderedDict()
        self._running: Future[_Result] | None = None
        self._jobs: list[_Job] = []
        self._hands = _Hands()

    def __len__(self) -> int:
        return len(self._states)

    def start(self, plan: StepPlan) -> None:
        """As MaskSource says."""
        self._jobs = [
            self._job(i, sequence, sequence.sampling.grammar)
            for i, sequence in enumerate(plan.sequences)
            if sequence.sample and sequence.sampling.grammar is not None
        ]
        if not self._jobs:
            return
        while len(self._states) > max(self._capacity, len(self._jobs)):
            self._states.popitem(last=False)
        self._running = self._hands.submit(self._grammars, self._words, self._jobs)

    def collect(self) -> tuple[Masks, dict[int, str]]:
        """As MaskSource says."""
        if self._running is None:
            return {}, {}
        running, self._running = self._running, None
        try:
            masks, problems, failed = running.result(self._seconds)
        except FutureTimeout:
            # That thread may still use the matchers: all of them are built anew, for another thread.
            self._states.clear()
            self._hands = _Hands()
            why = f"the grammar's tokens could not be found within {self._seconds:g} s"
            return {}, {index: why for index, _, _, _ in self._jobs}
        for session in failed:
            self._states.pop(session, None)
        return masks, problems

    def _job(self, index: int, sequence: ScheduledSequence, grammar: Grammar) -> _Job:
        session, output = sequence.session, len(sequence.known) - sequence.prompt_len
        state = self._states.get(session)
        if state is None or state.consumed > output:
            state = self._states[session] = _State(grammar)
        self._states.move_to_end(session)
        new = tuple(sequence.known[sequence.prompt_len + state.consumed :])
        state.consumed = output
        return index, session, state, new


class _Hands:
    """The thread that works, and llguidance's own that it shares the masks among."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        # As many as the forward has, whose threads wait for each other: work on one core holds up all of them.
        threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        self._executor = llguidance.LLExecutor(num_threads=threads)

    def submit(self, grammars: GrammarCache, words: int, jobs: list[_Job]) -> Future[_Result]:
        return self._thread.submit(self._work, grammars, words, jobs)

    def _work(self, grammars: GrammarCache, words: int, jobs: list[_Job]) -> _Result:
        problems: dict[int, str] = {}
        ready: list[tuple[int, llguidance.LLMatcher, Compiled, int]] = []
        width = words
        for index, _, state, new in jobs:
            try:
                if state.compiled is None:
                    state.compiled = grammars.get(state.grammar)
                if state.matcher is None:
                    state.lane, state.matcher = state.compiled.begin()
            except InvalidRequestError as exc:
                problems[index] = exc.message
                continue
            vocabulary = state.compiled.vocabulary
            refused = _consume(state.matcher, new, vocabulary.eos_tokens)
            if refused:
                problems[index] = refused
            else:
                width = max(words, -(-vocabulary.vocab_size // 32))
                ready.append((state.lane, state.matcher, state.compiled, index))
        ready.sort(key=itemgetter(0))  # the executor halves the list: its threads begin in different lanes
        bits = np.zeros((len(ready), width), np.uint32)
        if ready:
            targets = [(matcher, row) for row, (_, matcher, _, _) in enumerate(ready)]
            self._executor.unsafe_compute_mask_ptr(targets, bits.ctypes.data, width * 4, len(ready))
        masks: Masks = {}
        filled = np.count_nonzero(bits[:, :words], axis=1)
        for row, (_, matcher, compiled, index) in enumerate(ready):
            mask = bits[row, :words]
            if matcher.is_error():
                problems[index] = f"the grammar can't be followed: {_reason(matcher)}"
            elif not filled[row] or (matcher.is_stopped() and not matcher.is_accepting()):
                problems[index] = "the grammar allows no token here"
            elif filled[row] == 1 and not _spell(mask, compiled.vocabulary, matcher):
                problems[index] = UNSPELLED
            else:
                masks[index] = mask
        return masks, problems, [session for index, session, _, _ in jobs if index in problems]


def _consume(matcher: llguidance.LLMatcher, tokens: tuple[int, ...], eos_token_ids: list[int]) -> str:
    """Why a token is refused; empty when all are taken. Behind the end more ends may come, where ignore_eos or
    min_tokens keep a session going."""
    for i in range(0, len(tokens), _CONSUME_AT_ONCE):
        piece = list(tokens[i : i + _CONSUME_AT_ONCE])
        taken = matcher.try_consume_tokens(piece)
        if matcher.is_error():
            return f"the grammar can't be followed: {_reason(matcher)}"
        if taken < len(piece):
            if matcher.is_stopped() and all(
                token in eos_token_ids for token in (*piece[taken:], *tokens[i + _CONSUME_AT_ONCE :])
            ):
                return ""
            return f"token {piece[taken]} does not match the grammar"
    return ""


def _spell(mask: npt.NDArray[np.uint32], vocabulary: llguidance.LLTokenizer, matcher: llguidance.LLMatcher) -> bool:
    """Where the mask, which has one word that is not 0, allows a single token: has it be one that the matcher takes.
    False when there is none."""
    at = int(mask.argmax())
    word = int(mask[at])
    if word & (word - 1):
        return True
    token = 32 * at + word.bit_length() - 1
    spelt = spelt_out(vocabulary, matcher, token)
    if spelt is None or spelt >= 32 * len(mask):
        return False
    mask[at] = 0
    mask[spelt // 32] = 1 << spelt % 32
    return True


def _reason(matcher: llguidance.LLMatcher) -> str:
    return (matcher.get_error().splitlines() or ["unknown"])[0]
