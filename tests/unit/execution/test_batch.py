"""Packing a plan, and the worker's own promises."""

from __future__ import annotations

import pytest

from engine_core.config import InferenceConfig, ModelConfig, SchedulerConfig
from engine_core.execution.batch import BatchBuilder
from engine_core.execution.model_worker import HEADER_BYTES, ModelWorker
from engine_core.scheduler.step import ScheduledSequence, StepPlan
from engine_core.types.errors import InternalError
from engine_core.types.ids import SessionId
from engine_core.types.kv import KvGroupLayout, KvGroupSpec, KvLayout
from engine_core.types.sampling import SamplingParams
from tests.support.models import tiny_model
from tests.support.stepper import Stepper

LAYOUT = KvLayout(
    groups=(KvGroupLayout(spec=KvGroupSpec(2, 2, 16, "float32"), block_size=16, num_blocks=10),), region_bytes=0
)


def sequence(tokens: list[int], start: int, blocks: list[int], *, sample: bool = True) -> ScheduledSequence:
    return ScheduledSequence(SessionId(start), tokens, start, (blocks,), sample, SamplingParams(max_tokens=1))


def test_a_mixed_plan_is_packed() -> None:
    plan = StepPlan(
        3,
        (
            sequence([5], 17, [4, 2]),
            sequence([7, 8, 9], 15, [1, 3, 9]),
            sequence([6, 6], 0, [7], sample=False),
        ),
    )
    batch = BatchBuilder(LAYOUT, 100).build(plan)
    meta, (group,) = batch.metadata, batch.metadata.groups
    assert batch.input_ids.tolist() == [5, 7, 8, 9, 6, 6]
    assert batch.position_ids.tolist() == [17, 15, 16, 17, 0, 1]
    assert meta.query_starts.tolist() == [0, 1, 4, 6]
    assert meta.seq_lens.tolist() == [18, 18, 2]
    assert (meta.num_decodes, meta.max_query_len, meta.max_seq_len, meta.num_sequences) == (1, 3, 18, 3)
    assert group.block_tables.tolist() == [[4, 2], [1, 3], [7, 0]]
    assert group.slot_mapping.tolist() == [2 * 16 + 1, 16 + 15, 3 * 16, 3 * 16 + 1, 7 * 16, 7 * 16 + 1]
    assert meta.sample_rows.tolist() == [0, 3]
    assert batch.sampled_sequences == (0, 1)
    assert [d.position for d in batch.draws] == [18, 18]


def test_buffers_grow_and_shrink_with_the_plan() -> None:
    builder = BatchBuilder(LAYOUT, 100)
    assert builder.build(StepPlan(1, (sequence([1], 0, [1]),))).input_ids.tolist() == [1]
    many = StepPlan(2, tuple(sequence(list(range(10)), 0, [i % 9 + 1]) for i in range(60)))
    assert builder.build(many).position_ids.tolist() == list(range(10)) * 60
    assert builder.build(StepPlan(3, (sequence([2], 1, [1]),))).position_ids.tolist() == [1]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (sequence([], 0, [1]), "without tokens"),
        (sequence([100], 0, [1]), "outside the vocabulary"),
        (sequence([-1], 0, [1]), "outside the vocabulary"),
        (sequence([1], 16, [1]), "has 1 blocks and needs 2"),
        (sequence([1], 0, [10]), "beyond the pool"),
        (sequence([1], 0, [-1]), "beyond the pool"),
    ],
)
def test_a_broken_plan_is_refused(bad: ScheduledSequence, message: str) -> None:
    with pytest.raises(InternalError, match=message):
        BatchBuilder(LAYOUT, 100).build(StepPlan(1, (sequence([1], 0, [2]), bad)))


def test_the_layout_follows_the_configuration() -> None:
    def layout(**scheduler: int) -> KvLayout:
        worker = ModelWorker(
            InferenceConfig(
                model=ModelConfig(model_path=str(tiny_model("llama"))), scheduler=SchedulerConfig(**scheduler)
            )
        )
        worker.load()
        return worker.layout()

    block = 16 * 3 * 2 * 2 * 16 * 4
    by_tokens = layout(kv_tokens=100)
    assert by_tokens.groups[0].num_blocks == 7 + 1
    assert by_tokens.groups[0].offset == HEADER_BYTES
    assert by_tokens.region_bytes == HEADER_BYTES + 8 * block
    assert layout(kv_memory_bytes=10 * block + 5).groups[0].num_blocks == 10 + 1
    assert layout(kv_tokens=100, block_size=64).groups[0].num_blocks == 2 + 1


def test_warm_up_touches_the_null_block_alone() -> None:
    stepper = Stepper(tiny_model("llama"), kv_tokens=512)
    before = stepper.region.clone()
    stepper.worker.warm_up()
    layout = stepper.worker.layout().groups[0]
    changed = (stepper.region != before).nonzero().flatten()
    assert changed.numel() > 0
    assert int(changed.min()) >= layout.offset
    assert int(changed.max()) < layout.offset + layout.block_bytes


def test_a_step_reports_its_time_and_an_empty_plan_is_nothing() -> None:
    stepper = Stepper(tiny_model("llama"))
    assert stepper.worker.execute(StepPlan(9, ())).sampled == ()
    stream = stepper.stream([5, 6, 7], 4)
    result = stepper.worker.execute(StepPlan(9, (stream.part(2),)))
    assert (result.step, result.sampled) == (9, (-1,))
    assert 0 < result.forward_seconds <= result.seconds


def test_broken_numbers_fail_the_sequences_that_they_came_out_for() -> None:
    stepper = Stepper(tiny_model("llama"))
    calm = stepper.generate([5, 6, 7], 1)
    stepper.worker._model._embedding[9] = float("nan")
    streams = [stepper.stream(prompt, 1) for prompt in ([5, 6, 7], [5, 9, 7], [5, 9], [5, 6, 7])]
    parts = [stream.part(2) for stream in streams[:3]] + [streams[3].part(3)]
    result = stepper.worker.execute(StepPlan(1, tuple(parts)))
    # The second reaches no draw yet; the third does.
    assert result.sampled == (-1, -1, -1, calm[0])
    assert [(f.index, f.message, f.lost) for f in result.failures] == [(2, "the logits at position 2 hold NaN", False)]


def test_sampled_output_replays_whatever_the_chunks() -> None:
    stepper = Stepper(tiny_model("llama"))
    prompt = list(range(20, 60))
    params = SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, seed=77)
    first = stepper.generate(prompt, 20, sampling=params)
    assert stepper.generate(prompt, 20, chunk=9, sampling=params) == first
    # A resumed stream knows part of the output already and draws the rest alike.
    assert stepper.generate(prompt + first[:8], 12, sampling=params) == first[8:]
    other = SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, seed=78)
    assert stepper.generate(prompt, 20, sampling=other) != first
