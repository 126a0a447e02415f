"""Reads /metrics: samples by name, and what promtool has to say about the text."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

Samples = Mapping[str, list[tuple[dict[str, str], float]]]
"""(labels, value) by the name of the sample."""


def parse(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Samples by name. Raises AssertionError for a family without help or type."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation and family.type in ("counter", "gauge", "histogram"), family
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    """The sum of the samples that have these labels; a missing name is an AssertionError."""
    assert name in samples, f"no {name}; there are {sorted(samples)}"
    return sum(v for found, v in samples[name] if labels.items() <= found.items())


def promtool() -> str:
    """The program, which Debian's package `prometheus` has."""
    found = shutil.which("promtool")
    assert found is not None, "promtool is missing: install Debian's package prometheus"
    return found


async def run_promtool(*arguments: str, text: str = "") -> tuple[int, str]:
    """Exit code, and what it printed."""
    process = await asyncio.create_subprocess_exec(
        promtool(), *arguments,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    async with asyncio.timeout(60.0):
        out, _ = await process.communicate(text.encode())
    assert process.returncode is not None
    return process.returncode, out.decode()
