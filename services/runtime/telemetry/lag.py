"""How late the event loop of a service is."""

from __future__ import annotations

import asyncio
import math
from collections import deque


class LoopLagMonitor:
    """How late the event loop wakes a timer: 10 ms ticks, the last 1,000 kept."""

    TICK = 0.010
    SAMPLES = 1_000

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=self.SAMPLES)

    def record(self, lag: float) -> None:
        """Adds one sample in seconds."""
        self._samples.append(lag)

    def p99(self) -> float:
        """99th percentile of the kept samples in seconds; 0 without any."""
        if not self._samples:
            return 0.0
        ordered = sorted(self._samples)
        return ordered[math.ceil(0.99 * len(ordered)) - 1]

    async def run(self) -> None:
        """Samples until cancelled; spawn it with a TaskOwner."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self.TICK
            await asyncio.sleep(self.TICK)
            self.record(max(0.0, loop.time() - due))
