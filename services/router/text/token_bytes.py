"""What one token stands for: its bytes, where the vocabulary says so, and how a report of log probabilities spells it.

A token may be a part of a character. Its bytes are exact for byte-level vocabularies (llama 3, qwen, SmolLM) and
for those with byte fallback (llama 2, mistral); other decoders give text that depends on neighbours, so there a
token is spelled as its vocabulary has it.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping
from typing import Any

import tokenizers

_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"
"""How SentencePiece writes a space."""


class Kind(enum.Enum):
    """How text comes of tokens."""

    BYTES = "each token stands for bytes, wherever it is"
    PIECES = "each token stands for text: at the beginning, and after others"
    OTHER = "only the decoder knows"


class TokenBytes:
    """Bytes of each token, special ones included."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        spec = json.loads(backend.to_str())
        added = spec.get("added_tokens") or ()
        self.special_ids = frozenset(t["id"] for t in added if t.get("special"))
        self._added: dict[int, str] = {t["id"]: t["content"] for t in added}
        decoder = spec.get("decoder") or {}
        kinds = set(_kinds(decoder))
        self.kind, self.strip = _kind_of(decoder)
        """How text comes of the tokens; spaces at the very beginning that are left out."""
        self.byte_level = kinds == {"ByteLevel"}
        self._has_bytes = "ByteFallback" in kinds
        self._has_spaces = "Metaspace" in kinds or any(_replaces_space(step) for step in _steps(decoder))
        self._table: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes:
        """Its bytes; empty for an id without a token."""
        known = self._table.get(token_id)
        if known is None:
            known = self._table[token_id] = self._spell(token_id)
        return known

    def shown(self, token_id: int) -> bytes:
        """Its bytes where special tokens are no text."""
        return b"" if token_id in self.special_ids else self.of(token_id)

    def _spell(self, token_id: int) -> bytes:
        if token_id in self._added:  # spelled as it is
            return self._added[token_id].encode()
        token: str | None = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self.byte_level:
            return b"".join(bytes([_BYTE_OF[c]]) if c in _BYTE_OF else c.encode() for c in token)
        found = _FALLBACK.fullmatch(token) if self._has_bytes else None
        if found is not None:
            return bytes([int(found[1], 16)])
        return (token.replace(_SPACE, " ") if self._has_spaces else token).encode()


def _steps(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    steps = decoder.get("decoders")
    return list(steps) if isinstance(steps, list) else [decoder]


def _kind_of(decoder: Mapping[str, Any]) -> tuple[Kind, int]:
    """BYTES also with the spaces to strip at the beginning of a text, as SentencePiece's models have one."""
    steps, kinds = _steps(decoder), _kinds(decoder)
    if kinds == ["ByteLevel"]:
        return Kind.BYTES, 0
    if kinds in (["Metaspace"], ["WordPiece"], ["None"]):
        return Kind.PIECES, 0
    *fusing, last = kinds if kinds[-1] == "Strip" else [*kinds, ""]
    if sorted(fusing) not in (["ByteFallback", "Fuse", "Replace"], ["ByteFallback", "Fuse"], ["Fuse", "Replace"]):
        return Kind.OTHER, 0
    plain = all(_replaces_space(step) for step in steps if step.get("type") == "Replace") and fusing[-1] == "Fuse"
    strips = steps[-1] if last else {}
    if not plain or strips.get("content", " ") != " " or strips.get("stop", 0):
        return Kind.OTHER, 0
    return Kind.BYTES, int(strips.get("start", 0))


def _kinds(decoder: Mapping[str, Any]) -> list[str]:
    return [str(step.get("type")) for step in _steps(decoder)]


def _replaces_space(step: Mapping[str, Any]) -> bool:
    pattern = step.get("pattern")
    return step.get("type") == "Replace" and isinstance(pattern, dict) and pattern.get("String") == _SPACE


def _byte_symbols() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character; this is the way back."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    other = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(other)}


_BYTE_OF = _byte_symbols()


def chat_spelling(data: bytes) -> str:
    r"""A token as chat completions name it: its text, or `\xe2\x80` for a part of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in data)


def completion_spelling(data: bytes) -> str:
    r"""A token as completions name it: its text, or `bytes:\xe2\x80` for a part of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + chat_spelling(data)
