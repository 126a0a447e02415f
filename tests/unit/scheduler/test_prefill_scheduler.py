"""The prefill scheduler: whole-prompt reservation, set-back, tickets, pushes, pins, tombstones."""

from __future__ import annotations

import msgspec

from engine_core.scheduler.messages import (
    Delivered,
    EndSession,
    FirstToken,
    OpenPrefill,
    SessionFailed,
    Started,
    TicketArrived,
)
from engine_core.transfer.base import (
    AbortReceived,
    CancelPush,
    Push,
    PushDone,
    PushFailed,
    SendQuiet,
    SourceQuiet,
)
from engine_core.types.ids import SessionId
from engine_core.types.kv import GroupBlocks, ShardCount, ShardTicket
from engine_core.types.request import Role
from tests.support.builders import spec, ticket
from tests.support.cores import DrivenCore, next_token, of

S1, S2 = SessionId(1), SessionId(2)


def prefill(**more: object) -> DrivenCore:
    core = DrivenCore(Role.PREFILL, **more)  # type: ignore[arg-type]
    core.link()
    return core


def opened(core: DrivenCore, room: int = 1, prompt: tuple[int, ...] = (1, 2, 3), **more: object) -> list[object]:
    return core.send(OpenPrefill(spec(prompt, room=room, **more), link_id=1))  # type: ignore[arg-type,return-value]


def done(core: DrivenCore, push: Push) -> list[object]:
    blocks = len(push.src_blocks[0])
    size = core.layout.groups[0].block_bytes * blocks
    return core.event(PushDone(1, push.session, push.push_id, size, blocks, 0.1))  # type: ignore[return-value]


def test_the_life_of_a_session() -> None:
    core = prefill(max_batch_tokens=2)
    assert of(Started, opened(core, prompt=(1, 2, 3, 4, 5))) == [Started(S1, 0)]
    assert core.kv.usage().used == 3
    core.step()
    (push,) = of(Push, core.send(TicketArrived(S1, ticket((7, 8, 9), num_tokens=5))))
    assert (len(push.src_blocks[0]), push.dst_blocks) == (1, ((7,),))
    core.step()
    core.step()
    pushes = of(Push, core.commands)
    assert [p.dst_blocks for p in pushes] == [((7,),), ((8,),), ((9,),)]
    # Token 1 leaves ahead of the transfer's tail.
    assert [(f.token_id) for f in of(FirstToken, core.frames)] == [next_token(5)]
    assert of(Delivered, core.frames) == []
    for push in pushes:
        done(core, push)
    (delivered,) = of(Delivered, core.frames)
    assert delivered.shards == (ShardCount((0, 0, 0), 3 * core.layout.groups[0].block_bytes, 3),)
    assert core.kv.usage().used == 0
    core.send(EndSession(S1))
    assert core.core.idle()


def test_a_late_ticket_waits_with_token_one() -> None:
    core = prefill()
    opened(core)
    core.run()
    assert of(FirstToken, core.frames) == []
    out = core.send(TicketArrived(S1, ticket((7, 8), num_tokens=3)))
    assert len(of(Push, out)) == 1
    assert len(of(FirstToken, out)) == 1


def test_only_what_decode_lacks_is_pushed() -> None:
    core = prefill(num_blocks=9)
    opened(core, prompt=(1, 2, 3, 4, 5))
    core.send(TicketArrived(S1, ticket((9,), num_tokens=5, first_token=4)))
    core.run()
    (push,) = of(Push, core.commands)
    assert (push.src_blocks, push.dst_blocks) == (((core.kv.block_ids(S1)[0][2],),), ((9,),))


def test_without_transfer_ends_with_token_one() -> None:
    core = prefill()
    core.send(OpenPrefill(spec((1, 2, 3)), link_id=0, without_transfer=True))
    core.run()
    assert len(of(FirstToken, core.frames)) == 1
    assert of(Push, core.commands) == []
    core.send(EndSession(S1))
    assert core.core.idle()


def test_the_whole_prompt_is_reserved_so_two_prompts_cannot_block_each_other() -> None:
    core = prefill(num_blocks=5, max_batch_tokens=2)
    out = [*opened(core, 1, (1, 2, 3, 4, 5), arrival_ms=1), *opened(core, 2, (6, 7, 8, 9, 10), arrival_ms=2)]
    assert of(Started, out) == [Started(S1, 0)]
    core.run()
    assert core.kv.usage().used == 3


def test_an_older_prompt_sets_a_younger_unticketed_one_back_and_its_blocks_stay_cached() -> None:
    core = prefill(num_blocks=5)
    opened(core, 2, (6, 7, 8, 9, 10), arrival_ms=2)
    core.run()
    out = opened(core, 1, (1, 2, 3), arrival_ms=1)
    assert of(Started, out) == [Started(S1, 0)]
    assert core.core.stats().counters["set_back"] == 1
    core.run()
    core.send(TicketArrived(S1, ticket((7, 8), num_tokens=3)))
    (push,) = of(Push, core.commands)
    done(core, push)
    # Room 2 is granted again and starts once only.
    assert of(Started, core.frames) == [Started(S2, 0), Started(S1, 0)]
    core.run()
    core.send(TicketArrived(S2, ticket((1, 2, 3), num_tokens=5)))
    assert [f.session for f in of(FirstToken, core.frames)] == [S1, S2]


def test_a_ticketed_prompt_is_never_set_back() -> None:
    core = prefill(num_blocks=5)
    opened(core, 2, (6, 7, 8, 9, 10), arrival_ms=2)
    core.send(TicketArrived(S2, ticket((1, 2, 3), num_tokens=5)))
    assert of(Started, opened(core, 1, (1, 2, 3, 4), arrival_ms=1)) == []
    assert core.core.stats().counters.get("set_back", 0) == 0


def test_a_cancelled_push_pins_its_source_until_no_thread_reads_it() -> None:
    core = prefill(num_blocks=5)
    opened(core, prompt=(1, 2, 3))
    core.send(TicketArrived(S1, ticket((7, 8), num_tokens=3)))
    core.run()
    out = core.send(EndSession(S1))
    assert of(CancelPush, out) == [CancelPush(1, S1)]
    assert core.kv.usage().pinned == 2
    assert not core.core.idle()
    core.event(SourceQuiet(1, S1))
    assert core.kv.usage().pinned == 0
    assert core.core.idle()


def test_abort_is_answered_only_when_nothing_is_written_any_more() -> None:
    core = prefill()
    opened(core)
    core.send(TicketArrived(S1, ticket((7, 8), num_tokens=3)))
    core.run()
    out = core.event(AbortReceived(1, S1))
    assert of(SendQuiet, out) == []
    assert of(CancelPush, out) == [CancelPush(1, S1)]
    assert of(SendQuiet, core.event(SourceQuiet(1, S1))) == [SendQuiet(1, S1)]
    core.send(EndSession(S1))
    assert core.core.idle()


def test_abort_of_an_unknown_session_is_answered_and_leaves_a_tombstone() -> None:
    core = prefill()
    assert of(SendQuiet, core.event(AbortReceived(1, S1))) == [SendQuiet(1, S1)]
    (failed,) = of(SessionFailed, opened(core))
    assert failed.error.kind == "FencedError"
    assert core.core.idle()


def test_an_abort_on_another_link_leaves_the_session_alone() -> None:
    core = prefill()
    core.link(2)
    opened(core)
    out = core.event(AbortReceived(2, S1))
    assert of(SendQuiet, out) == [SendQuiet(2, S1)]
    core.run()
    core.send(TicketArrived(S1, ticket((7, 8), num_tokens=3)))
    assert len(of(Push, core.commands)) == 1


def test_a_ticket_after_an_abort_pushes_nothing() -> None:
    core = prefill()
    opened(core)
    core.event(AbortReceived(1, S1))
    core.send(TicketArrived(S1, ticket((7, 8), num_tokens=3)))
    core.run()
    assert of(Push, core.commands) == []


def test_tickets_are_checked() -> None:
    good = ticket((7, 8), num_tokens=3)
    for bad in (
        ticket((7,), num_tokens=3),
        ticket((7, 0), num_tokens=3),
        ticket((7, 8), num_tokens=4),
        ticket((8,), num_tokens=3, first_token=1),
        ticket((7, 8), num_tokens=3, link_id=2),
        msgspec.structs.replace(good, shards=(ShardTicket((0, 0, 0), (GroupBlocks(1, (7, 8)),)),)),
    ):
        core = prefill()
        opened(core)
        (failed,) = of(SessionFailed, core.send(TicketArrived(S1, bad)))
        assert failed.error.field == "ticket"
        core.send(EndSession(S1))
        assert core.core.idle()


def test_a_failed_push_fails_its_session_alone() -> None:
    core = prefill(num_blocks=9)
    opened(core, 1)
    opened(core, 2, (6, 7, 8))
    core.send(TicketArrived(S1, ticket((7, 8), num_tokens=3)))
    core.run()
    (push,) = of(Push, core.commands)
    out = core.event(PushFailed(1, S1, push.push_id, "reset"))
    assert [f.session for f in of(SessionFailed, out)] == [S1]
    assert core.kv.usage().pinned == 0
    core.send(TicketArrived(S2, ticket((1, 2), num_tokens=3)))
    assert [f.session for f in of(FirstToken, core.frames)] == [S1, S2]


def test_stuck_transfers_and_long_waits_end() -> None:
    core = prefill(queue_timeout=60.0, kv_progress_timeout=15.0, num_blocks=9)
    opened(core, 1)
    core.send(TicketArrived(S1, ticket((7, 8), num_tokens=3)))
    opened(core, 2, (6, 7, 8))
    core.run()
    core.clock.advance(15)
    core.take()
    (failed,) = of(SessionFailed, core.frames)
    assert (failed.session, failed.error.reason) == (S1, "TRANSFER_STUCK")
    assert core.kv.usage().pinned == 2
    core.clock.advance(45)
    core.take()
    assert [(f.session, f.error.reason) for f in of(SessionFailed, core.frames)][1] == (S2, "QUEUE_TIMEOUT")


def test_a_closed_link_fails_its_sessions_and_the_push_reports_its_own_end() -> None:
    core = prefill()
    opened(core)
    core.send(TicketArrived(S1, ticket((7, 8), num_tokens=3)))
    core.run()
    out = core.unlink()
    assert [f.error.reason for f in of(SessionFailed, out)] == ["LINK_DOWN"]
    assert core.kv.usage().pinned == 2
    core.event(SourceQuiet(1, S1))
    assert core.kv.usage().pinned == 0


def test_a_ticketed_session_gets_a_place_from_those_that_wait_for_tickets() -> None:
    """S1 and S3 are older, come later, and set S2 back while its ticket is on the way. Decode's blocks are S2's:
    without its place nobody would ever get a ticket."""
    core = prefill(num_blocks=5, max_running=2)
    s3 = SessionId(3)
    opened(core, 2, (1, 2, 3, 4, 5, 6), arrival_ms=10)
    opened(core, 1, (10, 11, 12, 13), arrival_ms=0)
    opened(core, 3, (20, 21, 22, 23), arrival_ms=1)
    core.run()
    assert [f.session for f in of(Started, core.frames)] == [S2, S1, s3]
    assert (core.kv.holds(S1), core.kv.holds(S2), core.kv.holds(s3)) == (True, False, True)

    core.send(TicketArrived(S2, ticket((1, 2, 3), num_tokens=6)))
    core.run()
    assert [f.session for f in of(FirstToken, core.frames)] == [S2]
    (push,) = of(Push, core.commands)
    assert of(Delivered, done(core, push))[0].session == S2
    assert core.core.stats().counters["set_back"] == 3


def test_a_prompt_that_cannot_be_computed_fails_alone() -> None:
    core = prefill(num_blocks=20, max_batch_tokens=4)
    core.failing[6] = False
    opened(core, 1, (1, 2, 3, 4, 5, 6))
    opened(core, 2, (7, 8, 9))
    core.send(TicketArrived(S1, ticket((7, 8, 9), num_tokens=6)))
    core.run()
    (failed,) = of(SessionFailed, core.frames)
    assert (failed.session, failed.error.kind, failed.error.reason) == (S1, "InternalError", "NUMBERS")
    for push in of(Push, core.commands):
        core.event(SourceQuiet(1, push.session))
    core.send(EndSession(S1))
    assert core.kv.lookup((1, 2, 3, 4, 5, 6), "") == 0, "what was computed for it is not to be trusted"
    core.send(TicketArrived(S2, ticket((3, 4), num_tokens=3)))
    assert [f.token_id for f in of(FirstToken, core.frames)] == [next_token(3)]
