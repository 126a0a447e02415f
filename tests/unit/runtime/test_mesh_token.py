"""The mesh token: its file, who is refused and why, and how it is changed."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from engine_core.types.errors import ConfigError
from services.runtime.token import EXPIRED, MAX_TOKENS, MISSING, WRONG, MeshToken, parse_tokens
from tests.support.certificates import Files

OLD, NEW, OTHER = "the-token-of-yesterday", "the-token-of-today", "somebody-elses-token"


def sent(token: str) -> list[tuple[str, str | bytes]]:
    return [("user-agent", "x"), ("authorization", f"Bearer {token}")]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        (f"{OLD}\n", (OLD,)),
        (f"\n# comment\n  {OLD}  \r\n\n{NEW}", (OLD, NEW)),
        (f"{OLD}\n{NEW}\n{OLD}\n", (OLD, NEW)),
        ("x" * 16, ("x" * 16,)),
        ("x" * 512, ("x" * 512,)),
    ],
)
def test_tokens_of_a_file(text: str, tokens: tuple[str, ...]) -> None:
    assert parse_tokens(text, "f") == tokens


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "f holds no token"),
        ("# only words\n\n", "f holds no token"),
        (f"{OLD}\n{'x' * 15}\n", "f, line 2: a token has 16 to 512 characters, this one 15"),
        ("x" * 513, "this one 513"),
        ("a token with blanks", "line 1: a token holds letters, digits and ASCII punctuation only"),
        ("\n".join(f"{i:016}" for i in range(MAX_TOKENS + 1)), "f holds 9 tokens; there may be 8"),
    ],
)
def test_a_file_that_is_none_is_refused_without_quoting_it(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_tokens(text, "f")
    assert problem in caught.value.message and caught.value.field == "--mesh-token-file"
    assert OLD not in caught.value.message and "xxxx" not in caught.value.message


@pytest.mark.parametrize(("content", "problem"), [(None, "can't be read"), (b"\xff" * 20, "ASCII"), (b"", "no token")])
def test_a_missing_or_broken_file_names_option_or_path(tmp_path: Path, content: bytes | None, problem: str) -> None:
    path = tmp_path / "t"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=problem) as caught:
        MeshToken(path)
    assert str(path) in caught.value.message and caught.value.field == "--mesh-token-file"


def test_who_is_refused_and_why(tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.tokens(NEW, OLD)
    token = MeshToken(files.token)
    assert token.metadata() == ("authorization", f"Bearer {NEW}")
    assert token.refusal(sent(NEW)) == token.refusal(sent(OLD)) == ""
    assert token.refusal([]) == token.refusal(None) == token.refusal([("x", "y")]) == MISSING
    for wrong in (OTHER, "", NEW[:-1], NEW + "x", NEW.upper(), "é" * 9):
        assert token.refusal(sent(wrong)) == WRONG
    assert token.refusal([("authorization", NEW)]) == token.refusal([("authorization", f"Basic {NEW}")]) == WRONG
    assert token.refusal(sent(NEW) + sent(NEW)) == WRONG
    assert token.refusal([("authorization", b"Bearer \xff\xfe")]) == WRONG
    assert NEW not in repr(token) and str(files.token) in repr(token)


def test_a_token_is_changed_in_three_steps(tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.tokens(OLD)
    token = MeshToken(files.token)
    assert not token.refresh()
    assert token.refusal(sent(NEW)) == WRONG
    files.tokens(OLD, NEW)
    assert token.refresh() and not token.refresh()
    assert (token.first, token.refusal(sent(OLD)), token.refusal(sent(NEW))) == (OLD, "", "")
    files.tokens(NEW, OLD)
    assert token.refresh()
    assert (token.first, token.secrets) == (NEW, (NEW.encode(), OLD.encode()))
    files.tokens(NEW)
    assert token.refresh()
    assert (token.refusal(sent(OLD)), token.refusal(sent(NEW)), token.refusal(sent(OTHER))) == (EXPIRED, "", WRONG)
    files.tokens(OLD)
    assert token.refresh()
    assert (token.refusal(sent(OLD)), token.refusal(sent(NEW))) == ("", EXPIRED)


def test_a_broken_file_changes_nothing_and_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = Files(tmp_path)
    files.tokens(OLD)
    token = MeshToken(files.token)
    with caplog.at_level(logging.INFO):
        files.tokens("short")
        assert not token.refresh() and not token.refresh()
        files.token.unlink()
        assert not token.refresh() and not token.refresh()
        assert (token.first, token.refusal(sent(OLD))) == (OLD, "")
        files.tokens(NEW)
        assert token.refresh() and token.first == NEW
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    assert lines[0].startswith("the mesh token stays as it was: ") and "this one 5" in lines[0]
    assert "can't be read" in lines[1] and lines[2].startswith("the mesh token was read anew from ")
    assert not [line for line in lines if OLD in line or NEW in line]


def test_a_secret_that_is_a_link_is_followed(tmp_path: Path) -> None:
    """As clusters mount secrets: a link to a folder that is turned over."""
    for name, value in (("one", OLD), ("two", NEW)):
        Files(tmp_path / name).tokens(value)
    (tmp_path / "now").symlink_to(tmp_path / "one")
    (tmp_path / "token").symlink_to(tmp_path / "now" / "token")
    token = MeshToken(tmp_path / "token")
    assert token.first == OLD
    (tmp_path / "next").symlink_to(tmp_path / "two")
    (tmp_path / "next").rename(tmp_path / "now")
    assert token.refresh() and token.first == NEW
