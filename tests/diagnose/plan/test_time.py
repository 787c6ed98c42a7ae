"""Least step times from measured rates: parts worked by hand, and what must grow with what."""

from dataclasses import replace

import pytest

from fp8rl.diagnose.plan.bench import Rate, Rates, decode_step, experts_read
from fp8rl.diagnose.plan.subject import CONFIGS
from fp8rl.diagnose.plan.time import StepTime, kernels, step_time
from fp8rl.models import read_shape
from fp8rl.models.adapters import AdapterSection
from fp8rl.rl.experiment.budget.job import Job
from fp8rl.trainer.config import TrainerSection
from lab.studies.document.calculated import NATIVE, on_h200

QWEN = read_shape(CONFIGS / "qwen3_30b_a3b")
BF16, FP8, COPY, LAUNCHES, NODES = (Rate(each, 2 * each, "") for each in (1e15, 2e15, 3e12, 2e5, 5e5))
RATES = Rates("", BF16, BF16, FP8, FP8, None, COPY, LAUNCHES, NODES)


def seconds(time: StepTime) -> dict[str, float]:
    """At the slower rates."""
    return {part.name: part.seconds[1] for part in time.parts if part.seconds}


def test_products_take_their_flops_and_the_update_its_bytes() -> None:
    """6 FLOP for each active parameter and token, half as long at the faster rates; 30 bytes a parameter."""
    config = TrainerSection(micro_batch_tokens=32768, head_chunk_tokens=32768)
    job = Job(read_shape(CONFIGS / "qwen3_8b"), config, NATIVE, "kernels", 8, 32768).in_bf16()
    time = step_time(job, RATES)
    found = seconds(time)
    assert found["products"] == pytest.approx(6 * job.shape.active_parameters * job.tokens / 1e15, rel=1e-6)
    assert found["update"] == pytest.approx(30 * job.shape.parameters / 3e12, rel=1e-6)
    work = sum(found.values()) - found["launches"]
    assert time.total == pytest.approx((work / 2, work))
    assert "quantization" not in found and set(found) == {"products", "activations", "update", "launches"}


def test_a_part_without_a_measured_rate_has_no_seconds_and_says_what_is_missing() -> None:
    job = replace(on_h200(), storage="kernels")
    lacking = step_time(job, replace(RATES, copy=None, fp8_experts=None))
    assert set(seconds(lacking)) == {"products", "launches"}
    missing = {part.name: part.rests_on for part in lacking.parts if part.seconds is None}
    assert "`quantizers`" in missing["quantization"] and "`grouped`" in missing["products of experts"]
    narrow = step_time(job, replace(RATES, fp8_gradient=Rate(1e15, 2e15, "")))
    assert seconds(narrow)["products of experts"] > seconds(step_time(job, RATES))["products of experts"]


def test_weights_with_adapters_have_no_gradients_and_are_quantized_once() -> None:
    config = TrainerSection(micro_batch_tokens=8192)
    whole = Job(read_shape(CONFIGS / "qwen3_4b"), config, NATIVE, "kernels", 8, 8192)
    adapter = AdapterSection(rank=16)
    adapted = replace(whole, shape=read_shape(CONFIGS / "qwen3_4b", adapter=adapter), separate=True)
    few, many = (seconds(step_time(job, RATES)) for job in (adapted, whole))
    assert few["products"] == pytest.approx(2 / 3 * many["products"], rel=0.01)
    assert few["update"] < 0.02 * many["update"]


def test_the_host_bounds_small_steps() -> None:
    job = replace(on_h200(512, 8), layout=TrainerSection(ep=8, dp=8), storage="kernels")
    time = step_time(job, replace(RATES, launches=Rate(2e4, 2e5, "")))
    assert time.total[1] == pytest.approx(kernels(job) * 5e-5 + seconds(time)["update"])
    assert kernels(job) - kernels(job.in_bf16()) == 48 * (49 - 34)


def test_recomputing_costs_a_forward() -> None:
    config = TrainerSection(micro_batch_tokens=8192, ep=8, dp=8)
    job = Job(QWEN, config, NATIVE, "transformer_engine", 128, 8192).in_bf16()

    def products(recompute: str, chunk: int = 8192) -> float:
        layout = job.layout.model_copy(update={"recompute": recompute, "head_chunk_tokens": chunk})
        found = seconds(step_time(replace(job, layout=layout), RATES))
        return found["products"] + found["products of experts"]

    none = products("none")
    assert products("attention") == none and products("layer", 1024) == pytest.approx(4 / 3 * none)
    assert none < products("none", 1024) < products("experts") < products("layer") < 4 / 3 * none


def test_experts_that_a_batch_reads() -> None:
    assert experts_read(128, 8, 1) == pytest.approx(8) and experts_read(128, 8, 10_000) == pytest.approx(128)
    assert experts_read(128, 8, 16) == pytest.approx(128 * (1 - (15 / 16) ** 16)) and experts_read(0, 0, 4) == 0


def test_a_decode_step_reads_weights_and_cache() -> None:
    shape, spec = read_shape(CONFIGS / "qwen3_8b"), NATIVE.rollout_spec
    bf16 = replace(NATIVE, rollout="bf16").rollout_spec
    one = decode_step(shape, bf16, 1, 1000)
    assert one.weights == 2 * (shape.parameters - 151_936 * 4096)
    assert (one.cache, one.kernels) == (1000 * 147_456, 36 * 9 + 14)
    assert one.seconds(COPY, NODES)[1] == pytest.approx((one.weights + one.cache) / 3e12 + one.kernels * 2e-6)
    assert decode_step(shape, spec, 1, 1000).weights < 0.6 * one.weights
    # Each of 16 ranks reads one of the eight key-value heads, and each of four ranks reads all latents.
    assert decode_step(shape, bf16, 2, 1000, 16).cache == 2 * 2 * 1000 * 147_456
    latent = decode_step(read_shape(CONFIGS / "deepseek_v3"), bf16, 1, 1000, 4)
    read = pytest.approx((latent.weights / 4 + 1000 * 70_272) / 3e12)
    assert latent.seconds(COPY, NODES)[1] - latent.kernels * 2e-6 == read
    tied = read_shape(CONFIGS / "qwen3_4b")  # its embedding is its head, which each step reads once
    assert decode_step(tied, bf16, 1, 1000).weights == 2 * tied.parameters
    assert decode_step(QWEN, spec, 1, 1).kernels == 48 * 15 + 14 <= decode_step(QWEN, spec, 1, 1, mode="native").kernels
