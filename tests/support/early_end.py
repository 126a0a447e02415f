"""A prefill service that ends its streams while they are written to, in threads of its own.

with early_end(error) as service:
    call = Duplex(service.stub(channel).Prefill(timeout=20.0))
    await call.write(...)
    service.end(0.1)                 # blocks this thread, and with it the event loop: the status is here, unseen
    await call.write(...)            # fails
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from grpc_status import rpc_status

from engine_core.types.errors import PdmeshError
from pdmesh.prefill.v1 import prefill_service_pb2, prefill_service_pb2_grpc
from services.runtime.errors import to_rich_status

TIMEOUT = 20.0


class EarlyEnd(prefill_service_pb2_grpc.PrefillServiceServicer):
    """Says STARTED, and ends each stream with `error`, or well, when told to."""

    def __init__(self, error: PdmeshError | None) -> None:
        self._error = error
        self._began, self._go, self._over = threading.Event(), threading.Event(), threading.Event()
        self.endpoint = ""

    def Prefill(self, request_iterator: Any, context: Any) -> Iterator[prefill_service_pb2.PrefillResponse]:
        """One stream at a time. What is written is not read."""
        context.add_callback(self._over.set)
        self._began.set()
        yield prefill_service_pb2.PrefillResponse(started=prefill_service_pb2.Started())
        assert self._go.wait(TIMEOUT)
        if self._error is not None:
            context.abort_with_status(rpc_status.to_status(to_rich_status(self._error)))

    def end(self, pause: float) -> None:
        """Ends the stream, and blocks until its end was sent and `pause` seconds more, for it to arrive."""
        assert self._began.wait(TIMEOUT)
        self._go.set()
        assert self._over.wait(TIMEOUT)
        for event in (self._began, self._go, self._over):
            event.clear()
        time.sleep(pause)

    def close(self) -> None:
        """Lets a stream go that a test has left."""
        self._go.set()


@contextmanager
def early_end(error: PdmeshError | None) -> Iterator[EarlyEnd]:
    """The service on a port of loopback."""
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        service = EarlyEnd(error)
        prefill_service_pb2_grpc.add_PrefillServiceServicer_to_server(service, server)
        service.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield service
        finally:
            service.close()
            server.stop(None).wait(TIMEOUT)
