"""Client channels, one per endpoint, shared by all calls of a process.

Ask the pool for a channel each time; don't keep one. A channel that nobody asked for in `idle_seconds`
and nobody holds with use() is closed, so endpoints of workers that are long gone don't pile up. Closing
cancels calls: that is why the idle time is longer than any request, and longer streams go through use().

With `security` channels show the mesh's token and this process's certificate. When the certificate changes, the next
to ask gets a new channel; calls on the former one go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from services.runtime.security import Security
from services.runtime.tasks import TaskOwner

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
KEEPALIVE_MS = 5_000
_RECONNECT_MS = 1_000


def channel_options(connect_timeout: float) -> list[tuple[str, Any]]:
    """Options of every client channel: keepalive 5 s + 5 s, reconnects at least once a second."""
    return [
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
        # What ends a connection whose other process stands still: the timeout above alone does not.
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", _RECONNECT_MS),
        # The time one connection attempt may take.
        ("grpc.min_reconnect_backoff_ms", int(connect_timeout * 1000)),
        # Retrying is decided above, where it is known whether a call has begun to act.
        ("grpc.enable_retries", 0),
        # One channel's back-off is not another's.
        ("grpc.use_local_subchannel_pool", 1),
        # Mesh traffic never goes through a proxy that the environment names.
        ("grpc.enable_http_proxy", 0),
    ]


class _Entry:
    __slots__ = ("channel", "generation", "last_asked", "users")

    def __init__(self, channel: grpc.aio.Channel, generation: int, now: float) -> None:
        self.channel, self.generation, self.last_asked, self.users = channel, generation, now, 0


class ChannelPool:
    """Channels by endpoint ("host:port" or "unix:path"). Used on one event loop only."""

    def __init__(
        self,
        connect_timeout: float = 2.0,
        *,
        security: Security | None = None,
        idle_seconds: float = 900.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = channel_options(connect_timeout)
        self._security = security if security is not None else Security()
        self._idle_seconds = idle_seconds
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._former: list[_Entry] = []
        """Channels with a certificate of before, for the calls that run on them."""
        self._tasks = TaskOwner("channels")

    def get(self, endpoint: str) -> grpc.aio.Channel:
        """The channel to `endpoint`; a new one does not connect before its first call."""
        return self._entry(endpoint).channel

    @contextmanager
    def use(self, endpoint: str) -> Iterator[grpc.aio.Channel]:
        """As get(), and keeps the channel open for as long as the block runs."""
        entry = self._entry(endpoint)
        entry.users += 1
        try:
            yield entry.channel
        finally:
            entry.users -= 1
            entry.last_asked = self._clock()

    @property
    def endpoints(self) -> frozenset[str]:
        """Endpoints that have a channel now."""
        return frozenset(self._entries)

    async def close(self) -> None:
        """Closes all channels; calls that still run are cancelled."""
        await self._tasks.close()
        entries = [*self._entries.values(), *self._former]
        self._entries, self._former = {}, []
        for entry in entries:
            await entry.channel.close(None)

    def _entry(self, endpoint: str) -> _Entry:
        now, generation = self._clock(), self._security.channel_generation
        entry = self._entries.get(endpoint)
        if entry is None or entry.generation != generation:
            self._evict(now)
            if entry is not None:
                self._former.append(entry)
            entry = _Entry(self._security.channel(endpoint, self._options), generation, now)
            self._entries[endpoint] = entry
        entry.last_asked = now
        return entry

    def _evict(self, now: float) -> None:
        for endpoint, entry in list(self._entries.items()):
            if self._idle(entry, now):
                del self._entries[endpoint]
                self._tasks.spawn(_close(entry.channel), f"close {endpoint}")
        for entry in [former for former in self._former if self._idle(former, now)]:
            self._former.remove(entry)
            self._tasks.spawn(_close(entry.channel), "close a former channel")

    def _idle(self, entry: _Entry, now: float) -> bool:
        return entry.users == 0 and now - entry.last_asked > self._idle_seconds


async def _close(channel: grpc.aio.Channel) -> None:
    await channel.close(None)
