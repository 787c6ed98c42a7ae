"""State and ops in too narrow formats, in the arithmetic of "What stays in BF16 and FP32", done again with the
roundings that the formats really have, and in training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lab.studies.harness import figures, live, spoiled
from lab.studies.harness.claims import claims_of
from lab.studies.harness.lab import Lab
from lab.studies.harness.spoiled import Narrow, NarrowState, narrowed
from lab.studies.harness.study import Band, Measurement, Study, TextTable, with_interval
from lab.studies.harness.training import LOST, RATE, TrainedArm, smoothed, teach

WEIGHT, GRADIENT, FIRST, SECOND = 0.731421, 3.2e-4, 1.1e-4, 8.5e-8
BETA1, BETA2, STEP_SIZE, EPS = 0.9, 0.95, 3.0e-4, 1.0e-8
"""The chapter's Adam step."""
STEPS = 10_000
TINY_UPDATE = 1e-7
MASTERS: dict[str, Narrow | None] = {"fp8": "fp8 1x128", "bf16": "bf16", "fp32": None}


def facts() -> dict[str, float]:
    """The facts by name; nothing here is random."""
    first = BETA1 * FIRST + (1 - BETA1) * GRADIENT
    second = BETA2 * SECOND + (1 - BETA2) * GRADIENT**2
    step = STEP_SIZE * first / (math.sqrt(second) + EPS)
    block = _with_neighbours(second)
    stored = float(narrowed(block, "fp8 1x128")[0])
    return {
        "e4m3 largest": torch.finfo(torch.float8_e4m3fn).max,
        "e5m2 largest": torch.finfo(torch.float8_e5m2).max,
        "e4m3 steps in a binade": 1 / torch.finfo(torch.float8_e4m3fn).eps,
        "grain below 1, fp8 1x128": _grain_below_one(lambda x: narrowed(_beside(x), "fp8 1x128")[0]),
        "grain below 1, bf16": _grain_below_one(lambda x: narrowed(x, "bf16")),
        "headroom of 1e-7, fp8": _headroom(lambda x: narrowed(_beside(x), "fp8 1x128")[0]),
        "headroom of 1e-7, bf16": _headroom(lambda x: narrowed(x, "bf16")),
        "headroom of 1e-7, fp32": _headroom(lambda x: x.float()),
        "tail of a gap of 15, fp32": _tail(lambda x: x),
        "tail of a gap of 15, bf16 off by": abs(1 - _tail(lambda x: narrowed(x, "bf16")) / _tail(lambda x: x)),
        "tail of a gap of 15, fp8 / fp32": _tail(lambda x: narrowed(x, "fp8 unscaled")) / _tail(lambda x: x),
        "m": first,
        "v": second,
        "step": step,
        "w": WEIGHT - step,
        "step, v fp8 1x128": STEP_SIZE * first / (math.sqrt(stored) + EPS),
        "step, v fp8 unscaled": STEP_SIZE * first / (math.sqrt(float(narrowed(block, "fp8 unscaled")[0])) + EPS),
        **{f"moved in 10,000 steps, {name}": _moved(step, to)[0] for name, to in MASTERS.items()},
        **{f"updates landed, {name}": _moved(step, to)[1] for name, to in MASTERS.items()},
        "least update that moves an fp8 master of 1": _least_update(),
        "script: fp8 master": _script_master(1e-4),
        "script: v": float(_script_quantizer(np.array([9e-8]))[0]),
        "script: fp8 softmax of the last": float(_script_softmax()[4]),
    }


def _beside(x: Tensor) -> Tensor:
    """x and, in its block, a value of 1, by which the block's scale goes."""
    return torch.cat([x.reshape(1), torch.ones(127)])


def _with_neighbours(value: float) -> Tensor:
    """A block of second moments: the value, and squares of normal numbers of its size."""
    normal = torch.randn(127, generator=torch.Generator().manual_seed(0))
    return torch.cat([torch.tensor([value]), value * normal.square()])


def _grain_below_one(store: Callable[[Tensor], Tensor]) -> float:
    """The distance from 1 to the next value below, found by bisection over what is stored."""
    least = _bisect(lambda delta: float(store(torch.tensor(1.0 - delta))) < 1.0)
    return 1.0 - float(store(torch.tensor(1.0 - least)))


def _headroom(store: Callable[[Tensor], Tensor]) -> float:
    """Orders of magnitude by which an update of 1e-7 exceeds the least that moves a weight of 1; negative: short."""
    least = _bisect(lambda delta: float(store(torch.tensor(1.0 - delta))) < 1.0)
    return math.log10(TINY_UPDATE / least)


def _bisect(holds: Callable[[float], bool]) -> float:
    low, high = 1e-12, 0.5
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _tail(store: Callable[[Tensor], Tensor]) -> float:
    """The second probability of softmax([0, -15])."""
    return float(store(torch.tensor([0.0, -15.0]).softmax(0))[1])


@cache
def _moved(step: float, to: Narrow | None) -> tuple[float, float]:
    """Move a master of WEIGHT, in a block of at most 1, by equal updates: how far it gets, and the share that lands."""
    weight = first = torch.tensor(WEIGHT) if to is None else narrowed(_beside(torch.tensor(WEIGHT)), to)[0]
    landed = 0
    for _ in range(STEPS):
        after = weight - step
        stored = after if to is None else narrowed(_beside(after), to)[0]
        if bool(stored == weight):
            break  # and so for good
        weight, landed = stored, landed + 1
    return float(first - weight), landed / STEPS


def _least_update() -> float:
    """The smallest update that the FP8 master of a weight of 1 keeps, in a block of ones."""
    return _bisect(lambda delta: float(narrowed(_beside(torch.tensor(1.0 - delta)), "fp8 1x128")[0]) < 1.0)


def _script_quantizer(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The chapter's `to_fp8_blockwise`: one scale from the largest value, then an even grid of 256 steps."""
    scale = 448.0 / max(float(np.abs(x).max()), 1e-12)
    step = 448.0 / 256
    return np.asarray(np.round(np.clip(x * scale, -448.0, 448.0) / step) * step / scale)


def _script_master(delta: float) -> float:
    weight = 1.0
    for _ in range(STEPS):
        weight = float(_script_quantizer(np.array([weight - delta]))[0])
    return weight


def _script_softmax() -> NDArray[np.float64]:
    logits = _script_quantizer(np.array([2.1, 8.7, 11.3, -3.4, 6.0]))
    powers = np.exp(logits - logits.max())
    return np.asarray(powers / powers.sum())


SLOW = RATE.model_copy(update={"adam_beta2": 0.999})
PLAIN, SLOW_PLAIN = "FP32 state, FP8 products", "β₂ 0.999"
WIDE = "attention by autograd"

STATES: dict[str, dict[str, Narrow]] = {
    "masters BF16": {"masters": "bf16"},
    "masters FP8 1x128": {"masters": "fp8 1x128"},
    "m FP8 1x128": {"first": "fp8 1x128"},
    "m and v BF16": {"first": "bf16", "second": "bf16"},
    "v FP8 1x128": {"second": "fp8 1x128"},
    "v FP8 tensor": {"second": "fp8 tensor"},
    "v FP8 unscaled": {"second": "fp8 unscaled"},
}
CHANGES: dict[str, Callable[..., Any]] = {
    "softmax FP8": spoiled.fp8_softmax,
    "scores FP8": spoiled.fp8_scores,
    "attention FP8": spoiled.fp8_attention,
    "norm FP8": spoiled.fp8_norm,
    "router FP8": spoiled.fp8_router,
    "residual FP8": spoiled.fp8_residual,
    "embedding FP8": spoiled.fp8_embedding,
    "head FP8": spoiled.fp8_head,
}
SLOW_STATES: dict[str, dict[str, Narrow]] = {
    "β₂ 0.999, v BF16": {"second": "bf16"},
    "β₂ 0.999, v FP8 1x128": {"second": "fp8 1x128"},
}
PAIRS = {
    **dict.fromkeys(SLOW_STATES, SLOW_PLAIN),
    **dict.fromkeys(("softmax FP8", "scores FP8", "attention FP8"), WIDE),
}
"""The arm from which an arm differs in one thing, where that is not PLAIN."""


def arms() -> dict[str, TrainedArm]:
    """The arms by name. Each is made anew, as what is noted of its state is its own."""
    plain = TrainedArm()
    slow = replace(plain, config=SLOW)
    wide = replace(plain, change=spoiled.wide_attention)
    return {
        PLAIN: plain,
        f"{PLAIN}, again": plain,
        WIDE: wide,
        **{name: replace(plain, after_step=_stored(**state)) for name, state in STATES.items()},
        SLOW_PLAIN: slow,
        **{name: replace(slow, after_step=_stored(**state)) for name, state in SLOW_STATES.items()},
        **{name: replace(plain, change=change) for name, change in CHANGES.items()},
    }


def _stored(**formats: Narrow) -> NarrowState:
    return NarrowState(formats.get("masters"), formats.get("first"), formats.get("second"))


QUICK_ARMS = (PLAIN, f"{PLAIN}, again", "masters BF16", "v FP8 unscaled", "softmax FP8")


def measure(lab: Lab) -> Measurement:
    """The chapter's numbers, and every arm taught with every seed."""
    lab.specs["all arms"] = live.exact().spec.digest()
    known = facts()
    chosen = {name: arm for name, arm in arms().items() if not lab.quick or name in QUICK_ARMS}
    jobs = [(arm, seed, lab.quick) for arm in chosen.values() for seed in lab.seeds]
    taught = lab.each(teach, jobs, "trained")
    count = len(lab.seeds)
    values: dict[str, dict[str, list[float]]] = {"arithmetic": {name: [value] * count for name, value in known.items()}}
    curves: dict[str, list[float]] = {}
    steps = max(len(one.losses) for one in taught)
    for index, name in enumerate(chosen):
        mine = taught[index * count : (index + 1) * count]
        values[name] = {
            "nll": [one.nll for one in mine],
            "completed": [len(one.losses) / steps for one in mine],
            **{metric: [one.noted[metric] for one in mine] for metric in mine[0].noted},
        }
        shortest = min(len(one.losses) for one in mine)
        curves[name] = smoothed(sum(one.losses[at] for one in mine) / count for at in range(shortest))
    return Measurement(
        values=values, subject=f"M, 1.0M parameters, {steps} SFT steps on right chains", details={"curves": curves}
    )


def draw(measurement: Measurement) -> Mapping[str, figures.Figure]:
    trained = [name for name in measurement.values if name != "arithmetic"]
    drawn = figures.figure("Held-out loss after training, above that with FP32 state", width=8.0, height=4.4)
    shown = [name for name in trained if not name.startswith((PLAIN, WIDE)) and name != SLOW_PLAIN]
    bars = {"nats": [_above(measurement, name) for name in shown]}
    figures.bars(drawn.axes[0], shown, bars, label="nats per token, above its pair")
    drawn.axes[0].set_yscale("symlog", linthresh=1e-4)
    curves = figures.figure("Training loss by arm")
    for index, name in enumerate((PLAIN, "masters BF16", "masters FP8 1x128", "v FP8 1x128", "v FP8 unscaled")):
        points = measurement.details["curves"].get(name, [])
        x = [10.0 * (at + 0.5) for at in range(len(points))]
        figures.curve(curves.axes[0], x, [(y, y, y) for y in points], name=name, index=index, band=False)
    curves.axes[0].set_yscale("log")
    curves.axes[0].set(xlabel="step", ylabel="nats per token, mean of 10 steps")
    figures.legend(curves.axes[0])
    return {"held_out": drawn, "curves": curves}


def tables(measurement: Measurement) -> Sequence[TextTable]:
    rows = []
    for name, metrics in measurement.values.items():
        if name == "arithmetic":
            continue
        nll = measurement.mean(name, "nll")
        above = with_interval(_above(measurement, name), "+.5f")
        lost = "broke down" if nll == LOST else f"{nll:.5f}"
        noted = [f"{measurement.mean(name, m):.3g}" if m in metrics else "" for m in NOTED]
        rows.append([name, lost, above, *noted])
    known = [[name, f"{found[0]:.6g}"] for name, found in measurement.values["arithmetic"].items()]
    columns = ("arm", "held-out NLL", "above its pair", "updates lost", "v lost")
    return [TextTable("Trained", columns, rows), TextTable("The chapter's arithmetic", ("what", "found"), known)]


NOTED: tuple[Literal["lost_updates", "lost_second"], ...] = ("lost_updates", "lost_second")


def _above(measurement: Measurement, name: str) -> Band:
    """Held-out loss above that of the arm which differs in one thing."""
    pair = PAIRS.get(name, PLAIN)
    return measurement.of(name, "nll", against=pair if pair in measurement.values else PLAIN)


STUDY = Study(
    name="failure_modes",
    question="What must not be in FP8, and what does it cost where it is?",
    seeds=5,
    claims=claims_of("failure_modes"),
    measure=measure,
    draw=draw,
    tables=tables,
    units={
        "nll": "nats",
        **{f"headroom of 1e-7, {name}": "orders of magnitude" for name in ("fp8", "bf16", "fp32")},
        "lost_updates": "of updates",
        "lost_second": "of values",
        "updates landed, bf16": "of updates",
    },
)
