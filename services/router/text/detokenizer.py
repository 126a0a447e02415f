"""Token ids to text, as they come: never half a character, and in sum what decoding all at once gives.

Three kinds, by what the tokenizer's decoder does (token_bytes.py). Where each token stands for bytes (byte-level: llama
3, qwen, SmolLM; byte fallback: llama 2, mistral, gemma) an incremental UTF-8 decoder holds back what begins a character
and no more, in well under a microsecond per token. Where each token stands for text nothing is held back. Any other
decoder may look at its neighbours, so there a window of the last tokens is decoded twice.

Bytes that are no UTF-8 become U+FFFD each for itself, whatever is around them. (transformers gives up all bytes of a
row of byte-fallback tokens for one that is wrong, also those that were whole characters and were shown long since.)
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Sequence
from os.path import commonprefix
from typing import Protocol

_REPLACEMENT = "\ufffd"
_MAX_HELD = 8
"""A character has at most four bytes: more tokens than this that end in a replacement are really broken."""


class Detokenizer(Protocol):
    """State of one output."""

    def add(self, token_ids: Sequence[int]) -> str:
        """Takes the next tokens; returns the text that is now certain, which may be empty."""

    def place(self, token_id: int) -> tuple[str, int, int]:
        """As add, of one token; returns also where the token's own text begins and ends, in characters from the
        beginning of what is returned. A part of a character has all of it; a token that shows nothing has (0, 0)."""

    def flush(self) -> str:
        """Returns what was held back; half characters become U+FFFD. Nothing is added afterwards."""


class ByteDetokenizer:
    """For vocabularies whose tokens are bytes. Leaves out up to `strip` spaces at the very beginning."""

    __slots__ = ("_bytes_of", "_decoder", "_strip")

    def __init__(self, bytes_of: Callable[[int], bytes], strip: int = 0) -> None:
        self._bytes_of, self._strip = bytes_of, strip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_ids: Sequence[int]) -> str:
        """See Detokenizer."""
        return self._take(b"".join(map(self._bytes_of, token_ids)))

    def place(self, token_id: int) -> tuple[str, int, int]:
        """See Detokenizer. The first byte says whether the token goes on with the character that is held back, or
        breaks it."""
        data = self._bytes_of(token_id)
        if not data:
            return "", 0, 0
        before = self._take(data[:1])
        start = len(before) if self._is_open else max(len(before) - 1, 0)
        text = before + self._take(data[1:])
        return text, start, len(text) + self._is_open

    @property
    def _is_open(self) -> bool:
        return bool(self._decoder.getstate()[0])

    def _take(self, data: bytes) -> str:
        text = self._decoder.decode(data)
        if data and 0xA0 <= data[-1] < 0xC0 and self._decoder.getstate()[0][:1] == b"\xed":
            # It begins half a surrogate pair, which is no character, though Python's decoder waits for the third byte.
            self._decoder.reset()
            text += 2 * _REPLACEMENT
        return self._begin(text) if self._strip and text else text

    def flush(self) -> str:
        """See Detokenizer."""
        return self._decoder.decode(b"", True)

    def _begin(self, text: str) -> str:
        while self._strip and text.startswith(" "):
            text, self._strip = text[1:], self._strip - 1
        if text:
            self._strip = 0
        return text


class Pieces:
    """What each token stands for as text: at the beginning of an output, and after others."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._first: dict[int, str] = {}
        self._later: dict[int, str] = {}

    def first(self, token_id: int) -> str:
        """At the beginning."""
        known = self._first.get(token_id)
        if known is None:
            known = self._first[token_id] = self._decode([token_id])
        return known

    def later(self, token_id: int) -> str:
        """After others: what it adds to itself."""
        known = self._later.get(token_id)
        if known is None:
            known = self._later[token_id] = self._decode([token_id, token_id])[len(self.first(token_id)) :]
        return known


class PieceDetokenizer:
    """For vocabularies whose tokens are whole characters: WordPiece, SentencePiece without bytes."""

    __slots__ = ("_begun", "_hidden", "_pieces")

    def __init__(self, pieces: Pieces, hidden: Collection[int], *, begun: bool = False) -> None:
        self._pieces, self._hidden = pieces, hidden
        self._begun = begun

    def add(self, token_ids: Sequence[int]) -> str:
        """See Detokenizer."""
        text = ""
        for token_id in token_ids:
            if token_id not in self._hidden:
                text += self._pieces.later(token_id) if self._begun else self._pieces.first(token_id)
                self._begun = True
        return text

    def place(self, token_id: int) -> tuple[str, int, int]:
        """See Detokenizer."""
        text = self.add((token_id,))
        return text, 0, len(text)

    def flush(self) -> str:
        """See Detokenizer."""
        return ""


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

    def place(self, token_id: int) -> tuple[str, int, int]:
        """See Detokenizer. What a neighbour changes of a token's text is the neighbour's."""
        held = self._held()
        text = self.add((token_id,))
        now = text or self._held()
        if now == held:
            return text, 0, 0
        if not now.startswith(held) or (not text and held):  # it goes on with the character
            held = held.rstrip(_REPLACEMENT)
        return text, len(commonprefix((held, now))), len(now)

    def _held(self) -> str:
        """What can't be given out yet."""
        return self._decode(self._ids[self._prefix :])[len(self._decode(self._ids[self._prefix : self._read])) :]

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
