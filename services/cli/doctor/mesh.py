"""The mesh: what its processes say of each other, and of themselves. gather() asks, judge() is pure."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import grpc
import httpx

from engine_core.lifecycle.membership import MembershipState
from engine_core.types.errors import Leg, UnavailableError
from engine_core.types.request import Role
from pdmesh.common.v1 import worker_pb2, worker_pb2_grpc
from services.cli.doctor.findings import Finding, error, ok, warning
from services.cli.routers import Trouble, http_client, trouble
from services.cli.status import get_table
from services.config import QueryConfig
from services.runtime.channels import ChannelPool
from services.runtime.errors import from_rpc_error
from services.runtime.security import Security
from services.wire.bootstrap import RankRow, RowKey, differing_parts, http_url, row_from_proto

_SKEW = 1.0
"""Seconds between two clocks that are worth a word: ages and incarnations are compared across machines."""
_BAD_SKEW = 30.0
_QUARANTINE = 0.25
_LAG = 0.1
_UNEQUAL = 4.0


@dataclass(frozen=True)
class Worker:
    """One worker as it answered. `skew` is its clock less ours, in seconds."""

    row: RankRow
    stats: worker_pb2.GetStatsResponse | None
    error: str = ""
    skew: float = 0.0

    @property
    def name(self) -> str:
        """Of the instance."""
        return self.row.instance.name


@dataclass
class Seen:
    """Everything that was asked for."""

    bootstraps: dict[str, list[RankRow] | str] = field(default_factory=dict)
    """The rows of each, or why there are none."""
    workers: list[Worker] = field(default_factory=list)
    routers: dict[str, Trouble | None] = field(default_factory=dict)
    """By address: why one is not ready; None when it is."""


async def gather(config: QueryConfig) -> Seen:
    """Asks every Bootstrap, every worker in any of their tables, and every router that watches."""
    seen = Seen()
    pool = ChannelPool(config.query_timeout, security=Security.of(config))
    endpoints: set[str] = set()
    try:
        for address in config.bootstrap:
            try:
                table = await get_table(pool, address, config.query_timeout)
                seen.bootstraps[address] = [row_from_proto(row) for row in table.rows]
                endpoints |= {s.http_endpoint for s in table.services if s.http_endpoint}
            except UnavailableError as exc:
                seen.bootstraps[address] = exc.message
        rows = {row.key: row for found in seen.bootstraps.values() if isinstance(found, list) for row in found}
        asked = (_ask(pool, row, config.query_timeout) for _, row in sorted(rows.items()))
        seen.workers = list(await asyncio.gather(*asked))
        seen.routers = await _ask_routers(sorted(endpoints), config)
    finally:
        await pool.close()
    return seen


async def _ask(pool: ChannelPool, row: RankRow, timeout: float) -> Worker:
    stub = worker_pb2_grpc.WorkerServiceStub(pool.get(row.endpoint))
    before = time.time()
    try:
        stats = await stub.GetStats(worker_pb2.GetStatsRequest(), timeout=timeout)
    except grpc.aio.AioRpcError as exc:
        return Worker(row, None, f"{exc.code().name}: {from_rpc_error(exc, Leg.UNKNOWN).message}")
    skew = stats.unix_seconds - (before + time.time()) / 2 if stats.unix_seconds else 0.0
    return Worker(row, stats, skew=skew)


async def _ask_routers(endpoints: Sequence[str], config: QueryConfig) -> dict[str, Trouble | None]:
    async with http_client(config.query_timeout, config.http_ca) as client:

        async def ask(endpoint: str) -> Trouble | None:
            try:
                answer = await client.get(f"{http_url(endpoint)}/readiness")
            except httpx.HTTPError as exc:
                why = trouble(exc)
                return Trouble(f"does not answer: {why.what}", why.advice)
            return None if answer.status_code == 200 else Trouble(f"is not ready: {answer.text[:200]}")

        return dict(zip(endpoints, await asyncio.gather(*map(ask, endpoints)), strict=True))


def judge(seen: Seen, version: str) -> Iterator[Finding]:
    """What is wrong in what was seen. `version` is this pdmesh's."""
    answering = [address for address, found in seen.bootstraps.items() if isinstance(found, list)]
    yield from _bootstraps(seen)
    if not answering:
        return
    yield from _answers(seen.workers)
    yield from _clocks(seen.workers)
    yield from _versions(seen.workers, version)
    yield from _pairs(seen.workers)
    yield from _pools(seen.workers)
    yield from _transfers(seen.workers)
    yield from _routers(seen.routers)


def _bootstraps(seen: Seen) -> Iterator[Finding]:
    tables: dict[str, set[RowKey]] = {}
    for address, found in seen.bootstraps.items():
        if isinstance(found, str):
            yield error(
                "bootstrap", found, "start it, or put --bootstrap right; a mesh token or TLS it may ask for too"
            )
        else:
            tables[address] = {row.key for row in found if row.state is not MembershipState.LOST}
            yield ok("bootstrap", f"{address} answers and knows {len(found)} workers")
    every = set().union(*tables.values()) if tables else set()
    for address, keys in tables.items():
        if lacking := sorted({key.instance for key in every - keys}):
            yield warning(
                "bootstrap",
                f"{address} does not know {', '.join(lacking)}, which others do",
                "give every worker all Bootstraps (--bootstrap, once for each)",
            )


def _answers(workers: Sequence[Worker]) -> Iterator[Finding]:
    well = 0
    for worker in workers:
        state = worker.row.state.value
        if worker.stats is None:
            advice = "see its log; from this machine its advertised address must be reachable (--advertise-host)"
            yield error(
                "workers", f"{worker.name} at {worker.row.endpoint} ({state}) does not answer: {worker.error}", advice
            )
        elif worker.row.state is MembershipState.DRAINING:
            note = worker.stats.drain_note or "it takes no new requests"
            yield warning(
                "workers", f"{worker.name} is draining: {note}", "wait, or `pdmesh drain --stop`, or `pdmesh role`"
            )
        elif worker.row.state is not MembershipState.READY:
            yield warning(
                "workers", f"{worker.name} is {state}", "see its log: it loads its model, or its lease has lapsed"
            )
        elif worker.stats.stalled_seconds > 5.0:
            what = f"{worker.name} has work but its engine stands still for {worker.stats.stalled_seconds:.0f} s"
            yield error("workers", what, "its watchdog ends it; see its log for what the engine did last")
        else:
            well += 1
        if worker.stats is not None and worker.stats.loop_lag_p99_seconds > _LAG:
            lag = worker.stats.loop_lag_p99_seconds * 1e3
            yield warning(
                "workers",
                f"{worker.name}'s service process lags {lag:.0f} ms",
                "give it a core that engines leave free",
            )
    if well:
        yield ok("workers", f"{well} of {len(workers)} are ready and answer")


def _clocks(workers: Sequence[Worker]) -> Iterator[Finding]:
    skews = [(worker, worker.skew) for worker in workers if worker.stats is not None and worker.stats.unix_seconds]
    off = [(w, s) for w, s in skews if abs(s) > _SKEW]
    for worker, skew in off:
        what = f"the clock of {worker.name} ({worker.row.host or worker.row.endpoint}) is {skew:+.1f} s off this one's"
        advice = "keep clocks in step (chrony, ntpd)"
        yield (error if abs(skew) > _BAD_SKEW else warning)("clock", what, advice)
    if skews and not off:
        yield ok("clock", f"all workers' clocks are within {_SKEW:g} s of this one's")


def _versions(workers: Sequence[Worker], own: str) -> Iterator[Finding]:
    versions = Counter(worker.row.instance.version or "unknown" for worker in workers)
    if len(versions) > 1:
        told = ", ".join(f"{version} ({count})" for version, count in sorted(versions.items()))
        yield warning("versions", f"workers run {told}", "right during an upgrade; else bring the old ones up to date")
    elif versions and own not in versions:
        yield warning(
            "versions", f"workers run {next(iter(versions))}, this command {own}", "use the mesh's version of pdmesh"
        )
    elif versions:
        yield ok("versions", f"all run {own}")


def _pairs(workers: Sequence[Worker]) -> Iterator[Finding]:
    ready = [w.row for w in workers if w.row.state is MembershipState.READY and w.row.is_leader]
    groups: dict[str, list[RankRow]] = defaultdict(list)
    for row in ready:
        groups[row.instance.fingerprint].append(row)
    whole = 0
    for rows in groups.values():
        roles = {row.instance.role for row in rows}
        if Role.MIXED in roles or {Role.PREFILL, Role.DECODE} <= roles:
            whole += 1
            continue
        names = ", ".join(row.instance.name for row in rows)
        others = [row for row in ready if row.instance.role not in roles]
        near = min(
            ((differing_parts(rows[0].instance, o.instance), o) for o in others), key=lambda f: len(f[0]), default=None
        )
        if near is None:
            lacks = "prefill" if roles == {Role.DECODE} else "decode"
            yield error("pairs", f"{names}: no {lacks} worker is ready", f"start one: `pdmesh {lacks}`")
        else:
            parts, other = near
            ours, theirs = rows[0].instance.fingerprint_parts, other.instance.fingerprint_parts
            told = "; ".join(f"{p} is {ours.get(p, 'unknown')} and {theirs.get(p, 'unknown')}" for p in parts)
            yield error(
                "pairs",
                f"{names} and {other.instance.name} can't be paired: {told}",
                "start both with one model and equal options",
            )
    if not ready:
        yield error("pairs", "no worker is ready", "start `pdmesh prefill` and `pdmesh decode`, or `pdmesh serve`")
    elif whole == len(groups):
        yield ok("pairs", f"prefill and decode fit each other{'' if whole == 1 else f', in {whole} fingerprints'}")


def _pools(workers: Sequence[Worker]) -> Iterator[Finding]:
    sizes: dict[str, dict[Role, int]] = defaultdict(dict)
    for worker in workers:
        spec = worker.row.instance
        if worker.stats is not None and (kv := worker.stats.load.kv).total:
            part = kv.quarantined / kv.total
            if part > _QUARANTINE:
                what = f"{part:.0%} of {worker.name}'s KV blocks are quarantined: a peer may still write there"
                yield error("kv", what, "see `pdmesh status` for the pair; end the peer if it hangs")
        if spec.kv_capacity_tokens:
            known = sizes[spec.fingerprint].get(spec.role, 0)
            sizes[spec.fingerprint][spec.role] = max(known, spec.kv_capacity_tokens)
    for roles in sizes.values():
        prefill, decode = roles.get(Role.PREFILL, 0), roles.get(Role.DECODE, 0)
        if prefill and decode and prefill > _UNEQUAL * decode:
            what = f"prefill pools hold {prefill} tokens, decode pools {decode}"
            yield warning("kv", what, "decode keeps a request much longer: give it the larger pool (--kv-memory-mb)")


def _transfers(workers: Sequence[Worker]) -> Iterator[Finding]:
    up: set[frozenset[int]] = set()
    hosts = {worker.name: worker.row.host for worker in workers}
    for worker in workers:
        for pair in worker.stats.pairs if worker.stats is not None else ():
            both = f"{worker.name} → {pair.peer_instance}"
            link = frozenset((worker.row.incarnation, pair.peer_incarnation))
            if not pair.up or link in up:
                continue
            up.add(link)
            here = bool(worker.row.host) and hosts.get(pair.peer_instance) == worker.row.host
            if pair.transport == "tcp" and here:
                why = f": {pair.reason}" if pair.reason else ""
                yield warning(
                    "transfer",
                    f"{both} goes by tcp on one machine{why}",
                    "share --socket-dir between their containers for shm",
                )
    if up:
        yield ok("transfer", f"{len(up)} {'pair is' if len(up) == 1 else 'pairs are'} linked")


def _routers(routers: Mapping[str, Trouble | None]) -> Iterator[Finding]:
    if not routers:
        yield warning("router", "none watches the rank table", "start `pdmesh router`, with the same --bootstrap")
    for address, why in routers.items():
        if why is None:
            yield ok("router", f"{address} is ready")
        else:
            yield error("router", f"{address} {why.what}", why.advice or "see its log, and the findings above")
