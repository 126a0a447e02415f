"""What both ends of a link's socket prove to each other before either reads anything else of the other.

    acceptor ── Challenge: magic, nonce ─────────────────────────────▶ caller
    acceptor ◀─ Claim: magic, link, both incarnations, nonce, proof ── caller
    acceptor ── Verdict: a code, proof ──────────────────────────────▶ caller

Each part has one length. A proof is an HMAC-SHA256 over all that was said so far, and over who proves it. Its key is
made of two secrets that never travel here:

    the pair's     32 random bytes for one pair of incarnations, minted by the acceptor's service process and told to
                   the caller's by NegotiateLayout: who has them was let in there
    the token      the mesh's, where there is one: the caller uses its first, the acceptor tries all of its own

Both nonces are new for each connection, so nothing that was heard on one is of use on another. A stranger learns a
nonce, and why it was refused.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Sequence
from typing import NamedTuple

from engine_core.transfer.recent import Recent

_MAGIC = b"pdm\x02"
_NONCE = 32
_PROOF = 32
_CLAIM = struct.Struct(f"<4sQQQ{_NONCE}s{_PROOF}s")
_SAID = struct.Struct(f"<{_NONCE}sQQQ{_NONCE}s")
_PEERS = 4096

CHALLENGE_BYTES = len(_MAGIC) + _NONCE
CLAIM_BYTES = _CLAIM.size
VERDICT_BYTES = 1 + _PROOF
SECRET_BYTES = 32

ACCEPTED, NOT_THIS_LIFE, NOT_EXPECTED, NO_PROOF = range(4)

REASONS = {
    NOT_THIS_LIFE: "another incarnation of the process is meant",
    NOT_EXPECTED: "no link of this peer is expected: none was negotiated",
    NO_PROOF: "the proof does not hold: both ends need the same mesh token (look at --mesh-token-file)",
}


class Refusal(Exception):
    """The other end is not who it should be, or does not take this end for who it is."""


class LinkSecrets:
    """The secrets of one process. Changed by the loop of the links, read by push threads too."""

    def __init__(self, tokens: Sequence[bytes] = ()) -> None:
        self.tokens = tuple(tokens)
        """The mesh's tokens, the one to use first; empty without any."""
        self._pairs: Recent[int, bytes] = Recent(_PEERS)

    def expect(self, peer_incarnation: int, secret: bytes) -> None:
        """Links of this peer may come, by this secret."""
        self._pairs[peer_incarnation] = secret

    def of(self, peer_incarnation: int) -> bytes | None:
        """The pair's secret; None when no link of the peer is expected."""
        return self._pairs.get(peer_incarnation)

    def keys(self, pair: bytes) -> list[bytes]:
        """Keys of proofs, the one to use first."""
        return [hmac.digest(pair, b"pdmesh link key" + token, "sha256") for token in self.tokens or (b"",)]


class Claim(NamedTuple):
    """Who calls, whom it means, and which link."""

    link_id: int
    incarnation: int
    peer_incarnation: int


class Challenger:
    """The accepting end, for one connection."""

    def __init__(self) -> None:
        self._nonce = secrets.token_bytes(_NONCE)

    def challenge(self) -> bytes:
        """What to send first."""
        return _MAGIC + self._nonce

    def read(self, data: bytes | bytearray) -> tuple[Claim, bytes, bytes]:
        """(claim, the caller's nonce, its proof). Raises Refusal for what is no claim."""
        magic, link_id, incarnation, peer, nonce, proof = _CLAIM.unpack(data)
        if magic != _MAGIC:
            raise Refusal("it does not speak this protocol, or another version of it")
        return Claim(link_id, incarnation, peer), nonce, proof

    def judge(self, claim: Claim, nonce: bytes, proof: bytes, keys: Sequence[bytes]) -> bytes | None:
        """The proof to answer with; None when the caller's own does not hold."""
        said = _SAID.pack(self._nonce, *claim, nonce)
        for key in keys:
            if hmac.compare_digest(proof, _caller_proof(key, said)):
                return _acceptor_proof(key, said)
        return None


def verdict(code: int, proof: bytes = bytes(_PROOF)) -> bytes:
    """What the acceptor answers."""
    return bytes([code]) + proof


class Claimant:
    """The calling end, for one connection: answer(challenge), then check(verdict)."""

    def __init__(self, claim: Claim, key: bytes) -> None:
        self._claim, self._key = claim, key
        self._said = b""

    def answer(self, challenge: bytes | bytearray) -> bytes:
        """The claim with its proof. Raises Refusal for what is no challenge."""
        if bytes(challenge[: len(_MAGIC)]) != _MAGIC:
            raise Refusal("it does not speak this protocol, or another version of it")
        nonce = secrets.token_bytes(_NONCE)
        self._said = _SAID.pack(bytes(challenge[len(_MAGIC) :]), *self._claim, nonce)
        return _CLAIM.pack(_MAGIC, *self._claim, nonce, _caller_proof(self._key, self._said))

    def check(self, answer: bytes | bytearray) -> None:
        """Raises Refusal with the acceptor's reason, or when it has not proved itself."""
        code, proof = answer[0], bytes(answer[1:])
        if code != ACCEPTED:
            raise Refusal(f"refused by the peer: {REASONS.get(code, f'for reason {code}')}")
        if not hmac.compare_digest(proof, _acceptor_proof(self._key, self._said)):
            raise Refusal("the peer could not prove who it is")


def _caller_proof(key: bytes, said: bytes) -> bytes:
    return hmac.digest(key, b"caller" + said, "sha256")


def _acceptor_proof(key: bytes, said: bytes) -> bytes:
    return hmac.digest(key, b"acceptor" + said, "sha256")
