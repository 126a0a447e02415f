"""tcp from the inside: how pushes are cut, what is sunk in the middle of a frame, what a stall does."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.transfer.base import (
    DropReceive,
    ExpectLink,
    LinkClosed,
    LinkOpened,
    PrepareReceive,
    ReceiveQuiet,
    SendAbort,
)
from engine_core.transfer.copy_plan import CopyOps
from engine_core.transfer.handshake import CHALLENGE_BYTES, VERDICT_BYTES, Claim, Claimant, LinkSecrets
from engine_core.transfer.outgoing import Outgoing
from engine_core.transfer.transport import Cancel, Dial, Interrupt, LinkBroken, PushJob, Source, Written
from engine_core.transfer.transports.tcp import FRAME_BYTES, FRAME_PIECES, TcpWriter, frames
from engine_core.transfer.wire import VERSION, Abort, Data, FrameReader, Hello, Ready, Received, Welcome, encode
from engine_core.types.ids import Incarnation, SessionId
from engine_core.types.kv import TransferDescriptor
from tests.support.transfer import PAIR_SECRET, Endpoint, Setup, prepare

S = SessionId(5)


def ops(sizes: list[int]) -> CopyOps:
    nbytes = np.array(sizes, dtype=np.int64)
    starts = np.cumsum(nbytes) - nbytes
    return CopyOps(starts * 2, starts * 3 + 7, nbytes)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 3 * FRAME_BYTES), max_size=20))
def test_frames_are_the_push_cut_small(sizes: list[int]) -> None:
    whole = ops(sizes)
    cut = list(frames(whole))
    assert [last for _, last in cut] == [False] * (len(cut) - 1) + [True]
    assert all(part.total_bytes <= FRAME_BYTES and len(part) <= FRAME_PIECES for part, _ in cut)
    pieces = [p for part, _ in cut for p in zip(part.src_offset, part.dst_offset, part.nbytes, strict=True)]
    at = 0
    for src, dst, n in zip(whole.src_offset, whole.dst_offset, whole.nbytes, strict=True):
        done = 0
        while True:
            s, d, size = pieces[at]
            assert (s, d) == (src + done, dst + done)
            done, at = done + size, at + 1
            if done >= n:
                break
        assert done == n
    assert at == len(pieces)


def test_many_small_pieces_are_bounded_by_number() -> None:
    cut = list(frames(ops([1] * (FRAME_PIECES * 2 + 1))))
    assert [len(part) for part, _ in cut] == [FRAME_PIECES, FRAME_PIECES, 1]


class HandWriter:
    """A writer that speaks the protocol by hand, so that a test can stop at any byte."""

    def __init__(self, decode: Endpoint) -> None:
        descriptor = next(d for d in decode.descriptors() if d.transport == "tcp")
        host, port = descriptor.address.split(":")
        self.sock = socket.create_connection((host, int(port)), timeout=10)
        self.reader = FrameReader(self.sock)
        decode.submit(ExpectLink(Incarnation(1), PAIR_SECRET))
        claimant = Claimant(Claim(9, 1, decode.setup.incarnation), LinkSecrets().keys(PAIR_SECRET)[0])
        self.sock.sendall(claimant.answer(self.sock.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)))
        claimant.check(self.sock.recv(VERDICT_BYTES, socket.MSG_WAITALL))
        hello = Hello(VERSION, "tcp", 9, 1, decode.setup.incarnation, "hand", descriptor.nonce)
        self.sock.sendall(encode(hello))
        assert self.reader.read() == Welcome(decode.region.nbytes)
        self.sock.sendall(encode(Ready("by hand")))
        decode.wait(LinkOpened, link_id=9)

    def header(self, push_id: int, *pieces: tuple[int, int], last: bool = True) -> None:
        columns = np.array(pieces, dtype="<i8").reshape(-1, 2)
        total = int(columns[:, 1].sum())
        self.sock.sendall(encode(Data(S, push_id, last, total, columns[:, 0].tobytes(), columns[:, 1].tobytes())))


@pytest.fixture
def decode() -> Iterator[Endpoint]:
    with Endpoint(Setup(accept=True)) as end:
        yield end


def until(condition: object, *, within: float = 10) -> None:
    deadline = time.monotonic() + within
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_drop_in_the_middle_of_a_frame_sinks_the_rest(decode: Endpoint) -> None:
    writer = HandWriter(decode)
    decode.submit(PrepareReceive(9, S, ((1, 2),), 8192))
    writer.header(1, (4096, 4096), (8192, 4096))
    writer.sock.sendall(b"\x01" * 5000)
    until(lambda: decode.block(2)[903] == 1)
    decode.submit(DropReceive(9, S))
    decode.wait(ReceiveQuiet, session=S)  # at once, though the frame hangs
    decode.pool[:] = 0xEE
    writer.sock.sendall(b"\x01" * 3192)
    assert writer.reader.read() == Received(S, 1, 5000)
    assert (decode.pool == 0xEE).all()
    decode.submit(PrepareReceive(9, S, ((3,),), 4096))  # the link lives on
    writer.header(2, (3 * 4096, 4096))
    writer.sock.sendall(b"\x02" * 4096)
    assert writer.reader.read() == Received(S, 2, 4096)
    assert (decode.block(3) == 2).all() and (decode.block(2) == 0xEE).all()
    writer.sock.close()
    assert decode.wait(LinkClosed).quiet_proved


def test_a_push_in_frames_is_counted_once(decode: Endpoint) -> None:
    writer = HandWriter(decode)
    decode.submit(prepare(9, S, 1, 2))
    writer.header(1, (4096, 4096), last=False)
    writer.sock.sendall(b"\x01" * 4096)
    writer.header(1, (8192, 100))
    writer.sock.sendall(b"\x02" * 100)
    assert writer.reader.read() == Received(S, 1, 4196)
    writer.header(2)  # nothing to copy: answered too
    assert writer.reader.read() == Received(S, 2, 0)
    writer.sock.close()


@pytest.mark.parametrize(
    "frame",
    [
        Data(S, 1, True, 8, b"\x00" * 8, b"\x07" + b"\x00" * 7),  # sizes don't add up
        Data(S, 1, True, 8, b"\x00" * 7, b"\x08" + b"\x00" * 6),  # not int64
        Data(S, 1, True, -8, b"\x00" * 8, (-8).to_bytes(8, "little", signed=True)),
        Data(S, 1, True, 1 << 50, b"\x00" * 8, (1 << 50).to_bytes(8, "little")),
        Received(S, 1, 1),  # not a writer's to say
    ],
)
def test_nonsense_ends_the_link(decode: Endpoint, frame: Data) -> None:
    writer = HandWriter(decode)
    writer.sock.sendall(encode(frame))
    closed = decode.wait(LinkClosed)
    assert closed.quiet_proved and "protocol error" in closed.reason
    assert writer.sock.recv(1) == b""
    writer.sock.close()


def test_aborts_wait_for_a_peer_that_does_not_read(decode: Endpoint) -> None:
    writer = HandWriter(decode)
    count = 60_000  # more than the kernel buffers
    decode.submit(*(SendAbort(9, SessionId(i)) for i in range(count)))
    for i in range(count):
        assert writer.reader.read() == Abort(SessionId(i))
    writer.sock.close()


class Stalled:
    """A TcpWriter whose peer reads only what it is told to; two frames to push."""

    def __init__(self, stall_seconds: float) -> None:
        self.mine, self.theirs = socket.socketpair()
        self.mine.setblocking(False)
        for end in (self.mine, self.theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        self.interrupt = Interrupt()
        self.cancel, self.stop = Cancel(self.interrupt), Cancel(self.interrupt)
        dial = Dial(1, S.room, b"", TransferDescriptor("tcp", ""), self.interrupt, self.stop)  # type: ignore[arg-type]
        writer = TcpWriter(
            self.mine, FrameReader(self.mine), "", Outgoing(self.mine, dial, stall_seconds=stall_seconds)
        )
        data = np.ones(2 * FRAME_BYTES, np.uint8)
        source = Source(int(data.ctypes.data), data.nbytes, data.data.cast("B"))
        job = PushJob(S, 1, ops([2 * FRAME_BYTES]), source, self.cancel)
        self.outcome: list[Written | LinkBroken] = []

        def write() -> None:
            try:
                self.outcome.append(writer.write(job))
            except LinkBroken as exc:
                self.outcome.append(exc)

        self.thread = threading.Thread(target=write)
        self.thread.start()
        self.header = FrameReader(self.theirs).read()  # blocking: the first frame has begun
        assert isinstance(self.header, Data) and self.header.nbytes == FRAME_BYTES and not self.header.last

    def end(self) -> Written | LinkBroken:
        self.thread.join(10)
        for end in (self.mine, self.theirs):
            end.close()
        return self.outcome[0]


def test_a_cancelled_frame_is_finished_when_the_peer_reads_on() -> None:
    stalled = Stalled(stall_seconds=60)
    stalled.cancel.set()
    left = FRAME_BYTES
    while left:
        left -= len(stalled.theirs.recv(left))
    assert stalled.end() == Written(FRAME_BYTES, FRAME_BYTES)


def test_a_cancelled_frame_that_can_not_be_finished_breaks_the_link() -> None:
    stalled = Stalled(stall_seconds=0.05)
    stalled.cancel.set()
    outcome = stalled.end()
    assert isinstance(outcome, LinkBroken) and "within 0.05 s" in outcome.message


def test_a_link_that_is_closed_does_not_wait_for_the_frame() -> None:
    stalled = Stalled(stall_seconds=60)
    stalled.stop.set()
    outcome = stalled.end()
    assert isinstance(outcome, LinkBroken) and "being closed" in outcome.message
