"""What BF16 keeps and what it loses: conversions, the addition of products, and a trainer in it beside one in FP32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp8rl.numerics import ops
from lab.studies.bf16.conversions import Convert, facts
from lab.studies.harness import figures, live
from lab.studies.harness.claims import Claim, difference, ratio, twice, value
from lab.studies.harness.lab import Lab
from lab.studies.harness.spoiled import NarrowState
from lab.studies.harness.study import Measurement, Study, TextTable, by_arm, with_interval
from lab.studies.harness.subjects import MODEL
from lab.studies.harness.training import QUICK_STEPS, STEPS, TrainedArm, teach

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fp8rl.trainer.trainer import Trainer

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


def _fact(id: str, says: str, metric: str, expected: float, arm: str = "conversion") -> Claim:
    """A claim that one number is met exactly."""
    return value(id, says, metric, arm, "within", expected, expected)


CLAIMS = (
    twice(
        "The same product of the same data has the same error.",
        "relative_error",
        "product again",
        "product",
        id="same product twice",
    ),
    twice(
        "The same training with the same data ends in the same loss.",
        "nll",
        "BF16 trainer again",
        "BF16 trainer",
        id="same training twice",
    ),
    value(
        "cut off",
        "Cutting bits off is told from rounding: at most 0.9 of the values come out rounded to the nearest.",
        "rounded to nearest even",
        "cut off",
        "below",
        0.9,
        control="positive",
    ),
    ratio(
        "BF16 accumulator",
        "Adding products in BF16 at least doubles the error.",
        "relative_error",
        "added in BF16",
        "product",
        "above",
        2.0,
        control="positive",
    ),
    difference(
        "BF16 masters",
        "Master weights in BF16 cost at least 0.001 nats of held-out loss.",
        "nll",
        "BF16 masters",
        "BF16 trainer",
        "above",
        0.001,
        control="positive",
    ),
    ratio(
        "001-1",
        "BF16 products are added in FP32 by default: the error of a product is that of adding in FP32.",
        "relative_error",
        "product",
        "added in FP32",
        "within",
        0.99,
        1.01,
    ),
    difference(
        "001-2a",
        "No loss of accuracy: a BF16 trainer's held-out loss is an FP32 trainer's, to 0.001 nats.",
        "nll",
        "BF16 trainer",
        "FP32 trainer",
        "within",
        0.0,
        0.0,
        margin=0.001,
    ),
    difference(
        "001-2b",
        "It needs no more steps: the mean loss over the steps is an FP32 trainer's, to 0.001 nats.",
        "mean loss",
        "BF16 trainer",
        "FP32 trainer",
        "within",
        0.0,
        0.0,
        margin=0.001,
    ),
    value(
        "001-3a",
        "The range of FP32: the largest value is at least 0.99 of FP32's.",
        "largest over FP32's",
        "conversion",
        "within",
        0.99,
        1.0,
    ),
    _fact("001-3b", "The range of FP32: the smallest normal value is FP32's.", "smallest normal over FP32's", 1.0),
    ratio(
        "001-3c",
        "Half the memory: the bytes of a trainer's weights.",
        "bytes per parameter/weights",
        "BF16 trainer",
        "FP32 trainer",
        "within",
        0.5,
        0.5,
    ),
    ratio(
        "001-3d",
        "Half the memory: the bytes of weights, gradients, masters and moments together.",
        "bytes per parameter/all",
        "BF16 trainer",
        "FP32 trainer",
        "within",
        0.45,
        0.55,
    ),
    _fact("001-5a", "FP32 to BF16 rounds to the nearest value, halves to the even one.", "rounded to nearest even", 1),
    _fact("001-5b", "FP32 to BF16 overflows to infinity.", "overflows to inf", 1),
    _fact("001-6a", "There are no subnormals: the conversion makes all of them 0.", "subnormals lost", 1),
    _fact("001-6b", "There are no subnormals: a product makes all of them 0.", "subnormals lost in products", 1),
    _fact("001-7a", "NaN survives the conversion.", "NaN kept", 1),
    _fact("001-7b", "Infinity survives the conversion.", "inf kept", 1),
    _fact("001-8", "BF16 to FP32 is exact: 16 zero bits are added.", "widened by zeros", 1),
    _fact("002-5a", "BF16 stores 8 bits of mantissa.", "stored bits", 8),
    _fact("002-5b", "The spacing of BF16 at x = 1 is x / 256.", "spacing at 1", 2**-8),
    value(
        "002-5c",
        "The spacing of FP32 at x = 1 is 1.2e-7.",
        "FP32 spacing at 1",
        "conversion",
        "within",
        1.15e-7,
        1.25e-7,
    ),
)


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
    """What a trainer holds for each parameter of its model, in bytes."""
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


def draw(measurement: Measurement) -> Mapping[str, Figure]:
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
    claims=CLAIMS,
    measure=measure,
    draw=draw,
    tables=tables,
    units={"nll": "nats", "mean loss": "nats", "stored bits": "bits"},
)
