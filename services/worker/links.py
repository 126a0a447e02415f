"""Links of a decode worker: one per prefill incarnation, negotiated once, reused while up.

    row READY      a link is opened ahead of the first request
    ensure()       the link of a pair, for a request; negotiates when there is none, single-flight
    LinkDown       the pair is forgotten; the next request, or the keeper, negotiates anew

A link counts as up when this end's engine says so, never by the peer's answer alone.

Each pair of incarnations has a secret, minted here: this end's engine takes links of the peer by it alone, and the
peer sessions over them.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol

import grpc

from engine_core.host import frames
from engine_core.lifecycle.membership import MembershipState
from engine_core.types.digest import session_proof
from engine_core.types.errors import Leg, PdmeshError, UnavailableError
from engine_core.types.ids import Incarnation, RankCoord, SessionId
from engine_core.types.request import Role
from pdmesh.transfer.v1 import transfer_service_pb2, transfer_service_pb2_grpc
from services.runtime.channels import ChannelPool
from services.runtime.errors import from_rpc_error
from services.runtime.tasks import TaskOwner
from services.wire.bootstrap import RankRow
from services.wire.common import coord_to_proto
from services.wire.transfer import descriptor_to_proto, layout_to_proto
from services.worker.engine_client import EngineClient
from services.worker.identity import WorkerIdentity

logger = logging.getLogger(__name__)

RETRY_SECONDS = 5.0
"""How often the keeper tries a READY row again to which no link could be opened."""

_DEAD_KEPT = 1_000
_SECRETS_KEPT = 4_096
_SECRET_BYTES = 32
_STALE_TRIES = 10
_STALE_PAUSE = 0.05


class PrefillPeer(Protocol):
    """What a link needs to know of its other end; RankRow has it."""

    @property
    def endpoint(self) -> str: ...

    @property
    def incarnation(self) -> int: ...


class DecodeLinks:
    """Links by prefill incarnation."""

    def __init__(
        self,
        engine: EngineClient,
        identity: WorkerIdentity,
        channels: ChannelPool,
        tasks: TaskOwner,
        *,
        transport: str = "auto",
        connect_timeout: float = 2.0,
    ) -> None:
        self._engine, self._identity, self._channels, self._tasks = engine, identity, channels, tasks
        self._transport, self._connect_timeout = transport, connect_timeout
        self._opening: dict[int, asyncio.Task[int | PdmeshError]] = {}
        self._by_peer: dict[int, int] = {}
        self._dead: OrderedDict[int, None] = OrderedDict()
        self._secrets: OrderedDict[int, bytes] = OrderedDict()
        self._changed = asyncio.Event()
        engine.add_link_listener(self._on_link)

    def up(self, incarnation: int) -> int | None:
        """The link to a prefill incarnation while it is up."""
        return self._by_peer.get(incarnation)

    def proof(self, peer: PrefillPeer, link_id: int, session: SessionId) -> bytes:
        """Shows the peer that a session over the pair's link comes from its other end."""
        return session_proof(self._secret(peer.incarnation), link_id, session.room, session.attempt)

    def _secret(self, incarnation: int) -> bytes:
        """The secret of a pair; the engine is told when it is minted, before the peer can know it."""
        secret = self._secrets.get(incarnation)
        if secret is None:
            secret = self._secrets[incarnation] = secrets.token_bytes(_SECRET_BYTES)
            while len(self._secrets) > _SECRETS_KEPT:
                self._secrets.popitem(last=False)
            self._engine.expect_peer(Incarnation(incarnation), secret)
        return secret

    async def ensure(self, peer: PrefillPeer) -> int:
        """The id of the pair's link; negotiates one when there is none.

        Raises what NegotiateLayout failed with (leg prefill or transfer), UnavailableError (leg transfer)
        when this end does not see the link within connect_timeout + 3 s.
        """
        link_id = self._by_peer.get(peer.incarnation)
        if link_id is not None:
            return link_id
        task = self._opening.get(peer.incarnation)
        if task is None:
            task = self._tasks.spawn(self._open(peer), f"negotiate {peer.incarnation}")
            self._opening[peer.incarnation] = task
        # Others may wait for the same link: one caller's cancel must not end it.
        outcome = await asyncio.shield(task)
        if isinstance(outcome, PdmeshError):
            raise outcome
        return outcome

    async def keep(self, rows: Callable[[], Iterable[RankRow]]) -> None:
        """Opens links to every READY prefill row of the own fingerprint; runs until cancelled.

        poke() makes it look at `rows()` again.
        """
        while True:
            self._changed.clear()
            missing = [row for row in rows() if self._wanted(row) and row.incarnation not in self._by_peer]
            await asyncio.gather(*(self._try(row) for row in missing))
            try:
                async with asyncio.timeout(RETRY_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _try(self, row: RankRow) -> None:
        try:
            await self.ensure(row)
        except PdmeshError as exc:
            logger.warning("no link to %s yet: %s", row.instance.name, exc)

    def poke(self) -> None:
        """The rank table changed."""
        self._changed.set()

    def _wanted(self, row: RankRow) -> bool:
        return (
            row.instance.role is Role.PREFILL
            and row.is_leader
            and row.state is MembershipState.READY
            and row.instance.fingerprint == self._identity.fingerprint
        )

    async def _open(self, peer: PrefillPeer) -> int | PdmeshError:
        try:
            return await self._negotiate(peer)
        except PdmeshError as exc:
            return exc
        finally:
            self._opening.pop(peer.incarnation, None)

    async def _negotiate(self, peer: PrefillPeer) -> int:
        limit = self._connect_timeout + 3.0
        for _ in range(_STALE_TRIES):
            link_id = await self._ask(peer, limit + self._connect_timeout)
            if link_id not in self._dead:
                await self._engine.wait_link(link_id, limit)
                if self._engine.link(link_id) is not None:
                    self._by_peer[peer.incarnation] = link_id
                    return link_id
            # The link ended, and the peer has not seen it yet.
            await asyncio.sleep(_STALE_PAUSE)
        raise UnavailableError(
            "the peer keeps offering a link that ended",
            leg=Leg.TRANSFER,
            reason="LINK_DOWN",
            peer_incarnation=peer.incarnation,
        )

    async def _ask(self, peer: PrefillPeer, timeout: float) -> int:
        ready = self._identity.ready
        rank = transfer_service_pb2.RankEndpoint(
            coord=coord_to_proto(RankCoord()),
            layout=layout_to_proto(ready.layout),
            descriptors=[descriptor_to_proto(descriptor) for descriptor in ready.descriptors],
        )
        request = transfer_service_pb2.NegotiateLayoutRequest(
            decode_instance=self._identity.instance,
            decode_incarnation=self._identity.incarnation,
            prefill_incarnation=peer.incarnation,
            fingerprint=self._identity.fingerprint,
            transport=self._transport,
            ranks=[rank],
            pair_secret=self._secret(peer.incarnation),
        )
        with self._channels.use(peer.endpoint) as channel:
            stub = transfer_service_pb2_grpc.TransferServiceStub(channel)
            try:
                answer = await stub.NegotiateLayout(request, timeout=timeout)
            except grpc.aio.AioRpcError as exc:
                error = from_rpc_error(exc, Leg.PREFILL)
                error.peer_incarnation = error.peer_incarnation or peer.incarnation
                raise error from exc
        return int(answer.link_id)

    def _on_link(self, frame: frames.LinkUp | frames.LinkDown) -> None:
        if isinstance(frame, frames.LinkUp):
            return
        self._dead[frame.link_id] = None
        while len(self._dead) > _DEAD_KEPT:
            self._dead.popitem(last=False)
        if self._by_peer.get(frame.peer_incarnation) == frame.link_id:
            del self._by_peer[frame.peer_incarnation]
            self._changed.set()
