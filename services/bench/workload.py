"""Which requests there are: lengths, arrival times and prompt text of every level, fixed by a seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator

import msgspec

from services.bench.arrivals import Arrival, TraceEntry, arrival_times, first_arrivals
from services.bench.lengths import Lengths

# Common short words: one token each, with their leading space, in most BPE vocabularies.
WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head house "
    "service friend father power hour game line end member law car city community name president team minute idea "
    "body information back parent face level office door health person art war history party result change morning "
    "reason research girl guy moment air teacher force education foot boy age policy process music market sense "
    "nation plan college interest death course someone experience behind reach local six remain effect use yeah "
    "suddenly early green small large old young great little different public bad same able important better black "
    "white free real best social only sure low late hard major strong possible whole special clear recent certain "
    "personal open red difficult available likely short single medical current wrong private past foreign fine "
    "common poor natural significant similar hot dead central happy serious ready simple left physical general "
    "environmental financial blue democratic dark various entire close legal"
).split()


class Ask(msgspec.Struct, frozen=True):
    """One request to be made."""

    index: int
    due: float | None
    """Seconds after the level's start; None in a closed loop: when it is its turn."""
    prompt_tokens: int
    output_tokens: int
    group: int
    """Which shared prefix it begins with."""


class Shape(msgspec.Struct, frozen=True):
    """What the requests of a run look like."""

    prompt_tokens: Lengths
    output_tokens: Lengths
    shared_prefix: int = 0
    """Tokens at the start that all prompts of a group have in common; part of prompt_tokens."""
    prefix_groups: int = 1
    seed: int = 0


class Calibration(msgspec.Struct, frozen=True):
    """How many tokens a server makes of our words: `fixed` for the request, and so many a word."""

    fixed: float = 0.0
    per_word: float = 1.0
    measured: bool = False

    def words(self, tokens: int) -> int:
        """How many words come closest to so many tokens; at least one."""
        return max(1, round((tokens - self.fixed) / self.per_word))


def calibrate(few: tuple[int, int], many: tuple[int, int]) -> Calibration:
    """From two prompts, each as (words, tokens that the server counted)."""
    per_word = (many[1] - few[1]) / (many[0] - few[0])
    if per_word <= 0:
        return Calibration()
    return Calibration(fixed=max(0.0, few[1] - per_word * few[0]), per_word=per_word, measured=True)


def closed_asks(shape: Shape, level: str) -> Iterator[Ask]:
    """Endless requests of a closed loop."""
    rng = random.Random(f"lengths {shape.seed} {level}")
    for index in itertools.count():
        yield _ask(index, None, shape, rng)


def open_asks(
    shape: Shape,
    level: str,
    *,
    arrival: Arrival,
    rate: float,
    burst_size: int,
    requests: int | None,
    duration: float | None,
) -> list[Ask]:
    """The requests of an open loop at `rate` a second, up to a count or a time in seconds."""
    arrivals = random.Random(f"arrivals {shape.seed} {level}")
    rng = random.Random(f"lengths {shape.seed} {level}")
    times = first_arrivals(arrival_times(arrival, rate, arrivals, burst_size), requests, duration)
    return [_ask(index, at, shape, rng) for index, at in enumerate(times)]


def trace_asks(
    shape: Shape,
    level: str,
    trace: Iterable[TraceEntry],
    *,
    speed: float,
    requests: int | None,
    duration: float | None,
) -> list[Ask]:
    """The requests of a trace, `speed` times as fast, up to a count or a time in seconds."""
    rng = random.Random(f"lengths {shape.seed} {level}")
    asks = []
    for index, entry in enumerate(trace):
        due = entry.timestamp / speed
        if index == requests or (duration is not None and due >= duration):
            break
        drawn = rng.randrange(shape.prefix_groups)
        group = drawn if entry.prefix_group is None else entry.prefix_group
        asks.append(Ask(index, due, entry.prompt_tokens, entry.output_tokens, group))
    return asks


def _ask(index: int, due: float | None, shape: Shape, rng: random.Random) -> Ask:
    prompt, output = shape.prompt_tokens.sample(rng), shape.output_tokens.sample(rng)
    return Ask(index, due, prompt, output, rng.randrange(shape.prefix_groups))


def prompt_text(ask: Ask, shape: Shape, level: str, calibration: Calibration) -> str:
    """The prompt: words by the seed, the level and the index; the shared ones by seed, level and group alone.

    No two levels share text, so that none finds its prompts in a cache that an earlier one filled.
    """
    words = calibration.words(ask.prompt_tokens)
    shared = min(words, round(shape.shared_prefix / calibration.per_word))
    prefix = random.Random(f"shared {shape.seed} {level} {ask.group}").choices(WORDS, k=shared)
    own = random.Random(f"own {shape.seed} {level} {ask.index}").choices(WORDS, k=words - shared)
    return " ".join([*prefix, *own])


def some_words(count: int, salt: str) -> str:
    """`count` words that only depend on `salt`."""
    return " ".join(random.Random(salt).choices(WORDS, k=count))
