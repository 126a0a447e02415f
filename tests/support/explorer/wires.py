"""gRPC calls between processes.

Messages of a call are delayed at will. A call may be lost together with all that is in flight; both
ends then learn it, each at its own time. A client's cancel may overtake what it wrote before.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any, Protocol

OK = "OK"
CANCELLED = "CANCELLED"
UNAVAILABLE = "UNAVAILABLE"


class Process(Protocol):
    """What a call needs of the process at either end."""

    @property
    def running(self) -> bool:
        """Alive and not stopped."""

    @property
    def alive(self) -> bool:
        """Not dead; a stopped process is alive."""


class Peer(Protocol):
    """A handler at one end of a call."""

    def on_message(self, call: Call, message: Any) -> None:
        """The other end wrote."""

    def on_end(self, call: Call, status: str, detail: Any) -> None:
        """The call is over for this end; nothing follows."""


class End:
    """Wraps the last item of a direction."""

    __slots__ = ("detail", "status")

    def __init__(self, status: str, detail: Any = None) -> None:
        self.status, self.detail = status, detail


class Call:
    """One call. `client` and `server` are processes; handlers are set at both ends when opened."""

    def __init__(self, name: str, client: Process, server: Process, handler: Peer, rng: random.Random) -> None:
        self.name, self.client, self.server = name, client, server
        self._rng = rng
        self.client_handler: Peer = handler
        self.server_handler: Peer | None = None
        self.to_server: deque[Any] = deque()
        self.to_client: deque[Any] = deque()
        self.client_open = self.server_open = True
        self.state: Any = None
        if not server.alive:
            self.drop_side(server)

    @property
    def over(self) -> bool:
        """True when neither end has anything more to do."""
        return not (self.to_server or self.to_client or self.client_open or self.server_open)

    def write(self, message: Any) -> None:
        """The client writes."""
        if self.client_open and self.server_open and self._flows(self.to_server):
            self.to_server.append(message)

    def reply(self, message: Any) -> None:
        """The server writes."""
        if self.server_open and self.client_open and self._flows(self.to_client):
            self.to_client.append(message)

    def finish(self, status: str, detail: Any = None) -> None:
        """The server ends the call."""
        if not self.server_open:
            return
        self.server_open = False
        self.to_server.clear()
        if self.client_open and self._flows(self.to_client):
            self.to_client.append(End(status, detail))

    def cancel(self) -> None:
        """The client ends the call; what it wrote may be lost."""
        if not self.client_open:
            return
        self.client_open = False
        self.to_client.clear()
        if self.server_open and self._flows(self.to_server):
            self._cut(self.to_server)
            self.to_server.append(End(CANCELLED))

    def lose(self) -> None:
        """The connection breaks: a prefix of each direction arrives, then the end."""
        for queue, opened in ((self.to_server, self.server_open), (self.to_client, self.client_open)):
            if opened and self._flows(queue):
                self._cut(queue)
                queue.append(End(UNAVAILABLE))

    def drop_side(self, process: Process) -> None:
        """A process died: its end is gone, the other learns it later."""
        if process is self.client:
            self.lose()
            self.client_open = False
            self.to_client.clear()
        elif process is self.server:
            self.lose()
            self.server_open = False
            self.to_server.clear()

    def deliver_to_client(self) -> None:
        """The client reads one item."""
        item = self.to_client.popleft()
        if isinstance(item, End):
            self.client_open = False
            self.client_handler.on_end(self, item.status, item.detail)
        else:
            self.client_handler.on_message(self, item)

    def deliver_to_server(self) -> None:
        """The server reads one item."""
        item = self.to_server.popleft()
        handler = self.server_handler
        if isinstance(item, End):
            self.server_open = False
            if handler is not None:
                handler.on_end(self, item.status, item.detail)
        elif handler is not None:
            handler.on_message(self, item)

    def _cut(self, queue: deque[Any]) -> None:
        keep = self._rng.randint(0, len(queue))
        while len(queue) > keep:
            queue.pop()

    @staticmethod
    def _flows(queue: deque[Any]) -> bool:
        return not (queue and isinstance(queue[-1], End))
