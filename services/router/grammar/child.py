"""Compiles grammars in a process of its own, which may be killed.

    python -m services.router.grammar.child DIR SECONDS

DIR is the model's. One JSON line in, {"kind", "text"}; one JSON line out, {"error"}: null, or why the grammar is
refused. Compiling has SECONDS of this process's time, MEMORY_BYTES of address space, and no say in the router's
life: patterns that intersect can take longer than anybody waits.
"""

from __future__ import annotations

import resource
import signal
import sys
import threading
from pathlib import Path

import msgspec

from engine_core.grammar.compiler import STACK_BYTES, compile_grammar, load_vocabulary, try_out
from engine_core.types.errors import ConfigError, InvalidRequestError
from engine_core.types.sampling import Grammar
from services.router.text.tokenizer import read_json

CPU_SECONDS = 3
MEMORY_BYTES = 4 * 1024**3


class Verdict(msgspec.Struct, frozen=True):
    """What became of a grammar."""

    error: str | None = None


def main() -> None:
    """Answers until its input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    threading.stack_size(STACK_BYTES)
    worker = threading.Thread(target=_answer, args=(sys.argv[1], int(sys.argv[2])), name="grammars")
    worker.start()
    worker.join()


def _answer(directory: str, cpu_seconds: int) -> None:
    reader = msgspec.json.Decoder(Grammar)
    try:
        vocabulary, refusal = load_vocabulary(directory, _eos_token_ids(Path(directory))), None
    except InvalidRequestError as exc:
        vocabulary, refusal = None, exc.message
    for line in sys.stdin.buffer:
        verdict = Verdict(refusal)
        if vocabulary is not None:
            _allow(cpu_seconds)
            try:
                try_out(vocabulary, compile_grammar(vocabulary, reader.decode(line)))
            except InvalidRequestError as exc:
                verdict = Verdict(exc.message)
        sys.stdout.buffer.write(msgspec.json.encode(verdict) + b"\n")
        sys.stdout.buffer.flush()


def _allow(seconds: int) -> None:
    """From now on, SIGXCPU ends this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _eos_token_ids(root: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        try:
            found = read_json(root / name).get("eos_token_id")
        except ConfigError:
            continue
        ids = found if isinstance(found, list) else [found]
        if ids and all(isinstance(i, int) for i in ids):
            return tuple(ids)
    return ()


if __name__ == "__main__":
    main()
