"""Token ids to text, as they come: never half a character, and in sum what decoding all at once gives.

Two kinds. A byte-level vocabulary (llama 3, qwen, SmolLM) maps each token to bytes, so an incremental
UTF-8 decoder does it exactly and in well under a microsecond per token. Any other decoder may look at
its neighbours (byte fallback, stripped spaces), so a window of the last tokens is decoded twice.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"
_MAX_HELD = 8
"""A character has at most four bytes: more tokens than this that end in a replacement are really broken."""


class Detokenizer(Protocol):
    """State of one output."""

    def add(self, token_ids: Sequence[int]) -> str:
        """Takes the next tokens; returns the text that is now certain, which may be empty."""

    def flush(self) -> str:
        """Returns what was held back; half characters become U+FFFD. Nothing is added afterwards."""


class ByteDetokenizer:
    """For vocabularies whose tokens are bytes."""

    __slots__ = ("_bytes_of", "_decoder")

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_ids: Sequence[int]) -> str:
        """See Detokenizer."""
        return self._decoder.decode(b"".join(map(self._bytes_of, token_ids)))

    def flush(self) -> str:
        """See Detokenizer."""
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """For all other decoders: text of the window [prefix, end) minus text of [prefix, read)."""

    __slots__ = ("_decode", "_ids", "_prefix", "_read")

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._prefix = self._read = 0

    def add(self, token_ids: Sequence[int]) -> str:
        """See Detokenizer."""
        self._ids.extend(token_ids)
        return self._take(last=False)

    def flush(self) -> str:
        """See Detokenizer."""
        return self._take(last=True)

    def _take(self, *, last: bool) -> str:
        known = self._decode(self._ids[self._prefix : self._read])
        text = self._decode(self._ids[self._prefix :])
        if len(text) <= len(known):
            return ""
        if text.endswith(_REPLACEMENT) and not last and len(self._ids) - self._read < _MAX_HELD:
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        if self._prefix > 256:  # keep the window short, so that a long output costs no more per token
            del self._ids[: self._prefix]
            self._prefix, self._read = 0, len(self._ids)
        return text[len(known) :]
