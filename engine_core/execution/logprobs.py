"""Log probabilities of tokens by the model itself: log_softmax of its float32 logits, before temperature,
penalties and masks. Tokens of equal logits rank by their ids."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine_core.types.errors import InternalError
from engine_core.types.sampling import TokenLogprobs


def logprobs_of(logits: npt.NDArray[np.float32], token: int, position: int, top: int) -> TokenLogprobs:
    """The definition, in float64: logits [V] that hold `token` at `position` -> its log probability and rank, and
    those of the `top` likeliest (all, when there are fewer). Raises InternalError for NaN."""
    x = logits.astype(np.float64)
    if np.isnan(x).any():
        raise nan_error(position)
    shifted = x - x.max()
    logprobs = shifted - np.log(np.exp(shifted).sum())
    order = np.lexsort((np.arange(x.size), -x))
    rank = int(np.flatnonzero(order == token)[0]) + 1
    best = tuple((int(t), float(logprobs[t])) for t in order[:top])
    return TokenLogprobs(token, float(logprobs[token]), rank, best)


def nan_error(position: int) -> InternalError:
    """What is said of logits that hold NaN."""
    return InternalError(f"the logits at position {position} hold NaN")
