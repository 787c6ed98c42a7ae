"""How wrong is one FP8 product: which part is the rounding of its operands, and which the kernel's accumulator?"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fp8rl.numerics.quantize import fake_quantize
from fp8rl.numerics.spec import QuantSpec
from lab.studies.harness import figures
from lab.studies.harness.claims import claims_of
from lab.studies.harness.lab import Lab
from lab.studies.harness.products import in_fp22, in_fp32, promoted
from lab.studies.harness.study import Band, Measurement, Study, TextTable, by_arm

SHAPES = (
    *((128, 128, 128), (256, 128, 256), (320, 128, 336), (320, 64, 336)),
    *((320, 256, 336), (1024, 4096, 1024), (2048, 2048, 512), (1024, 1024, 1024)),
)
"""(M, K, N) of the post's table."""
QUICK_SHAPES = SHAPES[:5]
PUBLISHED = {
    "cuBLAS": (0.00068, 0.00068, 0.000684, 0.00067, 0.00068, 0.000681, 0.00068, 0.000683),
    "DeepGEMM": (0.00036, 0.00037, 0.00037, 0.00024, 0.00048, 0.00065, 0.00063, 0.0006),
}
"""The post's table, for comparison."""

Accumulate = Callable[[Tensor, Tensor], Tensor]
FP32 = QuantSpec.preset("fp8_block_fp32")
POW2 = QuantSpec.preset("fp8_block_pow2")


@dataclasses.dataclass(frozen=True)
class Arm:
    """A way to take a product. operands: what is quantized. spec: how. positive: of absolute values."""

    operands: str = "both"
    spec: QuantSpec = FP32
    accumulate: Accumulate = in_fp32
    positive: bool = False


E5M2 = FP32.override({"weight": {"format": "e5m2"}, "activation": {"format": "e5m2"}})
ARMS = {
    "both operands": Arm(),
    "both operands again": Arm(),
    "weight alone": Arm("weight"),
    "activation alone": Arm("activation"),
    "pow2 scales": Arm(spec=POW2),
    "e5m2": Arm(spec=E5M2),
    "FP22": Arm(accumulate=in_fp22),
    "FP22 promoted": Arm(accumulate=promoted),
    "positive": Arm(positive=True),
    "positive FP22": Arm(accumulate=in_fp22, positive=True),
    "positive FP22 promoted": Arm(accumulate=promoted, positive=True),
}


def measure(lab: Lab) -> Measurement:
    """Every arm on the same random operands."""
    shapes = QUICK_SHAPES if lab.quick else SHAPES
    lab.specs |= {"fp32 scales": FP32.digest(), "pow2 scales": POW2.digest(), "e5m2": E5M2.digest()}
    by_seed = lab.each(_errors, [(seed, shapes) for seed in lab.seeds], "seeds")
    return Measurement(
        values=by_arm(by_seed),
        subject=f"{len(shapes)} shapes, BF16 operands from a standard normal distribution",
        details={"shapes": [list(shape) for shape in shapes]},
    )


def _errors(seed: int, shapes: Sequence[tuple[int, int, int]]) -> dict[str, dict[str, float]]:
    """The errors by arm, then metric."""
    found: dict[str, dict[str, float]] = {arm: {} for arm in ARMS}
    longest = max(range(len(shapes)), key=lambda index: shapes[index][1])
    for index, (m, k, n) in enumerate(shapes):
        generator = torch.Generator().manual_seed(seed * len(SHAPES) + index)
        x, w = (torch.randn(rows, k, generator=generator).bfloat16() for rows in (m, n))
        for name, arm in ARMS.items():
            errors = errors_of(arm, x.abs() if arm.positive else x, w.abs() if arm.positive else w)
            found[name] |= {f"{metric}/{m}x{k}x{n}": value for metric, value in errors.items()}
            if index == longest:
                found[name] |= {f"{metric}/longest": value for metric, value in errors.items()}
    for metrics in found.values():
        for metric in ("calc_diff", "relative_error"):
            each = [metrics[f"{metric}/{m}x{k}x{n}"] for m, k, n in shapes]
            metrics |= {metric: sum(each) / len(each)}
            metrics |= {f"{metric}/smallest": min(each), f"{metric}/largest": max(each)}
            metrics |= {f"{metric}/spread": max(each) / min(each)}
    return found


def errors_of(arm: Arm, x: Tensor, w: Tensor) -> dict[str, float]:
    """The errors of x [M, K] @ w [N, K]^T, BF16:

    calc_diff: DeepGEMM's 1 - 2<a, b> / (<a, a> + <b, b>) to the BF16 product.
    relative_error: Frobenius norm of the difference to the float64 product, over the norm of that.
    kernel_error: the same, but to the float64 product of the quantized operands: what the addition alone does.
    """
    quantized_x = fake_quantize(x, arm.spec.activation) if arm.operands != "weight" else x
    quantized_w = fake_quantize(w, arm.spec.weight) if arm.operands != "activation" else w
    got = arm.accumulate(quantized_x, quantized_w).double()
    plain = (x @ w.t()).double()
    exact, ideal = x.double() @ w.double().t(), quantized_x.double() @ quantized_w.double().t()
    return {
        "calc_diff": float(1 - 2 * (got * plain).sum() / (got.square().sum() + plain.square().sum())),
        "relative_error": float((got - exact).norm() / exact.norm()),
        "kernel_error": float((got - ideal).norm() / ideal.norm()),
    }


def draw(measurement: Measurement) -> Mapping[str, figures.Figure]:
    shapes = _shapes(measurement)
    drawn = figures.figure("Error of one FP8 product, by what is quantized", height=3.6)
    series = {arm: _by_shape(measurement, arm, "calc_diff") for arm in ("both operands", "weight alone", "pow2 scales")}
    for name, column in PUBLISHED.items():
        series[f"{name} (published)"] = [(value,) * 3 for value in column[: len(shapes)]]
    figures.bars(drawn.axes[0], ["×".join(map(str, shape)) for shape in shapes], series, label="calc_diff")
    kernels = figures.figure(f"Error of the addition alone, K = {max(k for _, k, _ in shapes)}")
    arms = ("both operands", "FP22 promoted", "FP22")
    values = {
        "Gaussian": [measurement.of(arm, "kernel_error/longest") for arm in arms],
        "positive": [
            measurement.of(arm, "kernel_error/longest")
            for arm in ("positive", "positive FP22 promoted", "positive FP22")
        ],
    }
    figures.bars(kernels.axes[0], ["FP32", "FP22, promoted", "FP22"], values, label="relative error", log=True)
    return {"gemm_error": drawn, "accumulator": kernels}


def tables(measurement: Measurement) -> Sequence[TextTable]:
    shapes = _shapes(measurement)
    arms = ("both operands", "weight alone", "activation alone", "pow2 scales", "FP22 promoted", "FP22")
    rows = [
        [
            "×".join(map(str, shape)),
            *(f"{_by_shape(measurement, arm, 'calc_diff')[index][0]:.6f}" for arm in arms),
            *(f"{PUBLISHED[name][index]:g}" for name in PUBLISHED),
        ]
        for index, shape in enumerate(shapes)
    ]
    published = [f"{name} (published)" for name in PUBLISHED]
    errors = [
        [
            arm,
            *(f"{measurement.mean(arm, metric):.3g}" for metric in ("relative_error/longest", "kernel_error/longest")),
        ]
        for arm in ARMS
    ]
    return [
        TextTable("calc_diff to the BF16 product", ("M×K×N", *arms, *published), rows),
        TextTable("Errors at the longest K", ("arm", "to float64", "of the addition alone"), errors),
    ]


def _shapes(measurement: Measurement) -> list[list[int]]:
    return list(measurement.details["shapes"])


def _by_shape(measurement: Measurement, arm: str, metric: str) -> list[Band]:
    return [measurement.of(arm, f"{metric}/{m}x{k}x{n}") for m, k, n in _shapes(measurement)]


STUDY = Study(
    name="gemm_error",
    question="How wrong is one FP8 product, and is it the operands or the addition?",
    seeds=5,
    claims=claims_of("gemm_error"),
    measure=measure,
    draw=draw,
    tables=tables,
)
