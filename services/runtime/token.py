"""The mesh token: a secret that all processes of one mesh share, by a file.

The file holds one token per line; blank lines and lines that begin with # count for nothing. The first token is the
one that is sent; all are accepted. So a token is changed without a moment in which anybody is refused:

    1. add the new token as the second line, everywhere    it is accepted
    2. make it the first line, everywhere                  it is sent
    3. remove the old one, everywhere                      it has expired
"""

from __future__ import annotations

import hashlib
import hmac
import string
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from engine_core.types.errors import ConfigError
from services.runtime.keyfiles import KeyFiles, read_key_file

OPTION = "--mesh-token-file"
METADATA_KEY = "authorization"
SCHEME = "Bearer "

MIN_LENGTH, MAX_LENGTH, MAX_TOKENS = 16, 512, 8
_ALLOWED = frozenset(string.ascii_letters + string.digits + string.punctuation)
_REMEMBERED = 64
"""Digests of tokens that were removed from the file, so that a refusal can say that a token has expired."""

MISSING = "the call came without a mesh token"
EXPIRED = "the mesh token that came has expired: it was removed from the file"
WRONG = "the mesh token that came is wrong"


def parse_tokens(text: str, source: str) -> tuple[str, ...]:
    """The tokens of a file, the one to send first. Raises ConfigError without ever quoting one."""
    lines = ((n, line.strip()) for n, line in enumerate(text.splitlines(), 1))
    tokens: list[str] = []
    for number, line in lines:
        if not line or line.startswith("#"):
            continue
        if not MIN_LENGTH <= len(line) <= MAX_LENGTH:
            raise ConfigError(
                f"{source}, line {number}: a token has {MIN_LENGTH} to {MAX_LENGTH} characters, this one {len(line)}",
                field=OPTION,
            )
        if not _ALLOWED.issuperset(line):
            raise ConfigError(
                f"{source}, line {number}: a token holds letters, digits and ASCII punctuation only", field=OPTION
            )
        tokens.append(line)
    if not tokens:
        raise ConfigError(f"{source} holds no token: it must have one on a line, at least", field=OPTION)
    if len(tokens) > MAX_TOKENS:
        raise ConfigError(f"{source} holds {len(tokens)} tokens; there may be {MAX_TOKENS}", field=OPTION)
    return tuple(dict.fromkeys(tokens))


class MeshToken:
    """The tokens of one file, followed as it changes. Never shown, in logs or errors."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError."""
        self._path = path
        self._files = KeyFiles("the mesh token", (path,), self._load)
        self._digests = tuple(_digest(token) for token in self._files.value)
        self._retired: OrderedDict[bytes, None] = OrderedDict()

    def __repr__(self) -> str:
        return f"MeshToken({str(self._path)!r})"

    @property
    def first(self) -> str:
        """What this process sends."""
        return self._files.value[0]

    @property
    def secrets(self) -> tuple[bytes, ...]:
        """All tokens as keys, the one to use first."""
        return tuple(token.encode() for token in self._files.value)

    def refresh(self) -> bool:
        """Looks at the file; True when other tokens count from now on."""
        if not self._files.refresh():
            return False
        before, self._digests = self._digests, tuple(_digest(token) for token in self._files.value)
        for digest in set(before) - set(self._digests):
            self._retired[digest] = None
        for digest in self._digests:
            self._retired.pop(digest, None)
        while len(self._retired) > _REMEMBERED:
            self._retired.popitem(last=False)
        return True

    def metadata(self) -> tuple[str, str]:
        """What goes with each call."""
        return METADATA_KEY, SCHEME + self.first

    def refusal(self, given: Sequence[tuple[str, str | bytes]] | None) -> str:
        """Why a call with this metadata is refused; "" when it is not. Takes as long for each wrong token."""
        values = [value for key, value in given or () if key == METADATA_KEY]
        if not values:
            return MISSING
        sent = values[0] if isinstance(values[0], str) else values[0].decode("latin-1")
        if len(values) > 1 or not sent.startswith(SCHEME):
            return WRONG
        digest = _digest(sent.removeprefix(SCHEME))
        if any([hmac.compare_digest(digest, known) for known in self._digests]):  # a list: all are compared
            return ""
        return EXPIRED if digest in self._retired else WRONG

    def _load(self) -> tuple[str, ...]:
        data = read_key_file(self._path, OPTION)
        try:
            text = data.decode("ascii")
        except UnicodeDecodeError as exc:
            raise ConfigError(f"{self._path}: a token holds ASCII characters only", field=OPTION) from exc
        return parse_tokens(text, str(self._path))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()
