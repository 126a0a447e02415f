"""What a process tells about itself: logs, event-loop lag, state moves, metrics and traces.

logs.py        lines as text or JSON, with the fields of the request that they are about
moves.py       the ring of state moves that `pdmesh explain` reads
lag.py         how late the event loop is
exposition.py  /metrics of a service, and what every service has in it
tracing.py     OpenTelemetry, imported only when it is on
spans.py       state moves as spans
"""

from services.runtime.telemetry.lag import LoopLagMonitor
from services.runtime.telemetry.logs import JsonFormatter, TextFormatter, bind_log_fields, log_fields, setup_logging
from services.runtime.telemetry.moves import MoveRing, RingEntry, wall_offset

__all__ = [
    "JsonFormatter",
    "LoopLagMonitor",
    "MoveRing",
    "RingEntry",
    "TextFormatter",
    "bind_log_fields",
    "log_fields",
    "setup_logging",
    "wall_offset",
]
