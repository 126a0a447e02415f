"""What was asked and answered, in the log: only where an operator asks for it, by --log-prompts."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from services.router.text.tokenizer import RouterTokenizer

log = logging.getLogger(__name__)


def log_prompts(tokenizer: RouterTokenizer, request_id: str, prompts: Sequence[Sequence[int]]) -> None:
    """One line per prompt, as the model is given it."""
    for i, prompt in enumerate(prompts):
        log.info("prompt %d: %r", i, _text(tokenizer, prompt), extra={"request_id": request_id})


def log_answers(tokenizer: RouterTokenizer, request_id: str, answers: Sequence[Sequence[int]]) -> None:
    """One line per choice, as the model gave it."""
    for i, answer in enumerate(answers):
        log.info("answer %d: %r", i, _text(tokenizer, answer), extra={"request_id": request_id})


def _text(tokenizer: RouterTokenizer, token_ids: Sequence[int]) -> str:
    return tokenizer.decode(list(token_ids), skip_special_tokens=False)
