"""What every transport promises to the engine's loop, on real sockets, mappings and processes.

"scripted-…" is the scripted transport without rules: it has to behave as what it wraps.
"""

from __future__ import annotations

import gc
import json
import os
import pathlib
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from engine_core.transfer.base import (
    AbortReceived,
    CancelPush,
    CloseLink,
    DropReceive,
    LinkClosed,
    LinkOpened,
    PushDone,
    PushFailed,
    QuietReceived,
    ReceiveQuiet,
    SendAbort,
    SendQuiet,
    SourceQuiet,
    Verified,
    VerifyBlocks,
)
from engine_core.transfer.handshake import CHALLENGE_BYTES, CLAIM_BYTES
from engine_core.types.errors import ConfigError
from engine_core.types.ids import Incarnation, SessionId
from engine_core.types.kv import KvLayout, TransferDescriptor
from tests.support.transfer import Endpoint, RemoteEndpoint, Setup, block_layout, connect, dial, prepare, push

KINDS = ("shm", "tcp", "scripted-shm", "scripted-tcp")
S1, S2 = SessionId(101), SessionId(102)
LINK = 7


def prefill_setup(kind: str, rules: list[dict[str, object]] | None = None, **more: object) -> Setup:
    """The writer's end; rules make it scripted whatever the kind."""
    inner = kind.removeprefix("scripted-")
    if rules is None and inner == kind:
        return Setup(accept=False, backend=kind, **more)  # type: ignore[arg-type]
    script = json.dumps({"transport": inner, "rules": rules or []})
    return Setup(accept=False, backend="scripted", script=script, **more)  # type: ignore[arg-type]


def decode_setup(**more: object) -> Setup:
    return Setup(accept=True, **more)  # type: ignore[arg-type]


def is_tcp(kind: str) -> bool:
    return kind.endswith("tcp")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def pair(kind: str) -> Iterator[tuple[Endpoint, Endpoint]]:
    """(prefill, decode) in this process, linked; prefill's pool is filled, decode's is zero."""
    with Endpoint(decode_setup()) as decode, Endpoint(prefill_setup(kind)) as prefill:
        prefill.fill(1)
        connect(LINK, prefill, decode)
        yield prefill, decode


def barrier(end: Endpoint) -> None:
    """Returns when the end's loop has carried out everything submitted before."""
    end.submit(push(0xBA44, S1, 999, (1,), (1,)))
    end.wait(PushFailed, link_id=0xBA44)


# ---- opening ----------------------------------------------------------------------------------------


def test_link_opens_at_both_ends(kind: str) -> None:
    with Endpoint(decode_setup()) as decode, Endpoint(prefill_setup(kind)) as prefill:
        prefill.submit(dial(LINK, prefill, decode))
        mine, theirs = prefill.wait(LinkOpened), decode.wait(LinkOpened)
        assert (mine.link_id, mine.peer_incarnation, mine.peer_instance) == (LINK, decode.setup.incarnation, "decode-0")
        assert (theirs.link_id, theirs.peer_incarnation) == (LINK, prefill.setup.incarnation)
        assert theirs.peer_instance == "prefill-0"
        assert mine.transport == kind.split("-")[0] and theirs.transport == kind.removeprefix("scripted-")
        assert mine.local_quiet == theirs.local_quiet == is_tcp(kind)
        expected = "connected to 127.0.0.1:" if is_tcp(kind) else "nonce read back through the shared region"
        assert expected in mine.reason and expected in theirs.reason


def test_auto_takes_shm_and_falls_back_to_tcp_with_a_reason() -> None:
    with Endpoint(decode_setup()) as decode, Endpoint(prefill_setup("auto")) as prefill:
        assert connect(1, prefill, decode).transport == "shm"
        away = [
            TransferDescriptor("shm", "/nowhere/kv.sock", d.nonce) if d.transport == "shm" else d
            for d in decode.descriptors()
        ]
        prefill.submit(dial(2, prefill, decode, descriptors=away))
        opened = prefill.wait(LinkOpened, link_id=2)
        assert opened.transport == "tcp"
        assert "shm: unix socket /nowhere/kv.sock not reachable" in opened.reason


def test_wrong_nonce_is_refused(kind: str) -> None:
    with Endpoint(decode_setup()) as decode, Endpoint(prefill_setup(kind)) as prefill:
        forged = [TransferDescriptor(d.transport, d.address, bytes(16)) for d in decode.descriptors()]
        prefill.submit(dial(LINK, prefill, decode, descriptors=forged))
        closed = prefill.wait(LinkClosed)
        assert closed.quiet_proved and "nonce" in closed.reason
        assert connect(LINK + 1, prefill, decode).link_id == LINK + 1
        assert not [e for e in decode.events if getattr(e, "link_id", 0) == LINK]


def test_another_incarnation_is_refused(kind: str) -> None:
    with Endpoint(decode_setup()) as decode, Endpoint(prefill_setup(kind)) as prefill:
        prefill.submit(dial(LINK, prefill, decode, peer_incarnation=Incarnation(decode.setup.incarnation + 1)))
        closed = prefill.wait(LinkClosed)
        assert closed.quiet_proved and "incarnation" in closed.reason
        assert not decode.events


def test_a_link_id_is_used_once(kind: str) -> None:
    with (
        Endpoint(decode_setup()) as decode,
        Endpoint(prefill_setup(kind)) as prefill,
        Endpoint(prefill_setup(kind)) as other,
    ):
        connect(LINK, prefill, decode)
        other.submit(dial(LINK, other, decode))
        assert "exists or existed" in other.wait(LinkClosed).reason
        prefill.submit(CloseLink(LINK))
        decode.wait(LinkClosed, link_id=LINK, quiet_proved=True)
        prefill.wait(LinkClosed, link_id=LINK)
        prefill.submit(dial(LINK, prefill, decode))
        assert prefill.wait(LinkClosed, link_id=LINK).reason == "the link was closed before"


def test_unreachable_peer_is_told_as_a_closed_link(kind: str) -> None:
    with Endpoint(prefill_setup(kind)) as prefill:
        with Endpoint(decode_setup()) as decode:
            gone = dial(LINK, prefill, decode)
        prefill.submit(gone)
        closed = prefill.wait(LinkClosed)
        assert closed.quiet_proved and "not reachable" in closed.reason
        prefill.submit(push(LINK, S1, 1, (1,), (1,)), CancelPush(LINK, S1))
        assert prefill.wait(PushFailed).push_id == 1
        prefill.wait(SourceQuiet, session=S1)


# ---- pushing ----------------------------------------------------------------------------------------


def test_bytes_arrive_in_their_blocks_and_nowhere_else(pair: tuple[Endpoint, Endpoint]) -> None:
    prefill, decode = pair
    decode.submit(prepare(LINK, S1, 5, 2, 7))
    prefill.submit(push(LINK, S1, 1, (1, 2), (5, 2)), push(LINK, S1, 2, (8,), (7,)))
    first, second = prefill.wait(PushDone), prefill.wait(PushDone)
    assert (first.session, first.push_id, first.bytes, first.blocks, first.checksum) == (S1, 1, 8192, 2, None)
    assert (second.push_id, second.bytes, second.blocks) == (2, 4096, 1)
    for src, dst in ((1, 5), (2, 2), (8, 7)):
        assert np.array_equal(decode.block(dst), prefill.block(src))
    for untouched in (0, 1, 3, 4, 6, 8):
        assert not decode.block(untouched).any()
    figures = prefill.manager.figures()[0]
    assert (figures.up, figures.bytes, figures.failures, figures.peer_instance) == (True, 12288, 0, "decode-0")


def test_layouts_that_do_not_fit_open_no_link(kind: str) -> None:
    """Found when the link is asked for, not at the first push."""
    with Endpoint(decode_setup(layout=block_layout(9, 8192))) as decode, Endpoint(prefill_setup(kind)) as prefill:
        prefill.submit(dial(LINK, prefill, decode))
        closed = prefill.wait(LinkClosed)
        assert closed.quiet_proved and "head_size" in closed.reason
        assert prefill.manager.figures() == ()


def test_layouts_of_another_order_and_place(kind: str) -> None:
    """Slices of heads, another dimension order, a pool of another size and offset."""
    theirs = KvLayout((block_layout(6, 4096, offset=4096, dim_order="NL_NB_TWO_BS_NH_HS").groups[0],), 7 * 4096)
    with Endpoint(decode_setup(layout=theirs)) as decode, Endpoint(prefill_setup(kind)) as prefill:
        prefill.fill(2)
        connect(LINK, prefill, decode)
        decode.submit(prepare(LINK, S1, 1, 3))
        prefill.submit(push(LINK, S1, 1, (4, 5), (3, 1)))
        assert prefill.wait(PushDone).bytes == 8192
        assert np.array_equal(decode.block(3), prefill.block(4))
        assert np.array_equal(decode.block(1), prefill.block(5))
        assert not decode.block(2).any() and not decode.pool[:4096].any()


def test_a_large_push_in_many_pieces(kind: str) -> None:
    layout = block_layout(40, 1 << 20)
    with Endpoint(decode_setup(layout=layout)) as decode, Endpoint(prefill_setup(kind, layout=layout)) as prefill:
        prefill.fill(3)
        connect(LINK, prefill, decode)
        dst = tuple(range(1, 40))
        src = tuple(1 + i * 11 % 39 for i in range(39))
        decode.submit(prepare(LINK, S1, *dst))
        prefill.submit(push(LINK, S1, 1, src, dst))
        assert prefill.wait(PushDone).bytes == 39 << 20
        for s, d in zip(src, dst, strict=True):
            assert np.array_equal(decode.block(d), prefill.block(s))
        assert not decode.block(0).any()


def test_a_push_that_can_not_be_planned_fails_alone(pair: tuple[Endpoint, Endpoint]) -> None:
    prefill, decode = pair
    decode.submit(prepare(LINK, S1, 1), prepare(LINK, S2, 2))
    prefill.submit(push(LINK, S1, 1, (1,), (99,)), push(LINK, S1, 2, (1,), (1,)), push(LINK, S2, 1, (3,), (2,)))
    assert "99" in prefill.wait(PushFailed, session=S1, push_id=1).reason
    prefill.wait(PushFailed, session=S1, push_id=2)  # nothing of a failed session is written
    assert prefill.wait(PushDone).session == S2
    assert not decode.block(1).any() and np.array_equal(decode.block(2), prefill.block(3))
    assert prefill.manager.figures()[0].failures == 2


@pytest.mark.parametrize("kind", ["tcp", "scripted-tcp"], indirect=True)
def test_tcp_writes_only_what_was_granted(pair: tuple[Endpoint, Endpoint]) -> None:
    prefill, decode = pair
    decode.submit(prepare(LINK, S1, 1, 2))
    prefill.submit(*(push(LINK, S2, i, (1,), (1,)) for i in range(1, 5)))  # unknown session
    assert prefill.wait(PushFailed, session=S2).reason == "the receiver took 0 of 4096 bytes"
    for i in range(2, 5):
        prefill.wait(PushFailed, session=S2, push_id=i)
    prefill.submit(push(LINK, S1, 1, (1, 3), (1, 3)))  # one block that is another's
    assert prefill.wait(PushFailed, session=S1).reason == "the receiver took 0 of 8192 bytes"
    assert not decode.pool.any()
    s3 = SessionId(103)
    decode.submit(prepare(LINK, s3, 4))
    prefill.submit(push(LINK, s3, 1, (5,), (4,)))  # the link lives on
    assert prefill.wait(PushDone).session == s3
    assert np.array_equal(decode.block(4), prefill.block(5))


@pytest.mark.parametrize("kind", ["tcp", "scripted-tcp"], indirect=True)
def test_tcp_dropped_session_writes_nothing(pair: tuple[Endpoint, Endpoint]) -> None:
    prefill, decode = pair
    decode.submit(prepare(LINK, S1, 1), DropReceive(LINK, S1))
    decode.wait(ReceiveQuiet, session=S1)
    prefill.submit(push(LINK, S1, 1, (1,), (1,)))
    prefill.wait(PushFailed, session=S1)
    assert not decode.pool.any()


# ---- abort and quiet --------------------------------------------------------------------------------


def test_abort_is_answered_and_nothing_is_written_after(kind: str, tmp_path: pathlib.Path) -> None:
    gate = tmp_path / "gate"
    rules: list[dict[str, object]] = [{"action": "hold_until_file", "push": 2, "path": str(gate)}]
    with Endpoint(decode_setup()) as decode, Endpoint(prefill_setup(kind, rules)) as prefill:
        prefill.fill(1)
        connect(LINK, prefill, decode)
        decode.submit(prepare(LINK, S1, 1, 2, 3), prepare(LINK, S2, 4))
        prefill.submit(
            push(LINK, S1, 1, (1,), (1,)), push(LINK, S1, 2, (2,), (2,)), push(LINK, S1, 3, (3,), (3,)),
            push(LINK, S2, 1, (4,), (4,)),
        )  # fmt: skip
        prefill.wait(PushDone, push_id=1)
        decode.submit(SendAbort(LINK, S1))
        prefill.wait(AbortReceived, session=S1)
        prefill.submit(CancelPush(LINK, S1))
        prefill.wait(SourceQuiet, session=S1)
        prefill.submit(SendQuiet(LINK, S1))
        decode.wait(QuietReceived, session=S1)
        decode.block(2)[:] = decode.block(3)[:] = 0xEE  # another session's now
        gate.touch()
        assert prefill.wait(PushDone, session=S2).push_id == 1
        prefill.submit(push(LINK, S1, 4, (2,), (2,)))
        prefill.wait(PushFailed, session=S1, push_id=4)
        assert (decode.block(2) == 0xEE).all() and (decode.block(3) == 0xEE).all()
        assert not [e for e in prefill.events if isinstance(e, PushDone) and e.session == S1]


def test_cancel_in_a_running_copy(kind: str) -> None:
    """Whenever the cancel comes, after SourceQuiet the blocks keep what they have."""
    layout = block_layout(65, 1 << 20)
    with Endpoint(decode_setup(layout=layout)) as decode, Endpoint(prefill_setup(kind, layout=layout)) as prefill:
        prefill.fill(4)
        connect(LINK, prefill, decode)
        blocks = tuple(range(1, 65))
        for attempt in range(4):
            session = SessionId(200 + attempt)
            decode.submit(prepare(LINK, session, *blocks))
            prefill.submit(push(LINK, session, 1, blocks, blocks), CancelPush(LINK, session))
            prefill.wait(SourceQuiet, session=session)
            decode.submit(DropReceive(LINK, session))
            if is_tcp(kind):
                decode.wait(ReceiveQuiet, session=session)
            decode.pool[:] = 0xEE
            probe = SessionId(300 + attempt)
            decode.submit(prepare(LINK, probe, 1))
            prefill.submit(push(LINK, probe, 1, (1,), (1,)))
            prefill.wait(PushDone, session=probe)  # all that was on the way has arrived by now
            assert (decode.pool[1 << 21 :] == 0xEE).all()


def test_cancel_of_an_unknown_session_is_answered(pair: tuple[Endpoint, Endpoint]) -> None:
    prefill, decode = pair
    decode.submit(SendAbort(LINK, S2))
    prefill.wait(AbortReceived, session=S2)
    prefill.submit(CancelPush(LINK, S2))
    prefill.wait(SourceQuiet, session=S2)
    prefill.submit(SendQuiet(LINK, S2))
    decode.wait(QuietReceived, session=S2)


# ---- ends of links ----------------------------------------------------------------------------------


def test_either_end_may_close(kind: str) -> None:
    with Endpoint(decode_setup()) as decode, Endpoint(prefill_setup(kind)) as prefill:
        for link_id, closer in ((1, prefill), (2, decode)):
            connect(link_id, prefill, decode)
            closer.submit(CloseLink(link_id))
            assert prefill.wait(LinkClosed, link_id=link_id).quiet_proved
            assert decode.wait(LinkClosed, link_id=link_id).quiet_proved
        assert [f.up for f in decode.manager.figures()] == [False, False]


def test_commands_for_a_link_that_is_gone(pair: tuple[Endpoint, Endpoint]) -> None:
    prefill, decode = pair
    prefill.submit(CloseLink(LINK))
    prefill.wait(LinkClosed)
    decode.wait(LinkClosed)
    prefill.submit(push(LINK, S1, 1, (1,), (1,)), CancelPush(LINK, S1), SendQuiet(LINK, S1), CloseLink(LINK))
    prefill.wait(PushFailed, session=S1)
    prefill.wait(SourceQuiet, session=S1)
    decode.submit(SendAbort(LINK, S1), DropReceive(LINK, S1), DropReceive(LINK + 1, S2))
    decode.wait(ReceiveQuiet, session=S1)
    for end in (prefill, decode):
        barrier(end)
        assert end.events == []  # nothing for a link that never was: nothing is proved


def test_killed_writer_proves_quiet(kind: str) -> None:
    with Endpoint(decode_setup()) as decode, RemoteEndpoint(prefill_setup(kind)) as prefill:
        connect(LINK, prefill, decode)
        decode.submit(prepare(LINK, S1, 1))
        prefill.fill(1)
        prefill.submit(push(LINK, S1, 1, (1,), (1,)))
        prefill.wait(PushDone, session=S1)
        prefill.kill()
        assert decode.wait(LinkClosed, link_id=LINK).quiet_proved
        decode.submit(DropReceive(LINK, S1))
        decode.wait(ReceiveQuiet, session=S1)


def test_killed_receiver_fails_pushes_and_frees_the_source(kind: str) -> None:
    with RemoteEndpoint(decode_setup()) as decode, Endpoint(prefill_setup(kind)) as prefill:
        connect(LINK, prefill, decode)
        decode.kill()
        closed = prefill.wait(LinkClosed, link_id=LINK)
        assert closed.peer_incarnation == decode.setup.incarnation
        prefill.submit(push(LINK, S1, 1, (1,), (1,)), CancelPush(LINK, S1))
        prefill.wait(PushFailed, session=S1)
        prefill.wait(SourceQuiet, session=S1)


def test_stopped_writer(kind: str, tmp_path: pathlib.Path) -> None:
    """Stopped before it writes: shm must prove nothing; tcp's own reader can, and what comes later is sunk."""
    gate = tmp_path / "gate"
    rules: list[dict[str, object]] = [{"action": "hold_until_file", "push": 1, "path": str(gate)}]
    with Endpoint(decode_setup()) as decode, RemoteEndpoint(prefill_setup(kind, rules)) as prefill:
        prefill.fill(1)
        connect(LINK, prefill, decode)
        decode.submit(prepare(LINK, S1, 1))
        prefill.submit(push(LINK, S1, 1, (1,), (1,)))
        prefill.stop()
        decode.submit(SendAbort(LINK, S1), DropReceive(LINK, S1))
        barrier(decode)
        if is_tcp(kind):
            decode.wait(ReceiveQuiet, session=S1)
            decode.block(1)[:] = 0xEE  # another session's now
            gate.touch()
            prefill.go_on()
            prefill.wait(PushFailed, session=S1)
            assert (decode.block(1) == 0xEE).all()
        else:
            assert decode.events == []
            gate.touch()
            prefill.go_on()
            prefill.wait(PushDone, session=S1)  # the late copy: it did land, so the blocks had to be kept
            assert decode.block(1).any()
            assert decode.events == []
        prefill.kill()
        assert decode.wait(LinkClosed).quiet_proved


@pytest.mark.parametrize("kind", ["tcp", "scripted-tcp"], indirect=True)
def test_cancel_while_the_receiver_is_stopped(kind: str) -> None:
    layout = block_layout(65, 1 << 20)  # more than the kernel buffers
    with RemoteEndpoint(decode_setup(layout=layout)) as decode, Endpoint(prefill_setup(kind, layout=layout)) as prefill:
        connect(LINK, prefill, decode)
        blocks = tuple(range(1, 65))
        decode.submit(prepare(LINK, S1, *blocks))
        decode.stop()
        prefill.submit(push(LINK, S1, 1, blocks, blocks), CancelPush(LINK, S2))
        prefill.wait(SourceQuiet, session=S2)  # others are not held up
        prefill.submit(CancelPush(LINK, S1))
        prefill.wait(SourceQuiet, session=S1)
        prefill.submit(CloseLink(LINK))
        prefill.wait(LinkClosed)
        decode.go_on()
        assert decode.wait(LinkClosed).quiet_proved


# ---- hygiene ----------------------------------------------------------------------------------------


def test_close_leaves_nothing_behind(kind: str, tmp_path: pathlib.Path) -> None:
    with Endpoint(decode_setup()) as first, Endpoint(prefill_setup(kind)) as second:
        connect(1, second, first)  # whatever is made once per process exists from here on
    gc.collect()
    fds, threads, shared = _fds(), threading.active_count(), sorted(os.listdir("/dev/shm"))
    with Endpoint(decode_setup(socket_dir=str(tmp_path))) as decode, Endpoint(prefill_setup(kind)) as prefill:
        connect(LINK, prefill, decode)
        decode.submit(prepare(LINK, S1, 1))
        prefill.submit(push(LINK, S1, 1, (1,), (1,)))
        prefill.wait(PushDone)
        assert list(tmp_path.glob("kv-*.sock"))
        assert sorted(os.listdir("/dev/shm")) == shared
        assert not [fd for fd in _fds() - fds if os.get_inheritable(fd)]
    gc.collect()
    assert _fds() == fds
    assert threading.active_count() == threads
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_swept() -> None:
    """Its pool went with it; its socket goes when the next process opens one beside it."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:  # short: unix sockets' paths are
        with RemoteEndpoint(decode_setup(socket_dir=folder)) as decode, Endpoint(decode_setup(socket_dir=folder)):
            decode.descriptors()
            decode.kill()
            assert len(list(pathlib.Path(folder).glob("kv-*.sock"))) == 2
            with Endpoint(decode_setup(socket_dir=folder)) as successor:
                left = {str(path) for path in pathlib.Path(folder).iterdir()}
                assert len(left) == 2 and successor.descriptors()[0].address in left
        assert not list(pathlib.Path(folder).iterdir())


def _fds() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}


def test_close_is_idempotent_and_bounded_while_a_push_hangs(kind: str) -> None:
    with Endpoint(decode_setup()) as decode, Endpoint(prefill_setup(kind, [{"action": "lose"}])) as prefill:
        connect(LINK, prefill, decode)
        prefill.submit(push(LINK, S1, 1, (1,), (1,)))
        prefill.manager.close()
        prefill.manager.close()
        assert prefill.wait(PushFailed, session=S1).reason == "closed here"
        prefill.submit(push(LINK, S1, 2, (1,), (1,)))  # ignored
        decode.wait(LinkClosed, quiet_proved=True)


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x05\x00\x00\x00\xc1\xc1\xc1\xc1\xc1", b"\x00" * 64])
def test_garbage_on_the_sockets_does_no_harm(kind: str, garbage: bytes) -> None:
    with Endpoint(decode_setup()) as decode, Endpoint(prefill_setup(kind)) as prefill:
        prefill.fill(1)
        by_kind = {d.transport: d.address for d in decode.descriptors()}
        host, port = by_kind["tcp"].split(":")
        for family, address in ((socket.AF_UNIX, by_kind["shm"]), (socket.AF_INET, (host, int(port)))):
            with socket.socket(family, socket.SOCK_STREAM) as stranger:
                stranger.settimeout(10)
                stranger.connect(address)
                stranger.sendall(garbage)
                try:
                    assert len(stranger.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)) == CHALLENGE_BYTES
                    stranger.sendall(bytes(CLAIM_BYTES))
                    assert stranger.recv(1) == b""  # it is hung up on
                except ConnectionResetError:
                    pass
        connect(LINK, prefill, decode)
        decode.submit(prepare(LINK, S1, 1))
        prefill.submit(push(LINK, S1, 1, (1,), (1,)))
        prefill.wait(PushDone)
        assert np.array_equal(decode.block(1), prefill.block(1))
        assert decode.events == []


def test_wildcard_and_useless_addresses_are_configuration_errors(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="socket_dir"):
        Endpoint(decode_setup(backend="shm", socket_dir=str(tmp_path / ("x" * 120))))
    with pytest.raises(ConfigError, match="not known"):
        Endpoint(decode_setup(backend="pigeon"))


# ---- checksums and scripts --------------------------------------------------------------------------


def verified(decode: Endpoint, session: SessionId, *blocks: int) -> int:
    decode.submit(VerifyBlocks(LINK, session, (blocks,)))
    return decode.wait(Verified, session=session).checksum


def test_checksum_runs_over_the_session(kind: str) -> None:
    with Endpoint(decode_setup(verify=True)) as decode, Endpoint(prefill_setup(kind, verify=True)) as prefill:
        prefill.fill(5)
        connect(LINK, prefill, decode)
        decode.submit(prepare(LINK, S1, 3, 1, 2))
        prefill.submit(push(LINK, S1, 1, (6, 7), (3, 1)), push(LINK, S1, 2, (8,), (2,)))
        first, second = prefill.wait(PushDone), prefill.wait(PushDone)
        assert first.checksum == verified(decode, S1, 3, 1)
        assert second.checksum == verified(decode, S1, 3, 1, 2)
        assert first.checksum != second.checksum
        decode.block(2)[100] ^= 1
        assert second.checksum != verified(decode, S1, 3, 1, 2)
        assert verified(decode, S1, 99) == -1


@pytest.mark.parametrize("inner", ["shm", "tcp"])
def test_script_does_what_it_says(inner: str, tmp_path: pathlib.Path) -> None:
    gate = tmp_path / "gate"
    rules: list[dict[str, object]] = [
        {"action": "fail", "push": 1},
        {"action": "short", "push": 2},
        {"action": "short_silent", "push": 3},
        {"action": "corrupt", "session": 4},
        {"action": "delay", "push": 5, "seconds": 0.05},
        {"action": "hold_until_file", "push": 6, "path": str(gate)},
        {"action": "lose", "push": 7},
    ]
    with (
        Endpoint(decode_setup(verify=True)) as decode,
        Endpoint(prefill_setup(inner, rules, verify=True)) as prefill,
    ):
        prefill.fill(6)
        connect(LINK, prefill, decode)
        sessions = [SessionId(i) for i in range(8)]
        for i in range(1, 8):
            decode.submit(prepare(LINK, sessions[i], i))
            prefill.submit(push(LINK, sessions[i], 1, (i,), (i,)))
        assert "script" in prefill.wait(PushFailed, session=sessions[1]).reason
        assert not decode.block(1).any()
        assert prefill.wait(PushDone, session=sessions[2]).bytes == 2048
        assert prefill.wait(PushDone, session=sessions[3]).bytes == 4096
        for i in (2, 3):
            assert np.array_equal(decode.block(i)[:2048], prefill.block(i)[:2048])
            assert not decode.block(i)[2048:].any()
        corrupt = prefill.wait(PushDone, session=sessions[4])
        assert corrupt.bytes == 4096 and corrupt.checksum != verified(decode, sessions[4], 4)
        assert (decode.block(4) != prefill.block(4)).sum() == 1
        late = prefill.wait(PushDone, session=sessions[5])
        assert late.seconds >= 0.05 and late.checksum == verified(decode, sessions[5], 5)
        assert not decode.block(6).any()
        gate.touch()
        prefill.wait(PushDone, session=sessions[6])
        prefill.submit(CancelPush(LINK, sessions[7]))
        prefill.wait(SourceQuiet, session=sessions[7])
        assert not decode.block(7).any()


def eventually(condition: Callable[[], bool], within: float = 10.0) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("inner", ["shm", "tcp"])
def test_rules_are_switched_by_a_file_and_a_stubborn_push_outlives_its_cancel(
    inner: str, tmp_path: pathlib.Path
) -> None:
    switch, gate = tmp_path / "switch", tmp_path / "gate"
    rules: list[dict[str, object]] = [
        {"action": "hold_until_file", "path": str(gate), "stubborn": True, "when": str(switch)}
    ]
    with Endpoint(decode_setup()) as decode, Endpoint(prefill_setup(inner, rules)) as prefill:
        prefill.fill(7)
        connect(LINK, prefill, decode)
        decode.submit(prepare(LINK, S1, 1), prepare(LINK, S2, 2))
        prefill.submit(push(LINK, S1, 1, (1,), (1,)))
        prefill.wait(PushDone, session=S1)

        switch.touch()
        prefill.submit(push(LINK, S2, 1, (2,), (2,)))
        eventually((tmp_path / "gate.held").exists)
        prefill.submit(CancelPush(LINK, S2))
        with pytest.raises(AssertionError):
            prefill.wait(SourceQuiet, within=0.2, session=S2)
        assert not decode.block(2).any()
        gate.touch()
        prefill.wait(SourceQuiet, session=S2)
        if inner == "shm":  # nobody can keep a mapped pool from being written
            assert np.array_equal(decode.block(2), prefill.block(2))
