"""TransferService, prefill side: negotiates how KV travels, opens links, proves quiet.

Called once per pair of incarnations by decode; the link it returns is up at this end.
"""

from __future__ import annotations

from typing import Any

import grpc

from engine_core.types.errors import InvalidRequestError, Leg, NotFoundError
from engine_core.types.ids import Incarnation
from pdmesh.transfer.v1 import transfer_service_pb2, transfer_service_pb2_grpc
from services.prefill.links import PrefillLinks
from services.prefill.peers import DecodePeers
from services.wire.common import checked_int, checked_size, checked_text, session_from_proto, session_to_proto
from services.wire.transfer import MAX_DESCRIPTORS, descriptor_from_proto, layout_from_proto
from services.worker.engine_client import EngineClient
from services.worker.identity import WorkerIdentity

MAX_SESSIONS = 100_000
PAIR_SECRET_BYTES = 32


class TransferServicer(transfer_service_pb2_grpc.TransferServiceServicer):
    """Serves NegotiateLayout and Quiesce."""

    def __init__(self, engine: EngineClient, identity: WorkerIdentity, links: PrefillLinks, peers: DecodePeers) -> None:
        self._engine, self._identity, self._links, self._peers = engine, identity, links, peers

    async def NegotiateLayout(
        self, request: transfer_service_pb2.NegotiateLayoutRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> transfer_service_pb2.NegotiateLayoutResponse:
        """Opens the pair's link, or returns the one that is up. Raises FencedError for another incarnation
        or fingerprint (naming the part that differs), InvalidRequestError, UnavailableError (leg transfer; leg decode
        when the caller is not in the rank table)."""
        self._identity.check_incarnation(request.prefill_incarnation)
        peer = Incarnation(checked_int(request.decode_incarnation, "decode_incarnation", 1))
        instance = checked_text(request.decode_instance, "decode_instance", empty=False)
        if not request.fingerprint:
            raise InvalidRequestError("fingerprint is missing", leg=Leg.PREFILL, field="fingerprint")
        checked_text(request.fingerprint, "fingerprint")
        secret = request.pair_secret
        if len(secret) != PAIR_SECRET_BYTES:
            raise InvalidRequestError(
                f"pair_secret has {len(secret)} bytes, must have {PAIR_SECRET_BYTES}",
                leg=Leg.PREFILL,
                field="pair_secret",
            )
        if len(request.ranks) != 1:
            raise InvalidRequestError(
                f"ranks has {len(request.ranks)} entries; this worker pushes to one rank",
                leg=Leg.PREFILL,
                field="ranks",
            )
        rank = request.ranks[0]
        checked_size(rank.descriptors, "ranks[0].descriptors", MAX_DESCRIPTORS)
        if not rank.descriptors:
            raise InvalidRequestError("ranks[0].descriptors is empty", leg=Leg.PREFILL, field="ranks[0].descriptors")
        layout = layout_from_proto(rank.layout, "ranks[0].layout")
        descriptors = tuple(
            descriptor_from_proto(d, f"ranks[0].descriptors[{i}]") for i, d in enumerate(rank.descriptors)
        )
        transport = checked_text(request.transport, "transport", 32)
        row = await self._peers.find(peer)
        self._identity.check_fingerprint(request.fingerprint, row.instance.fingerprint_parts)
        up = await self._links.open(peer, instance, layout, descriptors, transport, secret)
        return transfer_service_pb2.NegotiateLayoutResponse(
            link_id=up.link_id, transport=up.transport, reason=up.reason
        )

    async def Quiesce(
        self, request: transfer_service_pb2.QuiesceRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> transfer_service_pb2.QuiesceResponse:
        """Names sessions that are proved quiet because all their KV arrived. For any other session the proof
        is the link's QUIET; it is not claimed here."""
        self._identity.check_incarnation(request.prefill_incarnation)
        checked_size(request.sessions, "sessions", MAX_SESSIONS)
        if request.link_id and self._engine.link(request.link_id) is None:
            raise NotFoundError(f"link {request.link_id:x} is not open", leg=Leg.TRANSFER, field="link_id")
        asked = tuple(session_from_proto(s, f"sessions[{i}]") for i, s in enumerate(request.sessions))
        quiet = self._links.quiet(request.link_id, asked)
        return transfer_service_pb2.QuiesceResponse(quiet=[session_to_proto(session) for session in quiet])
