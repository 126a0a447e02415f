"""Masks follow what is known of each session, whatever came between two steps."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from engine_core.grammar.book import MatcherBook
from engine_core.grammar.cache import Compiled, GrammarCache
from engine_core.grammar.compiler import compile_grammar, tokens_of
from engine_core.scheduler.step import ScheduledSequence, StepPlan
from engine_core.types.ids import SessionId
from engine_core.types.sampling import Grammar, GrammarKind, SamplingParams
from tests.support.models import tiny_model

VOCAB, ENDS = 325, {0, 2}
PROMPT = (9, 8, 7)
DIGITS = Grammar(GrammarKind.REGEX, "[0-9]{4}")
JSON = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"array","items":{"enum":["ab",12]},"minItems":2,"maxItems":9}')


def part(session: int, output: Sequence[int], grammar: Grammar | None, *, sample: bool = True) -> ScheduledSequence:
    known = [*PROMPT, *output]
    return ScheduledSequence(
        session=SessionId(session), token_ids=known[-1:], start=len(known) - 1, block_ids=([1],), sample=sample,
        sampling=SamplingParams(max_tokens=64, grammar=grammar), known=known, prompt_len=len(PROMPT),
    )  # fmt: skip


class Book:
    """A book over the tiny model's tokens."""

    def __init__(self, capacity: int = 8) -> None:
        self.cache = GrammarCache(tiny_model(), (0, 2), VOCAB, lambda: None)
        self.book = MatcherBook(self.cache, VOCAB, capacity)

    def ask(self, *parts: ScheduledSequence) -> tuple[dict[int, list[int]], dict[int, str]]:
        """Allowed tokens and problems by index."""
        self.book.start(StepPlan(1, parts))
        masks, problems = self.book.collect()
        for mask in masks.values():
            assert mask.dtype == np.uint32 and mask.shape == (-(-VOCAB // 32),)
        return {i: list(tokens_of(mask.tobytes())) for i, mask in masks.items()}, problems

    def walk(self, session: int, grammar: Grammar, seed: int) -> list[int]:
        """A whole output, one token per step."""
        output: list[int] = []
        while not output or output[-1] not in ENDS:
            masks, problems = self.ask(part(session, output, grammar))
            assert not problems and len(output) < 200
            output.append(random.Random(seed + len(output)).choice(masks[0]))
        return output


def test_only_sampled_sequences_with_a_grammar_have_masks() -> None:
    masks, problems = Book().ask(
        part(1, [], None), part(2, [], DIGITS), part(3, [5], DIGITS, sample=False), part(4, [], JSON)
    )
    assert set(masks) == {1, 3} and not problems
    assert len(masks[1]) == 10 and len(masks[3]) == 1
    assert Book().ask(part(1, [], None)) == ({}, {})


def test_a_step_without_grammars_after_one_with_has_no_old_masks() -> None:
    book = Book()
    assert book.ask(part(1, [], DIGITS))[0]
    assert book.ask(part(2, [], None)) == ({}, {})


@pytest.mark.parametrize("grammar", [DIGITS, JSON])
def test_it_goes_on_from_any_number_of_known_tokens(grammar: Grammar) -> None:
    book, fresh = Book(), Book()
    output = book.walk(1, grammar, seed=3)
    for i in range(len(output)):
        at_once, problems = fresh.ask(part(100 + i, output[:i], grammar))
        step_by_step, _ = book.ask(part(200, output[:i], grammar))
        assert not problems and at_once == step_by_step
        assert output[i] in at_once[0]
    halves, _ = fresh.ask(part(300, output[:2], grammar))
    rest, _ = fresh.ask(part(300, output, grammar))
    assert output[2] in halves[0] and set(rest[0]) == ENDS


def test_when_complete_only_the_ends_are_left_and_more_ends_may_follow() -> None:
    book = Book()
    output = book.walk(1, DIGITS, seed=1)
    masks, problems = book.ask(part(1, [*output, 2, 0, 2], DIGITS))
    assert set(masks[0]) == ENDS and not problems


def test_a_token_that_does_not_match_is_that_sequences_problem_alone() -> None:
    book = Book()
    output = book.walk(1, DIGITS, seed=1)[:-1]
    letter = book.cache.get(DIGITS).vocabulary.tokenize_str("q")[0]
    for wrong in ([letter], [*output[:2], letter], [*output, letter], [*output, 2, letter]):
        masks, problems = book.ask(part(5, wrong, DIGITS), part(6, output[:1], DIGITS))
        assert list(masks) == [1] and len(masks[1]) == 10
        assert list(problems) == [0] and "does not match the grammar" in problems[0]


def test_a_grammar_that_cannot_be_compiled_is_a_problem() -> None:
    _, problems = Book().ask(part(1, [], Grammar(GrammarKind.REGEX, "(")))
    assert "unclosed group" in problems[0]


def test_a_grammar_that_nothing_matches_is_a_problem_not_an_end() -> None:
    book = Book()
    for _ in range(2):
        masks, problems = book.ask(part(1, [], Grammar(GrammarKind.JSON_SCHEMA, '{"$ref":"#"}')))
        assert not masks and list(problems) == [0]
    assert len(book.book) == 0


def test_sessions_beyond_its_capacity_are_forgotten_and_come_back() -> None:
    book = Book(capacity=4)
    outputs = {session: book.walk(session, JSON, seed=session) for session in range(10)}
    assert len(book.book) == 4
    masks, problems = book.ask(*(part(session, output[:5], JSON) for session, output in outputs.items()))
    assert not problems
    assert all(outputs[i][5] in mask for i, mask in masks.items()) and len(masks) == 10
    book.ask(part(1, [], JSON))
    assert len(book.book) == 4


def test_what_is_spelt_like_an_end_comes_as_text_and_the_end_behind_it() -> None:
    spelt = Grammar(GrammarKind.REGEX, r"a{3}(<\|im_end\|>|b)a")
    forced = Grammar(GrammarKind.REGEX, r"a{3}<\|im_end\|>a")
    book = Book()
    vocabulary = book.cache.get(spelt).vocabulary
    a, b, less = (vocabulary.tokenize_str(char)[0] for char in "ab<")
    masks, problems = book.ask(part(1, [a] * 3, spelt), part(2, [a] * 3, forced), part(3, [a, a, a, b, a], spelt))
    assert masks == {0: sorted([b, less]), 1: [less], 2: sorted(ENDS)} and not problems
    for seed, grammar in enumerate((spelt, forced) * 2):
        *text, end = book.walk(10 + seed, grammar, seed)
        assert end in ENDS and not ENDS & set(text)
        assert vocabulary.decode_str(text) in {"aaa<|im_end|>a", *(["aaaba"] if grammar == spelt else [])}


def test_many_sessions_at_once_have_the_masks_that_each_has_alone() -> None:
    together, alone = Book(64), Book(64)
    outputs = [together.walk(session, JSON, seed=session)[: session % 7] for session in range(24)]
    masks, problems = together.ask(*(part(100 + i, output, JSON) for i, output in enumerate(outputs)))
    assert not problems
    for i, output in enumerate(outputs):
        assert alone.ask(part(i, output, JSON))[0][0] == masks[i]


def test_sessions_take_lanes_in_turn_and_all_lanes_have_the_same_masks() -> None:
    book = Book()
    one = book.cache.get(JSON)
    compiled = Compiled(JSON, one.vocabulary, [compile_grammar(one.vocabulary, JSON) for _ in range(3)])
    assert [compiled.begin()[0] for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    matchers = [compiled.begin()[1] for _ in range(3)]
    for token in book.walk(1, JSON, seed=5):
        masks = [matcher.compute_bitmask() for matcher in matchers]
        assert masks[0] == masks[1] == masks[2] and token in tokens_of(masks[0])
        for matcher in matchers:
            assert matcher.consume_token(token)
    begun = [compiled.begin()[1].compute_bitmask() for _ in range(3)]
    assert begun == [one.begin()[1].compute_bitmask()] * 3


def test_masks_that_do_not_come_fail_their_sequences_and_later_steps_go_on() -> None:
    book = Book()
    book.book = MatcherBook(book.cache, VOCAB, 8, mask_seconds=0.05)
    with book.cache._lock:  # the thread that needs the grammar stands still
        asked = book.ask(part(1, [], DIGITS))
    assert asked == ({}, {0: "the grammar's tokens could not be found within 0.05 s"})
    assert len(book.book) == 0
    book.book._seconds = 60.0
    assert len(book.ask(part(1, [], DIGITS))[0][0]) == 10
