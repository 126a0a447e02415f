"""`pdmesh role INSTANCE PREFILL|DECODE|MIXED`: changes what a worker does, live.

The worker is drained, then the same process comes back at the same address under a new incarnation, with a
new engine. A drained worker comes back by its own role. A supervisor that has to restart the process later
starts it in the role of its command line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from engine_core.types.errors import ConfigError, NotFoundError, UnavailableError
from engine_core.types.request import Role
from pdmesh.bootstrap.v1 import rank_table_pb2
from pdmesh.common.v1 import worker_pb2
from services.cli.fleet import fleet, follow
from services.cli.options import add_command, query_fields
from services.config import QueryConfig, load
from services.runtime.tasks import run
from services.wire.common import role_to_proto

_WAIT = 600.0


def add_command_to(app: typer.Typer) -> None:
    """Adds `role`."""
    name = Annotated[str, typer.Argument(metavar="INSTANCE", help="Name in the rank table")]
    role = Annotated[str, typer.Argument(metavar="PREFILL|DECODE|MIXED", help="What it is to do")]
    limit = Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0.0, help="Hand over what is left then; else wait for all")
    ]
    force = Annotated[bool, typer.Option("--force", help="Even when nobody can serve its fingerprint meanwhile")]
    wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Return when it serves in that role")]
    timeout = Annotated[float, typer.Option(metavar="SECONDS", min=0.0, help="How long --wait waits")]
    extras = {
        "instance": (name, ...), "role": (role, ...), "limit": (limit, None), "force": (force, False),
        "wait": (wait, True), "timeout": (timeout, _WAIT),
    }  # fmt: skip
    doc = "Drain a worker and bring it back in another role, or a drained one in its own."
    add_command(app, "role", query_fields(), _command, doc=doc, extras=extras)


def _command(file: Path | None, flags: dict[str, Any], extra: dict[str, Any]) -> int:
    config = load(QueryConfig, file=file, flags=flags)
    try:
        role = Role(extra.pop("role").upper())
    except ValueError:
        raise ConfigError(f"the role must be one of {', '.join(Role)}", field="role") from None
    return run(lambda _stop: change_role(config, role=role, **extra))


async def change_role(
    config: QueryConfig, instance: str, *, role: Role, limit: float | None, force: bool, wait: bool, timeout: float
) -> int:
    """Orders the change, and waits for it if told to. Returns the exit code: 1 when it took too long.

    Raises NotFoundError when there is no such instance, PdmeshError of a worker that refuses.
    """
    async with fleet(config) as mesh:
        leaders = await mesh.leaders(instance)
        changing = []
        for row in leaders:
            request = worker_pb2.ChangeRoleRequest(
                role=role_to_proto(role), limit_seconds=limit, force=force, incarnation=row.incarnation
            )
            answer = await mesh.order(row, "ChangeRole", request)
            if answer.changed:
                changing.append(row)
                print(f"{instance}: drains {answer.sessions} sessions, then comes back as {role}", flush=True)
            else:
                print(f"{instance}: is {role} already", flush=True)
        if not wait or not changing:
            return 0

        async def look(name: str) -> tuple[bool, str]:
            for row in changing:
                stats = await mesh.stats(row)
                if stats is not None:
                    return False, stats.drain_note.partition(", at most")[0]
            try:
                now = await mesh.leaders(name)
            except (NotFoundError, UnavailableError):
                return False, "starts"
            old = {row.incarnation for row in changing}
            if any(_waits(row, role, old) for row in now):
                return False, "starts"
            return True, f"serves as {role}"

        left = await follow([instance], look, timeout, lambda line: print(line, flush=True))
    if left:
        print(f"{instance}: does not serve as {role} after {timeout:g} s", flush=True)
    return 1 if left else 0


def _waits(row: rank_table_pb2.RankRow, role: Role, old: set[int]) -> bool:
    return (
        row.incarnation in old
        or row.instance.role != role_to_proto(role)
        or row.state != rank_table_pb2.MEMBERSHIP_STATE_READY
    )
