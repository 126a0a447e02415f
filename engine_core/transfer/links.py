"""The links of one process: which there are, which there were, and how a new one is dialled."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

from engine_core.config import DisaggConfig
from engine_core.transfer.base import Connect, LinkFigures
from engine_core.transfer.receiver import InboundLink
from engine_core.transfer.recent import Recent
from engine_core.transfer.sender import Sender
from engine_core.transfer.transport import Cancel, ConnectFailed, Dial, Interrupt, Transport, Writer

AUTO_ORDER = ("shm", "tcp")
"""What "auto" tries: the fastest first."""

_REMEMBERED = 65536
_SHOWN = 64


@dataclasses.dataclass(slots=True, eq=False)
class OutboundLink:
    """A link on which this process writes into a peer's pool. `writer` is set once it is up."""

    connect: Connect
    sender: Sender
    transport: str = ""
    writer: Writer | None = None
    watched: bool = False

    def figures(self, *, up: bool, reason: str) -> LinkFigures:
        """As the port reports them."""
        nbytes, seconds, failures = self.sender.counts()
        return LinkFigures(
            link_id=self.connect.link_id,
            peer_incarnation=self.connect.peer_incarnation,
            peer_instance=self.connect.peer_instance,
            transport=self.transport,
            reason=reason,
            up=up,
            bytes=nbytes,
            seconds=seconds,
            failures=failures,
        )


class Links:
    """The registry. Only the manager's loop changes it; `figures` may be asked from any thread."""

    def __init__(self) -> None:
        self.outbound: dict[int, OutboundLink] = {}
        self.inbound: dict[int, InboundLink] = {}
        self._ended: Recent[int, bool] = Recent(_REMEMBERED)
        self._past: Recent[int, LinkFigures] = Recent(_SHOWN)

    def taken(self, link_id: int) -> bool:
        """True for every link that is or was."""
        return link_id in self.outbound or link_id in self.inbound or link_id in self._ended

    def quiet_proved(self, link_id: int) -> bool:
        """True for a link that is gone, and whose other end can write no more."""
        return bool(self._ended.get(link_id))

    def end_outbound(self, link: OutboundLink, reason: str) -> None:
        """Forgets it, but for its number and figures."""
        link_id = link.connect.link_id
        del self.outbound[link_id]
        self._ended[link_id] = True
        self._past[link_id] = link.figures(up=False, reason=reason)

    def end_inbound(self, link: InboundLink, reason: str, *, quiet_proved: bool) -> None:
        """As end_outbound."""
        del self.inbound[link.link_id]
        self._ended[link.link_id] = quiet_proved
        self._past[link.link_id] = inbound_figures(link, up=False, reason=reason)

    def figures(self) -> tuple[LinkFigures, ...]:
        """Links that are up, and the last ones that were."""
        outbound = [
            link.figures(up=link.writer is not None, reason=link.writer.reason if link.writer else "connecting")
            for link in list(self.outbound.values())
        ]
        inbound = [inbound_figures(link, up=True, reason=link.reason) for link in list(self.inbound.values())]
        return tuple(itertools.chain(outbound, inbound, self._past.values()))


def inbound_figures(link: InboundLink, *, up: bool, reason: str) -> LinkFigures:
    """As the port reports them; shm bytes are counted by the writer alone."""
    return LinkFigures(
        link_id=link.link_id,
        peer_incarnation=link.peer_incarnation,
        peer_instance=link.hello.instance,
        transport=link.transport.name,
        reason=reason,
        up=up,
        bytes=link.bytes,
        failures=link.failures,
    )


class Dialler:
    """Opens links by the first transport that works."""

    def __init__(self, config: DisaggConfig, transports: Mapping[str, Transport]) -> None:
        self._config, self._transports = config, transports

    def candidates(self, asked: str) -> tuple[tuple[str, Transport], ...]:
        """(kind of descriptor, transport to connect with), in the order in which they are tried."""
        configured = self._config.transfer_backend
        choice = configured if configured != "auto" else asked or "auto"
        names = AUTO_ORDER if choice == "auto" else (choice,)
        known = [self._transports[name] for name in names if name in self._transports]
        return tuple((kind, transport) for transport in known for kind in transport.kinds)

    def dial(self, connect: Connect, interrupt: Interrupt, stop: Cancel) -> tuple[str, Writer]:
        """(name of the transport, writer). Blocks, in the push thread; raises ConnectFailed with every reason."""
        failures: list[str] = []
        for kind, transport in self.candidates(connect.transport):
            descriptor = next((d for d in connect.descriptors if d.transport == kind), None)
            if descriptor is None:
                failures.append(f"{kind}: the peer does not offer it")
                continue
            try:
                writer = transport.connect(
                    Dial(connect.link_id, connect.peer_incarnation, connect.secret, descriptor, interrupt, stop)
                )
            except ConnectFailed as exc:
                failures.append(exc.message)
                continue
            if failures:
                writer.reason = f"{writer.reason} ({'; '.join(failures)})"
            return transport.name, writer
        raise ConnectFailed("; ".join(failures) or f"transport {connect.transport!r} is not known here")
