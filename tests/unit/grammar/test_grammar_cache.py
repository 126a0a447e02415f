"""Grammars are compiled once, off the caller's thread; what hangs is given up."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_core.grammar import cache as cache_module
from engine_core.grammar.cache import COMPILE_SECONDS, Compiled, GrammarCache
from engine_core.grammar.compiler import compile_grammar
from engine_core.types.errors import InvalidRequestError, QueueFullError
from engine_core.types.sampling import Grammar, GrammarKind
from tests.support.models import tiny_model

LIMIT = 60.0


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


class Caller:
    """Asks a cache, and waits to be woken."""

    def __init__(self, directory: Path | None = None) -> None:
        self.woken = threading.Semaphore(0)
        self.cache = GrammarCache(directory or tiny_model(), (0, 2), 325, self.woken.release)

    def compiled(self, grammar: Grammar) -> Compiled:
        deadline = time.monotonic() + LIMIT
        while (found := self.cache.want(grammar, time.monotonic())) is None:
            assert self.woken.acquire(timeout=max(0.0, deadline - time.monotonic()))
        return found


def test_a_grammar_comes_later_and_is_the_same_object_from_then_on() -> None:
    caller = Caller()
    assert caller.cache.want(regex("a+"), time.monotonic()) is None
    first = caller.compiled(regex("a+"))
    assert caller.cache.want(regex("a+"), time.monotonic()) is first
    assert caller.cache.get(regex("a+")) is first
    assert caller.compiled(regex("b+")) is not first


def test_a_refusal_is_raised_again_without_compiling() -> None:
    caller = Caller()
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="unclosed group"):
            caller.compiled(regex("("))
    assert not caller.woken.acquire(blocking=False)


def test_one_that_nobody_holds_is_forgotten_when_others_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "MAX_KEPT", 2)
    caller = Caller()
    held, dropped = caller.compiled(regex("a")), id(caller.compiled(regex("b")))
    caller.compiled(regex("c")), caller.compiled(regex("d"))
    gc.collect()
    assert caller.cache.want(regex("a"), time.monotonic()) is held
    assert caller.cache.want(regex("b"), time.monotonic()) is None, dropped


def test_texts_are_kept_within_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "MAX_KEPT_BYTES", 10)
    caller = Caller()
    caller.compiled(regex("a" * 6)), caller.compiled(regex("b" * 6))
    assert caller.cache.want(regex("b" * 6), time.monotonic()) is not None
    assert caller.cache.want(regex("a" * 6), time.monotonic()) is None


def test_a_model_without_a_tokenizer_refuses_all(tmp_path: Path) -> None:
    caller = Caller(tmp_path)
    with pytest.raises(InvalidRequestError, match=r"no tokenizer\.json"):
        caller.compiled(regex("a"))


class Stuck:
    """Stands in for compile_grammar: texts of x wait until they are let go."""

    def __init__(self, compile_grammar: Callable[..., object]) -> None:
        self._compile = compile_grammar
        self.go, self.begun = threading.Event(), threading.Semaphore(0)

    def __call__(self, vocabulary: object, grammar: Grammar) -> object:
        if grammar.text.startswith("x"):
            self.begun.release()
            assert self.go.wait(LIMIT)
        return self._compile(vocabulary, grammar)


def test_one_that_takes_too_long_is_refused_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = Stuck(compile_grammar)
    monkeypatch.setattr(cache_module, "compile_grammar", stuck)
    caller = Caller()
    try:
        for i in range(2):  # as many as there are threads
            assert caller.cache.want(regex(f"x{i}"), time.monotonic()) is None
            assert stuck.begun.acquire(timeout=LIMIT)
        late = time.monotonic() + COMPILE_SECONDS + 1
        with pytest.raises(InvalidRequestError, match="takes more than 30 s"):
            caller.cache.want(regex("x0"), late)
        assert caller.compiled(regex("a")).grammar == regex("a")
    finally:
        stuck.go.set()
    with pytest.raises(InvalidRequestError, match="takes more than 30 s"):
        caller.cache.want(regex("x1"), time.monotonic())


def test_too_many_that_wait_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = Stuck(compile_grammar)
    monkeypatch.setattr(cache_module, "compile_grammar", stuck)
    monkeypatch.setattr(cache_module, "MAX_PENDING", 3)
    caller = Caller()
    try:
        for i in range(3):
            assert caller.cache.want(regex(f"x{i}"), time.monotonic()) is None
        with pytest.raises(QueueFullError, match="3 grammars are waiting"):
            caller.cache.want(regex("x9"), time.monotonic())
    finally:
        stuck.go.set()
    assert caller.compiled(regex("x2")).grammar == regex("x2")
