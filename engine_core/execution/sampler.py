"""Drawing tokens: greedy, or by a counter. A draw depends on (seed, position) and its row of logits alone.

What happens to a row of logits x, in the order of vLLM's sampler:

 1. Grammar and bans. Tokens that the row's mask forbids, and banned ones (stop tokens below min_tokens), get
    -inf. Where both together leave nothing, the mask alone holds: a grammar that allows the end and nothing else
    has to end. Where nothing is left then, the row can't be drawn.
 2. Bias.       x[t] += bias[t]                                                       (OpenAI's logit_bias)
 3. Repetition. x[t] = x[t] / r if x[t] > 0 else x[t] * r      for t in prompt or output  (CTRL, arXiv:1909.05858;
    as Hugging Face and vLLM do it for negative logits, which a division would favour)
 4. Frequency and presence.  x[t] -= frequency * count(t) + presence * (count(t) > 0)       over the output alone
    (OpenAI's API reference)
 5. Greedy (temperature 0) takes the highest x, the lowest id of equal ones. Else x / temperature, then top_k, top_p
    (the smallest set of the likeliest whose share reaches top_p) and min_p (at least min_p times the likeliest),
    in Hugging Face's order. Equal logits count in the order of their ids, so that top_k keeps exactly k.
 6. The draw walks the kept tokens in order of their ids until their summed share passes u = uniform(seed, position).

Logits are float32 numbers before and after each of 2 to 4; what they change is computed in float64 and rounded once.
Log probabilities (logprobs.py) are those of the row as it came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from engine_core.execution.batch import DrawRow
from engine_core.execution.logprobs import logprobs_of, nan_error
from engine_core.types.errors import InternalError
from engine_core.types.sampling import SamplingParams, TokenLogprobs

_BITS = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

Mask = npt.NDArray[np.uint32]
"""ceil(V / 32) words; bit t % 32 of word t // 32 allows token t."""

NO_MASKS: Mapping[int, Mask] = {}


def _mix(z: int) -> int:
    """splitmix64's finaliser: a bijection of 64-bit integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _BITS
    return z ^ (z >> 31)


def seed_key(seed: int) -> int:
    """What a seed is to its draws: 64 bits."""
    return _mix((seed + _GOLDEN) & _BITS)


def uniform(seed: int, position: int) -> float:
    """The draw of (seed, position): a float64 in [0, 1) with 53 random bits."""
    return (_mix((seed_key(seed) + position * _GOLDEN) & _BITS) >> 11) * 2.0**-53


def penalised(params: SamplingParams) -> bool:
    """Whether drawing looks at the tokens before."""
    return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0


class Drawn(msgspec.Struct, frozen=True):
    """One step's draws, by row: tokens (-1 where there is none), why rows have none, log probabilities where they
    were asked for (None elsewhere)."""

    tokens: list[int]
    problems: dict[int, str]
    logprobs: list[TokenLogprobs | None]


class Sampler(Protocol):
    """Draws one token per row."""

    def sample(self, logits: torch.Tensor, draws: Sequence[DrawRow], masks: Mapping[int, Mask] = NO_MASKS) -> Drawn:
        """logits [S, V] float32 or bfloat16, one DrawRow each, masks by row -> S tokens.

        May overwrite the logits. A row that holds NaN, or nothing that may be drawn, is a problem of its own. Raises
        InternalError when a row's penalties need tokens that it does not know.
        """

    def score(self, logits: torch.Tensor, tokens: Sequence[int], position: int, top: int) -> list[TokenLogprobs]:
        """logits [R, V] of R tokens of the vocabulary that stand at `position` and on -> their log probabilities,
        with the `top` likeliest. Raises InternalError when a row holds NaN."""


def choose_sampler(platform_name: str) -> Sampler:
    """Returns the fastest sampler there is on a platform."""
    if platform_name == "cpu":
        from engine_core.execution.native_sampler import NativeSampler
        from engine_core.platforms.cpu.platform import native_kernels

        kernels = native_kernels()
        if kernels is not None:
            return NativeSampler(kernels)
    return ReferenceSampler()


class ReferenceSampler:
    """The definition, row by row in numpy and float64."""

    def sample(self, logits: torch.Tensor, draws: Sequence[DrawRow], masks: Mapping[int, Mask] = NO_MASKS) -> Drawn:
        rows = logits.float().numpy()
        tokens, problems = [-1] * len(draws), {}
        logprobs: list[TokenLogprobs | None] = [None] * len(draws)
        for i, row in enumerate(draws):
            try:
                tokens[i] = draw(rows[i], row, masks.get(i))
            except DrawError as exc:
                problems[i] = exc.message
                continue
            if row.params.logprobs is not None:
                logprobs[i] = logprobs_of(rows[i], tokens[i], row.position, row.params.logprobs)
        return Drawn(tokens, problems, logprobs)

    def score(self, logits: torch.Tensor, tokens: Sequence[int], position: int, top: int) -> list[TokenLogprobs]:
        rows = logits.float().numpy()
        return [logprobs_of(row, t, position + i, top) for i, (row, t) in enumerate(zip(rows, tokens, strict=True))]


class DrawError(InternalError):
    """This row can't be drawn."""


def draw(logits: npt.NDArray[np.float32], row: DrawRow, mask: Mask | None = None) -> int:
    """Draws one token from logits [V]. Raises DrawError for NaN, or when no token is left."""
    x = adjusted(logits, row, mask)
    peak = x.max()
    params = row.params
    if params.temperature <= 0.0:
        return int(x.argmax())
    weights = np.exp((x - peak) / params.temperature)
    kept = _kept(x, weights, params.top_k, params.top_p, params.min_p)
    weights = np.where(kept, weights, 0.0)
    sums = weights.cumsum()
    passed = int(np.searchsorted(sums, uniform(params.seed, row.position) * sums[-1], side="right"))
    return min(passed, int(np.flatnonzero(weights)[-1]))


def adjusted(logits: npt.NDArray[np.float32], row: DrawRow, mask: Mask | None = None) -> npt.NDArray[np.float64]:
    """Steps 1 to 4: logits [V] -> those that temperature applies to; the highest is finite. Raises DrawError."""
    params, size = row.params, logits.size
    if np.isnan(logits).any():
        raise DrawError(nan_error(row.position).message)
    x = logits.astype(np.float64)
    if mask is not None:
        x[~allowed_by(mask, size)] = -np.inf
    if row.banned:
        banned = x.copy()
        banned[[t for t in row.banned if 0 <= t < size]] = -np.inf
        if mask is None or banned.max() > -np.inf:
            x = banned
    for token, bias in params.logit_bias:
        if 0 <= token < size:
            x[token] += bias
    x = _rounded(x)
    if penalised(params):
        known = np.array(known_before(row, size), np.int64)
        seen, counts = np.unique(known), np.bincount(known[row.prompt_len :], minlength=size)
        if params.repetition_penalty != 1.0:
            r = params.repetition_penalty
            x[seen] = np.where(x[seen] > 0.0, x[seen] / r, x[seen] * r)
        x -= np.where(counts > 0, params.frequency_penalty * counts + params.presence_penalty, 0.0)
    x = _rounded(x)
    peak = x.max()
    if np.isnan(peak):
        raise DrawError(nan_error(row.position).message)
    if np.isinf(peak):
        what = f"the logits at position {row.position} hold infinity"
        raise DrawError(what if peak > 0 else f"no token may be drawn at position {row.position}")
    return x


def known_before(row: DrawRow, vocab_size: int) -> Sequence[int]:
    """The tokens before the drawn one. Raises InternalError when they are not all known, or not the vocabulary's."""
    known = row.known[: row.position]
    if len(known) != row.position or row.prompt_len > row.position:
        raise InternalError(
            f"session {row.session} knows {len(row.known)} tokens, {row.prompt_len} of the prompt, and draws "
            f"token {row.position}"
        )
    if known and not (min(known) >= 0 and max(known) < vocab_size):
        raise InternalError(f"session {row.session} knows a token outside the vocabulary of {vocab_size}")
    return known


def allowed_by(mask: Mask, vocab_size: int) -> npt.NDArray[np.bool_]:
    """The mask [ceil(V / 32)] as V truths. Raises InternalError when it has another length."""
    if mask.shape != (-(-vocab_size // 32),):
        raise InternalError(f"a mask has shape {mask.shape}; a vocabulary of {vocab_size} needs {-(-vocab_size // 32)}")
    bits = (mask[:, None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
    return bits.reshape(-1)[:vocab_size].astype(np.bool_)


def _rounded(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    with np.errstate(over="ignore"):
        return x.astype(np.float32).astype(np.float64)


def _kept(
    x: npt.NDArray[np.float64], weights: npt.NDArray[np.float64], top_k: int, top_p: float, min_p: float
) -> npt.NDArray[np.bool_]:
    kept = x > -np.inf
    if 0 < top_k < x.size or top_p < 1.0:
        order = np.lexsort((np.arange(x.size), -x))
        if 0 < top_k < x.size:
            kept[order[top_k:]] = False
        if top_p < 1.0:
            ranked = np.where(kept, weights, 0.0)[order]
            before = ranked.cumsum() - ranked
            kept[order[before >= top_p * ranked.sum()]] = False
            kept[order[0]] = True
    if min_p > 0.0:
        kept &= weights >= min_p
    return kept
