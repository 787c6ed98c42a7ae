"""Least step times from measured rates: parts worked by hand, and what must grow with what."""

from dataclasses import replace

import pytest

from fp8rl.diagnose.plan.bench import Rate, Rates, decode_step
from fp8rl.diagnose.plan.subject import CONFIGS
from fp8rl.diagnose.plan.time import Part, StepTime, kernels, quotient, ratios, step_time
from fp8rl.models import read_shape
from fp8rl.models.adapters import AdapterSection
from fp8rl.rl.experiment.budget.job import Job
from fp8rl.trainer.config import TrainerSection
from lab.studies.document.calculated import NATIVE, on_h200

QWEN = read_shape(CONFIGS / "qwen3_30b_a3b")
BF16, FP8, COPY, LAUNCHES = (Rate(each, 2 * each, "") for each in (1e15, 2e15, 3e12, 2e5))
RATES = Rates("", BF16, BF16, COPY, FP8, FP8, None, LAUNCHES)


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
    """Where the backward repeats the forward, two thirds are three quarters, and each forward quantizes its inputs."""
    plain, adapted = (read_shape(CONFIGS / "qwen3_4b", adapter=each) for each in (None, AdapterSection(rank=16)))
    x, dy = (36 * 65536 * each / 3e12 for each in (2 * 2560 + 4096 + 9728, 6144 + 2 * 9728 + 2 * 2560))
    for recompute, share, forwards in (("none", 2 / 3, 1), ("layer", 3 / 4, 2)):
        config = TrainerSection(micro_batch_tokens=8192, head_chunk_tokens=8192, recompute=recompute)
        job = Job(plain, config, NATIVE, "kernels", 8, 8192)
        few, many = (seconds(step_time(each, RATES)) for each in (replace(job, shape=adapted, separate=True), job))
        assert few["products"] == pytest.approx(share * many["products"], rel=0.02)
        assert few["update"] < 0.02 * many["update"]
        assert few["quantization"] == pytest.approx(forwards * 3 * x + 3 * dy)
        assert many["quantization"] == pytest.approx(forwards * 3 * x + 3 * x + 4 * dy)


def test_the_host_bounds_small_steps() -> None:
    job = replace(on_h200(512, 8), layout=TrainerSection(ep=8, dp=8), storage="kernels")
    time = step_time(job, replace(RATES, launches=Rate(2e4, 2e5, "")))
    assert time.total[1] == pytest.approx(kernels(job) * 5e-5 + seconds(time)["update"])
    assert kernels(job) - kernels(job.in_bf16()) == 48 * (36 - 28)


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


def test_a_decode_step_reads_weights_and_cache() -> None:
    shape, spec = read_shape(CONFIGS / "qwen3_8b"), NATIVE.rollout_spec
    bf16 = replace(NATIVE, rollout="bf16").rollout_spec
    one = decode_step(shape, bf16, 1, 1000)
    assert one.weights == 2 * (shape.parameters - 151_936 * 4096)
    assert (one.cache, one.kernels) == (1000 * 147_456, 36 * 9 + 14)
    assert decode_step(shape, spec, 1, 1000).weights < 0.6 * one.weights
    # Each of 16 ranks reads one of the eight key-value heads, and each of four ranks reads all latents.
    assert decode_step(shape, bf16, 2, 1000, 16).cache == 2 * 2 * 1000 * 147_456
    latent = decode_step(read_shape(CONFIGS / "deepseek_v3"), bf16, 1, 1000, 4)
    assert latent.bytes == pytest.approx(latent.weights / 4 + 1000 * 70_272)
    tied = read_shape(CONFIGS / "qwen3_4b")  # its embedding is its head, which each step reads once
    assert decode_step(tied, bf16, 1, 1000).weights == 2 * tied.parameters
    assert decode_step(QWEN, spec, 1, 1).kernels == 48 * 15 + 14 <= decode_step(QWEN, spec, 1, 1, mode="native").kernels


def at(rate: float) -> Rate:
    return Rate(rate, rate, "")


EXACT = Rates("", at(1e15), at(1e15), at(3e12), at(1e15), at(1e15), None, at(1e30), at(1 / 2e-6), {64: at(1 / 8e-6)})


def compared(model: str, exact: Rates, native: Rates = EXACT, trainer: str = "bf16") -> list[tuple[Part, Part]]:
    """Of decode steps of 64 and 256 answers of 512 tokens, and in FP8 of the training step."""
    shape, numerics = read_shape(CONFIGS / model), replace(NATIVE, trainer=trainer)
    steps = [(decode_step(shape, NATIVE.rollout_spec, batch, 512, each=1),) * 2 for batch in (64, 256)]  # an FP8 cache
    config = TrainerSection(micro_batch_tokens=1024, head_chunk_tokens=1024)
    job = Job(shape, config, numerics, "kernels", 8, 1024)
    return list(ratios(job, {"exact": exact, "native": native}, steps, step_time(job, exact)))


def test_ratios_are_those_worked_by_hand() -> None:
    """64 answers read 126 of 128 experts in each of 48 layers, 28.53 GB, attention's weights, 0.91, routers, 0.03, the
    head, 0.62, and 1.61 GB of cache: 31.70 GB take 10.57 ms at 3 TB/s. To these 734 kernels of 8 us add 5.87, and
    SGLang's 926 of 2 us 1.85 ms. Of Qwen3-8B a training step multiplies 6.946 G weights in FP8, for TransformerEngine
    at twice the rate, and 0.622 G in BF16."""
    decoding, _ = compared("qwen3_30b_a3b", EXACT)
    assert [each.seconds for each in decoding] == [pytest.approx((ms / 1e3,) * 2, rel=1e-3) for ms in (16.44, 12.42)]
    assert quotient(*decoding) == pytest.approx((1.324,) * 2, rel=1e-3)
    exact = replace(EXACT, copy=at(1e30))
    *_, training = compared("qwen3_8b", exact, replace(exact, fp8_dense=at(2e15)), "fp8")
    assert quotient(*training) == pytest.approx(((6.946 + 0.622) / (6.946 / 2 + 0.622),) * 2, rel=1e-3)


def test_a_ratio_without_a_measured_rate_is_not_given_and_says_what_is_missing() -> None:
    _, many = compared("qwen3_30b_a3b", EXACT)
    assert quotient(*many) is None and "256 answers of `graph`" in many[0].rests_on
    (_, least), _ = compared("qwen3_30b_a3b", replace(EXACT, nodes=None))
    assert least.seconds == pytest.approx((10.57e-3,) * 2, rel=1e-3) and "a node of `launch`" in least.rests_on
    *_, training = compared("qwen3_8b", replace(EXACT, copy=None), trainer="fp8")
    assert quotient(*training) is None and "`quantizers`" in training[0].rests_on
