"""Proofs before a link's first message: who is let in, and what a stranger gets to see."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from engine_core.transfer.base import ExpectLink, LinkClosed, LinkOpened, SetTokens
from engine_core.transfer.handshake import (
    CHALLENGE_BYTES,
    CLAIM_BYTES,
    NO_PROOF,
    NOT_EXPECTED,
    NOT_THIS_LIFE,
    VERDICT_BYTES,
    Challenger,
    Claim,
    Claimant,
    LinkSecrets,
    Refusal,
    verdict,
)
from engine_core.types.ids import Incarnation
from tests.support.transfer import PAIR_SECRET, Endpoint, Setup, connect, dial

OLD, NEW, OTHER = b"the-token-of-yesterday", b"the-token-of-today", b"somebody-elses-token"
CALLER = 7


# ---- the proofs themselves ----------------------------------------------------------------------------


def key(pair: bytes = PAIR_SECRET, *tokens: bytes) -> bytes:
    return LinkSecrets(tokens).keys(pair)[0]


def shake(claimant: Claimant, keys: list[bytes]) -> None:
    """A whole handshake in memory. Raises Refusal."""
    challenger = Challenger()
    claim, nonce, proof = challenger.read(claimant.answer(challenger.challenge()))
    answer = challenger.judge(claim, nonce, proof, keys)
    claimant.check(verdict(NO_PROOF) if answer is None else verdict(0, answer))


def test_both_ends_prove_the_same_secrets() -> None:
    claim = Claim(5, 6, 7)
    shake(Claimant(claim, key()), [key()])
    shake(Claimant(claim, key(PAIR_SECRET, NEW)), LinkSecrets((OLD, NEW)).keys(PAIR_SECRET))
    for other in (key(bytes(32)), key(PAIR_SECRET, OTHER), key(b""), b""):
        with pytest.raises(Refusal, match="proof does not hold.*--mesh-token-file"):
            shake(Claimant(claim, other), LinkSecrets((OLD, NEW)).keys(PAIR_SECRET))


def test_parts_have_one_length_and_no_secret() -> None:
    challenger, claimant = Challenger(), Claimant(Claim(5, 6, 7), key(PAIR_SECRET, OLD))
    challenge = challenger.challenge()
    answer = claimant.answer(challenge)
    assert (len(challenge), len(answer), len(verdict(0))) == (CHALLENGE_BYTES, CLAIM_BYTES, VERDICT_BYTES)
    assert PAIR_SECRET not in answer and OLD not in answer and challenger.read(answer)[0] == Claim(5, 6, 7)
    assert Challenger().challenge() != challenge and claimant.answer(challenge) != answer


@pytest.mark.parametrize("at", [4, 12, 20, 28, 60, CLAIM_BYTES - 1])
def test_a_changed_claim_proves_nothing(at: int) -> None:
    challenger, claimant = Challenger(), Claimant(Claim(5, 6, 7), key())
    answer = bytearray(claimant.answer(challenger.challenge()))
    answer[at] ^= 1
    assert challenger.judge(*challenger.read(answer), [key()]) is None


def test_an_acceptor_must_prove_itself_too() -> None:
    claimant = Claimant(Claim(5, 6, 7), key())
    answer = claimant.answer(Challenger().challenge())
    for proof in (bytes(32), answer[-32:]):  # nothing, and the caller's own sent back
        with pytest.raises(Refusal, match="could not prove who it is"):
            claimant.check(verdict(0, proof))
    with pytest.raises(Refusal, match="for reason 99"):
        claimant.check(verdict(99))
    for junk in (b"HTTP/1.1 400 Bad Request............", bytes(CHALLENGE_BYTES)):
        with pytest.raises(Refusal, match="does not speak this protocol"):
            claimant.answer(junk)


# ---- over sockets -----------------------------------------------------------------------------------


@pytest.fixture(params=["shm", "tcp"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def decode() -> Iterator[Endpoint]:
    with Endpoint(Setup(accept=True, tokens=(OLD,))) as made:
        yield made


def caller(decode: Endpoint, kind: str) -> socket.socket:
    address = next(d.address for d in decode.descriptors() if d.transport == kind)
    if kind == "shm":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address)
    else:
        host, _, port = address.rpartition(":")
        sock = socket.create_connection((host, int(port)))
    sock.settimeout(20)
    return sock


def exactly(sock: socket.socket, size: int) -> bytes:
    return sock.recv(size, socket.MSG_WAITALL)


def ended(sock: socket.socket) -> bool:
    """True once the other end has hung up; what it said before is lost."""
    with contextlib.suppress(ConnectionError):
        while sock.recv(4096):
            pass
    return True


def prove(sock: socket.socket, decode: Endpoint, pair: bytes = PAIR_SECRET, token: bytes = OLD, link: int = 9) -> bytes:
    claimant = Claimant(Claim(link, CALLER, decode.setup.incarnation), key(pair, token))
    claim = claimant.answer(exactly(sock, CHALLENGE_BYTES))
    sock.sendall(claim)
    claimant.check(exactly(sock, VERDICT_BYTES))
    return claim


def expect(decode: Endpoint) -> None:
    decode.submit(ExpectLink(Incarnation(CALLER), PAIR_SECRET))


def test_who_knows_both_secrets_is_let_in(decode: Endpoint, kind: str) -> None:
    expect(decode)
    with caller(decode, kind) as sock:
        prove(sock, decode)


def test_who_lacks_one_is_refused_and_named(decode: Endpoint, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    expect(decode)
    for pair, token in ((bytes(32), OLD), (PAIR_SECRET, OTHER), (PAIR_SECRET, b"")):
        with caller(decode, kind) as sock:
            with pytest.raises(Refusal, match="refused by the peer: the proof does not hold"):
                prove(sock, decode, pair, token)
            assert ended(sock)
    with caller(decode, kind) as sock:
        challenge = exactly(sock, CHALLENGE_BYTES)
        sock.sendall(Claimant(Claim(9, CALLER, 12345), key(PAIR_SECRET, OLD)).answer(challenge))
        assert exactly(sock, VERDICT_BYTES) == verdict(NOT_THIS_LIFE) and ended(sock)
    assert not decode.events and decode.manager.figures() == ()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2  # one for each reason, though three were refused for the first
    assert lines[0].startswith(f"{kind}: refused a link of {'process ' if kind == 'shm' else '127.0.0.1:'}")
    assert f"(incarnation {CALLER}, link 9): the proof does not hold" in lines[0]
    assert "another incarnation of the process is meant" in lines[1]


def test_an_old_claim_is_of_no_use(decode: Endpoint, kind: str) -> None:
    expect(decode)
    with caller(decode, kind) as sock:
        claim = prove(sock, decode)
    with caller(decode, kind) as sock:
        exactly(sock, CHALLENGE_BYTES)
        sock.sendall(claim)
        assert exactly(sock, VERDICT_BYTES) == verdict(NO_PROOF) and ended(sock)


def test_a_peer_may_come_before_it_is_expected(decode: Endpoint, kind: str) -> None:
    """Its claim waits for the word of this side's service process, which a long step may delay."""
    with caller(decode, kind) as sock:
        late = threading.Timer(0.2, expect, (decode,))
        late.start()
        prove(sock, decode)
        late.join()


def test_a_peer_that_is_never_expected_is_refused_in_the_end(
    decode: Endpoint, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caller(decode, kind) as sock:
        with pytest.raises(Refusal, match="none was negotiated"):
            prove(sock, decode)
        assert ended(sock)
    assert "no link of this peer is expected" in caplog.text


def test_who_speaks_while_waiting_is_let_go_at_once(decode: Endpoint, kind: str) -> None:
    for more in (b"x", None):
        with caller(decode, kind) as sock:
            claimant = Claimant(Claim(9, CALLER, decode.setup.incarnation), key(PAIR_SECRET, OLD))
            sock.sendall(claimant.answer(exactly(sock, CHALLENGE_BYTES)))
            if more is None:
                sock.shutdown(socket.SHUT_WR)
            else:
                sock.sendall(more)
            with contextlib.suppress(ConnectionError):
                assert sock.recv(VERDICT_BYTES) == b""  # who waits to the end is told a reason


def test_tokens_change_while_links_stay(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with (
        Endpoint(Setup(accept=True, tokens=(OLD,))) as decode,
        Endpoint(Setup(accept=False, tokens=(OLD,), backend=kind)) as prefill,
    ):
        connect(1, prefill, decode)
        prefill.submit(SetTokens((NEW, OLD)))
        prefill.submit(dial(2, prefill, decode))
        assert "the proof does not hold" in prefill.wait(LinkClosed, link_id=2).reason
        decode.submit(SetTokens((OLD, NEW)))
        connect(3, prefill, decode)
        decode.submit(SetTokens((NEW,)))
        connect(4, prefill, decode)
        prefill.submit(SetTokens((OLD,)))
        prefill.submit(dial(5, prefill, decode))
        assert "--mesh-token-file" in prefill.wait(LinkClosed, link_id=5).reason
        assert {figure.link_id for figure in decode.manager.figures() if figure.up} == {1, 3, 4}
        assert not [e for e in decode.events if isinstance(e, LinkOpened | LinkClosed)]
    assert OLD.decode() not in caplog.text and NEW.decode() not in caplog.text


def test_a_false_acceptor_is_found_out(kind: str) -> None:
    """Whoever listens at the peer's address without the pair's secret gets nothing but a claim."""
    with Endpoint(Setup(accept=True)) as decode, Endpoint(Setup(accept=False, backend=kind)) as prefill:
        decode.submit(ExpectLink(prefill.setup.incarnation, b"another secret than the other end's"))
        command = dial(1, prefill, decode, secret=PAIR_SECRET)
        decode.submit(ExpectLink(prefill.setup.incarnation, bytes(32)))
        prefill.submit(command)
        assert "the proof does not hold" in prefill.wait(LinkClosed, link_id=1).reason
        assert not decode.events


def test_reasons_are_numbers_that_both_know() -> None:
    assert (NOT_THIS_LIFE, NOT_EXPECTED, NO_PROOF) == (1, 2, 3)
