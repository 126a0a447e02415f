"""Log probabilities as the APIs write them.

chat completions    {"content": [{token, logprob, bytes, top_logprobs: [{token, logprob, bytes}]}]}
completions         {"tokens", "token_logprobs", "top_logprobs", "text_offset"}, lists of equal length
prompt_logprobs     vLLM's: per position null or {token id: {logprob, rank, decoded_token}}
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from engine_core.types.errors import InternalError
from engine_core.types.sampling import TokenLogprobs
from services.router.text.detokenizer import Detokenizer
from services.router.text.token_bytes import TokenBytes, chat_spelling, completion_spelling
from services.router.text.token_spans import TokenSpans, starts_of_prompt
from services.router.text.tokenizer import RouterTokenizer

_LOWEST = -9999.0
"""Stands for the logarithm of nothing, which JSON can't say; OpenAI's own value."""


def finite(logprob: float) -> float:
    """A number that JSON can say."""
    return logprob if logprob > _LOWEST and math.isfinite(logprob) else _LOWEST


class TokenNames:
    """How tokens are named; `as_ids` names them token_id:N."""

    def __init__(self, tokens: TokenBytes, *, as_ids: bool) -> None:
        self._bytes, self._as_ids = tokens, as_ids
        self._chat: dict[int, tuple[str, list[int]]] = {}
        """What was asked for once: the same tokens come up again and again."""

    def completion(self, token_id: int) -> str:
        """In completions."""
        return f"token_id:{token_id}" if self._as_ids else completion_spelling(self._bytes.of(token_id))

    def text(self, token_id: int) -> str:
        """In vLLM's prompt_logprobs."""
        return self._bytes.of(token_id).decode(errors="replace")

    def chat(self, token_id: int, logprob: float) -> dict[str, Any]:
        """In chat completions."""
        known = self._chat.get(token_id)
        if known is None:
            data = self._bytes.of(token_id)
            token = f"token_id:{token_id}" if self._as_ids else chat_spelling(data)
            known = self._chat[token_id] = (token, list(data))
        return {"token": known[0], "logprob": finite(logprob), "bytes": known[1]}


def check_count(token_ids: Sequence[int], positions: Sequence[TokenLogprobs]) -> None:
    """Raises InternalError unless there is one position per token."""
    if [p.token_id for p in positions] != list(token_ids):
        raise InternalError(f"the workers report {len(positions)} log probabilities of {len(token_ids)} tokens")


def chat_logprobs(names: TokenNames, positions: Sequence[TokenLogprobs], top: int) -> list[dict[str, Any]]:
    """The positions as chat completions list them."""
    return [
        {**names.chat(p.token_id, p.logprob), "top_logprobs": [names.chat(t, v) for t, v in p.top[:top]]}
        for p in positions
    ]


def prompt_logprobs(names: TokenNames, positions: Sequence[TokenLogprobs], top: int) -> list[dict[str, Any] | None]:
    """The positions of a prompt as vLLM lists them: none for the first, then the token's own and the best ones."""
    return [None, *(_ranked(names, position, top) for position in positions)]


def _ranked(names: TokenNames, position: TokenLogprobs, top: int) -> dict[str, Any]:
    own = (position.token_id, position.logprob, position.rank)
    best = [(t, v, rank) for rank, (t, v) in enumerate(position.top[:top], 1)]
    return {str(t): {"logprob": finite(v), "rank": rank, "decoded_token": names.text(t)} for t, v, rank in (own, *best)}


class CompletionLogprobs:
    """The lists of one choice of /v1/completions. `text_offset` is where a token's own text begins, in characters of
    the choice's text before a stop string cuts it (token_spans.py)."""

    def __init__(self, names: TokenNames, top: int, tokenizer: RouterTokenizer, detokenizer: Detokenizer) -> None:
        """`detokenizer` is a new one, as the output's text comes of."""
        self._names, self._top, self._tokenizer, self._detokenizer = names, top, tokenizer, detokenizer
        self._spans = TokenSpans(detokenizer)

    def prompt(self, token_ids: Sequence[int], positions: Sequence[TokenLogprobs], text: str) -> dict[str, Any]:
        """The lists of the prompt, whose first token has no probability. Its text comes before all other text."""
        check_count(token_ids[1:], positions)
        self._spans = TokenSpans(self._detokenizer, len(text))
        return {
            "tokens": [self._names.completion(token_id) for token_id in token_ids],
            "token_logprobs": [None, *(finite(p.logprob) for p in positions)],
            "top_logprobs": [None, *(self._best(p) for p in positions)],
            "text_offset": starts_of_prompt(self._tokenizer, token_ids, text),
        }

    def output(self, token_ids: Sequence[int], positions: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The lists of the next output tokens."""
        check_count(token_ids, positions)
        return {
            "tokens": [self._names.completion(token_id) for token_id in token_ids],
            "token_logprobs": [finite(p.logprob) for p in positions],
            "top_logprobs": [self._best(p) for p in positions],
            "text_offset": [start for start, _ in self._spans.add(token_ids)],
        }

    def _best(self, position: TokenLogprobs) -> dict[str, float]:
        """The best tokens and the token itself. Of two that are spelled alike the likelier one counts."""
        best: dict[str, float] = {}
        for token_id, logprob in (*position.top[: self._top], (position.token_id, position.logprob)):
            best.setdefault(self._names.completion(token_id), finite(logprob))
        return best
