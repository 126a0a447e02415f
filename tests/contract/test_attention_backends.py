"""Every attention backend equals a dense softmax in float64, and writes what it was given where it was told."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from engine_core import plugins
from engine_core.execution.attention.base import TORCH_DTYPES, AttentionBackend, group_tensor
from engine_core.execution.batch import BatchBuilder
from engine_core.execution.forward_metadata import ForwardMetaData
from engine_core.scheduler.step import ScheduledSequence, StepPlan
from engine_core.types.errors import InternalError
from engine_core.types.ids import SessionId
from engine_core.types.kv import KvGroupLayout, KvGroupSpec, KvLayout
from engine_core.types.sampling import SamplingParams

BACKENDS = sorted(plugins.ATTENTION_BACKENDS)
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_size: int
    block_size: int
    dtype: str = "float32"


class Bench:
    """A pool of one group with two layers, and sequences whose earlier KV is random."""

    def __init__(self, shape: Shape, parts: list[tuple[int, int]], seed: int = 0) -> None:
        """parts: (tokens already there, new tokens) per sequence."""
        self.shape, self.parts = shape, parts
        self.random = torch.Generator().manual_seed(seed)
        spec = KvGroupSpec(num_layers=2, num_heads=shape.kv_heads, head_size=shape.head_size, dtype=shape.dtype)
        needed = [-(-(start + new) // shape.block_size) for start, new in parts]
        layout = KvGroupLayout(spec=spec, block_size=shape.block_size, num_blocks=sum(needed) + 1, offset=4096)
        size = layout.offset + layout.num_blocks * layout.block_bytes
        self.layout = KvLayout(groups=(layout,), region_bytes=size)
        self.region = torch.zeros(size, dtype=torch.uint8)
        self.cache = group_tensor(self.region, layout)
        self.cache.copy_(torch.randn(self.cache.shape, generator=self.random))
        blocks = list(range(1, layout.num_blocks))
        random.Random(seed).shuffle(blocks)
        self.tables = [[blocks.pop() for _ in range(n)] for n in needed]
        self.metadata = self._metadata()
        self.scale = shape.head_size**-0.5
        total = sum(new for _, new in parts)
        dtype = TORCH_DTYPES[shape.dtype]
        self.q = torch.randn(total, shape.heads, shape.head_size, generator=self.random).mul_(2).to(dtype)
        self.k = torch.randn(total, shape.kv_heads, shape.head_size, generator=self.random).to(dtype)
        self.v = torch.randn(total, shape.kv_heads, shape.head_size, generator=self.random).to(dtype)

    def _metadata(self) -> ForwardMetaData:
        sequences = tuple(
            ScheduledSequence(SessionId(i), [1] * new, start, (table,), True, SamplingParams(max_tokens=1))
            for i, ((start, new), table) in enumerate(zip(self.parts, self.tables, strict=True))
        )
        self.builder = BatchBuilder(self.layout, 10)
        return self.builder.build(StepPlan(1, sequences)).metadata

    def backend(self, name: str) -> AttentionBackend:
        made = plugins.load(plugins.ATTENTION_BACKENDS, "attention backend", name)
        backend: AttentionBackend = made(self.layout.groups[0], self.cache, self.shape.heads, self.scale)
        return backend

    def expected(self, layer: int) -> torch.Tensor:
        """Dense attention in float64 over the pool as it is after the write."""
        out, row = [], 0
        for (start, new), table in zip(self.parts, self.tables, strict=True):
            flat = self.cache[table, layer].transpose(0, 1).flatten(1, 2).double()[:, : start + new]
            flat[:, start:] = torch.stack([self.k[row : row + new], self.v[row : row + new]]).double()
            keys, values = flat.repeat_interleave(self.shape.heads // self.shape.kv_heads, dim=2)
            scores = torch.einsum("qhd,khd->hqk", self.q[row : row + new].double(), keys) * self.scale
            hidden = torch.ones(new, start + new, dtype=torch.bool).triu(start + 1)
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out.append(torch.einsum("hqk,khd->qhd", weights, values).flatten(1))
            row += new
        return torch.cat(out)


SHAPES = [
    Shape(4, 2, 16, 16),
    Shape(9, 3, 64, 16),
    Shape(4, 4, 32, 32),
    Shape(8, 1, 128, 64),
    Shape(14, 2, 64, 128),
    Shape(16, 8, 80, 16),
    Shape(9, 3, 64, 16, "bfloat16"),
    Shape(6, 2, 48, 32, "bfloat16"),
]
BATCHES = {
    "one decode": [(5, 1)],
    "first token": [(0, 1)],
    "decodes at block edges": [(15, 1), (16, 1), (17, 1), (127, 1), (128, 1)],
    "long decodes": [(511, 1), (512, 1), (1300, 1), (3, 1)],
    "whole prompts": [(0, 1), (0, 16), (0, 33), (0, 70)],
    "chunks": [(16, 16), (64, 31), (130, 65), (7, 2)],
    "mixed": [(40, 1), (600, 1), (0, 40), (96, 100)],
}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.heads}x{s.kv_heads}x{s.head_size}b{s.block_size}{s.dtype}")
def test_output_equals_dense_attention(name: str, shape: Shape) -> None:
    for label, parts in BATCHES.items():
        bench = Bench(shape, parts)
        expected = bench.expected(1)
        got = bench.backend(name).forward(1, bench.q, bench.k, bench.v, bench.metadata)
        worst = float((got.double() - expected).abs().max())
        assert worst < TOLERANCE[shape.dtype], label


@pytest.mark.parametrize("name", BACKENDS)
def test_only_the_slots_of_new_tokens_in_that_layer_change(name: str) -> None:
    bench = Bench(Shape(4, 2, 16, 16), [(20, 1), (0, 5), (30, 9)])
    before = bench.cache.clone()
    bench.backend(name).forward(1, bench.q, bench.k, bench.v, bench.metadata)
    row = 0
    for (start, new), table in zip(bench.parts, bench.tables, strict=True):
        for position in range(start, start + new):
            block, offset = table[position // 16], position % 16
            assert torch.equal(bench.cache[block, 1, 0, offset], bench.k[row])
            assert torch.equal(bench.cache[block, 1, 1, offset], bench.v[row])
            bench.cache[block, 1, :, offset] = before[block, 1, :, offset]
            row += 1
    assert torch.equal(bench.cache, before)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_decode_is_bitwise_the_same_alone_and_in_a_batch(name: str) -> None:
    together = Bench(Shape(9, 3, 64, 16), [(700, 1), (37, 1), (64, 40)], seed=4)
    alone = Bench(Shape(9, 3, 64, 16), [(700, 1)], seed=4)
    for i, block in enumerate(alone.tables[0]):
        alone.cache[block] = together.cache[together.tables[0][i]]
    got = together.backend(name).forward(0, together.q, together.k, together.v, together.metadata)[0]
    single = alone.backend(name).forward(0, together.q[:1], together.k[:1], together.v[:1], alone.metadata)[0]
    assert torch.equal(got, single)


@pytest.mark.parametrize("name", BACKENDS)
def test_nan_comes_through(name: str) -> None:
    bench = Bench(Shape(4, 2, 16, 16), [(40, 1), (10, 1)])
    bench.q[0, 0, 3] = float("nan")
    got = bench.backend(name).forward(0, bench.q, bench.k, bench.v, bench.metadata)
    assert bool(got[0].isnan().any())
    assert not bool(got[1].isnan().any())


def test_a_region_that_is_too_small_is_refused() -> None:
    bench = Bench(Shape(4, 2, 16, 16), [(5, 1)])
    with pytest.raises(InternalError, match="needs"):
        group_tensor(bench.region[:-1], bench.layout.groups[0])
