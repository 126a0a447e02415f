"""Ends of links for tests: in this process, or in a process of their own that can be killed or stopped."""

from __future__ import annotations

import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from engine_core.config import DisaggConfig
from engine_core.kv.storage import KvRegion
from engine_core.transfer.base import (
    Connect,
    ExpectLink,
    LinkOpened,
    PrepareReceive,
    Push,
    TransferCommand,
    TransferEvent,
)
from engine_core.transfer.manager import KVTransferManager
from engine_core.types.ids import Incarnation, SessionId, mint_incarnation
from engine_core.types.kv import KvGroupLayout, KvGroupSpec, KvLayout

E = TypeVar("E")
WAIT = 20.0
PAIR_SECRET = b"a secret of thirty-two bytes ..."


def block_layout(num_blocks: int = 9, block_bytes: int = 4096, offset: int = 0, **more: Any) -> KvLayout:
    """One group; block_bytes a multiple of 64 (block size 16, one layer, one head, K only)."""
    spec = KvGroupSpec(num_layers=1, num_heads=1, head_size=block_bytes // 64, dtype="float32", kv_size=1)
    group = KvGroupLayout(spec, 16, num_blocks, offset=offset, **more)
    return KvLayout((group,), region_bytes=offset + num_blocks * block_bytes)


@dataclasses.dataclass(frozen=True)
class Setup:
    """What an end is made of; picklable."""

    accept: bool
    layout: KvLayout = dataclasses.field(default_factory=block_layout)
    backend: str = "auto"
    script: str = ""
    verify: bool = False
    socket_dir: str = ""
    tokens: tuple[bytes, ...] = ()
    incarnation: Incarnation = dataclasses.field(default_factory=mint_incarnation)

    @property
    def instance(self) -> str:
        return "decode-0" if self.accept else "prefill-0"


class Endpoint:
    """A region, a manager over it, and what it posted."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.layout = setup, setup.layout
        self.region = KvRegion.create(setup.layout.region_bytes)
        self.events: list[TransferEvent] = []
        self._news = threading.Condition()
        config = DisaggConfig(
            transfer_backend=setup.backend, script=setup.script, verify_kv=setup.verify, socket_dir=setup.socket_dir
        )
        self.manager = KVTransferManager(
            config,
            setup.incarnation,
            setup.instance,
            self.region,
            setup.layout,
            self._post,
            accept_links=setup.accept,
            tokens=setup.tokens,
        )

    def _post(self, event: TransferEvent) -> None:
        with self._news:
            self.events.append(event)
            self._news.notify_all()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self.manager.close()
        self.region.close()

    @property
    def pool(self) -> NDArray[np.uint8]:
        return np.frombuffer(self.region.buffer, np.uint8)

    def block(self, block_id: int) -> NDArray[np.uint8]:
        group = self.layout.groups[0]
        start = group.offset + block_id * group.block_bytes
        return self.pool[start : start + group.block_bytes]

    def fill(self, seed: int) -> None:
        self.pool[:] = np.random.default_rng(seed).integers(1, 255, self.region.nbytes, np.uint8)

    def submit(self, *commands: TransferCommand) -> None:
        for command in commands:
            self.manager.submit(command)

    def descriptors(self) -> Any:
        return self.manager.descriptors()

    def wait(self, kind: type[E], within: float = WAIT, **match: Any) -> E:
        """Takes the next event of a kind with these fields out of what was posted; fails after `within` s."""

        def found() -> E | None:
            for i, event in enumerate(self.events):
                if isinstance(event, kind) and all(getattr(event, k) == v for k, v in match.items()):
                    del self.events[i]
                    return event
            return None

        deadline = time.monotonic() + within
        with self._news:
            while (event := found()) is None:
                left = deadline - time.monotonic()
                assert left > 0, f"no {kind.__name__} {match} within {within} s; there were {self.events}"
                self._news.wait(left)
            return event


class RemoteEndpoint:
    """The same in another process. `kill`, `stop` and `go_on` act on that process."""

    def __init__(self, setup: Setup) -> None:
        context = multiprocessing.get_context("spawn")
        self.setup, self.layout = setup, setup.layout
        self._conn, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, setup), daemon=True)
        self.process.start()
        theirs.close()

    def __enter__(self) -> RemoteEndpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.is_alive():
            os.kill(self.process.pid or 0, signal.SIGCONT)
            self.process.kill()
        self.process.join()
        self._conn.close()

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self._conn.send((method, args, kwargs))
        assert self._conn.poll(WAIT + 5), f"{method} of the other process did not return"
        ok, value = self._conn.recv()
        assert ok, value
        return value

    def fill(self, seed: int) -> None:
        self.call("fill", seed)

    def submit(self, *commands: TransferCommand) -> None:
        self.call("submit", *commands)

    def wait(self, kind: type[E], **match: Any) -> E:
        event: E = self.call("wait", kind, **match)
        return event

    def descriptors(self) -> Any:
        return self.call("descriptors")

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def stop(self) -> None:
        os.kill(self.process.pid or 0, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.process.pid or 0, signal.SIGCONT)


def _serve(conn: multiprocessing.connection.Connection, setup: Setup) -> None:
    endpoint = Endpoint(setup)
    while True:
        method, args, kwargs = conn.recv()
        try:
            answer = (True, getattr(endpoint, method)(*args, **kwargs))
        except Exception as exc:
            answer = (False, repr(exc))
        conn.send(answer)


def connect(link_id: int, prefill: Endpoint | RemoteEndpoint, decode: Endpoint | RemoteEndpoint) -> LinkOpened:
    """Opens a link and waits until both ends have it; returns what prefill was told."""
    prefill.submit(dial(link_id, prefill, decode))
    opened = prefill.wait(LinkOpened, link_id=link_id)
    decode.wait(LinkOpened, link_id=link_id)
    return opened


def dial(link_id: int, prefill: Endpoint | RemoteEndpoint, decode: Endpoint | RemoteEndpoint, **change: Any) -> Connect:
    """The command by which `prefill` connects to `decode`, which is told to expect it."""
    decode.submit(ExpectLink(prefill.setup.incarnation, PAIR_SECRET))
    fields: dict[str, Any] = {
        "link_id": link_id,
        "peer_incarnation": decode.setup.incarnation,
        "peer_instance": decode.setup.instance,
        "layout": decode.layout,
        "descriptors": change.pop("descriptors", None) or decode.descriptors(),
        "transport": "auto",
        "secret": PAIR_SECRET,
    }
    return Connect(**{**fields, **change})


def prepare(link_id: int, session: SessionId, *blocks: int) -> PrepareReceive:
    return PrepareReceive(link_id, session, (blocks,), expected_bytes=0)


def push(link_id: int, session: SessionId, push_id: int, src: tuple[int, ...], dst: tuple[int, ...]) -> Push:
    return Push(link_id, session, push_id, (src,), (dst,))
