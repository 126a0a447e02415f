"""What a check says: one line of what is, and where something is wrong, one of what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """How bad it is. WARNING: it works, but not as well or as safely as it might; ERROR: it does not."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """One line of the report. `advice` is there unless all is well."""

    area: str
    level: Level
    what: str
    advice: str = ""

    def as_data(self) -> dict[str, Any]:
        """For --json."""
        return {**asdict(self), "level": self.level.value}


def ok(area: str, what: str) -> Finding:
    """All is well."""
    return Finding(area, Level.OK, what)


def warning(area: str, what: str, advice: str) -> Finding:
    """It works, but."""
    return Finding(area, Level.WARNING, what, advice)


def error(area: str, what: str, advice: str) -> Finding:
    """It does not work."""
    return Finding(area, Level.ERROR, what, advice)


def worst(findings: Iterable[Finding]) -> Level:
    """The worst level there is."""
    levels = [finding.level for finding in findings]
    return next((level for level in (Level.ERROR, Level.WARNING) if level in levels), Level.OK)
