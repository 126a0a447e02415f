"""What replies made of items have in common: from deltas to steps, with the text's log probabilities beside them.

    take(index, delta)      the events of a stream; then end(results), or fail(exc)
    collect(index, delta)   the same for a reply that comes whole; then complete(results)

There is one sample, so `index` is always 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import orjson

from engine_core.types.errors import PdmeshError
from services.router.chat.items import Item, ItemKind, Items, Opened, Step
from services.router.chat.text_positions import TextPositions
from services.router.journey import Delta, SampleResult
from services.router.prepare import PreparedChat
from services.router.token_report import TokenNames, chat_logprobs, check_count


def event(kind: str, data: dict[str, Any]) -> bytes:
    """A named server-sent event, whose data says its type too."""
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **data}) + b"\n\n"


class ItemReply:
    """State of one reply."""

    def __init__(self, prepared: PreparedChat) -> None:
        self.spec = prepared.spec
        self._output = prepared.output()
        self._items = Items()
        self._names = TokenNames(self.spec.tokenizer.bytes, as_ids=self.spec.tokens_as_ids)
        self._positions: TextPositions | None = None
        if self.spec.logprobs is not None:
            self._positions = TextPositions(self.spec.detokenizer())
        self._listed: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
        """Log probabilities by item."""
        self._begun = False

    # ---- for the routes -----------------------------------------------------------------------------

    def take(self, index: int, delta: Delta) -> bytes:
        """The events of a delta."""
        del index
        if not delta.text and not delta.token_ids and delta.result is None:
            return b""
        data = self._begin() if not self._begun else b""
        self._begun = True
        return data + b"".join(map(self._event, self._steps(delta)))

    def end(self, results: Sequence[SampleResult]) -> bytes:
        """The last events."""
        return self._finish(results[0])

    def fail(self, exc: PdmeshError) -> bytes:
        """The last events when it fails after the first byte."""
        data = self._begin() if not self._begun else b""
        self._begun = True
        return data + self._failed(exc)

    def collect(self, index: int, delta: Delta) -> None:
        """Keeps a delta for the whole."""
        del index
        for step in self._steps(delta):
            if isinstance(step, Opened):
                self._name(step.item)
            self._scores(step.item)

    def complete(self, results: Sequence[SampleResult]) -> dict[str, Any]:
        """The whole reply."""
        raise NotImplementedError

    # ---- what each kind has -------------------------------------------------------------------------

    def _begin(self) -> bytes:
        """The events before the first item."""
        raise NotImplementedError

    def _event(self, step: Step) -> bytes:
        """The events of a step."""
        raise NotImplementedError

    def _name(self, item: Item) -> None:
        """A new item."""

    def _finish(self, result: SampleResult) -> bytes:
        """The events behind the last item."""
        raise NotImplementedError

    def _failed(self, exc: PdmeshError) -> bytes:
        """The events of a failure."""
        raise NotImplementedError

    # ---- parts ----------------------------------------------------------------------------------------

    def _steps(self, delta: Delta) -> list[Step]:
        parts = self._output.take(delta)
        if self._positions is not None:
            check_count(delta.token_ids, delta.logprobs)
            self._positions.add(delta.logprobs)
            self._positions.take(parts, self._output.sources)
            if delta.result is not None:
                self._positions.finish()
        steps = self._items.take(parts)
        if delta.result is not None:
            steps += self._items.end(cut=self._output.is_cut(delta.result))
        return steps

    def _scores(self, item: Item) -> list[dict[str, Any]]:
        """The log probabilities of an item's text that are new."""
        if self._positions is None or item.kind is not ItemKind.TEXT:
            return []
        new = chat_logprobs(self._names, self._positions.new(item.run), self.spec.logprobs or 0)
        self._listed[item.index] += new
        return new

    def _timings(self, result: SampleResult) -> dict[str, Any]:
        """Where the time went, when asked for."""
        return {} if self.spec.timings is None else {"pdmesh_timings": [self.spec.timings(0, result)]}
