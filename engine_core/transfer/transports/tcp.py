"""tcp: from pool to pool through one socket, without staging at either end.

A push is cut into frames of at most FRAME_BYTES: a Data message that names the destination's pieces, then
their bytes, straight out of the source pool by sendmsg. The receiver reads them straight into its pool,
after looking whether the session may write there, and answers the last frame with the bytes it took.

Frames are small so that a cancelled push ends soon: a frame that was begun must be finished, or the link
must end, since the bytes that follow would be misread.
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import Iterator, Sequence

import numpy as np

from engine_core.transfer.copy_plan import CopyOps
from engine_core.transfer.outgoing import Greeting, Outgoing
from engine_core.transfer.transport import ConnectFailed, Dial, PushJob, TransportContext, Writer, Written
from engine_core.transfer.wire import Data, FrameReader, Hello, encode
from engine_core.types.errors import ConfigError
from engine_core.types.kv import TransferDescriptor

FRAME_BYTES = 16 << 20
FRAME_PIECES = 16384

_BACKLOG = 64
_WILDCARDS = ("", "0.0.0.0", "::")
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


class TcpTransport:
    """Both ends of tcp. The pool's nonce, which only the rank table tells, is the secret of the link."""

    name = "tcp"
    kinds: tuple[str, ...] = ("tcp",)
    local_quiet = True

    def __init__(self, context: TransportContext) -> None:
        self._context = context

    def listen(self) -> tuple[socket.socket, TransferDescriptor]:
        """A free port of config.tcp_host."""
        host = self._context.config.tcp_host
        if host in _WILDCARDS:
            raise ConfigError(f"disagg.tcp_host is {host!r}; it must be an address that peers can connect to")
        try:
            family, kind, proto, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            sock = socket.socket(family, kind, proto)
        except OSError as exc:
            raise ConfigError(f"disagg.tcp_host {host!r} can't be used: {exc.strerror or exc}") from exc
        try:
            sock.bind(address)
            sock.listen(_BACKLOG)
            sock.setblocking(False)
        except OSError as exc:
            sock.close()
            raise ConfigError(f"disagg.tcp_host {host!r} can't be used: {exc.strerror or exc}") from exc
        port = sock.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        return sock, TransferDescriptor("tcp", f"{shown}:{port}", self._context.region.nonce)

    def refusal(self, hello: Hello) -> str:
        """Only who knows the nonce may write."""
        return "" if hmac.compare_digest(hello.nonce, self._context.region.nonce) else "wrong nonce"

    def passed_fds(self) -> Sequence[int]:
        """None."""
        return ()

    def accepted(self, sock: socket.socket) -> None:
        """As at the other end."""
        prepare(sock)

    def connect(self, dial: Dial) -> Writer:
        """Connects and greets."""
        greeting = Greeting(self._context, dial, self.name, take_fds=False)
        host, _, port = dial.descriptor.address.rpartition(":")
        try:
            sock = socket.create_connection((host.strip("[]"), int(port)), timeout=greeting.seconds_left)
        except (OSError, ValueError, OverflowError) as exc:
            raise ConnectFailed(f"tcp: {dial.descriptor.address} not reachable ({exc})") from exc
        try:
            sock.setblocking(False)
            prepare(sock)
            reader, _ = greeting.hello(sock)
            reason = f"tcp: connected to {dial.descriptor.address}"
            greeting.ready(sock, reason)
        except BaseException:
            sock.close()
            raise
        return TcpWriter(sock, reader, reason, Outgoing(sock, dial))

    def close(self) -> None:
        """Nothing is left behind."""


class TcpWriter:
    """Sends frames; done when the receiver's count comes back."""

    local_quiet = True
    awaits_count = True

    def __init__(self, sock: socket.socket, reader: FrameReader, reason: str, outgoing: Outgoing) -> None:
        self.sock, self.reader, self.reason = sock, reader, reason
        self._outgoing = outgoing

    def write(self, job: PushJob) -> Written:
        """Ends at a frame's end when the job is cancelled."""
        sent = 0
        for part, last in frames(job.ops):
            if job.cancel.is_set():
                break
            size = part.total_bytes
            header = Data(
                session=job.session,
                push_id=job.push_id,
                last=last,
                nbytes=size,
                dst_offset=part.dst_offset.astype("<i8").tobytes(),
                sizes=part.nbytes.astype("<i8").tobytes(),
            )
            buffers = [memoryview(encode(header))]
            source = job.source.buffer
            for start, n in zip(part.src_offset.tolist(), part.nbytes.tolist(), strict=True):
                if start < 0 or start + n > job.source.nbytes:
                    raise ValueError(f"a piece of {n} bytes at {start} lies outside the source")
                buffers.append(source[start : start + n])
            self._outgoing.send(buffers, job.cancel)
            sent += size
        return Written(sent, sent)

    def send(self, frame: bytes) -> None:
        """A control message, between frames."""
        self._outgoing.send([memoryview(frame)])

    def release(self) -> None:
        """Nothing of the peer is mapped."""


def frames(ops: CopyOps) -> Iterator[tuple[CopyOps, bool]]:
    """Cuts a push into frames, in order: (pieces of a frame, is it the last). At least one."""
    cut = _cut(ops)
    ends, count, at = np.cumsum(cut.nbytes), len(cut.nbytes), 0
    if not count:
        yield cut, True
    while at < count:
        before = int(ends[at - 1]) if at else 0
        end = int(np.searchsorted(ends, before + FRAME_BYTES, side="right"))
        end = min(max(end, at + 1), at + FRAME_PIECES)
        part = slice(at, end)
        yield CopyOps(cut.src_offset[part], cut.dst_offset[part], cut.nbytes[part]), end == count
        at = end


def _cut(ops: CopyOps) -> CopyOps:
    """Cuts pieces that are longer than a frame."""
    times = np.maximum(1, -(-ops.nbytes // FRAME_BYTES))
    if not len(times) or int(times.max()) == 1:
        return ops
    piece = np.repeat(np.arange(len(times)), times)
    skip = (np.arange(len(piece)) - np.repeat(np.cumsum(times) - times, times)) * FRAME_BYTES
    sizes = np.minimum(FRAME_BYTES, ops.nbytes[piece] - skip)
    return CopyOps(ops.src_offset[piece] + skip, ops.dst_offset[piece] + skip, sizes)


def prepare(sock: socket.socket) -> None:
    """No delay for small messages; a peer whose host vanished is noticed within 20 s."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
