"""Links of a prefill worker: one per decode incarnation, opened when decode asks, reused while up.

The engine connects and owns the sockets; here is only which pair has which link. A link's end comes as
LinkDown from the engine and frees the pair to open a new one under a new id.

Each pair of incarnations has a secret, which decode mints and NegotiateLayout brings. The engines prove a link by it,
and whoever opens a session over the link: nobody else can bring a ticket for it.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections import OrderedDict

from engine_core.host import frames
from engine_core.types.digest import session_proof
from engine_core.types.errors import FencedError, Leg, PdmeshError, UnavailableError
from engine_core.types.ids import Incarnation, SessionId
from engine_core.types.kv import KvLayout, TransferDescriptor
from services.runtime.tasks import TaskOwner
from services.worker.engine_client import EngineClient

DELIVERED_KEPT = 10_000


class PrefillLinks:
    """Links by decode incarnation, single-flight."""

    def __init__(self, engine: EngineClient, tasks: TaskOwner, connect_timeout: float) -> None:
        self._engine, self._tasks = engine, tasks
        self._timeout = connect_timeout + 3.0
        self._opening: dict[int, asyncio.Task[frames.LinkUp | PdmeshError]] = {}
        self._up: dict[int, frames.LinkUp] = {}
        self._secrets: dict[int, bytes] = {}
        """Of the links that are up or being opened, by link id."""
        self._opening_secret: dict[int, bytes] = {}
        self._delivered: OrderedDict[SessionId, int] = OrderedDict()
        engine.add_link_listener(self._on_link)

    async def open(
        self,
        peer: Incarnation,
        instance: str,
        layout: KvLayout,
        descriptors: tuple[TransferDescriptor, ...],
        transport: str,
        secret: bytes,
    ) -> frames.LinkUp:
        """The pair's link; opens it when there is none. Raises UnavailableError (leg transfer), FencedError when
        the link was negotiated with another secret: then the caller is not its other end."""
        up = self._up.get(peer)
        known = self._opening_secret.get(peer) if up is None else self._secrets.get(up.link_id)
        if known is not None and not hmac.compare_digest(known, secret):
            raise _other_peer(f"the link to incarnation {peer} was negotiated with another secret")
        if up is not None:
            return up
        task = self._opening.get(peer)
        if task is None:
            frame = frames.ConnectLink(
                link_id=secrets.randbits(62) or 1,
                peer_incarnation=peer,
                peer_instance=instance,
                layout=layout,
                descriptors=descriptors,
                transport=transport or "auto",
                secret=secret,
            )
            self._opening_secret[peer] = self._secrets[frame.link_id] = secret
            task = self._tasks.spawn(self._connect(frame), f"link {peer}")
            self._opening[peer] = task
        # Others may wait for the same link: one caller's cancel must not end it.
        outcome = await asyncio.shield(task)
        if isinstance(outcome, PdmeshError):
            raise outcome
        return outcome

    async def _connect(self, frame: frames.ConnectLink) -> frames.LinkUp | PdmeshError:
        try:
            return await self._engine.connect_link(frame, self._timeout)
        except PdmeshError as exc:
            self._secrets.pop(frame.link_id, None)
            return exc
        finally:
            self._opening.pop(frame.peer_incarnation, None)
            self._opening_secret.pop(frame.peer_incarnation, None)

    def _on_link(self, frame: frames.LinkUp | frames.LinkDown) -> None:
        if isinstance(frame, frames.LinkUp):
            self._up[frame.peer_incarnation] = frame
            return
        self._secrets.pop(frame.link_id, None)
        if (up := self._up.get(frame.peer_incarnation)) is not None and up.link_id == frame.link_id:
            del self._up[frame.peer_incarnation]

    def check(self, link_id: int, peer: int, session: SessionId, proof: bytes) -> None:
        """Raises UnavailableError when the link is not up, FencedError when it is another peer's, or when the caller
        has not proved to be that peer."""
        up = self._engine.link(link_id)
        if up is None:
            raise UnavailableError(
                f"link {link_id:x} is not open", leg=Leg.TRANSFER, reason="LINK_DOWN", peer_incarnation=peer
            )
        if up.peer_incarnation != peer:
            raise _other_peer(f"link {link_id:x} belongs to incarnation {up.peer_incarnation}, not {peer}")
        secret = self._secrets.get(link_id, b"")
        if not hmac.compare_digest(proof, session_proof(secret, link_id, session.room, session.attempt)):
            raise _other_peer(f"the caller has not proved that link {link_id:x} is its own", "link_proof")

    def delivered(self, link_id: int, session: SessionId) -> None:
        """Remembers that all of a session's KV arrived: nothing of it is written any more."""
        self._delivered[session] = link_id
        while len(self._delivered) > DELIVERED_KEPT:
            self._delivered.popitem(last=False)

    def quiet(self, link_id: int, sessions: tuple[SessionId, ...]) -> tuple[SessionId, ...]:
        """Those of `sessions` whose KV all arrived over the link; all that are remembered when empty."""
        asked = sessions or tuple(self._delivered)
        return tuple(session for session in asked if self._delivered.get(session) == link_id)


def _other_peer(message: str, field: str = "") -> FencedError:
    return FencedError(message, leg=Leg.TRANSFER, reason="LINK_OF_OTHER_PEER", field=field)
