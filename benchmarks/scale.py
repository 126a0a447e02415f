"""A mesh of thousands of workers under a virtual clock: the pure parts that production runs, none of its I/O.

    RankTable (Bootstrap)  <- leases and loads of all workers, joins, crashes, departures
    Roster (a router)      <- its events, as the watch would send them: changes at once, loads each second
    placement              <- every request of every router, with that router's own samples in flight

Workers serve as queues do: a request holds its prefill worker for a time that grows with the prompt and its decode
worker for a time that grows with the output. Reported, over the measured seconds of virtual time:

    load imbalance   requests at a decode worker, against the mean over workers: p99 and the most
    staleness        age of the load reports that placements went by
    misses           requests sent to workers that had died, per request
    Bootstrap        calls, messages and rows per second, and CPU seconds per second of its pure parts
    router           CPU time per placement, per load update, per change of a row

Staleness and imbalance come of the virtual clock and the seed alone; CPU times are this machine's.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from engine_core.lifecycle.membership import MembershipState
from engine_core.types.errors import PdmeshError
from engine_core.types.ids import RankCoord
from engine_core.types.request import Role
from services.bootstrap.rank_table import RankTable
from services.config import PlacementPolicy
from services.router.routing.placement import Placement, Signals, choose
from services.router.routing.shortlist import Shortlist
from services.wire.bootstrap import InstanceSpec, Load, LoadUpdate, RankRow, RowKey, event_to_proto
from services.worker.roster import Roster

FINGERPRINT = "f" * 64
LOAD_INTERVAL = 1.0
"""Seconds between two load updates of a watch; services/bootstrap/servicer.py."""


@dataclass
class Shape:
    """What is simulated; times in virtual seconds."""

    workers: int = 2000
    routers: int = 200
    rate: float = 50_000.0
    churn_per_minute: float = 0.01
    warm_up: float = 20.0
    seconds: float = 20.0
    prefill_part: float = 0.4
    renew: float = 5.0
    ttl: float = 15.0
    prefill_time: float = 0.05
    decode_time: float = 8.0


@dataclass
class Worker:
    """A worker as it is, beside what the table says of it."""

    name: str
    role: Role
    incarnation: int
    lease: int = 0
    alive: bool = True
    running: int = 0

    @property
    def key(self) -> RowKey:
        """Its row."""
        return RowKey(self.name, self.role, RankCoord())


@dataclass
class Cost:
    """How often something was done, and the CPU seconds that it took."""

    count: int = 0
    seconds: float = 0.0

    @property
    def microseconds(self) -> float:
        """Of one."""
        return 1e6 * self.seconds / max(self.count, 1)


@dataclass
class Tally:
    """What the measured time showed."""

    placed: int = 0
    misses: int = 0
    refused: int = 0
    short: int = 0
    ages: list[float] = field(default_factory=list)
    imbalance: list[tuple[float, float]] = field(default_factory=list)
    watch_rows: int = 0
    watch_messages: int = 0
    watch_bytes: int = 0


class Simulation:
    """One run. Events are (time, order, action); an action may schedule more."""

    def __init__(self, shape: Shape, seed: int, policy: PlacementPolicy) -> None:
        self.shape, self.policy = shape, policy
        self.rng = random.Random(seed)
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = 0
        self.table = RankTable(1, ttl=shape.ttl, renew=shape.renew, log_size=65_536)
        self.roster = Roster(["b"], shape.ttl)
        self.listed = Shortlist((), "t", self.roster.get)
        self.listed_version = -1
        self.workers: dict[int, Worker] = {}
        self.reported: dict[int, float] = {}
        self.in_flight: list[Counter[int]] = [Counter() for _ in range(shape.routers)]
        self.broken: list[set[int]] = [set() for _ in range(shape.routers)]
        """Whom each router could not reach: its breaker is open until the table says more."""
        self.costs: dict[str, Cost] = {}
        self.tally = Tally()
        self.measuring = False
        self.published = 0
        self.minted = 0
        self.turn = 0

    # ---- the clock --------------------------------------------------------------------------------

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Schedules."""
        self.order += 1
        heapq.heappush(self.events, (when, self.order, action))

    def timed(self, name: str, work: Callable[[], Any]) -> Any:
        """Does something and counts its CPU time while measuring."""
        begun = time.process_time()
        done = work()
        if self.measuring:
            cost = self.costs.setdefault(name, Cost())
            cost.count += 1
            cost.seconds += time.process_time() - begun
        return done

    # ---- workers ----------------------------------------------------------------------------------

    def join(self, role: Role) -> None:
        """A new worker registers and renews from then on."""
        self.minted += 1
        worker = Worker(f"{role.value.lower()}-{self.minted}", role, self.minted)
        self.workers[worker.incarnation] = worker
        spec = InstanceSpec(
            worker.name, role, FINGERPRINT, tokenizer_digest="t", kv_capacity_tokens=400_000, max_model_len=32_768
        )
        row = RankRow(spec, RankCoord(), f"{worker.name}:1", worker.incarnation)
        grant = self.timed("register", lambda: self.table.register_rank(row, 0, self.now))
        worker.lease = grant.lease_id
        self.pass_changes()
        self.at(self.now + self.rng.uniform(0, self.shape.renew), lambda: self.renew(worker))

    def renew(self, worker: Worker) -> None:
        """Keeps the lease and tells the load."""
        if not worker.alive:
            return
        load = Load(running=worker.running)
        self.timed("renew", lambda: self.table.renew(worker.lease, worker.incarnation, load, self.now))
        self.reported[worker.incarnation] = self.now
        self.at(self.now + self.shape.renew * self.rng.uniform(0.9, 1.1), lambda: self.renew(worker))

    def churn(self) -> None:
        """One worker goes, in half of the cases without a word, and another one comes."""
        worker = self.rng.choice([w for w in self.workers.values() if w.alive])
        worker.alive = False
        if self.rng.random() < 0.5:
            self.timed("deregister", lambda: self.table.deregister(worker.lease, worker.incarnation, self.now))
        del self.workers[worker.incarnation]
        self.pass_changes()
        self.join(worker.role)
        per_second = self.shape.workers * self.shape.churn_per_minute / 60
        self.at(self.now + self.rng.expovariate(per_second), self.churn)

    # ---- the watch --------------------------------------------------------------------------------

    def pass_changes(self) -> None:
        """What changed goes to every watcher at once: routers and workers."""
        after = self.roster.revision
        changes = None if after is None else self.timed("changes", lambda: self.table.changes_after(after))
        events = [self.table.snapshot()] if changes is None else changes
        for event in events:
            self.timed("change at a router", lambda event=event: self.roster.apply("b", event, self.now))
            if self.measuring:
                watchers = self.shape.routers + len(self.workers)
                self.tally.watch_messages += watchers
                self.tally.watch_rows += watchers
                self.tally.watch_bytes += watchers * event_to_proto(event).ByteSize()

    def publish(self) -> None:
        """Loads of the last second go to the routers; leases that lapsed are seen."""
        self.timed("expire", lambda: self.table.expire(self.now))
        self.pass_changes()
        loads = self.timed("loads", lambda: self.table.loads_after(self.published))
        self.published = self.table.load_seq
        update = LoadUpdate(self.table.revision, loads)
        message = self.timed("encode loads", lambda: event_to_proto(update).SerializeToString())
        self.timed("loads at a router", lambda: self.roster.apply("b", update, self.now))
        if self.measuring:
            self.tally.watch_messages += self.shape.routers
            self.tally.watch_rows += self.shape.routers * len(loads)
            self.tally.watch_bytes += self.shape.routers * len(message)
            running = [w.running for w in self.workers.values() if w.role is Role.DECODE and w.alive]
            mean = statistics.fmean(running)
            self.tally.imbalance.append((sorted(running)[int(0.99 * len(running))] / mean, max(running) / mean))
        self.at(self.now + LOAD_INTERVAL, self.publish)

    # ---- requests ---------------------------------------------------------------------------------

    def request(self) -> None:
        """One arrives at some router."""
        self.at(self.now + self.rng.expovariate(self.shape.rate), self.request)
        self.attempt(self.rng.randrange(self.shape.routers), set())

    def attempt(self, router: int, avoid: set[int]) -> None:
        """Places, or places again after a miss."""
        own = self.in_flight[router]
        if self.listed_version != self.roster.version:
            self.listed = self.timed("list at a router", lambda: Shortlist(self.roster.rows(), "t", self.roster.get))
            self.listed_version = self.roster.version
        self.turn += 1
        try:
            placement = self.timed("placement", lambda: self.choose(own, avoid, self.broken[router]))
        except PdmeshError:
            self.tally.refused += self.measuring
            return
        dead = [row.incarnation for row in placement.rows if row.incarnation not in self.workers]
        if self.measuring:
            self.tally.placed += 1
            self.tally.misses += bool(dead)
            if not self.tally.placed % 64:
                self.tally.ages.append(self.now - self.reported.get(placement.decode.incarnation, self.now))
        if dead:
            self.broken[router] |= set(dead)
            self.attempt(router, avoid | set(dead))
            return
        assert placement.prefill is not None
        self.hold(router, placement.prefill.incarnation, self.shape.prefill_time)
        self.hold(router, placement.decode.incarnation, self.shape.decode_time)

    def choose(self, own: Counter[int], avoid: set[int], broken: set[int]) -> Placement:
        """As services/router/routing/mesh.py does."""
        room, signals = self.rng.getrandbits(62), Signals(own, avoid, broken)
        found = self.listed.choose(
            self.policy,
            room,
            turn=self.turn,
            rng=self.rng,
            signals=signals,
            prompt_tokens=512,
            whole_tokens=1024,
        )
        if self.measuring:
            self.tally.short += found is not None
        return found or choose(
            self.policy,
            room,
            self.roster.rows(),
            tokenizer_digest="t",
            turn=self.turn,
            rng=self.rng,
            signals=signals,
            prompt_tokens=512,
            whole_tokens=1024,
        )

    def hold(self, router: int, incarnation: int, mean: float) -> None:
        """A worker is busy with a request for a while."""
        worker = self.workers[incarnation]
        own = self.in_flight[router]
        worker.running += 1
        own[incarnation] += 1

        def end() -> None:
            worker.running -= 1
            own[incarnation] -= 1
            if not own[incarnation]:
                del own[incarnation]

        self.at(self.now + self.rng.expovariate(1 / mean), end)

    # ---- the whole --------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Returns what is reported."""
        shape = self.shape
        prefills = round(shape.workers * shape.prefill_part)
        for i in range(shape.workers):
            self.join(Role.PREFILL if i < prefills else Role.DECODE)
        self.at(0.0, self.publish)
        self.at(0.0, self.request)
        self.at(self.rng.expovariate(shape.workers * shape.churn_per_minute / 60), self.churn)
        end = shape.warm_up + shape.seconds
        while self.events and self.events[0][0] < end:
            self.now, _, action = heapq.heappop(self.events)
            self.measuring = self.now >= shape.warm_up
            action()
        return self.report()

    def report(self) -> dict[str, Any]:
        """Figures per second of virtual time."""
        tally, seconds = self.tally, self.shape.seconds
        own = ("register", "renew", "deregister", "changes", "expire", "loads", "encode loads")
        bootstrap = [self.costs.get(name, Cost()) for name in own]
        ages = sorted(tally.ages)
        ready = [r for r in self.table.rows() if r.state is MembershipState.READY]
        return {
            "workers": len(self.workers),
            "ready_rows": len(ready),
            "routers": self.shape.routers,
            "policy": self.policy.value,
            "requests_per_second": tally.placed / seconds,
            "misses_per_million": 1e6 * tally.misses / max(tally.placed, 1),
            "refused": tally.refused,
            "by_shortlist": tally.short / max(tally.placed, 1),
            "load_age_seconds": {"p50": ages[len(ages) // 2], "p99": ages[int(0.99 * len(ages))]},
            "imbalance": {
                "p99_over_mean": statistics.fmean(p for p, _ in tally.imbalance),
                "most_over_mean": statistics.fmean(m for _, m in tally.imbalance),
            },
            "bootstrap": {
                "calls_per_second": sum(self.costs.get(n, Cost()).count for n in own[:3]) / seconds,
                "messages_per_second": tally.watch_messages / seconds,
                "rows_per_second": tally.watch_rows / seconds,
                "megabytes_per_second": tally.watch_bytes / seconds / 1e6,
                "pure_cpu_seconds_per_second": sum(c.seconds for c in bootstrap) / seconds,
            },
            "cpu_microseconds": {name: round(cost.microseconds, 1) for name, cost in sorted(self.costs.items())},
        }


def main() -> None:
    """Runs each policy that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=Shape.workers)
    parser.add_argument("--routers", type=int, default=Shape.routers)
    parser.add_argument("--rate", type=float, default=Shape.rate, help="requests per second")
    parser.add_argument("--seconds", type=float, default=Shape.seconds, help="virtual seconds that are measured")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--policy", action="append", choices=[p.value for p in PlacementPolicy])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    gc.disable()  # the simulation's own millions of objects would be looked through in what is timed
    shape = Shape(workers=args.workers, routers=args.routers, rate=args.rate, seconds=args.seconds)
    policies = args.policy or [PlacementPolicy.LEAST_LOAD.value]
    runs = [Simulation(shape, args.seed, PlacementPolicy(policy)).run() for policy in policies]
    text = json.dumps({"runs": runs, "ratios": {}}, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text)


if __name__ == "__main__":
    main()
