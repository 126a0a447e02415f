"""Where tokens stand in a text, in characters. A token's span goes from the character that its first byte belongs to
to behind the one of its last: a part of a character has all of it, bytes that become U+FFFD have that. A token that
shows nothing has an empty span where the whole characters so far end.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.router.text.detokenizer import Detokenizer
from services.router.text.tokenizer import RouterTokenizer

Span = tuple[int, int]
"""From a character to before another one."""


class TokenSpans:
    """State of one text, whose detokenizer is this object's own. Spans depend on the tokens alone, never on what came
    together; behind a stop string they go on as if nothing were cut."""

    def __init__(self, detokenizer: Detokenizer, at: int = 0) -> None:
        """`at`: where the tokens' text begins."""
        self._detokenizer = detokenizer
        self._at = at

    def add(self, token_ids: Sequence[int]) -> list[Span]:
        """The spans of the next tokens."""
        spans = []
        for token_id in token_ids:
            text, start, end = self._detokenizer.place(token_id)
            spans.append((self._at + start, self._at + end))
            self._at += len(text)
        return spans


def starts_of_prompt(tokenizer: RouterTokenizer, token_ids: Sequence[int], text: str) -> list[int]:
    """Where the tokens of a prompt begin in its text: in what they decode to, special tokens left out or not, else in
    what a client wrote, which may hold what the tokenizer's normalizer changes and lack tokens that it adds."""
    for skip in (True, False):
        if tokenizer.decode(token_ids, skip_special_tokens=skip) == text:
            spans = TokenSpans(tokenizer.detokenizer(skip_special_tokens=skip)).add(token_ids)
            return [start for start, _ in spans]
    return tokenizer.starts(text, token_ids)
