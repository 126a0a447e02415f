"""What penalties know of a session's tokens, kept between steps and brought up to date by what is new."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine_core.execution.batch import DrawRow
from engine_core.execution.sampler import known_before
from engine_core.types.errors import InternalError
from engine_core.types.ids import SessionId

IDLE_STEPS = 64
"""A session that has drawn nothing for so many steps is forgotten; comes it back, its tokens are counted anew."""

_SPARE = 64


class TokenCounts:
    """Distinct tokens of one session and how often each is in its output.

    `ids` and `counts` [capacity] int32, of which the first `used` hold: the output's tokens, and with `whole` the
    prompt's too, whose count may be 0. The pointers are those of the two arrays.
    """

    def __init__(self, row: DrawRow, vocab_size: int, *, whole: bool) -> None:
        """Raises InternalError when the row does not know the tokens before its own."""
        known = np.array(known_before(row, vocab_size), np.int64)
        output = known[row.prompt_len :]
        seen = np.unique(known if whole else output)
        self.step = 0
        self._known, self._length = row.known, row.position
        self._vocab_size, self._whole = vocab_size, whole
        self._place = {token: place for place, token in enumerate(seen.tolist())}
        self.used = seen.size
        self._hold(seen, np.bincount(np.searchsorted(seen, output), minlength=seen.size))

    def follow(self, row: DrawRow, *, whole: bool) -> bool:
        """Takes what is new in the session's list. False when the row is not a continuation of what was counted."""
        known = row.known
        if known is not self._known or row.position < self._length or whole is not self._whole:
            return False
        if len(known) != row.position:
            raise InternalError(f"session {row.session} knows {len(known)} tokens and draws token {row.position}")
        for token in known[self._length :]:
            self._add(token)
        self._length = row.position
        return True

    def _add(self, token: int) -> None:
        place = self._place.get(token)
        if place is None:
            if not 0 <= token < self._vocab_size:
                raise InternalError(f"token {token} is outside the vocabulary of {self._vocab_size}")
            if self.used == self.ids.size:
                self._hold(self.ids, self.counts)
            place = self._place[token] = self.used
            self.ids[place] = token
            self.used += 1
        self.counts[place] += 1

    def _hold(self, ids: npt.NDArray[np.signedinteger], counts: npt.NDArray[np.signedinteger]) -> None:
        """Moves to arrays with room for as many again."""
        self.ids, self.counts = np.zeros((2, 2 * ids.size + _SPARE), np.int32)
        self.ids[: ids.size], self.counts[: ids.size] = ids, counts
        self.ids_pointer, self.counts_pointer = self.ids.ctypes.data, self.counts.ctypes.data


class CountBook:
    """The counts of the sessions that draw with penalties. A session's list of known tokens only ever grows; under
    another list its id is another session's."""

    def __init__(self) -> None:
        self._counts: dict[SessionId, TokenCounts] = {}
        self._step = 0

    def __len__(self) -> int:
        return len(self._counts)

    def next_step(self) -> None:
        """A step begins; now and then, those that have not been asked for lately are forgotten."""
        self._step += 1
        if self._step % IDLE_STEPS == 0:
            self._counts = {s: c for s, c in self._counts.items() if c.step > self._step - IDLE_STEPS}

    def of(self, row: DrawRow, vocab_size: int) -> TokenCounts:
        """The counts of a row's session, up to its position. Raises InternalError as TokenCounts does."""
        whole = row.params.repetition_penalty != 1.0
        counts = self._counts.get(row.session)
        if counts is None or not counts.follow(row, whole=whole):
            counts = self._counts[row.session] = TokenCounts(row, vocab_size, whole=whole)
        counts.step = self._step
        return counts
