"""The claims of the project's source documents that a calculation answers, each with its figure and a verdict.

Claims are numbered by document and claim, `002-23`. Models, GPUs and layouts are the documents' own where they name
some; efficiency is assumed (`step_time.SLOW` and `FAST`), so a claim about time is answered only where both corners
agree, and waits for a GPU where they do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from fp8rl.diagnose.plan.bench import decode_step
from fp8rl.diagnose.plan.subject import CONFIGS
from fp8rl.models import read_shape
from fp8rl.models.shape import Shape
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rl.experiment.budget.job import GPUS, Job
from fp8rl.rl.experiment.budget.memory import colocated_memory, trainer_memory
from fp8rl.trainer.config import OptimizerSection, TrainerSection
from fp8rl.weight_sync.served import served_bytes
from lab.studies.document.step_time import (
    FAST,
    PEAKS,
    SLOW,
    StepTime,
    expert_bytes,
    fp8_over_bf16,
    gathered_and_summed_bytes,
    product_bytes,
    read_seconds,
    step_time,
)

Verdict = Literal["confirmed", "contradicted", "waits for a GPU"]

V3_PARAMETERS = 671e9
"""DeepSeek-V3's size as the documents count it."""
V3_TABLE = {"FP8 weights": 1, "BF16 shadow": 2, "FP32 masters": 4, "m and v": 8, "BF16 gradients": 2}
"""Bytes a parameter, as document 002 counts them."""
IRONWOOD_FP8, IRONWOOD_BF16 = 3307, 2590
"""Tokens a second and chip, DeepSeek-V3 on 256 chips (000-13)."""
IRONWOOD_PEAK = 4614e12, 2307e12
"""FLOP/s of a chip, FP8 and BF16 (Google's figures of TPU7x)."""
SPECIAL_FUNCTIONS = 3.9e12
"""Exponentials a second of an H100 (FlashAttention-3's paper)."""

SPEC = QuantSpec.preset("fp8_block_fp32")
NATIVE = NumericsConfig(mode="native", spec=SPEC)
EXACT = NumericsConfig(spec=QuantSpec.preset("fp8_block_pow2"))


@dataclass(frozen=True)
class Calculation:
    """A claim, and what a calculation says to it."""

    id: str
    """Such as `002-23`."""
    claim: str
    figure: str
    """What was calculated, with units."""
    verdict: Verdict
    why: str = ""
    """Of the verdict, where the figure does not say it."""


def answers() -> list[Calculation]:
    """One for each claim that the planner can say something to, in their order."""
    return [answer for make in _ANSWERS for answer in make()]


def on_h200(length: int = 4096, rows: int = 256) -> Job:
    """Qwen3-30B-A3B on 8 GPUs, experts spread over all of them, in native FP8."""
    layout = TrainerSection(ep=8, dp=8, micro_batch_tokens=max(length, 8192))
    return Job(_shape("qwen3_30b_a3b"), layout, NATIVE, "transformer_engine", rows, length)


def deepseek_on_h800() -> Job:
    """DeepSeek-V3 as it was pretrained: 2,048 H800, 16 stages, experts over 64 ranks, 15,360 rows of 4,096 tokens."""
    layout = TrainerSection(pp=16, ep=64, dp=128, micro_batch_tokens=4096)
    return Job(_shape("deepseek_v3"), layout, NATIVE, "transformer_engine", 15360, 4096)


def on_h20(name: str) -> Job:
    """The MoE runs of document 003: 16 H20 for Qwen3-30B-A3B, 128 for Qwen3-235B-A22B; sides sleep in turns there."""
    small = name == "qwen3_30b_a3b"
    layout = TrainerSection(tp=4, pp=2, ep=8 if small else 64, dp=2 if small else 16)
    engine_tp = 1 if small else 4
    return Job(_shape(name), layout, NATIVE, "transformer_engine", 256, 4096, engine_tp=engine_tp, sleep=not small)


def products_share_of_ironwood() -> float:
    """Part of the BF16 step that products took, if FP8 halved them and nothing else: 2 (1 - 1 / speed-up)."""
    return 2 * (1 - IRONWOOD_BF16 / IRONWOOD_FP8)


def _ironwood() -> Iterator[Calculation]:
    shape, job = _shape("deepseek_v3"), deepseek_on_h800()
    served = served_bytes(shape, SPEC) / (2 * shape.parameters)
    state = _state(on_h200()) / _state(on_h200().in_bf16())
    ratio = fp8_over_bf16(on_h200(), PEAKS["h200"])
    yield Calculation(
        "000-1",
        "FP8 halves memory and doubles throughput of 16-bit formats",
        f"served weights {served:.3f} of BF16's; a trainer's state {state:.3f}; peak of products "
        f"{PEAKS['h200'].fp8 / PEAKS['h200'].bf16:.2f}; a training step of Qwen3-30B-A3B on 8 H200 "
        f"{1 / ratio.high:.2f} to {1 / ratio.low:.2f} times as fast",
        "contradicted",
        "true of what is served and of the products' peak, of no whole step",
    )
    flops = 6 * shape.active_parameters / shape.training_flops(4096)
    parts = {corner: _parts(time) for corner, time in _times(job.in_bf16()).items()}
    largest = {corner: max(shares, key=lambda name: shares[name]) for corner, shares in parts.items()}
    yield Calculation(
        "000-8",
        "Products of MLP and attention projections dominate",
        f"{flops:.0%} of DeepSeek-V3's FLOPs at 4,096 tokens; {parts['slow']['products']:.0%} to "
        f"{parts['fast']['products']:.0%} of a BF16 step on H800",
        "confirmed" if set(largest.values()) == {"products"} else "waits for a GPU",
        ""
        if largest["slow"] == "products"
        else f"of the FLOPs yes; but with nothing hidden {largest['slow']} take more",
    )
    share = {corner: shares["attention"] for corner, shares in parts.items()}
    widths = shape.attention_flops(1) / 2 / shape.sizes.layers / shape.sizes.heads
    products = [2 * widths / peak for peak in (PEAKS["h100"].bf16, PEAKS["h100"].fp8)]
    gain = (products[0] + 1 / SPECIAL_FUNCTIONS) / (products[1] + 1 / SPECIAL_FUNCTIONS)
    yield Calculation(
        "000-11",
        "FP8 attention brings no speed: element-wise work bounds it",
        f"attention is {min(share.values()):.0%} to {max(share.values()):.0%} of DeepSeek-V3's step on H800; with "
        f"exponentials in turn with products FP8 makes it {gain:.2f} times as fast on an H100, not 2",
        "waits for a GPU",
        "element-wise work takes half of the gain by calculation; how much of it kernels hide is to be timed",
    )
    shares8, shares16 = _parts(_times(job)["slow"]), _parts(_times(job.in_bf16())["slow"])
    yield Calculation(
        "000-12",
        "Faster products expose communication",
        f"transfers of DeepSeek-V3 on H800, none hidden: {shares16['transfers']:.1%} of a BF16 step, "
        f"{shares8['transfers']:.1%} of an FP8 step",
        "confirmed" if shares8["transfers"] > shares16["transfers"] else "contradicted",
    )
    rate = [tokens * shape.training_flops(4096) for tokens in (IRONWOOD_FP8, IRONWOOD_BF16)]
    yield Calculation(
        "000-13",
        "3307 against 2590 tokens/s and chip, about 1.3 times",
        f"{IRONWOOD_FP8 / IRONWOOD_BF16:.3f}; if FP8 halves products they took {products_share_of_ironwood():.0%} of "
        f"the BF16 step; {rate[0] / 1e12:.0f} and {rate[1] / 1e12:.0f} TFLOP/s, {rate[0] / IRONWOOD_PEAK[0]:.0%} and "
        f"{rate[1] / IRONWOOD_PEAK[1]:.0%} of the chip's peaks",
        "confirmed",
        "as arithmetic; nothing here has run on such a chip",
    )


def _bf16() -> Iterator[Calculation]:
    shape, gpu = _shape("qwen3_8b"), PEAKS["h100"]
    one = decode_step(shape, QuantSpec.preset("bf16"), 1, 4096)
    intensity = 2 * shape.active_parameters / one.weights
    yield Calculation(
        "001-4",
        "BF16 saves memory and bandwidth; some ops are bandwidth bound",
        f"half of FP32's bytes; decoding one answer takes {intensity:.1f} FLOP a byte, where an H100 has "
        f"{gpu.bf16 / gpu.bandwidth:.0f}, so memory sets its speed: {read_seconds(one, gpu, SLOW) * 1e3:.1f} ms a "
        "token of Qwen3-8B",
        "confirmed",
    )


def _map() -> Iterator[Calculation]:
    yield _peaks("002-2")
    total, moments = sum(V3_TABLE.values()), sum(V3_TABLE.values()) - 4
    yield Calculation(
        "002-17",
        "Backward and optimizer are uniformly FP32; nobody at scale does otherwise",
        f"the 671B table is {_tb(total)} with FP32 moments, {_tb(moments)} with BF16 moments",
        "contradicted",
        "DeepSeek-V3's own report keeps Adam's moments in BF16",
    )
    rows = ", ".join(f"{name} {_tb(size)}" for name, size in V3_TABLE.items())
    yield Calculation("002-22", "The 671B table: 17 bytes a parameter, 11.4 TB", f"{rows}: {_tb(total)}", "confirmed")
    yield Calculation(
        "002-23",
        "On 1,024 GPUs FP32 optimizer state is 11 GB each",
        f"12 bytes of FP32 state: {_gb_each(12):.1f} GB; all {total}, if all is sharded: {_gb_each(total):.1f} GB",
        "contradicted",
        "11 GB is the whole table; ZeRO-1 shards 12 of its 17 bytes",
    )
    yield Calculation(
        "002-24",
        "Forward weights from 2 bytes to 1 frees the budget",
        f"FP8 weights beside their BF16 shadow: 3 bytes in place of 2, {_tb(1)} more",
        "contradicted",
        "the table itself keeps both",
    )
    job = deepseek_on_h800()
    gathered, summed, sent = *gathered_and_summed_bytes(job, 8), expert_bytes(job, 8)
    yield Calculation(
        "002-25",
        "ZeRO-1 shards masters and moments; the gather is the most communication-heavy part",
        f"DeepSeek-V3 on 2,048 H800, of a rank and step: {gathered / 1e9:.1f} GB gathered, {summed / 1e9:.1f} GB of "
        f"gradients summed, {sent / 1e9:.0f} GB of tokens to experts and back",
        "contradicted" if sent > gathered else "confirmed",
        "tokens to experts are most; and gradients in FP32 more than weights",
    )
    dense = on_h200()
    residual = 2 * 2 * 2.0 * dense.shape.sizes.hidden_size * dense.shape.sizes.layers * dense.tokens / dense.layout.dp
    seconds = [
        residual / 2 / (PEAKS["h200"].bandwidth * rates.bandwidth) / step_time(dense, PEAKS["h200"], rates).total
        for rates in (SLOW, FAST)
    ]
    yield Calculation(
        "002-29",
        "Residual or softmax in FP8 buys no speed",
        f"a residual of one byte saves {min(seconds):.1%} to {max(seconds):.1%} of a step of Qwen3-30B-A3B on 8 H200",
        "confirmed" if max(seconds) < 0.02 else "contradicted",
        "softmax stays inside the attention kernel, and saves no bytes at all",
    )


def _unified() -> Iterator[Calculation]:
    job, shape = on_h200(), _shape("qwen3_30b_a3b")
    kept = shape.activations(0)
    held, change = kept.bf16, kept.fp8
    served = served_bytes(shape, SPEC) / (2 * shape.parameters)
    exact = replace(job, numerics=EXACT, storage="kernels")
    weights = [_weights(each) / _weights(job.in_bf16()) for each in (job, exact)]
    yield Calculation(
        "003-5",
        "FP8 halves weights and activations",
        f"Qwen3-30B-A3B: served weights {served:.3f} of BF16's; a trainer's weights {weights[0]:.2f} "
        f"(TransformerEngine), {weights[1]:.2f} (exact mode); activations {(held + change) / held:.2f}",
        "contradicted",
        "in theory and in the engine yes, in training no, as 003-13 and 003-14 say themselves",
    )
    yield _peaks("003-6")
    speeds = [decode_step(shape, spec, 32, 2048).weights for spec in (SPEC, _BF16)]
    traffic = product_bytes(job), product_bytes(job.in_bf16())
    yield Calculation(
        "003-7",
        "Less HBM traffic",
        f"decoding Qwen3-30B-A3B reads {speeds[0] / speeds[1]:.2f} of BF16's weights; products of its training step "
        f"move {traffic[0] / traffic[1]:.2f} of BF16's bytes, with the passes that quantize",
        "confirmed" if traffic[0] < traffic[1] else "contradicted",
        "" if traffic[0] < traffic[1] else "less in decoding; in training quantizing costs more bytes than codes save",
    )
    state = _state(job) / _state(job.in_bf16())
    yield Calculation(
        "003-13",
        "Transposed FP8 copies: weights do not shrink by 2",
        f"a code and its transpose are 2 bytes, as BF16; the state of a rank is {state:.4f} of BF16's, both 6 + 12/d a "
        "parameter",
        "confirmed",
    )
    yield Calculation(
        "003-14",
        "High-precision copies of activations stay",
        f"{held / 1024:.0f} KB a token and layer in BF16, {(held + change) / 1024:.0f} KB with FP8 products",
        "confirmed",
    )
    small, large = (fp8_over_bf16(on_h200(*size), PEAKS["h200"]) for size in ((512, 8), (4096, 256)))
    yield Calculation(
        "003-15",
        "Small batches make FP8 slower",
        f"8 H200, a row of 512 tokens each: an FP8 step takes {small.low:.2f} to {small.high:.2f} of a BF16 step; 32 "
        f"rows of 4,096 each: {large.low:.2f} to {large.high:.2f}",
        "confirmed" if small.low > 1 > large.low else "waits for a GPU",
        "the host starts kernels no faster, and FP8 has a third more of them",
    )
    tp4 = replace(job, layout=TrainerSection(tp=4, ep=8, dp=2))
    bf16 = trainer_memory(_offloaded(tp4.in_bf16())).always / 1e9
    fp8 = trainer_memory(tp4).always / 1e9
    yield Calculation(
        "003-21",
        "Offload excludes fp8-param-gather: FP8 may need more memory than BF16",
        f"Qwen3-30B-A3B, tp 4 ep 8 on 8 GPUs: BF16 with masters and moments on the host {bf16:.1f} GB, FP8 parameters, "
        f"which cannot, {fp8:.1f} GB",
        "confirmed" if fp8 > bf16 else "contradicted",
        "that the two exclude each other is open upstream (Megatron-LM#2407 and others)",
    )
    peaks = [colocated_memory(on_h20(name)).peak for name in ("qwen3_30b_a3b", "qwen3_235b_a22b")]
    limit = GPUS["h20"].memory
    yield Calculation(
        "003-28",
        "30B-A3B on 2 x 8 H20 and 235B-A22B on 16 x 8 H20",
        f"{peaks[0] / 1e9:.0f} and {peaks[1] / 1e9:.0f} of {limit / 1e9:.0f} GB on the fullest GPU, the second only if "
        "trainer and engine sleep in turns",
        "confirmed" if max(peaks) <= limit else "contradicted",
        "that they fit; clip fraction and difference wait for a GPU",
    )


_ANSWERS: tuple[Callable[[], Iterator[Calculation]], ...] = (_ironwood, _bf16, _map, _unified)
_BF16 = QuantSpec.preset("bf16")


def _peaks(id: str) -> Calculation:
    gpu = PEAKS["h100"]
    figure = f"peaks of an H100: {gpu.fp8 / 1e12:.0f} and {gpu.bf16 / 1e12:.0f} TFLOP/s, {gpu.fp8 / gpu.bf16:.2f} to 1"
    why = "as published; what a product reaches is `python -m lab.bench.gpu`'s to time"
    return Calculation(id, "H100: FP8 has (nearly) twice the throughput of BF16", figure, "confirmed", why)


def _offloaded(job: Job) -> Job:
    return replace(job, layout=job.layout.model_copy(update={"optimizer": OptimizerSection(offload=True)}))


@cache
def _shape(name: str) -> Shape:
    return read_shape(CONFIGS / name)


def _state(job: Job) -> float:
    """Bytes that a rank holds throughout, the runtime left out."""
    memory = trainer_memory(job)
    return memory.always - memory.held["runtime"]["train"]


def _weights(job: Job) -> float:
    held = trainer_memory(job).held
    return sum(held[name]["train"] for name in held if name.endswith((" parameters", " operands")))


def _times(job: Job) -> dict[str, StepTime]:
    return {"slow": step_time(job, PEAKS["h800"], SLOW), "fast": step_time(job, PEAKS["h800"], FAST)}


def _parts(time: StepTime) -> dict[str, float]:
    """Shares of a step, the bubble left out."""
    names = ("products", "quantization", "attention", "elementwise", "transfers", "optimizer")
    whole = sum(getattr(time, name) for name in names)
    return {name: getattr(time, name) / whole for name in names}


def _tb(each: float) -> str:
    """Terabytes of the 671B model at so many bytes a parameter."""
    total = each * V3_PARAMETERS
    return f"{total / 1e9:.0f} GB" if total < 1e12 else f"{total / 1e12:.{2 if total < 1e13 else 1}f} TB"


def _gb_each(each: float) -> float:
    return each * V3_PARAMETERS / 1024 / 1e9
