"""The teacher-forced oracle: is an output right, given its own prefix?

Recomputed KV rounds differently, and where two logits are closer than that a tie may go either way. So an
output is not compared with another output: transformers computes the logits after each of its prefixes,
and each token must be one that those logits allow.

    greedy      its logit lies within `tolerance` of the highest that is allowed. Where the two best logits
                are further apart than that, only one token is: it is token for token there.
    sampled     the draw of (seed, position) from these logits gives it, or does so from logits that differ
                by rounding: noise of `tolerance` at most.
    reported    log probabilities lie within `tolerance` of those of transformers' logits, and so do ranks.

Bans, biases and penalties are applied to those logits first, as the engine's definition says, over the output's own
prefix. What a grammar forbids is not known here.

Outputs are checked in batches and remembered by their tokens, so that the same output costs once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from engine_core.execution.batch import DrawRow
from engine_core.execution.sampler import adjusted, draw
from engine_core.types.request import FinishReason
from engine_core.types.sampling import SamplingParams, TokenLogprobs

TOLERANCES = {"float32": 2e-3, "bfloat16": 0.3}
"""Logits that differ by less may be the same but for rounding, by the data type of the engine under test."""

_BATCH_TOKENS = 4096
_NOISY_DRAWS = 256

Rows = npt.NDArray[np.float32]


class Claim(msgspec.Struct, frozen=True):
    """Somebody says that `output` is what `prompt` gives, and that these are log probabilities: one per token of the
    output, one per token of the prompt but the first; empty where none were reported."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    params: SamplingParams
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and output."""
        return self.prompt + self.output


class Verdict(msgspec.Struct, frozen=True):
    """What the oracle says of one claim.

    `gaps` are distances in logits from each token to the best allowed one, greedy claims only; `margin` is
    the smallest distance between the two best; `moved` are indexes of tokens that only rounding explains;
    `wrong` is the first index that nothing explains, or -1 (0 for what is reported of the prompt).
    """

    right: bool
    wrong: int
    moved: tuple[int, ...]
    gaps: tuple[float, ...]
    margin: float
    message: str = ""

    @property
    def exact(self) -> bool:
        """Right without any help of the tolerance: equal to transformers token for token."""
        return self.right and not self.moved


class Oracle:
    """transformers on a model directory, on the CPU, in float32 unless told otherwise. Not thread-safe."""

    def __init__(self, directory: str | Path, dtype: torch.dtype = torch.float32) -> None:
        import transformers  # not wanted by tests that only build claims

        load: Any = transformers.AutoModelForCausalLM.from_pretrained
        self._model = load(str(directory), dtype=dtype, local_files_only=True).eval()
        self._tokenizer_eos = transformers.AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True
        ).eos_token_id
        self._verdicts: dict[tuple[Claim, float], Verdict] = {}
        self.eos_token_ids = self._eos()
        self.forwards = 0
        """Forward passes so far."""

    def _eos(self) -> frozenset[int]:
        found: set[int] = set() if self._tokenizer_eos is None else {int(self._tokenizer_eos)}
        for config in (self._model.config, self._model.generation_config):
            ids = getattr(config, "eos_token_id", None)
            found.update([ids] if isinstance(ids, int) else ids or ())
        return frozenset(found)

    # ---- answers --------------------------------------------------------------------------------------

    def verify(self, claims: Sequence[Claim], *, tolerance: float = TOLERANCES["float32"]) -> list[Verdict]:
        """Judges claims, in their order. An empty output is right. Raises ValueError for an empty prompt."""
        new = list(dict.fromkeys(c for c in claims if (c, tolerance) not in self._verdicts))
        for claim, rows in self._logits(new):
            self._verdicts[claim, tolerance] = self._judge(claim, rows, tolerance)
        return [self._verdicts[c, tolerance] for c in claims]

    def assert_right(self, claims: Sequence[Claim], *, tolerance: float = TOLERANCES["float32"]) -> list[Verdict]:
        """Raises AssertionError naming the first token that is wrong; returns the verdicts."""
        verdicts = self.verify(claims, tolerance=tolerance)
        for claim, verdict in zip(claims, verdicts, strict=True):
            if not verdict.right:
                raise AssertionError(f"{verdict.message}\nprompt {claim.prompt}\noutput {claim.output}")
        return verdicts

    def greedy(self, prompt: Sequence[int], max_tokens: int, *, ignore_eos: bool = False) -> tuple[int, ...]:
        """transformers' own greedy output; the stop token is part of it."""
        ids = torch.tensor([list(prompt)])
        options: dict[str, Any] = {"eos_token_id": None} if ignore_eos else {"eos_token_id": sorted(self.eos_token_ids)}
        with torch.inference_mode():
            out = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, num_beams=1,
                pad_token_id=0, **options,
            )  # fmt: skip
        return tuple(int(t) for t in out[0, len(prompt) :])

    def finish(self, claim: Claim) -> FinishReason | None:
        """Why an output ends where it does; None when it should have gone on, or stopped before."""
        ends = set(claim.params.stop_token_ids) | (set() if claim.params.ignore_eos else self.eos_token_ids)
        early = [i for i, t in enumerate(claim.output) if t in ends and i >= claim.params.min_tokens]
        if early:
            return FinishReason.STOP if early[0] == len(claim.output) - 1 else None
        return FinishReason.LENGTH if len(claim.output) == claim.params.max_tokens else None

    # ---- logits ---------------------------------------------------------------------------------------

    def _logits(self, claims: Iterable[Claim]) -> Iterator[tuple[Claim, Rows]]:
        """Yields each claim with logits [len(output), V]; row i is what output[i] was drawn from. Where log
        probabilities of the prompt are claimed, the rows that they follow from come first."""
        for batch in _batches(claims):
            width = max(len(c.tokens) for c in batch) - 1
            ids = torch.zeros((len(batch), width), dtype=torch.long)
            mask = torch.zeros((len(batch), width), dtype=torch.long)
            for row, claim in enumerate(batch):
                known = claim.tokens[:-1]
                ids[row, : len(known)] = torch.tensor(known)
                mask[row, : len(known)] = 1
            with torch.inference_mode():
                hidden = self._model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
                self.forwards += 1
                for row, claim in enumerate(batch):
                    last = len(claim.prompt) - 1
                    part = hidden[row, 0 if claim.prompt_logprobs else last : last + len(claim.output)]
                    yield claim, self._model.get_output_embeddings()(part).float().numpy()

    # ---- judgement ------------------------------------------------------------------------------------

    def _judge(self, claim: Claim, rows: Rows, tolerance: float) -> Verdict:
        params, gaps, moved = claim.params, [], []
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else self.eos_token_ids)
        margin, wrong, message = float("inf"), -1, ""
        if claim.prompt_logprobs:
            before = len(claim.prompt) - 1
            message = _reported(
                claim.prompt_logprobs, rows[:before], claim.prompt[1:], params.prompt_logprobs, tolerance
            )
            rows = rows[before:]
        if not message and claim.logprobs:
            message = _reported(claim.logprobs, rows, claim.output, params.logprobs, tolerance)
        if message:
            return Verdict(False, 0, (), (), margin, message)
        for index, token in enumerate(claim.output):
            banned = tuple(sorted(stops)) if index < params.min_tokens else ()
            position = len(claim.prompt) + index
            drawn = DrawRow(params, position, banned, known=claim.tokens[:position], prompt_len=len(claim.prompt))
            row = rows[index]
            if params.temperature <= 0:
                x = adjusted(row, drawn)
                best = float(x.max())
                second = float(np.partition(x, -2)[-2]) if x.size > 1 else -np.inf
                gap = best - float(x[token])
                gaps.append(gap)
                margin = min(margin, best - second)
                if gap > tolerance:
                    wrong = index
                    message = (
                        f"token {index} is {token}, {gap:.4g} below the best one, {int(x.argmax())}; "
                        f"tolerance {tolerance:g}"
                    )
                    break
                if gap > 0:
                    moved.append(index)
            else:
                found = draw(row, drawn)
                if found == token:
                    continue
                if not _drawn_with_noise(row, drawn, token, tolerance):
                    wrong, message = index, f"token {index} is {token}; its draw gives {found}"
                    break
                moved.append(index)
        return Verdict(wrong < 0, wrong, tuple(moved), tuple(gaps), margin, message)


def _reported(
    reports: Sequence[TokenLogprobs], rows: Rows, tokens: Sequence[int], top: int | None, tolerance: float
) -> str:
    """What is wrong with reports of these tokens, whose logits are rows [T, V]; nothing when all is right."""
    if [r.token_id for r in reports] != list(tokens):
        return f"log probabilities are of tokens {[r.token_id for r in reports]}, not of {list(tokens)}"
    table = torch.from_numpy(rows).double().log_softmax(-1).numpy()
    for i, (report, row) in enumerate(zip(reports, table, strict=True)):
        own = float(row[report.token_id])
        highest, lowest = 1 + (row > own + 2 * tolerance).sum(), (row >= own - 2 * tolerance).sum()
        listed = [report.logprob, *(p for _, p in report.top)]
        right = [own, *(float(row[t]) for t, _ in report.top)]
        best = np.sort(row)[::-1][: len(report.top)]
        if len({t for t, _ in report.top}) != min(top or 0, row.size) or len(report.top) != min(top or 0, row.size):
            return f"report {i} lists {report.top}; {top or 0} tokens were asked for"
        if not highest <= report.rank <= lowest:
            return f"report {i} ranks token {report.token_id} {report.rank}; it is {highest}"
        if not np.allclose(listed, right, atol=tolerance, rtol=0):
            return f"report {i} is {report}; by transformers the log probabilities are {right}"
        if not np.allclose([p for _, p in report.top], best, atol=tolerance, rtol=0):
            return f"report {i} lists {report.top}; the best have {best.tolist()}"
    return ""


def _batches(claims: Iterable[Claim]) -> Iterator[list[Claim]]:
    """Claims of like length together, under a budget of padded tokens."""
    batch: list[Claim] = []
    for claim in sorted(claims, key=lambda c: len(c.tokens)):
        if not claim.prompt:
            raise ValueError("a claim needs a prompt")
        if batch and (len(batch) + 1) * len(claim.tokens) > _BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(claim)
    if batch:
        yield batch


def _drawn_with_noise(row: Rows, drawn: DrawRow, token: int, tolerance: float) -> bool:
    """Whether logits that differ by rounding would have given the token."""
    noise = np.random.default_rng(drawn.position)
    for _ in range(_NOISY_DRAWS):
        near = row + noise.uniform(-tolerance, tolerance, row.shape).astype(np.float32)
        if draw(near, drawn) == token:
            return True
    # Where one border decides, all logits on one side of it move together.
    for cut in (token, token + 1):
        for sign in (tolerance, -tolerance):
            near = row.copy()
            near[:cut] += sign
            near[cut:] -= sign
            if draw(near, drawn) == token:
                return True
    return False


@functools.cache
def oracle_for(directory: Path) -> Oracle:
    """The float32 oracle of a model directory, loaded once per process."""
    return Oracle(directory)
