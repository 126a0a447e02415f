"""Grammars compiled off the engine's thread, and kept.

    want(grammar) ── known ─────────────▶ Compiled
        │ new: a thread compiles it
        ▼
    pending ── done ──▶ Compiled, or InvalidRequestError; `wake` is called, and want says which
        │ longer than COMPILE_SECONDS
        ▼
    refused; another thread takes the place of the one that hangs

A Compiled that anybody holds is never compiled again; the latest stay beyond that, within MAX_KEPT and
MAX_KEPT_BYTES of text.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import llguidance

from engine_core.grammar.compiler import STACK_BYTES, compile_grammar, load_vocabulary
from engine_core.types.errors import InvalidRequestError, QueueFullError
from engine_core.types.sampling import Grammar

COMPILE_SECONDS = 30.0
MAX_KEPT = 256
MAX_KEPT_BYTES = 16 * 1024 * 1024
MAX_PENDING = 256
_THREADS = 2
_MAX_THREADS = 6
"""With those that hang."""
_KEEP_REFUSALS = 64
_MAX_LANES = 4
_LANE_SECONDS = 0.02
"""A grammar that takes longer to compile has one lane."""


class Compiled:
    """A grammar, compiled once per lane. All copies of a matcher share its lexer, which one thread at a time may use:
    only matchers of different lanes have their masks computed at the same time."""

    __slots__ = ("__weakref__", "_next", "grammar", "lanes", "vocabulary")

    def __init__(
        self, grammar: Grammar, vocabulary: llguidance.LLTokenizer, lanes: Sequence[llguidance.LLMatcher]
    ) -> None:
        """`lanes` are matchers that are copied, never advanced."""
        self.grammar, self.vocabulary, self.lanes = grammar, vocabulary, tuple(lanes)
        self._next = itertools.count()

    def begin(self) -> tuple[int, llguidance.LLMatcher]:
        """The next lane in turn, and a matcher of it before the first token."""
        lane = next(self._next) % len(self.lanes)
        return lane, self.lanes[lane].deep_copy()


class GrammarCache:
    """Thread-safe. Loads the vocabulary in the background from the start."""

    def __init__(
        self, directory: str | Path, eos_token_ids: tuple[int, ...], vocab_size: int, wake: Callable[[], None]
    ) -> None:
        """`wake` is called from a thread whenever something that was pending is decided."""
        self._directory, self._eos_token_ids, self._vocab_size = directory, eos_token_ids, vocab_size
        self._wake = wake
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | InvalidRequestError | None = None
        self._alive: weakref.WeakValueDictionary[Grammar, Compiled] = weakref.WeakValueDictionary()
        self._kept: OrderedDict[Grammar, Compiled] = OrderedDict()
        self._kept_bytes = 0
        self._refused: OrderedDict[Grammar, InvalidRequestError] = OrderedDict()
        self._pending: dict[Grammar, float] = {}
        self._started: dict[Grammar, float] = {}
        self._threads = 0
        self._hanging = 0
        self._jobs: queue.SimpleQueue[Grammar | None] = queue.SimpleQueue()
        for _ in range(_THREADS):
            self._start_thread()
        self._jobs.put(None)

    def want(self, grammar: Grammar, now: float) -> Compiled | None:
        """The grammar when it is compiled; None while that goes on. `now` is on CLOCK_MONOTONIC.

        Raises InvalidRequestError when it can't be compiled, QueueFullError when too many wait.
        """
        with self._lock:
            found = self._alive.get(grammar)
            if found is not None:
                self._keep(found)
                return found
            self._sweep(now)
            refusal = self._refused.get(grammar)
            if refusal is not None:
                raise refusal
            if grammar in self._pending:
                return None
            if len(self._pending) >= MAX_PENDING:
                raise QueueFullError(f"{MAX_PENDING} grammars are waiting to be compiled")
            self._pending[grammar] = now
        self._jobs.put(grammar)
        return None

    def get(self, grammar: Grammar) -> Compiled:
        """The grammar, compiled here and now unless it is known. Raises InvalidRequestError."""
        with self._lock:
            found = self._alive.get(grammar)
        return found if found is not None else self._compile(grammar)

    def _sweep(self, now: float) -> None:
        """Refuses what takes too long; the thread that hangs gets a successor."""
        for grammar, since in [*self._started.items()]:
            if now - since > COMPILE_SECONDS:
                del self._started[grammar]
                self._pending.pop(grammar, None)
                self._refuse(grammar, _too_long())
                self._hanging += 1
                if self._threads < _MAX_THREADS:
                    self._start_thread()

    def _keep(self, compiled: Compiled) -> None:
        if compiled.grammar in self._kept:
            self._kept.move_to_end(compiled.grammar)
            return
        self._kept[compiled.grammar] = compiled
        self._kept_bytes += len(compiled.grammar.text)
        while len(self._kept) > MAX_KEPT or (self._kept_bytes > MAX_KEPT_BYTES and len(self._kept) > 1):
            grammar, _ = self._kept.popitem(last=False)
            self._kept_bytes -= len(grammar.text)

    def _refuse(self, grammar: Grammar, error: InvalidRequestError) -> None:
        self._refused[grammar] = error
        while len(self._refused) > _KEEP_REFUSALS:
            self._refused.popitem(last=False)

    # ---- in the threads ---------------------------------------------------------------------------

    def _start_thread(self) -> None:
        self._threads += 1
        before = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=self._work, name="grammars", daemon=True).start()
        finally:
            threading.stack_size(before)

    def _work(self) -> None:
        while True:
            grammar = self._jobs.get()
            if grammar is None:
                self._load_once()
                continue
            with self._lock:
                if grammar not in self._pending:
                    continue
                self._started[grammar] = time.monotonic()
            error = None
            try:
                self._compile(grammar)
            except InvalidRequestError as exc:
                error = exc
            except BaseException as exc:  # noqa: BLE001  # a panic in the library is one; it costs this grammar alone
                error = InvalidRequestError(f"compiling the grammar failed: {exc}", field="grammar")
            with self._lock:
                if grammar in self._started:
                    del self._started[grammar], self._pending[grammar]
                    if error is not None:
                        self._refuse(grammar, error)
                else:  # it was refused for the time that it took
                    self._hanging -= 1
                    if self._threads - self._hanging > _THREADS:
                        self._threads -= 1
                        return
            self._wake()

    def _load_once(self) -> llguidance.LLTokenizer | InvalidRequestError:
        with self._loading:
            if self._vocabulary is None:
                try:
                    self._vocabulary = load_vocabulary(self._directory, self._eos_token_ids, self._vocab_size)
                except InvalidRequestError as exc:
                    self._vocabulary = exc
            return self._vocabulary

    def _compile(self, grammar: Grammar) -> Compiled:
        vocabulary = self._load_once()
        if isinstance(vocabulary, InvalidRequestError):
            raise vocabulary
        began = time.monotonic()
        lanes = [compile_grammar(vocabulary, grammar)]
        if time.monotonic() - began <= _LANE_SECONDS:
            more = min(_MAX_LANES, len(os.sched_getaffinity(0))) - 1
            lanes += [compile_grammar(vocabulary, grammar) for _ in range(more)]
        compiled = Compiled(grammar, vocabulary, lanes)
        with self._lock:
            known = self._alive.setdefault(grammar, compiled)
            self._keep(known)
        return known


def _too_long() -> InvalidRequestError:
    return InvalidRequestError(f"compiling the grammar takes more than {COMPILE_SECONDS:g} s", field="grammar")
