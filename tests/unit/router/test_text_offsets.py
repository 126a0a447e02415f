"""text_offset of /v1/completions: where each token's own text begins, whatever the bytes, cuts and deltas."""

from __future__ import annotations

import codecs
import functools
import json
from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from engine_core.types.sampling import TokenLogprobs
from services.router.journey import Delta, SampleResult
from services.router.openai.stream import CompletionReply
from services.router.reply_spec import ReplySpec
from services.router.text.output_text import OutputText
from services.router.text.token_spans import TokenSpans, starts_of_prompt
from services.router.text.tokenizer import RouterTokenizer
from tests.support.models import tiny_model

FAMILY = "👩‍👩‍👧‍👦"
WORDS = ["▁the", "▁", "s", "日", "é▁"]
SPECIAL = ["<s>", "</s>"]
STOPS = ["s", "the", "\ufffd", "日s", "👦s", "\u200d👧"]


@functools.cache
def fallback() -> RouterTokenizer:
    """As llama 2 has it: words, a token per byte, a space left out at the beginning."""
    vocab = {word: i for i, word in enumerate(["<unk>", *WORDS, *(f"<0x{b:02X}>" for b in range(256))])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(SPECIAL)
    return RouterTokenizer(backend, None)


@functools.cache
def byte_level() -> RouterTokenizer:
    return RouterTokenizer.load(tiny_model())


def byte(value: int) -> int:
    return 1 + len(WORDS) + value


def end_of(tokenizer: RouterTokenizer) -> int:
    return max(tokenizer.bytes.special_ids)


def reference(
    tokenizer: RouterTokenizer, ids: Sequence[int], *, skip: bool, goes_on: bool = False
) -> tuple[str, list[int]]:
    """The text of tokens that are bytes, and where each begins, by decoding all that is before."""
    hidden = tokenizer.bytes.special_ids if skip else ()
    data, starts = b"", []
    for token_id in ids:
        own = b"" if token_id in hidden else tokenizer.bytes.of(token_id)
        if own:
            starts.append(len((data + own[:1]).decode(errors="replace")) - 1)
        else:
            lone = (
                data[-2:-1] == b"\xed" and data[-1] >= 0xA0
            )  # begins half a surrogate pair: no character, whatever follows
            starts.append(len(codecs.utf_8_decode(data, "replace", lone)[0]))
        data += own
    text = data.decode(errors="replace")
    dropped = tokenizer.bytes.strip if text.startswith(" ") and not goes_on else 0
    return text[dropped:], [max(start - dropped, 0) for start in starts]


def spoken(
    tokenizer: RouterTokenizer, ids: Sequence[int], sizes: Sequence[int], stops: Sequence[str], *, skip: bool
) -> list[Delta]:
    """Deltas of an output, as a journey makes them of messages of these sizes."""
    output = OutputText(tokenizer.detokenizer(skip_special_tokens=skip, goes_on=True), stops)
    deltas: list[Delta] = []
    at = 0
    for size in [*sizes, len(ids)]:
        before, some = len(output.token_ids), ids[at : at + size]
        at += size
        text = output.add(some)
        if not some:
            continue
        taken = output.token_ids[before:]
        deltas.append(Delta(text, taken, None, [scored(i) for i in taken]))
        if output.stopped:
            break
    deltas.append(Delta(output.finish(), []))
    listed = [scored(i) for i in output.token_ids]
    deltas[-1].result = SampleResult(1, 1, output.token_ids, "stop", None, 0, {}, logprobs=listed)
    return deltas


def scored(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -0.5, 1, ())


def replies(
    tokenizer: RouterTokenizer, prompt: Sequence[int], echo: str | None, deltas: Sequence[Delta], *, skip: bool
) -> list[tuple[str, dict[str, list[Any]]]]:
    """Text and lists of the choice, whole and streamed."""
    spec = ReplySpec("r", "m", [prompt], tokenizer, logprobs=0, skip_special_tokens=skip)
    first = Delta("", [], prompt_logprobs=[scored(i) for i in prompt[1:]])
    result = deltas[-1].result
    assert result is not None
    whole = CompletionReply(spec, None if echo is None else [echo])
    for delta in (first, *deltas):
        whole.collect(0, delta)
    choice = whole.complete([result])["choices"][0]
    stream = CompletionReply(spec, None if echo is None else [echo])
    data = b"".join(stream.take(0, delta) for delta in (first, *deltas))
    parts = [json.loads(line.removeprefix("data: "))["choices"][0] for line in data.decode().split("\n\n") if line]
    lists: dict[str, list[Any]] = {name: [] for name in choice["logprobs"]}
    for part in parts:
        for name, values in (part["logprobs"] or {}).items():
            lists[name] += values
    return [(choice["text"], choice["logprobs"]), ("".join(part["text"] for part in parts), lists)]


def pieces_of(tokenizer: RouterTokenizer) -> st.SearchStrategy[list[int]]:
    """Words, whole characters byte by byte, broken ones, any bytes, special tokens."""
    if tokenizer is fallback():
        bytes_of = lambda data: [byte(b) for b in data]  # noqa: E731
        words = [[1 + i] for i in range(len(WORDS))]
    else:
        known = {tokenizer.bytes.of(i): i for i in range(tokenizer.vocab_size)}
        bytes_of = lambda data: [known[bytes([b])] for b in data]  # noqa: E731
        words = [tokenizer.encode(word, add_special_tokens=False) for word in (" the", "s", "user 日", "é ")]
    whole = [bytes_of(text.encode()) for text in ("é", "日", "🦜", FAMILY, "e\u0301", "🏳️‍🌈", "s")]
    broken = [
        bytes_of(data)
        for data in (b"\xe2", b"\xe2\x82", b"\xf0\x9f", b"\xf0\x9f\xa6", b"\x80", b"\xff", b"\xe0\x80", b"\xed\xa0")
    ]
    special = [[i] for i in sorted(tokenizer.bytes.special_ids)]
    one = st.one_of(
        st.sampled_from([*words, *whole, *broken, *special]), st.binary(min_size=1, max_size=2).map(bytes_of)
    )
    return st.lists(one, max_size=9).map(lambda found: [i for some in found for i in some])


@pytest.mark.parametrize("make", [fallback, byte_level], ids=["byte fallback", "byte level"])
@pytest.mark.parametrize("skip", [True, False], ids=["skipped", "shown"])
@settings(max_examples=40)
@given(data=st.data())
def test_offsets_of_whole_streamed_and_echoed_replies(make: Any, skip: bool, data: st.DataObject) -> None:
    tokenizer = make()
    ids = data.draw(pieces_of(tokenizer))
    stops = data.draw(st.lists(st.sampled_from(STOPS), max_size=2))
    sizes = data.draw(st.lists(st.integers(1, 4), max_size=12))
    deltas = spoken(tokenizer, ids, sizes, stops, skip=skip)
    result = deltas[-1].result
    assert result is not None
    taken = result.token_ids
    uncut, starts = reference(tokenizer, taken, skip=skip, goes_on=True)
    prompt = data.draw(pieces_of(tokenizer).filter(bool))
    before, prompt_starts = reference(tokenizer, prompt, skip=skip)
    for echo in (None, before):
        base = len(echo or "")
        wanted = [*(prompt_starts if echo is not None else []), *(base + start for start in starts)]
        for text, lists in replies(tokenizer, prompt, echo, deltas, skip=skip):
            assert ((echo or "") + uncut).startswith(text)
            assert lists["text_offset"] == wanted == sorted(wanted)
            assert len(lists["tokens"]) == len(wanted)
            if not stops:
                assert text == (echo or "") + uncut


def test_a_broken_character_is_one_before_what_breaks_it() -> None:
    ids = [1, byte(0xE2), byte(0x82), 3, *(byte(b) for b in "é".encode()), byte(0xF0)]
    text, lists = replies(fallback(), [1], None, spoken(fallback(), ids, [1] * 9, (), skip=True), skip=True)[1]
    assert text == " the\ufffdsé\ufffd"
    assert lists["text_offset"] == [0, 4, 4, 5, 6, 6, 7]


def test_a_stop_string_cuts_text_and_moves_no_offset() -> None:
    ids = [3, *(byte(b) for b in FAMILY.encode()), 3, 1]
    deltas = spoken(fallback(), ids, [2] * 40, ["\u200d👧"], skip=True)
    for text, lists in replies(fallback(), [1], None, deltas, skip=True):
        assert text == "s👩\u200d👩"
        assert lists["text_offset"] == [0, *[1] * 4, *[2] * 3, *[3] * 4, *[4] * 3, *[5] * 4]


# ---- prompts that clients write -------------------------------------------------------------------------------


def test_special_tokens_in_a_prompt_are_spelled_or_added() -> None:
    tokenizer = byte_level()
    text = "the<|im_end|> é<|im_start|>"
    ids = tokenizer.encode(text)
    assert starts_of_prompt(tokenizer, ids, text) == reference(tokenizer, ids, skip=False)[1]
    begun = [1, *tokenizer.encode("the é")]
    assert starts_of_prompt(tokenizer, begun, "the é") == [0, *reference(tokenizer, begun[1:], skip=False)[1]]


def test_offsets_are_those_of_the_prompt_as_it_was_written() -> None:
    """A normalizer composes the accent: two characters of the prompt are one of the tokens'."""
    backend = tokenizers.Tokenizer.from_file(str(tiny_model() / "tokenizer.json"))
    backend.normalizer = normalizers.NFC()
    tokenizer = RouterTokenizer(backend, None)
    text = "e\u0301 the user<|im_end|>  so"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) != text
    starts = starts_of_prompt(tokenizer, ids, text)
    composed = reference(tokenizer, ids, skip=False)[1]
    assert starts == [0 if start == 0 else start + 1 for start in composed]


def test_decoders_that_look_around() -> None:
    """A character that is certain late, in a vocabulary that only its decoder can read."""
    vocab = {word: i for i, word in enumerate(["<unk>", "▁the", "s", *(f"<0x{b:02X}>" for b in range(256))])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip("▁", 1, 0)])
    tokenizer = RouterTokenizer(backend, None)
    ids = [1, *(3 + b for b in "é🦜".encode()), 2, 3 + 0xE2, 2]
    spans = TokenSpans(tokenizer.detokenizer()).add(ids)
    assert tokenizer.decode(ids) == "theé🦜s\ufffds"
    assert [start for start, _ in spans] == [0, *[3] * 2, *[4] * 4, 5, 6, 7]
