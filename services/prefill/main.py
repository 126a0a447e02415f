"""A prefill worker's service process."""

from __future__ import annotations

import grpc

from engine_core.types.errors import Leg
from pdmesh.prefill.v1 import prefill_service_pb2_grpc
from pdmesh.transfer.v1 import transfer_service_pb2_grpc
from services.prefill.links import PrefillLinks
from services.prefill.peers import DecodePeers
from services.prefill.servicer import PrefillServicer
from services.prefill.transfer_servicer import TransferServicer
from services.worker.late import LateServicer
from services.worker.life import WorkerParts


class PrefillServices:
    """PrefillService and TransferService."""

    names = ("pdmesh.prefill.v1.PrefillService", "pdmesh.transfer.v1.TransferService")

    def __init__(self) -> None:
        self._prefill, self._transfer = LateServicer(Leg.PREFILL), LateServicer(Leg.PREFILL)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds both; they refuse until connect()."""
        prefill_service_pb2_grpc.add_PrefillServiceServicer_to_server(self._prefill, server)
        transfer_service_pb2_grpc.add_TransferServiceServicer_to_server(self._transfer, server)

    def connect(self, parts: WorkerParts) -> None:
        """The engine is ready."""
        links = PrefillLinks(parts.engine, parts.tasks, parts.config.connect_timeout)

        peers = DecodePeers(parts.watcher.roster.find_incarnation)
        parts.watcher.on_change(peers.poke)
        self._prefill.set(
            PrefillServicer(
                parts.engine,
                parts.identity,
                parts.sessions,
                links,
                peers,
                parts.session_tasks,
                observer=parts.observer,
            )
        )
        self._transfer.set(TransferServicer(parts.engine, parts.identity, links, peers))
