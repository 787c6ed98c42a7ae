"""Gains and losses of BF16: conversions, the addition of products, and a trainer in it beside one in FP32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp8rl.numerics import ops
from lab.studies.harness import figures, live
from lab.studies.harness.claims import claims_of
from lab.studies.harness.lab import Lab
from lab.studies.harness.spoiled import NarrowState
from lab.studies.harness.study import Measurement, Study, TextTable, by_arm, with_interval
from lab.studies.harness.subjects import MODEL
from lab.studies.harness.training import QUICK_STEPS, STEPS, TrainedArm, teach

if TYPE_CHECKING:
    from fp8rl.trainer.trainer import Trainer

Convert = Callable[[Tensor], Tensor]
"""FP32 to BF16."""

SAMPLES = 1 << 20
PATTERNS = 1 << 16
INFINITY = 0x7F80
"""The bits of infinity; larger ones, without the sign, are NaN, and those of subnormals are below 0x80."""
SMALLEST_NORMAL = 0x80


def facts(convert: Convert, seed: int) -> dict[str, float]:
    """Shares of values of which something holds, and sizes of BF16's grid.

    Tried are all BF16 values, all points half-way between two of them, and FP32 values with random bits.
    """
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.arange(PATTERNS)
    magnitudes = patterns & 0x7FFF
    values = _bf16(patterns)
    samples = torch.randint(0, 1 << 32, (SAMPLES,), generator=generator)
    below = patterns[magnitudes < INFINITY]
    halves = (below << 16) + 0x8000
    finite = torch.cat([halves, samples[(samples >> 16 & 0x7FFF) < INFINITY]])
    converted = _bits(convert(_fp32(finite)))
    expected = nearest(finite)
    nan = torch.cat([samples[(samples & 0x7FFFFFFF) > 0x7F800000], torch.tensor([0x7F800001, 0xFF80FFFF])])
    infinite, too_large = _fp32(torch.tensor([0x7F800000, 0xFF800000])), expected & 0x7FFF == INFINITY
    subnormal = values[(magnitudes > 0) & (magnitudes < SMALLEST_NORMAL)]
    exact = _value(magnitudes[:INFINITY])
    one = int(torch.tensor(1.0).bfloat16().view(torch.int16))
    return {
        "widened by zeros": _share(values.float().view(torch.int32) == (patterns << 16).to(torch.int32)),
        "rounded to nearest even": _share(converted == expected),
        "halves to even": _share((converted == expected)[: len(halves)]),
        "overflows to inf": _share((converted == expected)[too_large]),
        "NaN kept": _share(convert(_fp32(nan)).isnan()),
        "inf kept": _share(convert(infinite).float() == infinite),
        "subnormals lost": _share(convert(subnormal.float()) == 0),
        "subnormals lost in arithmetic": _share(subnormal * torch.ones_like(subnormal) == 0),
        "subnormals lost in products": _share(
            ops.linear(torch.eye(128).bfloat16(), _columns(subnormal)).t()[:, 0] == 0
        ),
        "largest over FP32's": float(exact[-1]) / torch.finfo(torch.float32).max,
        "smallest normal over FP32's": float(exact[SMALLEST_NORMAL]) / torch.finfo(torch.float32).smallest_normal,
        "stored bits": float(torch.tensor(float(((exact >= 1) & (exact < 2)).sum())).log2()),
        "spacing at 1": float(exact[one + 1] - exact[one]),
        "spacing below 1": float(exact[one] - exact[one - 1]),
        "FP32 spacing at 1": float(_fp32(torch.tensor([0x3F800001])).double() - 1),
    }


def nearest(fp32_bits: Tensor) -> Tensor:
    """The bits of the BF16 value nearest to finite FP32 values, given as bits; of two, the one with an even pattern."""
    sign, magnitude = fp32_bits >> 31 << 15, fp32_bits & 0x7FFFFFFF
    low = magnitude >> 16
    exact = _fp32(magnitude).double()
    down, up = exact - _value(low), _value(low + 1) - exact
    return sign + torch.where((up < down) | ((up == down) & (low % 2 == 1)), low + 1, low)


def _value(pattern: Tensor) -> Tensor:
    """Values of BF16 patterns without sign, in float64; infinity's is 2^128, at which rounding begins to overflow."""
    exponent, mantissa = pattern >> 7, (pattern & 0x7F).double()
    normal = torch.ldexp(mantissa + 128, exponent - 134)
    return torch.where(exponent > 0, normal, torch.ldexp(mantissa, torch.tensor(-133)))


def _fp32(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def _bf16(bits: Tensor) -> Tensor:
    return bits.to(torch.int16).view(torch.bfloat16)


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.int16).long() & 0xFFFF


def _columns(values: Tensor) -> Tensor:
    """A weight [len(values), 128] whose first column is `values`."""
    return torch.cat([values[:, None], values.new_zeros(len(values), 127)], 1)


def _share(holds: Tensor) -> float:
    return float(holds.double().mean())


Product = Callable[[Tensor, Tensor], Tensor]

LENGTHS, QUICK_LENGTHS = (128, 512, 2048, 8192), (128, 2048)
"""K of the products."""
ROWS = 64
BF16, FP8 = live.exact(precision="bf16"), live.exact()


def as_the_machine_rounds(x: Tensor) -> Tensor:
    """FP32 to BF16 by torch."""
    return x.bfloat16()


def cut_off(x: Tensor) -> Tensor:
    """FP32 to BF16 by leaving away the lower 16 bits."""
    return (x.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


def added_in_fp32(x: Tensor, w: Tensor) -> Tensor:
    """x [M, K] @ w [N, K]^T of BF16 operands, added in FP32, rounded once."""
    return (x.float() @ w.float().t()).bfloat16()


def added_in_bf16(x: Tensor, w: Tensor) -> Tensor:
    """The same with a sum that is rounded to BF16 after every product."""
    total = x.new_zeros(x.shape[0], w.shape[0])
    for a, b in zip(x.t().float(), w.t().float(), strict=True):
        total = (total + torch.outer(a, b)).bfloat16()
    return total


CONVERSIONS: dict[str, Convert] = {"conversion": as_the_machine_rounds, "cut off": cut_off}
PRODUCTS: dict[str, Product] = {
    "product": ops.linear,
    "product again": ops.linear,
    "added in FP32": added_in_fp32,
    "added in BF16": added_in_bf16,
}
TRAINED = {
    "FP32 trainer": TrainedArm(BF16, dtype=torch.float32),
    "BF16 trainer": TrainedArm(BF16),
    "BF16 trainer again": TrainedArm(BF16),
    "BF16 masters": TrainedArm(BF16, after_step=NarrowState(masters="bf16")),
    "FP8 trainer": TrainedArm(FP8),
}
QUICK_TRAINED = ("FP32 trainer", "BF16 trainer")
"""20 steps are too few to find the harm of BF16 masters with three seeds."""
STATES = {"FP32 trainer": torch.float32, "BF16 trainer": torch.bfloat16}


def measure(lab: Lab) -> Measurement:
    """Conversions and products on data of each seed, then the trainers."""
    lengths = QUICK_LENGTHS if lab.quick else LENGTHS
    lab.specs |= {"FP8": FP8.spec.digest()}
    small = lab.each(_small, [(seed, lengths) for seed in lab.seeds], "conversions and products")
    states = dict(zip(STATES, lab.each(_state, [(dtype,) for dtype in STATES.values()], "state"), strict=True))
    arms = QUICK_TRAINED if lab.quick else tuple(TRAINED)
    jobs = [(arm, seed) for seed in lab.seeds for arm in arms]
    taught = lab.each(teach, [(TRAINED[arm], seed, lab.quick) for arm, seed in jobs], "trainings")
    trained = dict(zip(jobs, taught, strict=True))
    values = by_arm(small)
    for arm in arms:
        runs = [trained[arm, seed] for seed in lab.seeds]
        values[arm] = {
            "nll": [run.nll for run in runs],
            "mean loss": [sum(run.losses) / len(run.losses) for run in runs],
        }
        values[arm] |= {metric: [number] * len(runs) for metric, number in states.get(arm, {}).items()}
    steps = QUICK_STEPS if lab.quick else STEPS
    return Measurement(
        values=values,
        subject=f"all 65,536 BF16 values; Gaussian products; {MODEL.name}, 1.0M parameters, {steps} SFT steps",
        details={"lengths": list(lengths)},
    )


def _small(seed: int, lengths: Sequence[int]) -> dict[str, dict[str, float]]:
    found = {name: facts(convert, seed) for name, convert in CONVERSIONS.items()}
    for name, take in PRODUCTS.items():
        errors = [relative_error(take, k, seed) for k in lengths]
        found[name] = {f"relative_error/{k}": error for k, error in zip(lengths, errors, strict=True)}
        found[name]["relative_error"] = sum(errors) / len(errors)
    return found


def relative_error(take: Product, k: int, seed: int) -> float:
    """The error of x [ROWS, K] @ w [ROWS, K]^T, BF16 and Gaussian: the difference's Frobenius norm over the float64
    product's."""
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(ROWS, k, generator=generator).bfloat16() for _ in range(2))
    exact = x.double() @ w.double().t()
    return float((take(x, w).double() - exact).norm() / exact.norm())


def _state(dtype: torch.dtype) -> dict[str, float]:
    with live.world() as layout:
        return state_bytes(live.trainer_of(MODEL, BF16, layout, dtype=dtype))


def state_bytes(trainer: Trainer) -> dict[str, float]:
    """Bytes that a trainer holds for each parameter of its model."""
    parameters = list(trainer.model.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    optimizers = trainer.optimizer.inner.chained_optimizers
    held = {
        "weights": parameters,
        "gradients": [parameter.main_grad for parameter in parameters],
        "masters": [p for o in optimizers for group in o.shard_fp32_from_float16_groups for p in group],
        "moments": [state[name] for o in optimizers for state in o.optimizer.state.values() for name in MOMENTS],
    }
    bytes_of = {name: sum(tensor.nbytes for tensor in tensors) / count for name, tensors in held.items()}
    return {
        f"bytes per parameter/{name}": number for name, number in {**bytes_of, "all": sum(bytes_of.values())}.items()
    }


MOMENTS = ("exp_avg", "exp_avg_sq")


def draw(measurement: Measurement) -> Mapping[str, figures.Figure]:
    lengths = measurement.details["lengths"]
    added = figures.figure("Error of a BF16 product, by what its sum is kept in")
    axes = added.axes[0]
    for index, arm in enumerate(("product", "added in FP32", "added in BF16")):
        errors = [measurement.of(arm, f"relative_error/{k}") for k in lengths]
        figures.curve(axes, lengths, errors, name=arm, index=index, marker="o")
    axes.set(xscale="log", yscale="log", xlabel="K", ylabel="relative error")
    figures.legend(axes)
    trained = figures.figure("Held-out loss after training, less the FP32 trainer's")
    arms = _trained(measurement)[1:]
    differences = [measurement.of(arm, "nll", "FP32 trainer") for arm in arms]
    figures.bars(trained.axes[0], arms, {"difference": differences}, label="nats")
    return {"products": added, "trained": trained}


def tables(measurement: Measurement) -> Sequence[TextTable]:
    names = measurement.values["conversion"]
    conversions = [[name, *(f"{measurement.mean(arm, name):.7g}" for arm in CONVERSIONS)] for name in names]
    lengths = measurement.details["lengths"]
    products = [[arm, *(f"{measurement.mean(arm, f'relative_error/{k}'):.3g}" for k in lengths)] for arm in PRODUCTS]
    kinds = ("weights", "gradients", "masters", "moments", "all")
    states = [[arm, *(f"{measurement.mean(arm, f'bytes per parameter/{kind}'):g}" for kind in kinds)] for arm in STATES]
    trained = []
    for arm in _trained(measurement):
        above = with_interval(measurement.of(arm, "nll", "FP32 trainer"), "+.5f")
        loss, mean = (measurement.mean(arm, metric) for metric in ("nll", "mean loss"))
        trained.append([arm, f"{loss:.5f}", above, f"{mean:.5f}"])
    return [
        TextTable("Conversions: share of the values, or a number", ("", *CONVERSIONS), conversions),
        TextTable("Relative error of a product", ("", *(f"K = {k}" for k in lengths)), products),
        TextTable("Bytes per parameter in training", ("", *kinds), states),
        TextTable("Trained", ("", "held-out loss, nats", "less the FP32 trainer's", "mean loss of the steps"), trained),
    ]


def _trained(measurement: Measurement) -> list[str]:
    return [arm for arm in TRAINED if arm in measurement.values]


STUDY = Study(
    name="bf16",
    question="What does BF16 keep of FP32, where does it lose, and does a trainer notice?",
    seeds=5,
    claims=claims_of("bf16"),
    measure=measure,
    draw=draw,
    tables=tables,
    units={"nll": "nats", "mean loss": "nats", "stored bits": "bits"},
)
