"""What prefill and decode workers run: one main for every role, since a worker may change its role while it lives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine_core.types.request import Role
from services.config import WorkerConfig
from services.runtime.tasks import Stop
from services.worker.build import run_worker
from services.worker.life import RoleServices


def services_of(role: Role) -> RoleServices:
    """The services of a role, fresh ones for each life."""
    if role is Role.PREFILL:
        from services.prefill.main import PrefillServices

        return PrefillServices()
    from services.decode.main import DecodeServices

    return DecodeServices()


async def run(config: WorkerConfig, stop: Stop, on_ready: Callable[[dict[str, Any]], None]) -> None:
    """Runs a worker to its end; it begins in the role of its configuration. See run_worker."""
    await run_worker(config, stop, on_ready, services_of)
