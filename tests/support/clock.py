"""A clock that tests move by hand."""

from __future__ import annotations


class VirtualClock:
    """Seconds that pass only when told to. Callable, so that it stands in for time.monotonic."""

    __slots__ = ("_now",)

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start

    def __call__(self) -> float:
        """The time now, in seconds."""
        return self._now

    @property
    def now(self) -> float:
        """The time now, in seconds."""
        return self._now

    def advance(self, seconds: float) -> float:
        """Lets time pass; returns the new time. Raises ValueError when asked to go back."""
        if seconds < 0:
            raise ValueError(f"time does not run backwards: {seconds}")
        self._now += seconds
        return self._now

    def advance_to(self, when: float) -> float:
        """Lets time pass until `when`; stays where it is when that is past."""
        self._now = max(self._now, when)
        return self._now
