"""Bytes with mistakes in them, peers that lie, and what is left of a process after both."""

from __future__ import annotations

import array
import asyncio
import contextlib
import hashlib
import os
import random
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from engine_core.transfer.handshake import CHALLENGE_BYTES, VERDICT_BYTES, Claim, Claimant, LinkSecrets
from engine_core.transfer.wire import VERSION, FrameReader, Hello, Ready, Welcome, encode
from engine_core.types.errors import Leg, UnavailableError
from engine_core.types.ids import mint_incarnation
from engine_core.types.kv import TransferDescriptor
from pdmesh.bootstrap.v1 import bootstrap_service_pb2, rank_table_pb2
from pdmesh.transfer.v1 import transfer_service_pb2_grpc
from services.runtime.server import GrpcServer
from services.wire.transfer import descriptor_from_proto
from tests.support.raw import TIMEOUT, Raw

_LENGTHS = (0, 1, 3, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 20, (1 << 20) + 1)


def mutated(rng: random.Random, data: bytes) -> bytes:
    """The bytes after one to four mistakes: flipped, dropped, doubled, foreign or overlong ones."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(7):
            case 0 if out:
                out[at % len(out)] ^= 1 << rng.randrange(8)
            case 1 if out:
                out[at % len(out)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                del out[at:]
            case 3:
                del out[at : at + rng.randint(1, 16)]
            case 4:
                out[at:at] = out[at : at + rng.randint(1, 64)]
            case 5:
                out[at:at] = rng.randbytes(rng.randint(1, 16))
            case _:
                out[at : at + 4] = struct.pack("<I", rng.choice(_LENGTHS))
    return bytes(out)


def pool_digest(engine_pid: int) -> str:
    """What a worker's KV pools hold, all of it; read through the engine's own descriptors."""
    digest, found = hashlib.sha256(), 0
    for name in sorted(os.listdir(f"/proc/{engine_pid}/fd"), key=int):
        path = f"/proc/{engine_pid}/fd/{name}"
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(path).startswith("/memfd:pdmesh-kv"):
                digest.update(Path(path).read_bytes())
                found += 1
    assert found, f"engine {engine_pid} has no pool"
    return digest.hexdigest()


@asynccontextmanager
async def no_descriptor_left(raw: Raw) -> AsyncIterator[None]:
    """Asserts that all processes get back to as many descriptors as they had."""
    for channel in raw.channels.values():
        await asyncio.wait_for(channel.channel_ready(), TIMEOUT)
    ranks = (await raw.mesh.status())["ranks"]
    pids = [*raw.mesh.pids.values(), *(r["engine_pid"] for r in ranks if r["instance"] in raw.mesh.pids)]
    before = {pid: opened(pid) for pid in pids}
    yield
    await until_level(before)


def opened(pid: int) -> list[str]:
    """What a process has open."""
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return sorted(found)


async def until_level(before: dict[int, list[str]]) -> None:
    """Waits until no process has more descriptors than before."""
    from tests.support.asking import until

    def more() -> dict[int, tuple[list[str], list[str]]]:
        now = {pid: opened(pid) for pid in before}
        return {pid: (then, now[pid]) for pid, then in before.items() if len(now[pid]) > len(then)}

    await until(lambda: not more(), TIMEOUT, lambda: f"descriptors before and now: {more()}")


class FalsePrefill(transfer_service_pb2_grpc.TransferServiceServicer):
    """A prefill worker in the rank table whose links a test opens by hand: an insider, with all that one knows."""

    def __init__(self, raw: Raw) -> None:
        self.raw, self.incarnation = raw, mint_incarnation()
        self.secret, self.descriptors = b"", ()
        self._key = b""

    @classmethod
    @asynccontextmanager
    async def of(cls, raw: Raw) -> AsyncIterator[FalsePrefill]:
        """Joins, and waits until decode-0 has told it the secret of the pair. Routers must not be asked meanwhile."""
        from tests.support.asking import until

        made, security = cls(raw), raw.mesh.security

        def add(server: Any) -> None:
            transfer_service_pb2_grpc.add_TransferServiceServicer_to_server(made, server)

        server = await GrpcServer.start("127.0.0.1:0", add, (), leg=Leg.PREFILL, security=security)
        try:
            table = await raw.bootstrap.GetRankTable(bootstrap_service_pb2.GetRankTableRequest(), timeout=TIMEOUT)
            row = rank_table_pb2.RankRow()
            row.CopyFrom(next(row for row in table.rows if row.instance.name == "prefill-0"))
            row.instance.name, row.incarnation, row.endpoint = "insider", made.incarnation, server.endpoint
            await raw.register(bootstrap_service_pb2.RegisterRankRequest(row=row, ttl_seconds=600.0))
            await until(lambda: bool(made.secret), TIMEOUT, lambda: "decode-0 has not asked for a link")
            made._key = LinkSecrets(security.link_secrets).keys(made.secret)[0]
            yield made
        finally:
            await server.stop(0)

    async def NegotiateLayout(self, request: Any, context: Any) -> Any:
        """Takes what decode tells, and opens nothing."""
        found = [descriptor_from_proto(d) for d in request.ranks[0].descriptors]
        self.secret, self.descriptors = request.pair_secret, tuple(found)
        raise UnavailableError("links are opened by hand here", leg=Leg.PREFILL)

    def descriptor(self, kind: str) -> TransferDescriptor:
        """Of decode-0's socket."""
        return next(d for d in self.descriptors if d.transport == kind)

    def claimant(self, link_id: int) -> Claimant:
        """Proves this peer, for one connection."""
        return Claimant(Claim(link_id, self.incarnation, self.raw.row.incarnation), self._key)

    @contextlib.contextmanager
    def link(self, kind: str, link_id: int) -> Iterator[socket.socket]:
        """A link that is up, by hand."""
        with connected(self.descriptor(kind)) as sock:
            claimant = self.claimant(link_id)
            sock.sendall(claimant.answer(sock.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)))
            claimant.check(sock.recv(VERDICT_BYTES, socket.MSG_WAITALL))
            sock.sendall(encode(self.hello(kind, link_id)))
            reader = FrameReader(sock, take_fds=True)
            answer = reader.read()
            assert isinstance(answer, Welcome), answer
            for fd in reader.fds:
                os.close(fd)
            sock.sendall(encode(Ready("by hand")))
            yield sock

    def hello(self, kind: str, link_id: int) -> Hello:
        """The greeting of a link."""
        nonce, decode = self.descriptor(kind).nonce, self.raw.row.incarnation
        return Hello(VERSION, kind, link_id, self.incarnation, decode, "insider", nonce)


@contextlib.contextmanager
def connected(descriptor: TransferDescriptor) -> Iterator[socket.socket]:
    """A connection to a link's socket."""
    if descriptor.transport == "shm":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(descriptor.address)
    else:
        host, _, port = descriptor.address.rpartition(":")
        sock = socket.create_connection((host, int(port)))
    sock.settimeout(TIMEOUT)
    with sock:
        yield sock


def say(sock: socket.socket, data: bytes) -> None:
    """Sends; the other end may have hung up already."""
    with contextlib.suppress(OSError):
        sock.sendall(data)


def hang_up(sock: socket.socket) -> None:
    """Ends what this side says, and waits until the other side ends too."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(65536):
            pass


def passed(sock: socket.socket, data: bytes) -> None:
    """Sends with a descriptor that nobody asked for."""
    fd = os.memfd_create("passed")
    with contextlib.suppress(OSError):
        sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
    os.close(fd)
