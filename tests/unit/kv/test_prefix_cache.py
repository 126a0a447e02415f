"""Digests are the same in every process; chains hash each block once; the memo is bounded."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest

from engine_core.kv.prefix_cache import ChainKey, ChainMemo, DigestChain, PrefixCache, root_digest
from engine_core.types.errors import InternalError

TOKENS = tuple(range(100, 148))

# Written to disk and compared between hosts: a change here is a change of format.
GOLDEN = (
    "2dd534dde6b65ee792ba1fde8c3a15a0154ed5b01280a50d8820904095a3bec6",
    "41f4c5731e49c90a61c002a122000bcaaa03a5071a4ff729cfe2ef35f5b85689",
    "7f6df1e0022a98445102829699911ffc0873c559250fbaa7eb0e487788570d63",
    "c5498c141e8b0d1be9b48dec34692fc09c5842fa04c475b0dd0af01c32808192",
)


def _digests(salt: str = "s") -> list[str]:
    root = root_digest("fp", 1, 16, salt)
    chain = DigestChain(root, 16)
    chain.digest(2, TOKENS)
    return [root.hex(), *(chain.digest(i, TOKENS).hex() for i in range(3))]


def test_digests_are_the_pinned_ones() -> None:
    assert tuple(_digests()) == GOLDEN


def test_the_format_is_what_the_docstring_says() -> None:
    le = lambda n: n.to_bytes(8, "little")  # noqa: E731
    root = hashlib.sha256(b"pdmesh-kv-1" + le(2) + le(1) + le(16) + le(1) + b"fp" + b"s").digest()
    first = hashlib.sha256(root + b"".join(le(t) for t in TOKENS[:16])).digest()
    second = hashlib.sha256(first + b"".join(le(t) for t in TOKENS[16:32])).digest()
    assert _digests()[:3] == [root.hex(), first.hex(), second.hex()]


@pytest.mark.parametrize("seed", ["0", "4711"])
def test_another_process_finds_the_same_digests(seed: str) -> None:
    code = (
        "from engine_core.kv.prefix_cache import DigestChain, root_digest\n"
        "print(DigestChain(root_digest('fp', 1, 16, 's'), 16).digest(2, list(range(100, 148))).hex())"
    )
    env = {**os.environ, "PYTHONHASHSEED": seed}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == GOLDEN[3]


def test_everything_that_sets_texts_apart_changes_the_root() -> None:
    roots = {
        root_digest(*args)
        for args in [("fp", 0, 16, ""), ("fq", 0, 16, ""), ("fp", 1, 16, ""), ("fp", 0, 32, ""), ("fp", 0, 16, "x"),
                     ("fpx", 0, 16, ""), ("f", 0, 16, "p"), ("fp", 0, 16, "\ud800")]
    }  # fmt: skip
    assert len(roots) == 8


def test_a_changed_token_changes_its_block_and_all_after() -> None:
    other = (*TOKENS[:20], 7, *TOKENS[21:])
    chain, changed = (DigestChain(b"r", 16) for _ in range(2))
    same = [chain.digest(i, TOKENS) == changed.digest(i, other) for i in range(3)]
    assert same == [True, False, False]


class _Counting(tuple[int, ...]):
    """A token sequence that counts how often it is sliced."""

    slices = 0

    def __getitem__(self, key):  # type: ignore[no-untyped-def]
        _Counting.slices += 1
        return super().__getitem__(key)


def test_a_chain_hashes_each_block_once() -> None:
    tokens, chain = _Counting(TOKENS), DigestChain(b"r", 16)
    for _ in range(3):
        chain.digest(1, tokens)
    assert _Counting.slices == 2
    chain.copy().digest(2, tokens)
    assert _Counting.slices == 3
    assert len(chain) == 2


def test_agrees_looks_at_one_block() -> None:
    chain = DigestChain(b"r", 16)
    chain.digest(1, TOKENS)
    assert chain.agrees(1, TOKENS)
    assert chain.agrees(1, (*[0] * 16, *TOKENS[16:]))
    assert not chain.agrees(1, (*TOKENS[:31], 0))


KEYS = [ChainKey("fp", 0, 4), ChainKey("fp", 1, 8)]


def test_the_memo_gives_one_chain_per_group_and_remembers_a_tuple() -> None:
    memo = ChainMemo(KEYS)
    chains = memo.chains(TOKENS, "")
    assert [c.digest(0, TOKENS) for c in chains] == [
        DigestChain(root_digest("fp", 0, 4, ""), 4).digest(0, TOKENS),
        DigestChain(root_digest("fp", 1, 8, ""), 8).digest(0, TOKENS),
    ]
    assert memo.chains(TOKENS, "") is chains
    assert memo.chains(TOKENS, "x") is not chains


def test_the_memo_does_not_remember_what_can_change() -> None:
    memo, tokens = ChainMemo(KEYS), list(TOKENS)
    before = memo.chains(tokens, "")[0].digest(0, tokens)
    tokens[0] = 1
    assert memo.chains(tokens, "")[0].digest(0, tokens) != before
    assert len(memo) == 0


def test_the_memo_is_bounded_in_entries_and_tokens() -> None:
    memo = ChainMemo(KEYS, max_entries=2, max_tokens=10)
    texts = [tuple(range(n)) for n in (3, 4, 5, 20)]
    for text in texts[:2]:
        memo.chains(text, "")
    first = memo.chains(texts[0], "")
    memo.chains(texts[2], "")
    assert memo.chains(texts[0], "") is first, "used lately, so the other one went"
    assert len(memo) == 2
    memo.chains(texts[3], "")
    assert len(memo) == 1, "one text may exceed the bound, and then it is alone"
    assert memo.chains(texts[0], "") is not first


def test_evicting_from_an_index_where_nothing_rests_is_caught() -> None:
    cache = PrefixCache()
    cache.insert(b"d", 1)
    with pytest.raises(InternalError, match="nothing to evict"):
        cache.evict()
    cache.rest(1)
    assert list(cache.resting()) == [1]
    assert cache.evict() == 1
    assert len(cache) == 0
    cache.check()
