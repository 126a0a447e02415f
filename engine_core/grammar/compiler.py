"""From a grammar's text to a matcher. The router's check and the engine compile by the same code.

llguidance bounds what a matcher may cost per step (LIMITS), not what building one may cost: intersected patterns
grow exponentially, and rules that name rules use one stack frame each. So whoever compiles text from outside does it
where it can be killed (services/router/grammar/check.py), and every thread that compiles has STACK_BYTES of stack,
enough for any text of MAX_GRAMMAR_BYTES.

JSON is written without free whitespace: one space may follow a comma or a colon and nothing else, so that a
model at a high temperature can't fill its output with blanks. A schema's own `x-guidance` goes before that.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import numpy.typing as npt

from engine_core.types.errors import InvalidRequestError
from engine_core.types.sampling import MAX_GRAMMAR_BYTES, Grammar, GrammarKind

STACK_BYTES = 512 * 1024 * 1024
"""Address space, not memory: rules that name one another go 30,000 deep in a text of MAX_GRAMMAR_BYTES."""

ITEM_SEPARATOR, KEY_SEPARATOR = ", ?", ": ?"
"""Between the parts of JSON, as patterns: nothing else there is whitespace."""

UNSPELLED = "the grammar forces text that the model's tokens can't write"

_LETTERS = ("[a-zA-Z]{1,4}", "[a-zA-Z]{1,10}", "[a-zA-Z ]{1,10}", "[a-zA-Z ]{1,30}")
"""Beside llguidance's own: tokens that are allowed together, unseen, where a form takes all such text next. Without
these a class such as `[A-Za-z0-9 ._-]` has nearly the whole vocabulary looked through for each mask."""

_TRIAL_TOKENS = 12
_MESSAGE_CHARS = 400


def limits() -> llguidance.LLParserLimits:
    """llguidance's own limits; a lexer's state takes 1 to 2 kB, so 50,000 of them bound a matcher's memory."""
    return llguidance.LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


def load_vocabulary(directory: str | Path, eos_token_ids: Sequence[int], vocab_size: int = 0) -> llguidance.LLTokenizer:
    """The vocabulary of a model directory's tokenizer.json, with all the tokens that end an output; takes up to a
    second or two and holds the GIL. `vocab_size` is the number of the model's logits where that is more.

    Raises InvalidRequestError, in the name of the requests that then can't be served.
    """
    path = Path(directory) / "tokenizer.json"
    if not path.is_file():
        raise InvalidRequestError("this model has no tokenizer.json, which grammars need", field="grammar")
    try:
        found = json.loads(path.read_bytes())
        found["padding"] = found["truncation"] = None
        known = 1 + max([*_ids_of(found), *eos_token_ids])
        return llguidance.LLTokenizer(
            json.dumps(found),
            n_vocab=max(known, vocab_size),
            eos_token=list(eos_token_ids) or None,
            slices=[*llguidance.LLTokenizer.general_slices(), *_LETTERS],
        )
    except Exception as exc:  # the library raises whatever its parts raise
        message = f"grammars can't be used with this model's tokenizer.json: {_short(str(exc))}"
        raise InvalidRequestError(message, field="grammar") from exc


def _ids_of(tokenizer: dict[str, Any]) -> list[int]:
    vocab = tokenizer["model"].get("vocab", {})
    ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
    return [*ids, *(token["id"] for token in tokenizer.get("added_tokens", ()))]


def compile_grammar(vocabulary: llguidance.LLTokenizer, grammar: Grammar) -> llguidance.LLMatcher:
    """A matcher that has consumed nothing; lets go of the GIL. Raises InvalidRequestError with llguidance's reason,
    for the field "grammar"."""
    size = len(grammar.text.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise _refused(f"the grammar has {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed")
    try:
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                text = llguidance.LLMatcher.grammar_from_json_schema(
                    grammar.text,
                    defaults={
                        "whitespace_flexible": False,
                        "item_separator": ITEM_SEPARATOR,
                        "key_separator": KEY_SEPARATOR,
                    },
                )
            case GrammarKind.REGEX:
                text = llguidance.LLMatcher.grammar_from_regex(grammar.text)
            case GrammarKind.LARK:
                text = llguidance.LLMatcher.grammar_from_lark(grammar.text)
    except ValueError as exc:
        raise _refused(_short(str(exc))) from exc
    matcher = llguidance.LLMatcher(vocabulary, text, log_level=0, limits=limits())
    if matcher.is_error():
        raise _refused(_short(matcher.get_error()))
    if matcher.is_stopped() and not matcher.is_accepting():
        raise _refused("nothing matches the grammar")
    return matcher


def try_out(vocabulary: llguidance.LLTokenizer, matcher: llguidance.LLMatcher) -> None:
    """Takes some steps on a copy: what is too big to be followed shows at the first tokens.

    Raises InvalidRequestError for the field "grammar".
    """
    copy = matcher.deep_copy()
    for step in range(_TRIAL_TOKENS):
        allowed = tokens_of(copy.compute_bitmask())
        if copy.is_error():
            raise _refused(_short(copy.get_error()))
        if copy.is_stopped() and not copy.is_accepting():
            raise _refused("nothing matches the grammar")
        if not allowed.size:
            raise _refused("nothing matches the grammar")
        if copy.is_stopped():
            return
        if allowed.size == 1:
            spelt = spelt_out(vocabulary, copy, int(allowed[0]))
            if spelt is None:
                raise _refused(UNSPELLED)
            allowed[0] = spelt
        going_on = allowed[~np.isin(allowed, vocabulary.eos_tokens)]
        if not going_on.size:
            return
        if not copy.consume_token(int(going_on[step % going_on.size])):
            raise _refused(_short(copy.get_error()))


def spelt_out(vocabulary: llguidance.LLTokenizer, matcher: llguidance.LLMatcher, token: int) -> int | None:
    """The token that comes next where a mask allows `token` alone: itself, if the matcher takes it.

    llguidance has text that must come tokenised as the tokenizer would, and that one may answer with a token that is
    not this text: a special token where the text is spelt like one, or what a normaliser makes of it. Then text is
    written with the longest token of the vocabulary that begins it. None when there is none.
    """
    if _takes(vocabulary, matcher, token):
        return token
    text = matcher.compute_ff_bytes()
    try:
        whole = text.decode()
    except UnicodeDecodeError as exc:
        whole = text[: exc.start].decode()
    ids = vocabulary.greedy_tokenize(whole)
    return ids[0] if ids and _takes(vocabulary, matcher, ids[0]) else None


def _takes(vocabulary: llguidance.LLTokenizer, matcher: llguidance.LLMatcher, token: int) -> bool:
    if token not in vocabulary.eos_tokens:
        return bool(matcher.validate_tokens([token]))
    # As the end of the output, or because the grammar names the token and not its text.
    return matcher.is_stopped() or matcher.is_accepting() or matcher.deep_copy().consume_token(token)


def tokens_of(bits: bytes) -> npt.NDArray[np.int64]:
    """The token ids that a packed mask allows."""
    return np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little"))


def _refused(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, field="grammar")


def _short(message: str) -> str:
    """One line: without the source listing and the state that llguidance appends."""
    lines = [line.strip() for line in message.split("<state>")[0].split("<non-verbose/>")[0].splitlines()]
    kept = [line for line in lines if line and not (line[0].isdigit() and " | " in line) and set(line) != {"^"}]
    text = " ".join(" ".join(kept).split())
    if text.startswith("NoExtension"):
        return "nothing matches the grammar"
    return text if len(text) <= _MESSAGE_CHARS else text[: _MESSAGE_CHARS - 1] + "…"
