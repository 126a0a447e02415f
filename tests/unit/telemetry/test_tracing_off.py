"""Tracing: off, nothing of the SDK is imported; on, a wrong endpoint is refused before anything starts."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine_core.types.errors import ConfigError
from services.runtime.telemetry.tracing import start_tracing

PROBE = """
import sys
import services.router.main, services.prefill.main, services.decode.main, services.worker.build, services.bootstrap.main
from services.runtime.telemetry.tracing import start_tracing
assert start_tracing("", 1.0, "router", "r") is None
print(sorted(m for m in sys.modules if m.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))))
"""


def test_nothing_is_imported_while_tracing_is_off() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=100, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


@pytest.mark.parametrize("endpoint", ["localhost:4317", "http://localhost", "grpc://h:1", "http://h:4317/v1/traces"])
def test_a_wrong_endpoint_is_named(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"otlp_endpoint: .* is not like http://HOST:4317") as caught:
        start_tracing(endpoint, 1.0, "router", "r")
    assert caught.value.field == "otlp_endpoint"


async def test_contexts_are_continued_and_refused_ones_begin_anew() -> None:
    tracing = start_tracing("http://127.0.0.1:9", 1.0, "router", "r")
    assert tracing is not None
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    known = tracing.open("a", f"00-{trace_id}-b7ad6b7169203331-01", 1.0, {}, serves=True)
    assert known.trace_id == trace_id and known.traceparent.startswith(f"00-{trace_id}-")
    assert known.traceparent.split("-")[2] != "b7ad6b7169203331" and known.traceparent.endswith("-01")
    unsampled = tracing.open("b", f"00-{trace_id}-b7ad6b7169203331-00", 1.0, {}, serves=True)
    assert unsampled.trace_id == "" and unsampled.traceparent.startswith(f"00-{trace_id}-")
    assert unsampled.traceparent.endswith("-00")
    for wrong in ("", "nonsense", f"00-{'0' * 32}-{'0' * 16}-01"):
        begun = tracing.open("c", wrong, 1.0, {}, serves=True)
        assert len(begun.trace_id) == 32 and begun.trace_id != trace_id
    never = start_tracing("http://127.0.0.1:9", 0.0, "router", "r")
    assert never is not None
    assert never.open("d", "", 1.0, {}, serves=True).trace_id == ""
    assert never.open("e", f"00-{trace_id}-b7ad6b7169203331-01", 1.0, {}, serves=True).trace_id == trace_id
