"""Files that hold keys: read whole or not at all, and again when they have changed.

A new version is taken only when it can be used and did not change while it was read; until then the former one
counts, and the log says once what is wrong with the new one. Secrets that a cluster mounts change by a link that is
turned over: what counts is the file that a path leads to.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from engine_core.types.errors import ConfigError

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_BYTES = 1 << 20
"""No key file is larger."""

_READ_TRIES = 5


def read_key_file(path: Path, option: str) -> bytes:
    """The file's bytes. Raises ConfigError that names the option."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as exc:
        raise ConfigError(f"{option} {path} can't be read: {exc.strerror or exc}", field=option) from exc
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{option} {path} is larger than {MAX_BYTES} bytes: it is no key file", field=option)
    return data


class KeyFiles(Generic[T]):
    """What `load` makes of the files at `paths`; `what` names it in logs. Used on one event loop only.

    `load` reads and checks; it raises ConfigError, here in the constructor as well.
    """

    def __init__(self, what: str, paths: Sequence[Path], load: Callable[[], T]) -> None:
        self._what, self._paths, self._load = what, tuple(paths), load
        self._refused: object = None
        self.value, self._seen = self._read()
        self.generation = 1
        """Counts the versions that were taken."""

    def refresh(self) -> bool:
        """Looks at the files; True when a new version was taken. Raises nothing."""
        now = self._signature()
        if now in (self._seen, self._refused):
            return False
        try:
            self.value, self._seen = self._read()
        except ConfigError as exc:
            self._refused = now
            log.error("%s stays as it was: %s", self._what, exc.message)
            return False
        self.generation += 1
        self._refused = None
        log.info("%s was read anew from %s", self._what, ", ".join(map(str, self._paths)))
        return True

    def _read(self) -> tuple[T, object]:
        for _ in range(_READ_TRIES):
            before = self._signature()
            value = self._load()
            if self._signature() == before:
                return value, before
        raise ConfigError(f"{', '.join(map(str, self._paths))}: changed while being read")

    def _signature(self) -> object:
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: Path) -> object:
    try:
        found = os.stat(path)
    except OSError as exc:
        return exc.errno
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
