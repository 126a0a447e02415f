"""Entry point of the engine process: `python -m engine_core.host.main --fd N [--page-fd M]`.

N is one end of a socket pair; the service process holds the other, and shares M, the page that says whose step it
is. The first frame is Configure. Then:
load the model, lay out and allocate the KV pool, open the transfer sockets, warm up, send Ready, loop.
What is wrong with configuration or model files goes back as StartupFailed, in one line.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from engine_core import plugins
from engine_core.config import InferenceConfig, load_config
from engine_core.engine import EngineCore
from engine_core.execution.executor_api import Executor
from engine_core.host.channel import FrameChannel, leave
from engine_core.host.faults import FaultyExecutor
from engine_core.host.loop import EngineLoop, EventQueue, QuarantineOverflow, Wake
from engine_core.host.step_page import StepPage
from engine_core.scheduler.messages import Configure, Ready, StartupFailed
from engine_core.types.errors import ConfigError, PdmeshError
from engine_core.types.kv import fingerprint_of
from engine_core.types.request import Role

CONFIGURE_SECONDS = 30.0
CRASHED = 70
"""Exit code after an exception; the others are in services/worker/engine_death.py too."""
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Runs an engine to its end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="inherited end of the frame socket pair")
    parser.add_argument("--page-fd", type=int, help="inherited page that says whose step it is")
    args = parser.parse_args()
    # A service process that is killed takes its engine along, even in the middle of a step.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The terminal's Ctrl-C is for the service process, which drains first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wake = Wake()
    channel = FrameChannel(socket.socket(fileno=args.fd), wake)
    first = channel.receive(CONFIGURE_SECONDS)
    if not isinstance(first, Configure):
        leave(2, f"Configure did not come within {CONFIGURE_SECONDS:g} s")
    try:
        config = load_config(first.config)
        page = StepPage(args.page_fd) if args.page_fd is not None else None
        loop, close = _build(config, first, channel, wake, page)
    except PdmeshError as exc:
        _startup_failed(channel, exc.message)
    except MemoryError as exc:
        _startup_failed(channel, f"out of memory: {exc}")
    try:
        loop.run()
    except QuarantineOverflow as exc:
        leave(3, str(exc))
    except Exception:  # noqa: BLE001  # whatever it is, the process ends; at once, so that peers see proofs of quiet
        traceback.print_exc()
        leave(CRASHED, "an exception ended the engine")
    close()
    channel.close()


def _startup_failed(channel: FrameChannel, message: str) -> NoReturn:
    channel.send(StartupFailed(" ".join(message.split())))
    channel.close()
    sys.exit(2)


def _build(
    config: InferenceConfig, first: Configure, channel: FrameChannel, wake: Wake, page: StepPage | None
) -> tuple[EngineLoop, Callable[[], None]]:
    """Composition root of the engine process. Returns the loop and what to close after it."""
    started = time.monotonic()
    import torch  # the service process imports this module's package; torch stays here

    from engine_core.execution.model_worker import ModelWorker
    from engine_core.execution.profiler import ProfilerManager
    from engine_core.grammar.book import MatcherBook
    from engine_core.grammar.cache import GrammarCache
    from engine_core.host.gate import GrammarGate
    from engine_core.kv.manager import KVCacheManager
    from engine_core.kv.storage import KvRegion

    worker = ModelWorker(config)
    info = worker.load()
    directory = plugins.load_path(plugins.MODEL_DIRECTORY)(config.model.model_path)
    grammars = GrammarCache(directory, info.eos_token_ids, info.vocab_size, wake)
    worker.follow(MatcherBook(grammars, info.vocab_size, 2 * config.scheduler.max_running))
    layout = worker.layout()
    region = KvRegion.create(layout.region_bytes)
    worker.bind_kv(torch.frombuffer(region.buffer, dtype=torch.uint8))
    fingerprint = fingerprint_of(info.fingerprint_parts)
    kv = KVCacheManager(layout, fingerprint, config.scheduler.enable_prefix_cache)
    role = config.disagg.disaggregation_mode
    events = EventQueue(wake)
    transfer = None
    if role is not Role.MIXED:
        from engine_core.transfer.manager import KVTransferManager

        transfer = KVTransferManager(
            config.disagg, first.incarnation, first.instance, region, layout, events.post,
            accept_links=role is Role.DECODE, tokens=first.tokens,
        )  # fmt: skip
    core = EngineCore(
        role, config.scheduler, kv, layout,
        eos_token_ids=info.eos_token_ids, max_model_len=info.max_model_len, verify_kv=config.disagg.verify_kv,
        vocab_size=info.vocab_size,
    )  # fmt: skip
    worker.warm_up()
    tokens = min(g.num_blocks - 1 for g in layout.groups) * config.scheduler.block_size
    if tokens < 1:
        raise ConfigError("scheduler.kv_tokens leaves no block of KV cache; raise it or kv_memory_bytes")
    channel.send(
        Ready(
            pid=os.getpid(),
            layout=layout,
            descriptors=transfer.descriptors() if transfer is not None else (),
            fingerprint_parts=info.fingerprint_parts,
            max_model_len=info.max_model_len,
            num_kv_tokens=tokens,
            eos_token_ids=info.eos_token_ids,
            seconds_to_ready=time.monotonic() - started,
        )
    )

    def close() -> None:
        if transfer is not None:
            transfer.close()

    executor: Executor = FaultyExecutor(worker, config.fault_script) if config.fault_script else worker
    gate = GrammarGate(grammars, config.scheduler.max_queued)
    return EngineLoop(core, executor, channel, transfer, events, wake, ProfilerManager(), gate, page), close


if __name__ == "__main__":
    main()
