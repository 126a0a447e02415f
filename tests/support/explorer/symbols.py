"""Symbolic KV and true outputs.

A slot's content is (position, chain): `chain` digests the salt and every token up to and including
its own. The next token is drawn from the chain, so that the true output follows from the request; so do the log
probabilities of whatever token stands there.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine_core.types.request import GenerateSpec
from engine_core.types.sampling import SamplingParams, TokenLogprobs

VOCABULARY = 6
EOS = 0

Content = tuple[int, int]
_MASK = (1 << 61) - 1


class Violation(Exception):
    """A rule of the house is broken."""


def extend(chain: int, token: int) -> int:
    """The chain after one more token."""
    mixed = (chain ^ (token + 0x9E3779B97F4A7C1)) * 0x2545F4914F6CDD1D & _MASK
    return mixed ^ (mixed >> 29)


def start_chain(salt: str) -> int:
    """The chain before the first token."""
    chain = 1
    for byte in salt.encode():
        chain = extend(chain, byte + 1000)
    return chain


def draw(chain: int, seed: int, banned: Sequence[int] = ()) -> int:
    """The token after a prefix."""
    token = extend(chain, seed + 77) % VOCABULARY
    while token in banned:
        token = (token + 1) % VOCABULARY
    return token


def score(chain: int, token: int) -> TokenLogprobs:
    """The log probabilities of a token after a prefix."""
    return TokenLogprobs(token, -float(extend(chain, token) % 100_003), 1)


def stop_tokens(params: SamplingParams) -> tuple[int, ...]:
    """Tokens that end an output."""
    return params.stop_token_ids if params.ignore_eos else (EOS, *params.stop_token_ids)


class Truth:
    """What one request must produce, and what every slot of its KV must hold."""

    __slots__ = ("chains", "output", "prompt", "tokens")

    def __init__(self, prompt: tuple[int, ...], params: SamplingParams, salt: str) -> None:
        chain = start_chain(salt)
        chains = [chain := extend(chain, token) for token in prompt]
        stops = stop_tokens(params)
        output: list[int] = []
        while len(output) < params.max_tokens:
            banned = stops if len(output) < params.min_tokens else ()
            token = draw(chain, params.seed, banned)
            output.append(token)
            chain = extend(chain, token)
            chains.append(chain)
            if token in stops:
                break
        self.prompt, self.output, self.chains = prompt, tuple(output), chains
        self.tokens = prompt + self.output

    def score(self, position: int) -> TokenLogprobs:
        """The log probabilities of the token at a position."""
        return score(self.chains[position - 1], self.tokens[position])

    def content(self, position: int) -> Content:
        """What the slot of a position must hold."""
        return (position, self.chains[position])


def truth_of(spec: GenerateSpec) -> Truth:
    """The truth of an attempt's request."""
    return Truth(spec.prompt_token_ids, spec.sampling, spec.cache_salt)


class SymbolicPool:
    """The slots of one engine's KV."""

    __slots__ = ("block_size", "slots")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots: list[list[Content | None]] = [[None] * block_size for _ in range(num_blocks)]

    def at(self, table: Sequence[int], position: int) -> Content | None:
        """Content of a position under a block table."""
        return self.slots[table[position // self.block_size]][position % self.block_size]

    def put(self, table: Sequence[int], position: int, content: Content | None) -> None:
        """Writes a position under a block table."""
        self.slots[table[position // self.block_size]][position % self.block_size] = content
