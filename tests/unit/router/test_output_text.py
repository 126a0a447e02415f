"""Stop strings are cut alike however the text is cut into tokens and messages."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from services.router.text.output_text import OutputText, StopMatcher

_TEXT = st.text("ab c\u00e9", max_size=40)
_STOPS = st.lists(st.text("ab c", min_size=1, max_size=5), max_size=4)


def naive_cut(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(_TEXT, _STOPS, st.lists(st.integers(0, 40), max_size=12))
def test_matcher_equals_the_naive_cut_for_any_chunking(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    borders = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    out = ""
    for start, end in zip(borders, borders[1:], strict=False):
        out += matcher.push(text[start:end])
        # What was shown is never taken back.
        assert naive_cut(text, stops)[0].startswith(out)
    out += matcher.flush()
    assert (out, matcher.matched) == naive_cut(text, stops)


def test_matcher_holds_back_no_more_than_it_must() -> None:
    matcher = StopMatcher(["END", "\n\n"])
    assert matcher.push("text E") == "text "
    assert matcher.push("N") == ""
    assert matcher.push("NE") == "ENN"
    assert matcher.push("ND") == ""
    assert matcher.matched == "END"


class Letters:
    """Token 1 is "a", 2 is "b", …"""

    def add(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(96 + t) for t in token_ids)

    def flush(self) -> str:
        return ""


def test_tokens_behind_a_stop_string_are_not_taken() -> None:
    output = OutputText(Letters(), stops=["cd"])
    assert output.add([1, 2, 3]) == "ab"
    assert output.add([4, 5, 6]) == ""
    assert output.stopped and output.stop_string == "cd"
    assert output.token_ids == [1, 2, 3, 4]
    assert output.finish() == ""


def test_stop_token_is_counted_but_not_shown() -> None:
    output = OutputText(Letters(), stop_token_ids=[3])
    assert output.add([1, 3, 2]) == "a"
    assert output.token_ids == [1, 3]
    assert output.stop_token_id == 3


def test_nothing_stops_within_min_tokens() -> None:
    output = OutputText(Letters(), stops=["ab"], stop_token_ids=[3], min_tokens=3)
    assert output.add([1, 2, 3, 1]) == "abc"
    assert not output.stopped
    assert output.add([2]) == ""
    assert output.stop_string == "ab"


def test_held_text_comes_at_the_end() -> None:
    output = OutputText(Letters(), stops=["abc"])
    assert output.add([1, 2]) == ""
    assert output.finish() == "ab"
    assert output.stop_string is None
