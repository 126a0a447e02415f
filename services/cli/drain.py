"""`pdmesh drain INSTANCE...`: takes workers out of the mesh without an error for anybody.

The worker leaves placement at once and takes no new sessions. Those that it has end by themselves; what is
left at --limit is handed over: its streams go on at another pair. It then stays as it is, out of placement,
until --stop, or `pdmesh role` brings it back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from pdmesh.bootstrap.v1 import rank_table_pb2
from pdmesh.common.v1 import worker_pb2
from services.cli.fleet import Fleet, fleet, follow
from services.cli.options import add_command, query_fields
from services.config import QueryConfig, load
from services.runtime.tasks import run

_WAIT = 3600.0


def add_command_to(app: typer.Typer) -> None:
    """Adds `drain`."""
    names = Annotated[list[str], typer.Argument(metavar="INSTANCE...", help="Names in the rank table")]
    limit = Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0.0, help="Hand over what is left then; without it, wait for all"),
    ]
    force = Annotated[
        bool, typer.Option("--force", help="Hand over at the limit even when no other pair of the fingerprint is ready")
    ]
    stop = Annotated[bool, typer.Option("--stop", help="End the process once it is drained")]
    wait = Annotated[bool, typer.Option("--wait", help="Return when it is drained; with --stop, when it has left")]
    timeout = Annotated[float, typer.Option(metavar="SECONDS", min=0.0, help="How long --wait waits")]
    extras = {
        "instances": (names, ...), "limit": (limit, None), "force": (force, False), "stop": (stop, False),
        "wait": (wait, False), "timeout": (timeout, _WAIT),
    }  # fmt: skip
    doc = "Take workers out of placement and let their sessions end, or hand them over at --limit."
    add_command(app, "drain", query_fields(), _command, doc=doc, extras=extras)


def _command(file: Path | None, flags: dict[str, Any], extra: dict[str, Any]) -> int:
    config = load(QueryConfig, file=file, flags=flags)
    return run(lambda _stop: drain(config, **extra))


async def drain(
    config: QueryConfig,
    instances: list[str],
    *,
    limit: float | None,
    force: bool,
    stop: bool,
    wait: bool,
    timeout: float,
) -> int:
    """Gives the orders, and waits if told to. Returns the exit code: 1 when something was not drained in time.

    Raises NotFoundError for an instance that is not there, before any order is given; PdmeshError of a worker
    that refuses.
    """
    async with fleet(config) as mesh:
        rows = {name: await mesh.leaders(name) for name in dict.fromkeys(instances)}
        for name, leaders in rows.items():
            for row in leaders:
                request = worker_pb2.DrainWorkerRequest(
                    limit_seconds=limit, force=force, stop=stop, incarnation=row.incarnation
                )
                answer = await mesh.order(row, "DrainWorker", request)
                print(f"{name}: drains {answer.sessions} sessions", flush=True)
                if answer.last_pair and not force:
                    print(
                        f"{name}: no other pair of its fingerprint is ready: new requests find nobody, and its own "
                        "sessions are waited for; add a pair, or use --force to hand them over at --limit",
                        flush=True,
                    )
        if not wait:
            return 0

        async def look(name: str) -> tuple[bool, str]:
            return await _drained(mesh, rows[name], stop=stop)

        left = await follow(list(rows), look, timeout, lambda line: print(line, flush=True))
    for name in left:
        print(f"{name}: not drained within {timeout:g} s", flush=True)
    return 1 if left else 0


async def _drained(mesh: Fleet, leaders: list[rank_table_pb2.RankRow], *, stop: bool) -> tuple[bool, str]:
    """Whether all leaders are drained, or gone, and what the first one that is not waits for."""
    for row in leaders:
        stats = await mesh.stats(row)
        if stats is None:
            continue  # it has ended
        if stop or not stats.drained:
            return False, stats.drain_note.partition(", at most")[0]
    return True, "has ended" if stop else "drained"
