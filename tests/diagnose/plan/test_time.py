"""Step times: parts worked by hand, published steps between the corners, and what must grow with what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8rl.diagnose.plan.decode import decode_kernels, decode_step, experts_read
from fp8rl.diagnose.plan.efficiency import Rates, assumed
from fp8rl.diagnose.plan.subject import CONFIGS
from fp8rl.diagnose.plan.time import (
    expert_bytes,
    gathered_and_summed_bytes,
    kernels,
    step_time,
)
from fp8rl.diagnose.plan.verdict import Bracket, break_even, fp8_over_bf16, pays
from fp8rl.models import read_shape
from fp8rl.models.adapters import AdapterSection
from fp8rl.rl.experiment.budget.gpus import GPUS
from fp8rl.rl.experiment.budget.job import Job
from fp8rl.trainer.config import TrainerSection
from lab.studies.document.calculated import NATIVE, deepseek_on_h800, on_h200, products_share_of_ironwood

QWEN = read_shape(CONFIGS / "qwen3_30b_a3b")
EFFICIENCY = assumed("native")
PERFECT = Rates(1, 1, 1, 1, 1, 1, 1, launches=2e5, nodes=5e5, hidden=True)


def tokens_per_gpu(job: Job, gpu: str) -> Bracket:
    rates = (EFFICIENCY.slow, EFFICIENCY.fast)
    return Bracket(*(job.tokens / step_time(job, GPUS[gpu], each).total / job.layout.world_size for each in rates))


def qwen(rows: int, **layout: int) -> Job:
    config = TrainerSection(micro_batch_tokens=8192, **layout)
    return Job(QWEN, config, NATIVE, "transformer_engine", rows, 8192).in_bf16()


@pytest.mark.parametrize(
    ("layout", "rows", "found"),
    [({"pp": 2, "ep": 8, "dp": 8}, 128, 6325), ({"pp": 4, "ep": 4, "dp": 4}, 256, 6244)],
)
def test_published_steps_of_qwen3_30b_on_16_h800_lie_between_the_corners(
    layout: dict[str, int], rows: int, found: int
) -> None:
    """alibaba/Pai-Megatron-Patch#643: BF16, one row of 8,192 tokens a micro-batch, nothing recomputed."""
    assert tokens_per_gpu(qwen(rows, **layout), "h800").holds(found)


def test_deepseek_v3s_own_pretraining_lies_between_the_corners() -> None:
    """272.8 G tokens a day on 2,048 H800, in FP8."""
    assert tokens_per_gpu(deepseek_on_h800(), "h800").holds(272.8e9 / 86400 / 2048)


def test_fp8_is_slower_for_qwen3_30b_on_8_h200_at_small_steps() -> None:
    """As reported of whole runs (verl#7232)."""
    small = fp8_over_bf16(on_h200(512, 8), GPUS["h200"], EFFICIENCY)
    assert small.low > 1
    assert pays(small) == "FP8 is slower here"
    large = fp8_over_bf16(on_h200(4096, 1024), GPUS["h200"], EFFICIENCY)
    assert large.low < 0.9 < large.high
    assert pays(large) == "FP8 may be faster or slower here"


@pytest.mark.slow
def test_the_break_even_is_where_the_ratio_crosses_one() -> None:
    job = on_h200()
    _, tokens = break_even(job, GPUS["h200"], EFFICIENCY)
    assert tokens is not None
    above, below = (fp8_over_bf16(job.of_tokens(n), GPUS["h200"], EFFICIENCY).fast for n in (tokens, tokens * 9 // 10))
    assert above < 1 <= below


def test_ironwoods_speed_up_is_43_percent_of_the_step_in_products() -> None:
    share = products_share_of_ironwood()
    assert share == pytest.approx(0.43, abs=0.005)
    assert 1 / (1 - share / 2) == pytest.approx(1.277, abs=0.001)
    # Of DeepSeek-V3's FLOPs, at the chip's BF16 peak and at half of it: the share of products lies between.
    shape = read_shape(CONFIGS / "deepseek_v3")
    at_peak = 2590 * 6 * shape.active_parameters / 2307e12
    assert at_peak < share < 2 * at_peak


def test_products_take_their_flops_where_these_are_many() -> None:
    """One layer's worth at the peak: 6 FLOP for each active parameter and token."""
    job = Job(
        read_shape(CONFIGS / "qwen3_8b"),
        TrainerSection(micro_batch_tokens=32768, head_chunk_tokens=32768),
        NATIVE,
        "kernels",
        8,
        32768,
    )
    job = job.in_bf16()
    time = step_time(job, GPUS["h100"], PERFECT)
    assert time.products == pytest.approx(6 * job.shape.active_parameters * job.tokens / 989e12, rel=1e-6)
    attention = 3.5 * job.shape.attention_flops(32768 / 2) * job.tokens / 989e12
    assert time.attention == pytest.approx(attention, rel=1e-6)
    assert (time.quantization, time.transfers, time.bubble) == (0, 0, 0)
    assert time.optimizer == pytest.approx(30 * job.shape.parameters / 3.35e12, rel=1e-6)


def test_weights_with_adapters_have_no_gradients_and_are_quantized_once() -> None:
    config = TrainerSection(micro_batch_tokens=8192)
    whole = Job(read_shape(CONFIGS / "qwen3_4b"), config, NATIVE, "kernels", 8, 8192)
    adapter = AdapterSection(rank=16)
    adapted = replace(whole, shape=read_shape(CONFIGS / "qwen3_4b", adapter=adapter), separate=True)
    times = [step_time(job, GPUS["h100"], PERFECT) for job in (adapted, whole)]
    assert times[0].products == pytest.approx(2 / 3 * times[1].products, rel=0.01)
    assert times[0].optimizer < 0.02 * times[1].optimizer


def test_products_take_their_bytes_where_tokens_are_few() -> None:
    """A token alone: each weight is read in the forward and for the input's gradient, and its gradient written."""
    job = Job(read_shape(CONFIGS / "qwen3_8b"), TrainerSection(), NATIVE, "kernels", 1, 1).in_bf16()
    time = step_time(job, GPUS["h100"], PERFECT)
    assert time.products == pytest.approx(3 * 2 * job.shape.active_parameters / 3.35e12, rel=0.01)


def test_the_host_bounds_small_steps() -> None:
    job = replace(on_h200(512, 8), layout=TrainerSection(ep=8, dp=8))
    time = step_time(job, GPUS["h200"], PERFECT)
    assert time.host_bound
    assert time.total == pytest.approx(kernels(job) * 5e-6 + time.optimizer)


def test_a_pipeline_waits_for_its_stages() -> None:
    """(p - 1) / m of the work, which is (p - 1) / (m + p - 1) of the step."""
    job = qwen(64, pp=4, ep=2, dp=2)
    time = step_time(job, GPUS["h100"], PERFECT)
    assert job.micro_batches == 32
    assert time.bubble / (time.work + time.bubble) == pytest.approx(3 / 35)


def test_tokens_travel_to_experts_and_back_twice() -> None:
    job = on_h200()
    per_token = 4 * 48 * 8 * 2048 * 2 * 7 / 8
    assert expert_bytes(job) == pytest.approx(job.tokens / 8 * per_token)


def test_narrow_wires_carry_less() -> None:
    """Experts are on all of 4 ranks: 28.99 G elements; so are dense weights, of which 59% are quantized."""
    layout = TrainerSection(dp=4)
    job = Job(QWEN, layout, NATIVE, "kernels", 256, 4096)
    dense = sum(weight.size * weight.count for weight in QWEN.weights if weight.share != "experts")
    quantized = 48 * (2048 * (32 + 8) * 128 + 4096 * 2048) + QWEN.parameters - dense
    gathered, summed = gathered_and_summed_bytes(job)
    assert (gathered, summed) == (2 * QWEN.parameters * 3 / 4, 4 * QWEN.parameters * 3 / 4)
    narrow = layout.model_copy(update={"gradient_wire": "e4m3", "weight_gather": "e4m3"})
    gathered, summed = gathered_and_summed_bytes(replace(job, layout=narrow))
    assert gathered == pytest.approx((2 * QWEN.parameters - quantized) * 3 / 4)
    assert summed == pytest.approx((1 + 1 / 32) * QWEN.parameters * 3 / 4)


def test_recomputing_costs_a_forward() -> None:
    job = qwen(128, ep=8, dp=8)

    def parts(recompute: str, chunk: int = 8192) -> tuple[float, float]:
        layout = job.layout.model_copy(update={"recompute": recompute, "head_chunk_tokens": chunk})
        time = step_time(replace(job, layout=layout), GPUS["h100"], PERFECT)
        return time.products, time.attention

    products, attention = parts("none")
    assert parts("attention") == pytest.approx((products, 4.5 / 3.5 * attention))
    assert parts("layer", 1024) == pytest.approx((4 / 3 * products, 4.5 / 3.5 * attention))
    assert products < parts("none", 1024)[0] < parts("experts")[0] < parts("layer")[0] < 4 / 3 * products
    assert parts("experts")[1] == attention


def test_fp8_adds_kernels_of_every_expert_unless_they_are_grouped() -> None:
    libraries, shared = on_h200(), replace(on_h200(), storage="kernels")
    own = 128 // 8
    assert kernels(libraries) - kernels(libraries.in_bf16()) == 48 * 2 * (2 + 2 * own)
    assert kernels(shared) - kernels(shared.in_bf16()) == 48 * (49 - 34)


def test_experts_that_a_batch_reads() -> None:
    assert experts_read(128, 8, 1) == pytest.approx(8)
    assert experts_read(128, 8, 10_000) == pytest.approx(128)
    assert experts_read(128, 8, 16) == pytest.approx(128 * (1 - (15 / 16) ** 16))
    assert experts_read(0, 0, 4) == 0


def test_a_decode_step_reads_weights_and_cache() -> None:
    shape, spec = read_shape(CONFIGS / "qwen3_8b"), NATIVE.rollout_spec
    bf16 = replace(NATIVE, rollout="bf16").rollout_spec
    one = decode_step(shape, bf16, GPUS["h100"], PERFECT, 1, 1000)
    assert one.weights == 2 * (shape.parameters - 151_936 * 4096)
    assert one.cache == 1000 * 147_456
    assert one.work == pytest.approx((one.weights + one.cache) / 3.35e12)
    assert one.seconds == one.work + one.kernels * 2e-6 and one.kernels == 36 * 10 + 14
    assert decode_step(shape, spec, GPUS["h100"], PERFECT, 1, 1000).weights < 0.6 * one.weights
    tied = read_shape(CONFIGS / "qwen3_4b")  # its embedding is its head, which each step reads once
    assert decode_step(tied, bf16, GPUS["h100"], PERFECT, 1, 1000).weights == 2 * tied.parameters
    many = decode_step(shape, bf16, GPUS["h100"], PERFECT, 4096, 1)
    assert many.work > 2 * 4096 * shape.active_parameters / 989e12


def test_an_exact_decode_step_has_no_more_kernels_than_a_native_one() -> None:
    """Of Qwen3-30B-A3B on an H100, 64 answers of 4,096 tokens: by bytes and kernels, not by how fast a kernel is."""
    spec, rates = NATIVE.rollout_spec, assumed("exact").slow
    assert decode_kernels(QWEN, spec, "exact") == 48 * 15 + 14 <= decode_kernels(QWEN, spec, "native")
    for batch in (64, 1):
        exact = decode_step(QWEN, spec, GPUS["h100"], rates, batch, 4096, 1, "exact")
        native = decode_step(QWEN, spec, GPUS["h100"], rates, batch, 4096, 1, "native")
        assert exact.seconds <= 1.1 * native.seconds
