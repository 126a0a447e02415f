"""Text that comes token by token, for every kind of decoder, cut everywhere; and stop strings in it."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from services.router.text.detokenizer import ByteDetokenizer, Detokenizer, PieceDetokenizer, WindowDetokenizer
from services.router.text.output_text import OutputText
from services.router.text.tokenizer import RouterTokenizer
from tests.support.models import tiny_model

FAMILY = "👩‍👩‍👧‍👦"  # four people and three joiners
HARD = [
    "é",
    "e\u0301",
    "日本語",
    "🦜",
    FAMILY,
    "👍🏽",
    "🏳️‍🌈",
    "\u200d",
    "a\U0010ffffb",
    "x" + FAMILY + "é" + FAMILY + "y",
]
WORDS = ["▁", "▁the", "▁bird", "s", "▁is", "##ing", ".", "▁,", "'s", "n't", "日", "▁▁", "sea</w>"]
SPECIAL = ["<s>", "</s>", "<|call|>"]


def backend(decoder: decoders.Decoder | None, words: Sequence[str] = WORDS) -> tokenizers.Tokenizer:
    """A vocabulary with these words, all bytes as SentencePiece spells them, and special tokens at its end."""
    vocab = {word: i for i, word in enumerate(["<unk>", *words, *(f"<0x{b:02X}>" for b in range(256))])}
    found = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    if decoder is not None:
        found.decoder = decoder
    found.add_special_tokens(SPECIAL)
    return found


def sentencepiece(*, strip: bool = True) -> decoders.Decoder:
    """As llama 2 and mistral have it, with `strip`; gemma without."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)


KINDS = {
    "llama2": (sentencepiece(), ByteDetokenizer),
    "gemma": (sentencepiece(strip=False), ByteDetokenizer),
    "metaspace": (decoders.Metaspace(), PieceDetokenizer),
    "metaspace-never": (decoders.Metaspace(prepend_scheme="never"), PieceDetokenizer),
    "wordpiece": (decoders.WordPiece("##", True), PieceDetokenizer),
    "wordpiece-plain": (decoders.WordPiece("##", False), PieceDetokenizer),
    "none": (None, PieceDetokenizer),
    "suffix": (decoders.BPEDecoder("</w>"), WindowDetokenizer),
    "odd": (decoders.Sequence([decoders.Strip("▁", 1, 0), decoders.Fuse()]), WindowDetokenizer),
}


@functools.cache
def loaded(kind: str) -> tuple[tokenizers.Tokenizer, RouterTokenizer]:
    found = backend(KINDS[kind][0])
    return found, RouterTokenizer(found, None)


def byte_id(byte: int) -> int:
    return 1 + len(WORDS) + byte


def ids_of(words: Sequence[str]) -> list[int]:
    """Token ids of words, and of the bytes of what is no word."""
    out: list[int] = []
    vocab = loaded("llama2")[0].get_vocab()
    for word in words:
        out += [vocab[word]] if word in vocab else [byte_id(b) for b in word.encode()]
    return out


def in_pieces(state: Detokenizer, ids: Sequence[int], sizes: Sequence[int]) -> list[str]:
    """What comes of parts of these sizes, and of the end."""
    out, at = [], 0
    for size in [*sizes, len(ids)]:
        out.append(state.add(ids[at : at + size]))
        at += size
    return [*out, state.flush()]


_TEXTS = st.lists(st.sampled_from([*WORDS, *SPECIAL, *HARD, " ", "ab"]), max_size=14)
_SIZES = st.lists(st.integers(1, 4), max_size=40)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
@given(words=_TEXTS, sizes=_SIZES)
def test_in_sum_it_is_what_the_library_decodes_at_once(
    kind: str, skip: bool, words: list[str], sizes: list[int]
) -> None:
    library, ours = loaded(kind)
    ids = ids_of(words)
    state = ours.detokenizer(skip_special_tokens=skip)
    assert type(state) is KINDS[kind][1]
    whole = library.decode(ids, skip_special_tokens=skip)
    shown = ""
    for piece in in_pieces(state, ids, sizes):
        shown += piece
        assert whole.startswith(shown)
    assert shown == whole == ours.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["llama2", "gemma"])
@pytest.mark.parametrize("text", HARD)
def test_a_character_comes_with_its_last_byte_and_none_is_held_longer(kind: str, text: str) -> None:
    _, ours = loaded(kind)
    state, data = ours.detokenizer(), text.encode()
    shown = ""
    for at, byte in enumerate(data, 1):
        shown += state.add([byte_id(byte)])
        assert shown == data[:at].decode(errors="ignore")
    assert (shown, state.flush()) == (text, "")


@pytest.mark.parametrize("text", HARD)
def test_the_same_for_byte_level_tokens(text: str) -> None:
    ours = RouterTokenizer.load(tiny_model())
    ids = ours.encode(text, add_special_tokens=False)
    data = b"".join(map(ours.bytes.of, ids))
    state, shown, at = ours.detokenizer(), "", 0
    for token_id in ids:
        shown += state.add([token_id])
        at += len(ours.bytes.of(token_id))
        assert shown == data[:at].decode(errors="ignore")
    assert (shown, state.flush()) == (text, "")


def test_bytes_that_are_no_utf8_spoil_no_whole_character() -> None:
    _, ours = loaded("llama2")
    ids = [*ids_of(["é"]), byte_id(0xFF), *ids_of([FAMILY]), byte_id(0xE2), byte_id(0x82)]
    for sizes in ([1] * len(ids), [3, 5], []):
        assert "".join(in_pieces(ours.detokenizer(), ids, sizes)) == f"é\ufffd{FAMILY}\ufffd"
    assert ours.decode(ids) == f"é\ufffd{FAMILY}\ufffd"
    # A special token ends a character that was begun, whether or not it is shown.
    begun = [byte_id(0xC3), loaded("llama2")[0].token_to_id("</s>"), *ids_of(["▁the"])]
    assert ours.decode(begun, skip_special_tokens=False) == "\ufffd</s> the"


def test_bytes_are_held_only_while_they_can_become_a_character() -> None:
    _, ours = loaded("llama2")
    for lead in range(0xC0, 0x100):
        for second in range(256):
            state = ours.detokenizer()
            shown = state.add([byte_id(lead)]) + state.add([byte_id(second)])
            data = bytes([lead, second])
            certain = b"" if _begins(data) else data[:1] if _begins(data[1:]) else data
            assert shown == certain.decode(errors="replace"), data
            for rest in (b"s", b"\x80s", b"\xed\xa0\xed\xa0\x80s"):
                state = ours.detokenizer()
                whole = "".join(state.add([byte_id(b)]) for b in data + rest)
                assert whole + state.flush() == (data + rest).decode(errors="replace")


def _begins(data: bytes) -> bool:
    """Whether this is the beginning of a character, and not yet the whole."""
    for rest in (b"\x80", b"\xbf", b"\x80\x80", b"\xbf\xbf", b"\x80\x80\x80", b"\xbf\x80\x80"):
        with contextlib.suppress(UnicodeDecodeError):
            if len((data + rest).decode()) == 1:
                return True
    return False


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_that_are_kept(kind: str) -> None:
    library, ours = loaded(kind)
    start, call = library.token_to_id("<s>"), library.token_to_id("<|call|>")
    ids = [start, *ids_of(["▁the"]), call, *ids_of(["▁bird"]), start]
    text = "".join(in_pieces(ours.detokenizer(kept_ids=(call,)), ids, [1, 1, 1]))
    assert text == library.decode([i for i in ids if i != start], skip_special_tokens=False)
    assert "<|call|>" in text and "<s>" not in text


@pytest.mark.parametrize("kind", [kind for kind, (_, state) in KINDS.items() if state is not WindowDetokenizer])
@given(words=_TEXTS, sizes=_SIZES)
def test_an_output_that_goes_on_joins_its_prompt(kind: str, words: list[str], sizes: list[int]) -> None:
    library, ours = loaded(kind)
    prompt, ids = ids_of(["▁the", "s"]), ids_of(words)
    text = "".join(in_pieces(ours.detokenizer(goes_on=True), ids, sizes))
    assert library.decode(prompt) + text == library.decode(prompt + ids)


# ---- stop strings -------------------------------------------------------------------------------------


def cut(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Where the first of the stop strings is complete; of several the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def held(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of a text that could begin a stop string."""
    sizes = (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
    return max(sizes, default=0)


STOPPED: list[tuple[str, list[str]]] = [
    ("one two END three", ["END"]),
    ("one EENEND", ["END"]),
    ("ab abab abababc x", ["ababc", "babab"]),
    ("a\n\nb", ["\n\n", "\n"]),
    (f"so {FAMILY} and {FAMILY}!", [f"{FAMILY}!"]),
    (f"{FAMILY} then 👩‍👩", ["👩‍👩 "]),
    (f"{FAMILY}{FAMILY[:-1]}x", [FAMILY + FAMILY]),
    ("日本語日本", ["本日", "語日本"]),
    ("e\u0301 é e", ["\u0301 é"]),
    ("\u200d\u200dz", ["\u200dz"]),
    ("never", ["x", "yy"]),
    ("stop at the very en", ["end"]),
]


@pytest.mark.parametrize(("text", "stops"), STOPPED)
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_are_cut_at_every_byte_alike(text: str, stops: list[str], include: bool) -> None:
    _, ours = loaded("gemma")
    data = [byte_id(b) for b in text.encode()]
    before, matched = cut(text, stops)
    wanted = before + (matched or "") if include else before
    borders = range(len(data) + 1)
    for first, second in itertools.combinations(borders, 2):
        output = OutputText(ours.detokenizer(), stops, include_stop=include)
        shown = "".join(output.add(part) for part in (data[:first], data[first:second], data[second:]))
        assert shown + output.finish() == wanted and output.stop_string == matched
    # Token by token no more is held back than could begin a stop string, or is half a character.
    output, shown = OutputText(ours.detokenizer(), stops, include_stop=include), ""
    for at in range(1, len(data) + 1):
        shown += output.add(data[at - 1 : at])
        seen = text.encode()[:at].decode(errors="ignore")
        if cut(seen, stops)[1] is None:
            assert shown == seen[: len(seen) - held(seen, stops)]
    assert len(output.token_ids) == len((before + (matched or "")).encode())  # what came after is not taken


@given(
    st.text("ab\u200dé👩", max_size=24),
    st.lists(st.text("ab\u200dé👩", min_size=1, max_size=4), max_size=4),
    st.lists(st.integers(1, 9), max_size=30),
    st.integers(0, 12),
)
def test_nothing_within_min_tokens_stops_or_begins_to(
    text: str, stops: list[str], sizes: list[int], min_tokens: int
) -> None:
    _, ours = loaded("gemma")
    data = [byte_id(b) for b in text.encode()]
    output = OutputText(ours.detokenizer(), stops, min_tokens=min_tokens)
    shown, at = "", 0
    for size in [*sizes, len(data)]:
        shown += output.add(data[at : at + size])
        at += size
    shown += output.finish()
    free = text.encode()[:min_tokens].decode(errors="ignore")
    rest, matched = cut(text[len(free) :], stops)
    assert (shown, output.stop_string) == (free + rest, matched)
