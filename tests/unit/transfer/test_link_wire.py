"""Frames on a link's socket: whole, bounded, never read beyond."""

from __future__ import annotations

import array
import os
import socket
import time
from collections.abc import Iterator

import pytest

from engine_core.transfer.wire import (
    MAX_MESSAGE_BYTES,
    Abort,
    Data,
    EndOfLink,
    FrameReader,
    Hello,
    ProtocolError,
    Quiet,
    Received,
    Welcome,
    encode,
    read_within,
)
from engine_core.types.ids import SessionId

S = SessionId((1 << 63) - 1, 3)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    a, b = socket.socketpair()
    b.setblocking(False)
    with a, b:
        yield a, b


@pytest.mark.parametrize(
    "message",
    [
        Hello(1, "shm", 5, 6, 7, "prefill-0", b"n" * 16),
        Welcome(1 << 40),
        Data(S, 3, True, 8, b"\x00" * 8, b"\x08" + b"\x00" * 7),
        Received(S, 3, 8),
        Abort(S),
        Quiet(S),
    ],
)
def test_messages_come_back_equal_however_they_are_cut(
    ends: tuple[socket.socket, socket.socket], message: Abort
) -> None:
    a, b = ends
    reader, frame = FrameReader(b), encode(message)
    for i in range(len(frame)):
        assert reader.read() is None
        a.sendall(frame[i : i + 1])
    assert reader.read() == message
    a.sendall(frame + frame)
    assert reader.read() == message and reader.read() == message and reader.read() is None


def test_bytes_after_a_message_stay_in_the_socket(ends: tuple[socket.socket, socket.socket]) -> None:
    a, b = ends
    a.sendall(encode(Abort(S)) + b"raw")
    assert FrameReader(b).read() == Abort(S)
    assert b.recv(10) == b"raw"


@pytest.mark.parametrize(
    "junk",
    [
        b"\x00\x00\x00\x00",
        (MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"),
        b"\x01\x00\x00\x00\xc1",
        b"\x03\x00\x00\x00\x92\xa1x",
    ],
)
def test_junk_is_a_protocol_error(ends: tuple[socket.socket, socket.socket], junk: bytes) -> None:
    a, b = ends
    a.sendall(junk)
    with pytest.raises(ProtocolError):
        FrameReader(b).read()


def test_the_end_is_told_even_in_the_middle_of_a_message(ends: tuple[socket.socket, socket.socket]) -> None:
    a, b = ends
    a.sendall(encode(Abort(S))[:5])
    reader = FrameReader(b)
    assert reader.read() is None
    a.close()
    with pytest.raises(EndOfLink):
        reader.read()


def test_a_message_beyond_the_bound_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="too long"):
        encode(Data(S, 1, True, 0, bytes(MAX_MESSAGE_BYTES), b""))


def test_waiting_ends_at_the_deadline_or_when_stopped(ends: tuple[socket.socket, socket.socket]) -> None:
    _, b = ends
    with pytest.raises(TimeoutError, match="no answer"):
        read_within(FrameReader(b), b, time.monotonic() + 0.02, lambda: False)
    with pytest.raises(TimeoutError, match="closed meanwhile"):
        read_within(FrameReader(b), b, time.monotonic() + 60, lambda: True)


def test_descriptors_are_taken_only_when_asked_for(ends: tuple[socket.socket, socket.socket]) -> None:
    a, b = ends
    passed = os.memfd_create("x")
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [passed]))]
    a.sendmsg([encode(Welcome(1))], rights)
    reader = FrameReader(b, take_fds=True)
    assert reader.read() == Welcome(1)
    (fd,) = reader.fds
    assert not os.get_inheritable(fd) and os.fstat(fd).st_ino == os.fstat(passed).st_ino
    os.close(fd)
    reader.stop_taking_fds()
    before = len(os.listdir("/proc/self/fd"))
    a.sendmsg([encode(Welcome(2))], rights)
    assert reader.read() == Welcome(2) and len(reader.fds) == 1
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(passed)
