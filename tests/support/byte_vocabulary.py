"""A vocabulary of one token per byte and some special ones, and what a grammar allows in it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from random import Random

import llguidance
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from engine_core.types.sampling import Grammar, GrammarKind
from services.router.text.tokenizer import RouterTokenizer

EOS = "<eos>"


@cache
def byte_tokenizer(special: tuple[str, ...]) -> RouterTokenizer:
    """One token per byte, and the special ones."""
    return RouterTokenizer(_backend(special), None)


@cache
def _backend(special: tuple[str, ...]) -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(s, special=True, normalized=False) for s in (EOS, *special)])
    return backend


@cache
def _vocabulary(special: tuple[str, ...]) -> llguidance.LLTokenizer:
    backend = _backend(special)
    return llguidance.LLTokenizer(backend.to_str(), eos_token=backend.token_to_id(EOS))


def error_of(grammar: Grammar) -> str:
    """Why a grammar can't be compiled, "" when it can."""
    found: str = llguidance.LLMatcher(_vocabulary(()), grammar.text, log_level=0).get_error()
    return found


def allows(special: Sequence[str], grammar: Grammar, *texts: str) -> bool:
    """Whether the texts are a whole output by the grammar: every other one, from the second, without special tokens."""
    assert grammar.kind is GrammarKind.LARK
    vocabulary = _vocabulary(tuple(special))
    matcher = llguidance.LLMatcher(vocabulary, grammar.text)
    assert not matcher.get_error(), (matcher.get_error(), grammar.text)
    backend, ids = _backend(tuple(special)), list[int]()
    for i, text in enumerate(texts):
        for piece in text if i % 2 else (text,):
            ids += backend.encode(piece, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def drawn(special: Sequence[str], grammar: Grammar, random: Random, *, most: int) -> str | None:
    """A whole output by the grammar, each token drawn from those it allows; None when it has more than `most`."""
    vocabulary, backend = _vocabulary(tuple(special)), _backend(tuple(special))
    matcher, ids = llguidance.LLMatcher(vocabulary, grammar.text), list[int]()
    assert not matcher.get_error(), (matcher.get_error(), grammar.text)
    end = backend.token_to_id(EOS)
    while len(ids) <= most:
        allowed = [i for i, bias in enumerate(matcher.compute_logit_bias()) if bias]
        if not allowed or matcher.is_stopped() or (end in allowed and random.random() < 0.5):
            return str(backend.decode(ids, skip_special_tokens=False))
        ids.append(random.choice([i for i in allowed if i != end]))
        matcher.consume_token(ids[-1])
    return None
