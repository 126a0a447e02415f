"""Who was refused by TLS: gRPC tells nobody. What it tells is that a handshake begins; so whoever was connected then,
is gone soon after and never made a call has not come through it.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

import psutil

_GRACE = 1.0
"""Seconds that a handshake and the first call after it may take before a connection that is gone is suspect."""

_BETWEEN = 0.05
"""Seconds between two looks at the connections: a peer that is refused comes again, and a crowd must not cost much."""

_PEER = re.compile(r"ipv[46]:(?:%5B|\[)?(.*?)(?:%25[^%]*)?(?:%5D|\])?:(\d+)$")

Address = tuple[str, int]


class Handshakes:
    """The connections of one port, from the time their handshake begins. begun() may be called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.port = 0
        """To be set once it is bound."""
        self._clock = clock
        self._lock = threading.Lock()
        self._looked = -1.0
        self._begun: dict[Address, float] = {}
        self._spoken: set[Address] = set()

    def begun(self) -> None:
        """A handshake begins."""
        now = self._clock()
        with self._lock:
            if not self.port or now - self._looked < _BETWEEN:
                return
            self._looked = now
        connected = connections(self.port)
        with self._lock:
            for address in connected - self._spoken:
                self._begun.setdefault(address, now)

    def spoke(self, peer: str) -> None:
        """A call came, of a peer as gRPC names it."""
        found = _PEER.match(peer)
        if found is None:
            return
        address = (found[1].removeprefix("::ffff:"), int(found[2]))
        with self._lock:
            self._begun.pop(address, None)
            self._spoken.add(address)

    def refused(self) -> list[str]:
        """Those, as host:port, that have come to nothing since the last time."""
        before = self._clock() - _GRACE
        with self._lock:
            due = [address for address, at in self._begun.items() if at <= before]
            if not due and len(self._spoken) < 1_000:
                return []
        connected = connections(self.port)
        with self._lock:
            self._spoken &= connected
            gone = [
                address for address in due if address not in connected and self._begun.pop(address, None) is not None
            ]
        return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in gone]


def connections(port: int) -> set[Address]:
    """The other ends of what is connected to a port of this process; none where that can't be seen."""
    try:
        found = psutil.Process().net_connections("tcp")
    except (psutil.Error, OSError):
        return set()
    return {
        (other.raddr.ip.removeprefix("::ffff:"), other.raddr.port)
        for other in found
        if other.raddr and other.laddr.port == port and other.status == psutil.CONN_ESTABLISHED
    }
