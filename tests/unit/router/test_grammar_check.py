"""The router's verdicts: right, kept, and given whatever a grammar does to the process that compiles it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio

from engine_core.types.errors import InvalidRequestError, QueueFullError, UnavailableError
from engine_core.types.sampling import Grammar, GrammarKind
from services.router.grammar import check as grammar_check
from services.router.grammar.check import GrammarCheck
from tests.support.asking import TIMEOUT, until
from tests.support.models import tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def checker() -> AsyncIterator[GrammarCheck]:
    made = GrammarCheck(str(tiny_model()), cpu_seconds=1)
    yield made
    await made.close()
    assert not made._all


async def test_good_grammars_pass_and_bad_ones_are_refused_in_the_name_of_the_clients_field(
    checker: GrammarCheck,
) -> None:
    for _ in range(2):
        await checker.check(regex("a+"), "guided_regex")
        with pytest.raises(InvalidRequestError, match=r"guided_regex: .*unclosed group") as refused:
            await checker.check(regex("("), "guided_regex")
        assert refused.value.field == "guided_regex"
    with pytest.raises(InvalidRequestError, match="tools: nothing matches the grammar"):
        await checker.check(Grammar(GrammarKind.JSON_SCHEMA, '{"$ref":"#"}'), "tools")


async def test_rules_that_name_rules_as_deep_as_a_text_can_hold_are_compiled(checker: GrammarCheck) -> None:
    depth = 16_500
    rules = "\n".join(f"r{i}:r{i + 1}" for i in range(depth))
    await checker.check(Grammar(GrammarKind.LARK, f'start: r0\n{rules}\nr{depth}: "a"'), "guided_grammar")


async def test_a_grammar_that_explodes_costs_its_child_alone(checker: GrammarCheck) -> None:
    patterns = " & ".join(f"/.*a{i}.*/" for i in range(40))
    with pytest.raises(InvalidRequestError, match="guided_grammar: compiling it takes more than 1 s"):
        await checker.check(Grammar(GrammarKind.LARK, f"start: A\nA: {patterns}"), "guided_grammar")
    await checker.check(regex("b+"), "guided_regex")


async def test_equal_grammars_that_come_together_are_compiled_once(checker: GrammarCheck) -> None:
    checks = [asyncio.ensure_future(checker.check(regex("c+"), "guided_regex")) for _ in range(20)]
    await asyncio.sleep(0)
    assert len(checker._asked) == 1
    checks[0].cancel()  # its client has gone; the others still get their answer
    await asyncio.gather(*checks[1:])
    assert checks[0].cancelled()


async def test_too_many_that_wait_are_refused(checker: GrammarCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "_MAX_WAITING", 3)
    checks = [asyncio.ensure_future(checker.check(regex(f"d{i}"), "guided_regex")) for i in range(5)]
    results = await asyncio.gather(*checks, return_exceptions=True)
    assert [type(result) for result in results] == [type(None)] * 3 + [QueueFullError] * 2


async def test_verdicts_are_kept_within_bounds(checker: GrammarCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "_MAX_KEPT", 2)
    for text in ("e", "f", "g"):
        await checker.check(regex(text), "guided_regex")
    assert list(checker._known) == [regex("f"), regex("g")]
    assert checker._known_bytes == 2


async def test_a_child_that_is_killed_is_replaced(checker: GrammarCheck) -> None:
    await checker.check(regex("h"), "guided_regex")
    for child in checker._all:
        child.process.send_signal(signal.SIGKILL)
        await child.death()
    await checker.check(regex("i"), "guided_regex")  # one that ended while idle is nobody's loss
    (child,) = checker._idle
    process = psutil.Process(child.process.pid)
    process.suspend()
    await until(lambda: process.status() == psutil.STATUS_STOPPED, TIMEOUT, lambda: "it does not stop")
    asked = asyncio.ensure_future(checker.check(regex("j"), "guided_regex"))
    await until(lambda: not checker._idle, TIMEOUT, lambda: "nobody took the child")
    child.process.send_signal(signal.SIGKILL)
    with pytest.raises(UnavailableError, match="try again"):
        await asked
    await checker.check(regex("j"), "guided_regex")
