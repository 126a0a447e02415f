"""KV transfer against what the machine can do, for prompts of the demo model (46,080 bytes of KV a token).

    python benchmarks/transfer.py [--tokens 1000] [--rounds 15] [--json FILE]

shm: one push into another process's pool, over one memcpy of as many bytes between pools of this process.
tcp: one push, over as many bytes through a bare TCP socket into the same kind of pool. A push is timed by
itself (PushDone.seconds, on tcp up to the receiver's count); what the way through the threads adds stands
beside it as handover_ms. Rounds alternate, so that a busy machine slows both sides; ratios are of medians.
Prints one JSON object; targets are 0.8 and 0.7.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import multiprocessing.connection
import pathlib
import queue
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

from engine_core.config import DisaggConfig
from engine_core.kv.storage import KvRegion
from engine_core.transfer.base import Connect, ExpectLink, LinkOpened, PrepareReceive, Push, PushDone, TransferEvent
from engine_core.transfer.manager import KVTransferManager
from engine_core.types.ids import SessionId, mint_incarnation
from engine_core.types.kv import KvGroupLayout, KvGroupSpec, KvLayout

SPEC = KvGroupSpec(num_layers=30, num_heads=3, head_size=64, dtype="float32")
BLOCK_SIZE = 16
SECRET = bytes(32)


def pool_layout(num_blocks: int) -> KvLayout:
    """Two prompts' worth, so that source and destination blocks can be spread."""
    group = KvGroupLayout(SPEC, BLOCK_SIZE, num_blocks)
    return KvLayout((group,), group.block_bytes * num_blocks)


class End:
    """One end of the links, here or in the child."""

    def __init__(self, num_blocks: int, *, accept: bool) -> None:
        self.incarnation, self.layout = mint_incarnation(), pool_layout(num_blocks)
        self.region = KvRegion.create(self.layout.region_bytes)
        self._queue: queue.SimpleQueue[TransferEvent] = queue.SimpleQueue()
        self.manager = KVTransferManager(
            DisaggConfig(), self.incarnation, "bench", self.region, self.layout, self._queue.put, accept_links=accept
        )

    def next(self) -> TransferEvent:
        return self._queue.get(timeout=60)


def receive(conn: multiprocessing.connection.Connection, num_blocks: int) -> None:
    """The child: decode's end, and the receiving end of the bare socket."""
    end = End(num_blocks, accept=True)
    listener = socket.create_server(("127.0.0.1", 0))
    conn.send((end.incarnation, end.manager.descriptors(), listener.getsockname()[1]))
    peer, _ = listener.accept()
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while (order := conn.recv()) is not None:
        kind, value = order
        if kind == "prepare":
            end.manager.submit(value)
            conn.send(None)
            continue
        left, view = value, end.region.buffer
        while left:
            left -= peer.recv_into(view[:left])
        peer.sendall(b".")
    end.manager.close()


def measure(tokens: int, rounds: int) -> dict[str, Any]:
    """Runs all four, alternating."""
    per_prompt = -(-tokens // BLOCK_SIZE)
    num_blocks = 2 * per_prompt + 1
    context = multiprocessing.get_context("spawn")
    conn, theirs = context.Pipe()
    child = context.Process(target=receive, args=(theirs, num_blocks), daemon=True)
    child.start()
    peer_incarnation, descriptors, port = conn.recv()
    end = End(num_blocks, accept=False)
    conn.send(("prepare", ExpectLink(end.incarnation, SECRET)))
    conn.recv()
    end.region.buffer[:] = b"\x01" * end.region.nbytes
    bare = socket.create_connection(("127.0.0.1", port))
    bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for link_id, kind in ((1, "shm"), (2, "tcp")):
        end.manager.submit(Connect(link_id, peer_incarnation, "decode", end.layout, descriptors, kind, SECRET))
        opened = end.next()
        assert isinstance(opened, LinkOpened), opened

    # Every other block: nothing coalesces, as in a pool that has been in use.
    src = tuple(range(1, 2 * per_prompt, 2))
    dst = tuple(range(2, 2 * per_prompt + 1, 2))
    nbytes = per_prompt * end.layout.groups[0].block_bytes
    other = KvRegion.create(nbytes)
    other.buffer[:] = bytes(nbytes)

    def memcpy() -> float:
        start = time.perf_counter()
        ctypes.memmove(other.address, end.region.address, nbytes)
        return time.perf_counter() - start

    def bare_socket() -> float:
        conn.send(("bytes", nbytes))
        start = time.perf_counter()
        bare.sendall(end.region.buffer[:nbytes])
        bare.recv(1)
        return time.perf_counter() - start

    def push(link_id: int) -> Callable[[], float]:
        def once() -> float:
            end.manager.submit(Push(link_id, SessionId(link_id), 1, (src,), (dst,)))
            done = end.next()
            assert isinstance(done, PushDone) and done.bytes == nbytes, done
            return done.seconds

        conn.send(("prepare", PrepareReceive(link_id, SessionId(link_id), (dst,), nbytes)))
        conn.recv()
        return once

    cases = {"memcpy": memcpy, "shm": push(1), "bare_socket": bare_socket, "tcp": push(2)}
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    handover: dict[str, list[float]] = {name: [] for name in cases}
    for round_number in range(rounds + 2):
        for name, run in cases.items():
            start = time.perf_counter()
            took = run()
            if round_number >= 2:  # the first two warm caches and socket buffers up
                seconds[name].append(took)
                handover[name].append(time.perf_counter() - start - took)
    conn.send(None)
    end.manager.close()
    child.join(10)
    rates = {name: nbytes / statistics.median(values) / 1e9 for name, values in seconds.items()}
    ratios = {
        "shm_over_memcpy": round(rates["shm"] / rates["memcpy"], 3),
        "tcp_over_bare_socket": round(rates["tcp"] / rates["bare_socket"], 3),
    }
    return {
        "ratios": ratios,
        "tokens": tokens,
        "bytes": nbytes,
        "gb_per_s": {name: round(rate, 2) for name, rate in rates.items()},
        "best_gb_per_s": {name: round(nbytes / min(values) / 1e9, 2) for name, values in seconds.items()},
        "handover_ms": {name: round(statistics.median(handover[name]) * 1e3, 2) for name in ("shm", "tcp")},
    }


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file too")
    args = parser.parse_args()
    text = json.dumps(measure(args.tokens, args.rounds), indent=2)
    print(text)
    if args.json:
        args.json.write_text(text)


if __name__ == "__main__":
    main()
