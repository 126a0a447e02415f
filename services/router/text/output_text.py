"""From the tokens of one sample to the text that its client may see: detokenise, hold back, cut.

Text that could be the beginning of a stop string waits until it is clear whether it is one. A stop string
is found at the first character that completes one, however tokens and messages were cut; of two that are
complete there, the longer counts. Neither it nor a stop token's own text is part of the output, unless the client
wants them included.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from services.router.text.detokenizer import Detokenizer


class StopMatcher:
    """Looks for any of some strings in text that comes in pieces; linear in the text."""

    __slots__ = ("_begins", "_buffer", "_fails", "_include", "_states", "_stops", "matched")

    def __init__(self, stops: Collection[str], *, include: bool = False) -> None:
        self._include = include
        self._stops = tuple(stops)
        self._fails = [_failure_links(stop) for stop in self._stops]
        self._begins = frozenset(stop[0] for stop in self._stops)
        self._states = [0] * len(self._stops)
        self._buffer = ""
        self.matched: str | None = None
        """The stop string that was found."""

    def push(self, text: str) -> str:
        """Takes the next piece; returns what is certainly output. After a match nothing more comes."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        if not self._buffer and self._begins.isdisjoint(text):
            return text  # nothing is held back, and nothing begins
        start = len(self._buffer)
        self._buffer += text
        for at, char in enumerate(text, start + 1):
            found = ""
            for i, stop in enumerate(self._stops):
                state, fail = self._states[i], self._fails[i]
                while state and stop[state] != char:
                    state = fail[state - 1]
                if stop[state] == char:
                    state += 1
                if state == len(stop):
                    found = max(found, stop, key=len)
                    state = fail[state - 1]
                self._states[i] = state
            if found:
                self.matched = found
                return self._buffer[: at if self._include else at - len(found)]
        held = max(self._states)
        out, self._buffer = self._buffer[: len(self._buffer) - held], self._buffer[len(self._buffer) - held :]
        return out

    def flush(self) -> str:
        """Returns what was held back; the output ends here."""
        out, self._buffer = self._buffer, ""
        return "" if self.matched is not None else out


def _failure_links(pattern: str) -> list[int]:
    """Per prefix, the length of its longest proper prefix that is also its suffix (Knuth, Morris, Pratt)."""
    links = [0] * len(pattern)
    k = 0
    for i in range(1, len(pattern)):
        while k and pattern[k] != pattern[i]:
            k = links[k - 1]
        if pattern[k] == pattern[i]:
            k += 1
        links[i] = k
    return links


class OutputText:
    """State of one sample's output. `token_ids` are the tokens taken so far, from attempt 0 on."""

    __slots__ = ("_detokenizer", "_include_stop", "_matcher", "_min_tokens", "_stop_ids", "stop_token_id", "token_ids")

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Collection[str] = (),
        stop_token_ids: Collection[int] = (),
        min_tokens: int = 0,
        *,
        include_stop: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._include_stop = include_stop
        self._matcher = StopMatcher(stops, include=include_stop)
        self._stop_ids = frozenset(stop_token_ids)
        self._min_tokens = min_tokens
        self.token_ids: list[int] = []
        self.stop_token_id: int | None = None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the output, if one did."""
        return self._matcher.matched

    @property
    def stopped(self) -> bool:
        """True once a stop string or a stop token was met; later tokens are ignored."""
        return self._matcher.matched is not None or self.stop_token_id is not None

    def add(self, token_ids: Sequence[int], ended_by: int | None = None) -> str:
        """Takes new tokens; returns the text that may be shown. Tokens behind a stop are not taken.

        `ended_by` is the stop token that the worker names when these are its last tokens.
        """
        text = ""
        last = len(token_ids) - 1
        for i, token_id in enumerate(token_ids):
            if self.stopped:
                break
            self.token_ids.append(token_id)
            count = len(self.token_ids)
            is_stop = token_id in self._stop_ids and count > self._min_tokens
            if is_stop or (i == last and token_id == ended_by):
                self.stop_token_id = token_id
                if not self._include_stop:
                    break
            piece = self._detokenizer.add((token_id,))
            if piece:
                # Text within min_tokens can't stop the output, nor begin what does.
                text += self._matcher.push(piece) if count > self._min_tokens else piece
        return text

    def finish(self) -> str:
        """Returns what is left; half characters become U+FFFD."""
        return self._matcher.push(self._detokenizer.flush()) + self._matcher.flush()
