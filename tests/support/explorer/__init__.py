"""The explorer: interleavings of the whole mesh's machines, chosen by a seed.

It drives the very EngineCore and KVCacheManager that production runs. Modelled around them are the
router's journey, the relays of the two service processes, the gRPC streams, the frame pipes, the
links with their transports, and the processes, which can be killed, stopped and continued. KV is
symbolic: a slot holds what it stands for, so that wrong, stale or foreign KV is seen at once.

    symbols     requests with their true output, the symbolic pool
    scenario    what a seed decides: sizes, topology, faults
    wires       gRPC calls: delayed, lost with all that is in flight, cancelled
    links       shm-like and tcp-like transports
    engines     an engine process: EngineCore, its inboxes, its executor
    shells      the relays of the decode and prefill service processes
    journey     the router's side of one request
    faults      kills, stops, cancels, broken calls and links, damage, leaps of time
    world       the schedule: what may happen next, and the checks at the end
"""

from tests.support.explorer.scenario import Scenario
from tests.support.explorer.world import Failure, explore, record, run_seed

__all__ = ["Failure", "Scenario", "explore", "record", "run_seed"]
