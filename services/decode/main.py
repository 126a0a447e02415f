"""A decode worker's service process; with role MIXED one that serves alone."""

from __future__ import annotations

import grpc

from engine_core.types.errors import Leg
from engine_core.types.request import Role
from pdmesh.decode.v1 import decode_service_pb2_grpc
from services.decode.peers import PrefillPeers
from services.decode.servicer import DecodeServicer
from services.worker.late import LateServicer
from services.worker.life import WorkerParts
from services.worker.links import DecodeLinks


class DecodeServices:
    """DecodeService, and for a DECODE instance what finds prefill workers and keeps links to them."""

    names = ("pdmesh.decode.v1.DecodeService",)

    def __init__(self) -> None:
        self._decode = LateServicer(Leg.DECODE)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds the service; it refuses until connect()."""
        decode_service_pb2_grpc.add_DecodeServiceServicer_to_server(self._decode, server)

    def connect(self, parts: WorkerParts) -> None:
        """The engine is ready."""
        peers = links = None
        if parts.identity.role is Role.DECODE:
            watcher = parts.watcher
            peers = PrefillPeers(parts.identity, lambda: watcher.roster.leaders(Role.PREFILL))
            links = DecodeLinks(
                parts.engine,
                parts.identity,
                parts.channels,
                parts.tasks,
                transport=parts.config.transfer_backend,
                connect_timeout=parts.config.connect_timeout,
            )
            watcher.on_change(peers.poke)
            watcher.on_change(links.poke)
            parts.tasks.spawn(links.keep(lambda: watcher.roster.leaders(Role.PREFILL)), "keep links")
        self._decode.set(
            DecodeServicer(
                parts.engine,
                parts.identity,
                parts.sessions,
                parts.session_tasks,
                parts.channels,
                peers=peers,
                links=links,
                token_stall_timeout=parts.config.token_stall_timeout,
                observer=parts.observer,
            )
        )
