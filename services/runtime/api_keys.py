"""API keys: what clients show the router's HTTP port, and how it knows them.

Keys come from options and from a file, one on a line; blank lines and lines that begin with # count for nothing. All
are accepted; where one is to be sent (by commands) it is the first. The file is read anew when it changes, so a key is
changed without a moment in which anybody is refused: add the new one, give it out, remove the old one.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from pathlib import Path

from engine_core.types.errors import ConfigError
from services.runtime.keyfiles import KeyFiles, read_key_file

OPTION, FILE_OPTION = "--api-key", "--api-key-file"
MAX_LENGTH, MAX_KEYS = 512, 1000

_SCHEME = b"bearer "
_MOST_SHOWN = 2
"""Keys of a request that are looked at: one for each kind of header."""


def parse_keys(text: str, source: str) -> tuple[str, ...]:
    """The keys of a file, in order. Raises ConfigError without ever quoting one."""
    lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    keys = [
        check_key(line, f"{source}, line {number}", FILE_OPTION)
        for number, line in lines
        if line and not line.startswith("#")
    ]
    if not keys:
        raise ConfigError(f"{source} holds no key: it must have one on a line, at least", field=FILE_OPTION)
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"{source} holds {len(keys)} keys; there may be {MAX_KEYS}", field=FILE_OPTION)
    return tuple(keys)


def check_key(key: str, source: str, option: str) -> str:
    """The key. Raises ConfigError, without quoting it, when no client could send it."""
    if not 0 < len(key) <= MAX_LENGTH:
        raise ConfigError(f"{source}: a key has 1 to {MAX_LENGTH} characters, this one {len(key)}", field=option)
    if "," in key or not all("!" <= char <= "~" for char in key):
        raise ConfigError(f"{source}: a key holds letters, digits and ASCII punctuation but commas", field=option)
    return key


def read_keys(path: Path) -> tuple[str, ...]:
    """The keys of a file. Raises ConfigError."""
    try:
        text = read_key_file(path, FILE_OPTION).decode("ascii")
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path}: a key holds ASCII characters only", field=FILE_OPTION) from exc
    return parse_keys(text, str(path))


def key_to_send(key: str, file: str) -> str:
    """What a command sends: `key` (the first of several, as environments hold them) or the first of the file; empty
    without either. Raises ConfigError."""
    if key:
        return check_key(key.partition(",")[0].strip(), OPTION, OPTION)
    return read_keys(Path(file))[0] if file else ""


def bearer(key: str) -> dict[str, str]:
    """The header that shows a key; none without one."""
    return {"authorization": f"Bearer {key}"} if key else {}


class ApiKeys:
    """The keys that count now. Never shown, in logs or errors. Used on one event loop only."""

    def __init__(self, keys: Sequence[str] = (), file: Path | None = None) -> None:
        """Raises ConfigError."""
        self._given = tuple(check_key(key, OPTION, OPTION) for key in keys)
        self._file = file
        self._files = None if file is None else KeyFiles("the API keys", (file,), lambda: read_keys(file))
        self._digests: tuple[bytes, ...] = ()
        self._take()

    def __repr__(self) -> str:
        return f"ApiKeys({len(self._digests)} keys, {str(self._file)!r})"

    @property
    def required(self) -> bool:
        """True when clients must show one."""
        return bool(self._digests)

    def refresh(self) -> bool:
        """Looks at the file; True when other keys count from now on. A file that can't be used changes nothing."""
        if self._files is None or not self._files.refresh():
            return False
        self._take()
        return True

    def _take(self) -> None:
        keys = (*self._given, *(() if self._files is None else self._files.value))
        self._digests = tuple(_digest(key.encode()) for key in dict.fromkeys(keys))

    def holder(self, shown: Iterable[bytes]) -> str | None:
        """A name for the owner of the first key among those shown that counts, which does not tell the key; None when
        none does. Takes as long for each wrong key."""
        for key in shown:
            digest = _digest(key)
            # A list: all are compared.
            if any([hmac.compare_digest(digest, known) for known in self._digests]):
                return name_of(key)
        return None


def name_of(key: bytes) -> str:
    """A name for whoever has this key, which does not tell it."""
    return hashlib.sha256(b"client of pdmesh:" + key).hexdigest()[:16]


def shown_keys(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """The keys that a request shows: OpenAI's clients send `Authorization: Bearer KEY`, Anthropic's `x-api-key: KEY`.

    `headers` as ASGI has them, their names in lower case.
    """
    found = []
    for name, value in headers:
        if name == b"x-api-key":
            found.append(value.strip())
        elif name == b"authorization" and value[: len(_SCHEME)].lower() == _SCHEME:
            found.append(value[len(_SCHEME) :].strip())
    return [key for key in found if key][:_MOST_SHOWN]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
