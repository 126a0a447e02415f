"""Distributions of an engine against counting by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine_core.scheduler.figures import Distributions, Histogram

BOUNDS = (1.0, 2.5, 10.0)


@given(st.lists(st.floats(0, 20) | st.sampled_from(BOUNDS)))
def test_counts_are_those_of_a_naive_count(values: list[float]) -> None:
    histogram = Histogram(BOUNDS)
    for value in values:
        histogram.observe(value)
    figures = histogram.figures()
    edges = [float("-inf"), *BOUNDS, float("inf")]
    naive = tuple(sum(low < v <= high for v in values) for low, high in zip(edges, edges[1:], strict=False))
    assert figures.counts == naive and sum(figures.counts) == len(values)
    assert abs(figures.sum - sum(values)) < 1e-6


def test_a_step_is_of_the_kind_that_it_computes() -> None:
    distributions = Distributions()
    for decodes, others, tokens in ((3, 0, 3), (0, 2, 500), (3, 1, 100)):
        distributions.step(decodes, others, tokens, 0.02)
    distributions.push(4096, 0.002)
    distributions.push(4096, 0.0)
    figures = distributions.figures()
    assert {name: sum(f.counts) for name, f in figures.items()} == {
        "step_seconds.decode": 1, "step_seconds.prefill": 1, "step_seconds.mixed": 1, "step_sequences": 3,
        "step_tokens": 3, "push_seconds": 2, "push_bytes": 2, "push_bytes_per_second": 1,
    }  # fmt: skip
    assert (figures["step_sequences"].sum, figures["step_tokens"].sum, figures["push_bytes"].sum) == (9, 603, 8192)
