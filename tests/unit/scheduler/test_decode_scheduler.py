"""The decode scheduler: ends, tickets, delivery, quarantine, preemption, order by age."""

from __future__ import annotations

import pytest

from engine_core.scheduler.messages import (
    EndSession,
    ErrorInfo,
    LegDelivered,
    LegFailed,
    LegStarted,
    LegToken,
    Open,
    OpenLeg,
    SendTicket,
)
from engine_core.transfer.base import (
    DropReceive,
    PrepareReceive,
    QuietReceived,
    ReceiveQuiet,
    SendAbort,
    Verified,
    VerifyBlocks,
)
from engine_core.types.ids import SessionId
from engine_core.types.kv import ShardCount
from engine_core.types.request import FinishReason, Role
from engine_core.types.sampling import SamplingParams
from services.router.routing.priority import MOST_MS, STEP_MS, order_ms
from tests.support.builders import sampling, spec
from tests.support.cores import EOS, DrivenCore, next_token, of

S1, S2 = SessionId(1), SessionId(2)
NOON = 10**12


def mixed(**more: object) -> DrivenCore:
    return DrivenCore(Role.MIXED, **more)  # type: ignore[arg-type]


def decode(**more: object) -> DrivenCore:
    core = DrivenCore(Role.DECODE, **more)  # type: ignore[arg-type]
    core.link()
    return core


def to_ticket(core: DrivenCore, room: int = 1, prompt: tuple[int, ...] = (1, 2, 3), **more: object) -> SendTicket:
    """Brings a remote session to AWAITING_KV; returns its ticket."""
    done = core.send(Open(spec(prompt, room=room, **more), remote=True, link_id=1))  # type: ignore[arg-type]
    assert of(OpenLeg, done) == [OpenLeg(SessionId(room))]
    (ticket,) = of(SendTicket, core.send(LegStarted(SessionId(room))))
    return ticket


def deliver(core: DrivenCore, room: int = 1, token: int = 50, blocks: int = 2) -> None:
    core.send(LegToken(SessionId(room), token))
    core.send(LegDelivered(SessionId(room), (count(core, blocks),)))


def count(core: DrivenCore, blocks: int, checksum: int | None = None) -> ShardCount:
    return ShardCount((0, 0, 0), core.layout.groups[0].block_bytes * blocks, blocks, checksum)


# ---- ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_exactly_max_tokens(limit: int) -> None:
    core = mixed()
    core.send(Open(spec((1, 2, 3), max_tokens=limit), remote=False))
    core.run()
    assert core.tokens() == [next_token(3 + i) for i in range(limit)]
    assert core.outputs()[-1].finish is not None
    assert core.outputs()[-1].finish.reason is FinishReason.LENGTH
    core.send(EndSession(S1))
    assert core.core.idle()
    assert core.kv.usage().used == 0


def test_an_eos_as_first_token_ends_the_request() -> None:
    core = mixed()
    core.forced[3] = EOS
    core.send(Open(spec((1, 2, 3), max_tokens=9), remote=False))
    core.run()
    assert core.tokens() == [EOS]
    finish = core.outputs()[-1].finish
    assert finish is not None
    assert (finish.reason, finish.stop_token_id) == (FinishReason.STOP, EOS)


def test_ignore_eos_and_stop_ids_and_min_tokens() -> None:
    core = mixed(num_blocks=20)
    core.forced.update({3: EOS, 4: 7, 5: EOS, 6: 7})
    params = SamplingParams(max_tokens=9, stop_token_ids=(7,), ignore_eos=True, min_tokens=3)
    core.send(Open(spec((1, 2, 3), params=params), remote=False))
    core.run()
    assert core.tokens() == [EOS, 7, EOS, 7]
    # Stop tokens are banned until three tokens are out; EOS is no stop token here.
    assert [p.sequences[0].banned_token_ids for p in core.plans] == [(7,), (7,), (7,), ()]


def test_max_tokens_is_clamped_to_the_pool() -> None:
    core = mixed(num_blocks=5)
    core.send(Open(spec((1, 2, 3), max_tokens=65535), remote=False))
    core.run()
    # 4 blocks of 2 hold 8 tokens; the ninth needs no KV.
    assert len(core.tokens()) == 6
    finish = core.outputs()[-1].finish
    assert finish is not None
    assert finish.reason is FinishReason.LENGTH


def test_a_prompt_that_leaves_no_room_is_refused_before_work() -> None:
    core = mixed(num_blocks=5)
    core.send(Open(spec(tuple(range(9))), remote=False))
    error = core.outputs()[-1].error
    assert error is not None
    assert (error.kind, error.field) == ("ContextLengthError", "prompt_token_ids")
    assert core.core.idle()
    assert core.plans == []


def test_a_resumed_session_continues_the_count() -> None:
    core = mixed(num_blocks=20)
    core.send(Open(spec((1, 2, 3), emitted=(1003, 1004), attempt=1, max_tokens=4), remote=False))
    core.run()
    assert core.outputs()[0].first_index == 2
    assert core.tokens() == [1005, 1006]
    assert core.plans[0].sequences[0].token_ids == [1, 2, 3, 1003, 1004]


def test_a_full_queue_refuses() -> None:
    core = mixed(max_queued=1, max_running=1)
    core.send(Open(spec((1, 2, 3), room=1, max_tokens=2), remote=False))
    core.send(Open(spec((1, 2, 3), room=2, max_tokens=2), remote=False))
    core.send(Open(spec((1, 2, 3), room=3, max_tokens=2), remote=False))
    error = core.outputs(3)[-1].error
    assert error is not None
    assert (error.kind, error.retryable) == ("QueueFullError", True)
    assert core.outputs(2) == []


# ---- transfer ----------------------------------------------------------------------------------------


def test_blocks_are_opened_for_receiving_before_the_ticket_leaves() -> None:
    core = decode()
    core.send(Open(spec((1, 2, 3)), remote=True, link_id=1))
    done = core.send(LegStarted(S1))
    (prepare,), (ticket,) = of(PrepareReceive, done), of(SendTicket, done)
    assert done.index(prepare) < done.index(ticket)
    assert prepare.block_ids == (ticket.ticket.shards[0].groups[0].block_ids,)
    assert len(prepare.block_ids[0]) == 2
    assert prepare.expected_bytes == 2 * core.layout.groups[0].block_bytes
    assert (ticket.ticket.first_token, ticket.ticket.num_tokens) == (0, 3)


def test_no_step_before_delivered_and_token_one_goes_out_at_once() -> None:
    core = decode()
    to_ticket(core)
    assert core.step() is None
    core.send(LegToken(S1, 50))
    assert core.tokens() == [50]
    assert core.step() is None
    core.send(LegDelivered(S1, (count(core, 2),)))
    plan = core.step()
    assert plan is not None
    assert (plan.sequences[0].token_ids, plan.sequences[0].start) == ([50], 3)
    assert core.tokens() == [50, 1004]


@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_kv_that_is_not_whole_is_never_decoded(blocks: int) -> None:
    core = decode()
    to_ticket(core)
    core.send(LegToken(S1, 50))
    core.send(LegDelivered(S1, (count(core, blocks),)))
    error = core.outputs()[-1].error
    assert error is not None
    assert error.reason == "KV_INCOMPLETE"
    assert core.step() is None
    assert core.kv.usage().quarantined > 0


@pytest.mark.parametrize("good", [True, False])
def test_verify_kv_compares_checksums(good: bool) -> None:  # noqa: FBT001
    core = decode(verify_kv=True)
    to_ticket(core)
    core.send(LegToken(S1, 50))
    done = core.send(LegDelivered(S1, (count(core, 2, checksum=77),)))
    assert len(of(VerifyBlocks, done)) == 1
    assert core.step() is None
    core.event(Verified(1, S1, 77 if good else 78))
    if good:
        assert core.step() is not None
    else:
        error = core.outputs()[-1].error
        assert error is not None
        assert error.reason == "KV_CORRUPT"
        assert core.step() is None


@pytest.mark.parametrize("proof", ["writer", "reader", "link"])
def test_blocks_stay_quarantined_until_quiet_is_proved(proof: str) -> None:
    core = decode(num_blocks=5, quarantine_refuse_share=1.0)
    to_ticket(core, max_tokens=2)
    done = core.send(EndSession(S1))
    assert of(DropReceive, done) == [DropReceive(1, S1)]
    assert of(SendAbort, done) == [SendAbort(1, S1)]
    assert core.kv.usage().quarantined == 2
    assert not core.core.idle()
    # A second request that needs all four blocks waits, whatever streams have closed meanwhile.
    core.send(Open(spec(tuple(range(7)), room=2, max_tokens=1), remote=True, link_id=1))
    assert of(SendTicket, core.send(LegStarted(S2))) == []
    if proof == "writer":
        done = core.event(QuietReceived(1, S1))
    elif proof == "reader":
        done = core.event(ReceiveQuiet(1, S1))
    else:
        core.send(EndSession(S2))
        core.unlink(quiet_proved=True)
        assert core.kv.usage().free == 4
        assert core.core.idle()
        return
    assert core.kv.usage().quarantined == 0
    assert len(of(SendTicket, done)) == 1


def test_a_closed_link_without_proof_frees_nothing() -> None:
    core = decode()
    to_ticket(core)
    core.unlink(quiet_proved=False)
    core.send(EndSession(S1))
    assert core.kv.usage().quarantined == 3  # the prompt's two blocks and one for growth
    error = core.outputs()[-1].error
    assert error is not None
    assert error.reason == "LINK_DOWN"


def test_received_blocks_enter_the_prefix_index_only_when_whole() -> None:
    core = decode(num_blocks=9)
    prompt = (1, 2, 3, 4, 5)
    to_ticket(core, prompt=prompt)
    core.send(LegToken(S1, 50))
    assert core.kv.lookup(prompt, "") == 0
    core.send(LegDelivered(S1, (count(core, 3),)))
    assert core.kv.lookup(prompt, "") == 4
    ticket = to_ticket(core, room=2, prompt=prompt, max_tokens=1 + 1)
    assert ticket.ticket.first_token == 4
    assert len(ticket.ticket.shards[0].groups[0].block_ids) == 1


def test_token_one_may_end_the_request_while_a_push_is_in_flight() -> None:
    core = decode()
    to_ticket(core)
    core.send(LegToken(S1, EOS))
    assert core.outputs()[-1].finish is not None
    assert core.kv.usage().quarantined > 0
    core.send(LegDelivered(S1, (count(core, 2),)), EndSession(S1))
    assert core.kv.usage().quarantined > 0
    core.event(QuietReceived(1, S1))
    assert core.core.idle()


def test_without_transfer_relays_one_token_and_takes_no_block() -> None:
    core = decode()
    core.send(Open(spec((1, 2, 3), max_tokens=1), remote=True, link_id=0, without_transfer=True))
    core.send(LegStarted(S1), LegToken(S1, 50))
    assert core.tokens() == [50]
    assert of(SendTicket, core.frames) == []
    core.send(EndSession(S1))
    assert core.core.idle()


def test_unticketed_prompts_are_bounded_by_free_blocks_but_one_always_may() -> None:
    core = decode(num_blocks=5)
    done = core.send(*[Open(spec(tuple(range(5)), room=r, max_tokens=2), remote=True, link_id=1) for r in (1, 2, 3)])
    assert of(OpenLeg, done) == [OpenLeg(S1)]
    error = ErrorInfo("UnavailableError", "gone", leg="prefill", retryable=True)
    done = core.send(LegFailed(S1, error))
    assert of(OpenLeg, done) == [OpenLeg(S2)]
    assert core.outputs(1)[-1].error == error


def test_legs_out_of_turn_fail_the_session_not_the_engine() -> None:
    core = decode()
    core.send(Open(spec((1, 2, 3)), remote=True, link_id=1))
    core.send(LegDelivered(S1, (count(core, 2),)))
    error = core.outputs()[-1].error
    assert error is not None
    assert error.kind == "InternalError"


def test_a_peer_that_quarantines_too_much_is_refused() -> None:
    core = decode(num_blocks=5, quarantine_refuse_share=0.25)
    to_ticket(core)
    core.send(EndSession(S1))
    assert core.core.quarantined_share() == 0.0  # the writer has had no time to answer yet
    core.clock.advance(1.0)
    core.send(Open(spec((1, 2, 3), room=2), remote=True, link_id=1))
    assert core.core.quarantined_share() == 0.75
    error = core.outputs(2)[-1].error
    assert error is not None
    assert (error.reason, error.peer_incarnation) == ("QUARANTINE", 7)


# ---- order, deadlines, preemption --------------------------------------------------------------------


def test_blocks_are_granted_by_age_and_the_head_is_not_overtaken() -> None:
    core = decode(num_blocks=9)
    to_ticket(core, room=1, prompt=tuple(range(9)), max_tokens=1 + 1)
    for room, arrival, tokens in ((3, 1, 7), (2, 2, 2)):
        core.send(Open(spec(tuple(range(tokens)), room=room, arrival_ms=arrival), remote=True, link_id=1))
    core.send(Open(spec((1, 2), room=4, arrival_ms=3), remote=True, link_id=1))
    # Room 3 needs four blocks and three are free: the younger ones wait behind it, although they would fit.
    core.send(LegStarted(S2), LegStarted(SessionId(3)))
    assert [t.session.room for t in of(SendTicket, core.frames)] == [1]
    core.send(EndSession(S1))
    core.event(QuietReceived(1, S1))
    assert [t.session.room for t in of(SendTicket, core.frames)] == [1, 3, 2]


def test_queue_deadline_and_kv_deadline() -> None:
    core = decode(queue_timeout=60.0, kv_progress_timeout=15.0)
    core.send(Open(spec((1, 2, 3)), remote=True, link_id=1))
    assert core.core.next_wakeup() == core.clock() + 60
    core.clock.advance(59.9)
    core.take()
    assert core.outputs() == []
    core.clock.advance(0.1)
    core.take()
    error = core.outputs()[-1].error
    assert error is not None
    assert (error.reason, error.leg) == ("QUEUE_TIMEOUT", "prefill")

    to_ticket(core, room=2)
    core.send(LegToken(S2, 50))
    core.clock.advance(15)
    core.take()
    error = core.outputs(2)[-1].error
    assert error is not None
    assert error.reason == "TRANSFER_STUCK"
    assert core.kv.usage().quarantined > 0


@pytest.mark.parametrize(("priorities", "later_ms", "loser"), [
    ((0, 0), 1000, 2),
    ((1, 0), 1000, 1),
    ((0, -1), 1000, 1),
    ((1, 0), STEP_MS + 1, 2),
    ((9, 0), STEP_MS + 1, 1),
    ((10**9, 0), MOST_MS + 1, 2),
])  # fmt: skip
def test_the_least_urgent_is_preempted_though_it_is_a_little_older(
    priorities: tuple[int, int], later_ms: int, loser: int
) -> None:
    core = mixed(num_blocks=7, num_reserved_decode_tokens=0)
    for room, (priority, arrival) in enumerate(zip(priorities, (NOON, NOON + later_ms), strict=True), 1):
        moved = order_ms(arrival, priority)
        core.send(Open(spec((room, 2, 3), room=room, arrival_ms=moved, max_tokens=8), remote=False))
    core.run()
    preempted = {move.session.room for move in core.core.take_moves() if move.target == "PREEMPTED"}
    assert preempted == {loser}
    for room in (1, 2):
        assert core.tokens(room) == [next_token(3 + i) for i in range(8)]


def test_the_youngest_is_preempted_and_its_text_is_the_same() -> None:
    core = mixed(num_blocks=7, num_reserved_decode_tokens=0)
    core.send(Open(spec((1, 2, 3), room=1, arrival_ms=1, max_tokens=8), remote=False))
    core.send(Open(spec((4, 5, 6), room=2, arrival_ms=2, max_tokens=8), remote=False))
    core.run()
    assert core.core.stats().counters["preemptions"] >= 1
    for room in (1, 2):
        assert core.tokens(room) == [next_token(3 + i) for i in range(8)]
    core.send(EndSession(S1), EndSession(S2))
    assert core.core.idle()
    usage = core.kv.usage()
    assert usage.free + usage.cached == usage.total


def test_running_sequences_come_before_chunks_under_one_budget() -> None:
    core = mixed(num_blocks=30, max_batch_tokens=4)
    core.send(Open(spec((1, 2, 3), room=1, max_tokens=8), remote=False))
    core.step()
    core.send(Open(spec(tuple(range(10, 17)), room=2, max_tokens=2), remote=False))
    plans = [core.step() for _ in range(3)]
    shapes = [[(s.session.room, len(s.token_ids), s.sample) for s in p.sequences] for p in plans if p]
    assert shapes == [
        [(1, 1, True), (2, 3, False)],
        [(1, 1, True), (2, 3, False)],
        [(1, 1, True), (2, 1, True)],
    ]


def test_sampling_depends_on_the_position_that_is_drawn() -> None:
    core = mixed(num_blocks=20)
    params = sampling(3, seed=9, temperature=1.0)
    core.send(Open(spec((1, 2, 3), params=params), remote=False))
    core.run()
    assert [p.sequences[0].start + len(p.sequences[0].token_ids) for p in core.plans] == [3, 4, 5]
    assert all(p.sequences[0].sampling == params for p in core.plans)


@pytest.mark.parametrize("token", [-1, 100, 2**31 - 1])
def test_a_first_token_outside_the_vocabulary_fails_its_session_alone(token: int) -> None:
    core = decode(vocab_size=100)
    to_ticket(core)
    core.send(LegToken(S1, token))
    failed = core.outputs()[-1]
    assert failed.token_ids == () and failed.error is not None and failed.error.leg == "prefill"
    assert f"token {token}, which is outside the vocabulary of 100" in failed.error.message


@pytest.mark.parametrize("lost", [False, True])
def test_a_sequence_that_cannot_be_computed_fails_alone(lost: bool) -> None:  # noqa: FBT001
    core = mixed(num_blocks=20)
    core.failing[5] = lost
    core.send(Open(spec((1, 2, 3), max_tokens=9), remote=False))
    core.send(Open(spec(tuple(range(10, 22)), room=2, max_tokens=3), remote=False))
    core.run()
    assert core.tokens(1) == [next_token(3), next_token(4)]
    error = core.outputs(1)[-1].error
    assert error is not None
    expected = ("PeerFailedError", "SEQUENCE_LOST", True) if lost else ("InternalError", "NUMBERS", False)
    assert (error.kind, error.reason, error.retryable) == expected
    assert core.tokens(2) == [next_token(12 + i) for i in range(3)]
    core.send(EndSession(S1), EndSession(S2))
    assert core.kv.usage().used == 0
    assert core.kv.lookup((1, 2, 3, 4), "") == 0, "what was computed for it is not to be trusted"
    assert core.kv.lookup(tuple(range(10, 22)), "") == 10


def test_the_first_output_says_what_was_cached() -> None:
    core = mixed(num_blocks=20)
    prompt = tuple(range(10, 20))
    for room, cached in ((1, 0), (2, 8)):
        core.send(Open(spec(prompt, room=room, max_tokens=3), remote=False))
        core.run()
        assert [o.cached_tokens for o in core.outputs(room)] == [cached, None, None]
    remote = decode(num_blocks=20)
    to_ticket(remote, prompt=(1, 2, 3))
    remote.send(LegToken(S1, 50, cached_tokens=2))
    assert [o.cached_tokens for o in remote.outputs(1)] == [2]


def preempted(**more: object) -> DrivenCore:
    """Two remote sessions of 3 + 9 tokens in a pool of 12: the younger one is preempted half-way."""
    core = decode(num_blocks=7, num_reserved_decode_tokens=2, **more)
    for room in (1, 2):
        to_ticket(core, room, (10 * room, 2, 3), max_tokens=9, arrival_ms=room)
        deliver(core, room)
    for _ in range(10):
        core.step()
        if core.core.stats().counters.get("preemptions"):
            return core
    raise AssertionError("nobody was preempted")


def test_a_preempted_session_recomputes_what_is_little() -> None:
    core = preempted(max_local_recompute=100)
    core.run()
    for room in (1, 2):
        assert len(core.tokens(room)) == 9
        assert core.outputs(room)[-1].finish is not None
    assert core.core.stats().counters.get("given_back", 0) == 0


def test_a_preempted_session_with_much_to_recompute_is_given_back() -> None:
    core = preempted(max_local_recompute=0)
    core.run()
    last = core.outputs(2)[-1]
    assert last.finish is not None and last.finish.reason is FinishReason.PREEMPTED and not last.token_ids
    assert last.first_index == len(core.tokens(2)) < 9, "the router knows all that it had"
    assert core.core.stats().counters["given_back"] == 1
    assert len(core.tokens(1)) == 9
    core.send(EndSession(S1), EndSession(S2))
    assert core.core.idle() and core.kv.usage().used == 0


def test_a_preempted_session_that_nobody_will_make_room_for_is_given_back() -> None:
    """All that it needs is quarantined, and nobody runs."""
    core = decode(num_blocks=7, num_reserved_decode_tokens=2)
    to_ticket(core, 1, (10, 2, 3), max_tokens=9, arrival_ms=1)
    deliver(core, 1)
    to_ticket(core, 2, (20, 2, 3), max_tokens=9, arrival_ms=0)
    core.send(EndSession(S2))  # while its push may still write
    assert core.kv.usage().quarantined == 3
    core.run()
    assert core.core.stats().counters["preemptions"] == 1
    core.take()
    assert core.outputs(1)[-1].finish is None, "a living writer answers within a second"
    core.clock.advance(1.5)
    core.take()
    finish = core.outputs(1)[-1].finish
    assert finish is not None and finish.reason is FinishReason.PREEMPTED
    core.send(EndSession(S1))
    core.event(QuietReceived(1, S2))
    assert core.core.idle() and core.kv.usage().quarantined == 0
