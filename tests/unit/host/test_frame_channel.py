"""What waits for a service process that does not read for a while is joined, not lost."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from engine_core.host.channel import MAX_PENDING_FRAMES, FrameChannel, join_scores
from engine_core.host.frames import FrameSplitter, from_engine_decoder
from engine_core.scheduler.messages import FirstToken, Frame, PromptLogprobs, Started, StartupFailed
from engine_core.types.ids import SessionId
from engine_core.types.request import StageTimings
from engine_core.types.sampling import TokenLogprobs

ROOMS = [SessionId(1), SessionId(2)]


def scores(session: SessionId, first: int, count: int = 1) -> PromptLogprobs:
    return PromptLogprobs(session, first, tuple(TokenLogprobs(i, -1.0, 1) for i in range(first, first + count)))


@contextmanager
def connected() -> Iterator[tuple[FrameChannel, socket.socket]]:
    """A channel, and the other end of its socket."""
    ours, theirs = socket.socketpair()
    theirs.settimeout(60)
    channel = FrameChannel(ours, lambda: None)
    try:
        yield channel, theirs
    finally:
        channel.close(0.1)  # first: a channel that is not closing takes its process along
        theirs.close()


def test_scores_that_wait_are_joined_per_session_and_stay_in_order() -> None:
    with connected() as (channel, theirs):
        channel.send(StartupFailed("x" * (8 << 20)))  # more than the socket takes
        deadline = time.monotonic() + 60
        while channel._outbox:  # the writer holds it, and waits for a reader
            assert time.monotonic() < deadline
            time.sleep(0.001)
        for session in ROOMS:
            channel.send(Started(session))
        for first in range(1, MAX_PENDING_FRAMES + 1):  # twice as many as may wait
            for session in ROOMS:
                channel.send(scores(session, first))
        for session in ROOMS:
            channel.send(FirstToken(session, 7, 0, StageTimings()))
        waiting = len(channel._outbox)
        assert waiting < 100
        splitter, found = FrameSplitter(), list[Frame]()
        while len(found) < 1 + waiting:
            found += [from_engine_decoder.decode(body) for body in splitter.feed(theirs.recv(1 << 20))]
        for session in ROOMS:
            own = [frame for frame in found if getattr(frame, "session", None) == session]
            assert isinstance(own[0], Started) and isinstance(own[-1], FirstToken)
            parts = [frame for frame in own if isinstance(frame, PromptLogprobs)]
            assert len(parts) == len(own) - 2
            positions = [one.token_id for part in parts for one in part.positions]
            assert positions == list(range(1, MAX_PENDING_FRAMES + 1))
            assert all(part.positions[0].token_id == part.first_position for part in parts)


def test_only_what_follows_is_joined_and_not_without_bound() -> None:
    session = ROOMS[0]
    assert join_scores(scores(session, 1, 3), scores(session, 4, 2)) == scores(session, 1, 5)
    assert join_scores(scores(session, 1, 3), scores(session, 5)) is None
    assert join_scores(scores(session, 1, 8192), scores(session, 8193)) is None
