"""ProfilerManager: records a number of steps with torch.profiler and writes a Chrome trace."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Any

import torch

log = logging.getLogger(__name__)

DEFAULT_STEPS = 10


class ProfilerManager:
    """One recording at a time; a new one ends the one before. All calls come from the engine's loop."""

    def __init__(self) -> None:
        self._profile: Any = None
        self._path = ""
        self._steps_left = 0

    def start(self, path: str, steps: int) -> None:
        """Records the next `steps` steps (0: DEFAULT_STEPS) into `path`, a Chrome trace in JSON."""
        self.stop()
        self._path, self._steps_left = path, steps or DEFAULT_STEPS
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self._profile.__enter__()

    def after_step(self) -> None:
        """Counts a step; the last one ends the recording."""
        if self._profile is not None:
            self._steps_left -= 1
            if self._steps_left <= 0:
                self.stop()

    def stop(self) -> None:
        """Ends the recording and writes it. No-op without one; a file that can't be written is logged."""
        if self._profile is None:
            return
        profile, self._profile = self._profile, None
        nothing: tuple[type[BaseException] | None, BaseException | None, TracebackType | None] = (None, None, None)
        profile.__exit__(*nothing)
        try:
            profile.export_chrome_trace(self._path)
        except (OSError, RuntimeError) as exc:
            log.error("the profile could not be written to %s: %s", self._path, exc)
