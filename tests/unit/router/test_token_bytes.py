"""What one token stands for, and how reports of log probabilities spell it."""

from __future__ import annotations

import functools

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from services.router.text.token_bytes import TokenBytes, chat_spelling, completion_spelling
from services.router.text.tokenizer import RouterTokenizer
from tests.support.models import tiny_model


@functools.cache
def tiny() -> RouterTokenizer:
    return RouterTokenizer.load(tiny_model())


def _fallback(decoder: decoders.Decoder) -> tokenizers.Tokenizer:
    vocab = {"<unk>": 0, "▁the": 1, "s": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoder
    return backend


@given(st.text(max_size=40))
def test_the_bytes_of_all_tokens_are_those_of_the_text(text: str) -> None:
    ids = tiny().encode(text, add_special_tokens=False)
    assert b"".join(map(tiny().bytes.of, ids)) == text.encode()


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    ],
)
def test_byte_fallback_and_spaces(decoder: decoders.Decoder) -> None:
    tokens = TokenBytes(_fallback(decoder))
    assert [tokens.of(i) for i in (1, 2, 3 + 0xE2)] == [b" the", b"s", b"\xe2"]


def test_added_tokens_are_spelled_as_they_are() -> None:
    vocab = {"a": 0, "Ġa": 1, "é": 2}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("né", special=False)])
    backend.add_special_tokens([AddedToken("<é>", special=True)])
    tokens = TokenBytes(backend)
    assert [tokens.of(i) for i in range(6)] == [b"a", b" a", b"\xe9", "né".encode(), "<é>".encode(), b""]
    assert [tokens.shown(i) for i in (3, 4)] == ["né".encode(), b""]


def test_parts_of_characters_are_spelled_by_their_bytes() -> None:
    assert (chat_spelling(" é".encode()), completion_spelling(" é".encode())) == (" é", " é")
    assert (chat_spelling(b" \xe2\x80"), completion_spelling(b" \xe2\x80")) == (
        "\\x20\\xe2\\x80",
        "bytes:\\x20\\xe2\\x80",
    )


@pytest.mark.parametrize(
    ("skip", "kept", "text"),
    [
        (True, (), "the user"),
        (True, (2,), "the<|im_end|> user"),
        (False, (), "<|im_start|>the<|im_end|> user"),
        (False, (2,), "<|im_start|>the<|im_end|> user"),
    ],
)
def test_special_tokens_are_left_out_kept_or_shown(skip: bool, kept: tuple[int, ...], text: str) -> None:
    ids = [1, *tiny().encode("the", add_special_tokens=False), 2, *tiny().encode(" user", add_special_tokens=False)]
    state = tiny().detokenizer(skip_special_tokens=skip, kept_ids=kept)
    assert "".join(state.add([i]) for i in ids) + state.flush() == text

    backend = _fallback(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]))
    backend.add_special_tokens(["<s>", "</s>"])
    start, end = backend.token_to_id("<s>"), backend.token_to_id("</s>")
    window = RouterTokenizer(backend, None).detokenizer(skip_special_tokens=skip, kept_ids=(end,) if kept else ())
    wanted = text.replace("<|im_start|>", "<s>").replace("<|im_end|>", "</s>").replace("the", " the")
    pieces = [window.add([i]) for i in (start, 1, end)]
    assert "".join(pieces) + window.flush() == wanted.replace(" user", "")
