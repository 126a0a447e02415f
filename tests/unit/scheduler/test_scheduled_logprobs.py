"""Log probabilities through the schedulers: one per token, each prompt position once, in order, before token 1."""

from __future__ import annotations

import pytest

from engine_core.host.channel import join_outputs
from engine_core.scheduler.context import SCORES_PER_FRAME
from engine_core.scheduler.messages import (
    EndSession,
    FirstToken,
    LegDelivered,
    LegStarted,
    LegToken,
    Open,
    OpenPrefill,
    Outputs,
    PromptLogprobs,
    SessionFailed,
    SessionOutput,
    Started,
    TicketArrived,
)
from engine_core.types.ids import SessionId
from engine_core.types.kv import ShardCount
from engine_core.types.request import Role
from engine_core.types.sampling import SamplingParams, TokenLogprobs
from tests.support.builders import spec, ticket
from tests.support.cores import DrivenCore, next_token, of, score

S1, S2 = SessionId(1), SessionId(2)
PROMPT = (1, 2, 3, 4, 5, 6, 7)


def asks(max_tokens: int = 4, *, logprobs: int | None = None, prompt_logprobs: int | None = None) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs)


def scores_of(prompt: tuple[int, ...]) -> list[TokenLogprobs]:
    return [score(prompt[position], position) for position in range(1, len(prompt))]


def drawn(prompt_len: int, count: int) -> list[TokenLogprobs]:
    return [score(next_token(position), position) for position in range(prompt_len, prompt_len + count)]


def logprobs(core: DrivenCore, room: int = 1) -> list[TokenLogprobs]:
    return [one for output in core.outputs(room) for one in output.logprobs]


# ---- drawn tokens ----------------------------------------------------------------------------------


def test_each_token_brings_its_own_and_only_where_asked_for() -> None:
    core = DrivenCore(Role.MIXED, num_blocks=30, max_batch_tokens=16)
    core.send(Open(spec(PROMPT, room=1, params=asks(logprobs=2)), remote=False))
    core.send(Open(spec((9, 8), room=2, params=asks()), remote=False))
    core.run()
    assert logprobs(core, 1) == drawn(7, 4) and logprobs(core, 2) == []
    assert all(len(output.logprobs) == len(output.token_ids) for output in core.outputs(1))


def test_the_first_tokens_come_from_prefill() -> None:
    core = DrivenCore(Role.PREFILL)
    core.link()
    core.send(OpenPrefill(spec((1, 2, 3), params=asks(logprobs=0)), link_id=1))
    core.run()
    core.send(TicketArrived(S1, ticket((7, 8), num_tokens=3)))
    (token,) = of(FirstToken, core.frames)
    assert (token.token_id, token.logprobs) == (next_token(3), score(next_token(3), 3))


@pytest.mark.parametrize("alone", [True, False])
def test_decode_passes_the_first_ones_on(alone: bool) -> None:  # noqa: FBT001
    core = DrivenCore(Role.DECODE, num_blocks=9)
    core.link()
    params = asks(1 if alone else 3, logprobs=1)
    core.send(Open(spec((1, 2, 3), params=params), remote=True, link_id=0 if alone else 1, without_transfer=alone))
    core.send(LegStarted(S1))
    core.send(LegToken(S1, 50, logprobs=score(50, 3)))
    assert logprobs(core) == [score(50, 3)]
    if not alone:
        count = ShardCount((0, 0, 0), core.layout.groups[0].block_bytes * 2, 2)
        core.send(LegDelivered(S1, (count,)))
        core.run()
        assert logprobs(core) == [score(50, 3), *drawn(4, 2)]


def test_outputs_are_joined_with_what_belongs_to_their_tokens() -> None:
    first = SessionOutput(S1, 0, (5,), logprobs=(score(5, 0),), cached_tokens=3)
    second = SessionOutput(S1, 1, (6, 7), logprobs=(score(6, 1), score(7, 2)))
    assert join_outputs(Outputs((first,)), Outputs((second,))).outputs == (
        SessionOutput(S1, 0, (5, 6, 7), logprobs=(score(5, 0), score(6, 1), score(7, 2)), cached_tokens=3),
    )


# ---- the prompt's ----------------------------------------------------------------------------------


@pytest.mark.parametrize("role", [Role.PREFILL, Role.MIXED])
@pytest.mark.parametrize("budget", [1, 2, 3, 16])
@pytest.mark.parametrize("length", [1, 2, 7])
def test_each_position_once_whatever_the_chunks(role: Role, budget: int, length: int) -> None:
    core = DrivenCore(role, num_blocks=30, max_batch_tokens=budget)
    asked = spec(PROMPT[:length], params=asks(prompt_logprobs=0))
    if role is Role.PREFILL:
        core.send(OpenPrefill(asked, link_id=0, without_transfer=True))
    else:
        core.send(Open(asked, remote=False))
    core.run()
    assert core.scores() == scores_of(PROMPT[:length])
    assert len(of(FirstToken, core.frames)) == (role is Role.PREFILL)


def test_steps_know_all_tokens_and_how_many_are_the_prompts() -> None:
    core = DrivenCore(Role.MIXED, max_batch_tokens=2)
    core.send(Open(spec((1, 2, 3), emitted=(1000,), params=asks(3, prompt_logprobs=0)), remote=False))
    core.forced[3] = 1000
    parts = []
    while (plan := core.step()) is not None:
        (part,) = plan.sequences
        parts.append((part.start, part.scored, part.prompt_len, part.sample))
        assert list(part.known)[:4] == [1, 2, 3, 1000]
    assert parts == [(0, (1, 3), 3, False), (2, (0, 0), 3, True), (4, (0, 0), 3, True)]


@pytest.mark.parametrize("role", [Role.PREFILL, Role.MIXED])
def test_what_is_to_be_scored_is_computed_whatever_is_cached(role: Role) -> None:
    core = DrivenCore(role, num_blocks=30)

    def ask(room: int, params: SamplingParams) -> None:
        asked = spec(PROMPT, room=room, params=params)
        if role is Role.PREFILL:
            core.send(OpenPrefill(asked, link_id=0, without_transfer=True))
        else:
            core.send(Open(asked, remote=False))
        core.run()
        core.send(EndSession(SessionId(room)))

    def computed() -> float:
        return core.core.stats().counters["prompt_tokens_computed"]

    ask(1, asks(1))
    assert computed() == 7
    ask(2, asks(1, prompt_logprobs=1))
    assert computed() == 14 and core.scores(2) == scores_of(PROMPT)
    ask(3, asks(1))
    assert computed() == 15, "others go on finding it"


def test_who_does_not_compute_the_prompt_scores_none_of_it() -> None:
    """A remote session's positions come by its leg, past the engine, also when the KV is computed anew here."""
    core = DrivenCore(Role.DECODE, num_blocks=7, num_reserved_decode_tokens=2, max_local_recompute=100)
    core.link()
    for room in (1, 2):
        session = SessionId(room)
        params = asks(9, logprobs=0, prompt_logprobs=0)
        core.send(Open(spec((10 * room, 2, 3), room=room, arrival_ms=room, params=params), remote=True, link_id=1))
        count = ShardCount((0, 0, 0), core.layout.groups[0].block_bytes * 2, 2)
        core.send(LegStarted(session))
        core.send(LegToken(session, next_token(3), logprobs=score(next_token(3), 3)))
        core.send(LegDelivered(session, (count,)))
    core.run()
    assert core.core.stats().counters["preemptions"] >= 1
    assert [core.scores(room) for room in (1, 2)] == [[], []]
    assert [logprobs(core, room) for room in (1, 2)] == [drawn(3, 9)] * 2


def test_a_prompt_that_is_set_back_goes_on_where_it_was() -> None:
    core = DrivenCore(Role.PREFILL, num_blocks=5, max_batch_tokens=3)
    core.link()
    young = spec((6, 7, 8, 9, 10, 11, 12), room=2, arrival_ms=2, params=asks(1, logprobs=0, prompt_logprobs=0))
    core.send(OpenPrefill(young, link_id=1))
    core.step()
    assert [s.token_id for s in core.scores(2)] == [7, 8, 9]
    core.send(OpenPrefill(spec((1, 2, 3), room=1, arrival_ms=1), link_id=1))
    assert core.core.stats().counters["set_back"] == 1
    core.step()
    core.send(EndSession(S1))
    core.run()
    assert [frame.session for frame in of(Started, core.frames)] == [S2, S1]
    assert core.scores(2) == scores_of(young.prompt_token_ids)
    core.send(TicketArrived(S2, ticket((1, 2, 3, 4), num_tokens=7)))
    (token,) = [frame for frame in of(FirstToken, core.frames) if frame.session == S2]
    assert token.logprobs == score(next_token(7), 7)


def test_a_preempted_prompt_goes_on_where_it_was() -> None:
    core = DrivenCore(Role.MIXED, num_blocks=6, max_batch_tokens=2, num_reserved_decode_tokens=0)
    core.send(Open(spec((1, 2, 3), room=1, arrival_ms=1, params=asks(8)), remote=False))
    core.step()
    core.step()
    young = spec((6, 7, 8, 9, 10, 11), room=2, arrival_ms=2, params=asks(2, logprobs=0, prompt_logprobs=0))
    core.send(Open(young, remote=False))
    core.run()
    moves = [move for move in core.core.take_moves() if move.session == S2]
    assert ("COMPUTING", "PREEMPTED") in [(move.source, move.target) for move in moves]
    assert core.scores(2) == scores_of(young.prompt_token_ids)
    assert core.tokens(2) == [next_token(6), next_token(7)] and logprobs(core, 2) == drawn(6, 2)


def test_frames_are_bounded() -> None:
    core = DrivenCore(Role.MIXED, num_blocks=30)
    many = tuple(score(position, position) for position in range(1, 2 * SCORES_PER_FRAME + 2))
    core.core._context.out.scores(S1, 1, many)
    sent = of(PromptLogprobs, core.core.take_frames())
    assert [(f.first_position, len(f.positions)) for f in sent] == [
        (1, SCORES_PER_FRAME), (1 + SCORES_PER_FRAME, SCORES_PER_FRAME), (1 + 2 * SCORES_PER_FRAME, 1),
    ]  # fmt: skip


# ---- an executor that gives none -------------------------------------------------------------------


@pytest.mark.parametrize("params", [asks(logprobs=0), asks(prompt_logprobs=0)])
def test_what_is_missing_fails_its_session_alone(params: SamplingParams) -> None:
    core = DrivenCore(Role.MIXED, num_blocks=30, max_batch_tokens=16)
    core.silent = True
    core.send(Open(spec(PROMPT, room=1, params=params), remote=False))
    core.send(Open(spec((9, 8), room=2, params=asks()), remote=False))
    core.run()
    error = core.outputs(1)[-1].error
    assert error is not None and error.kind == "InternalError" and "log probabilities" in error.message
    assert core.tokens(1) == [] and len(core.tokens(2)) == 4


def test_what_is_missing_fails_a_prefill_session() -> None:
    core = DrivenCore(Role.PREFILL)
    core.silent = True
    core.send(OpenPrefill(spec((1, 2, 3), params=asks(prompt_logprobs=3)), link_id=0, without_transfer=True))
    core.run()
    (failed,) = of(SessionFailed, core.frames)
    assert "[1, 3)" in failed.error.message
