"""What must not be in FP8: state and ops in too narrow formats, in arithmetic and in training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from lab.studies.failure_modes.facts import facts
from lab.studies.harness import figures, live, spoiled
from lab.studies.harness.claims import Claim, Control, difference, twice, value
from lab.studies.harness.lab import Lab
from lab.studies.harness.spoiled import Narrow, NarrowState
from lab.studies.harness.study import Band, Measurement, Study, TextTable, with_interval
from lab.studies.harness.training import LOST, NOISE, RATE, TrainedArm, smoothed, teach

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


def _fact(id: str, says: str, metric: str, low: float, high: float) -> Claim:
    return value(id, says, metric, "arithmetic", "within", low, high)


def _harm(
    id: str,
    says: str,
    arm: str,
    than: float = 0.0,
    against: str = PLAIN,
    margin: float = NOISE,
    control: Control | None = None,
) -> Claim:
    """That an arm loses more than so many nats of held-out loss."""
    return difference(id, says, "nll", arm, against, "above", than, margin=margin, control=control)


CONTROLS = (
    twice("The same training twice ends at the same loss, bit for bit.", "nll", f"{PLAIN}, again", PLAIN),
    _harm("BF16 masters", "Masters in BF16 cost held-out loss.", "masters BF16", control="positive", margin=0.0),
    _harm("v without scales", "v as a plain FP8 number ends training.", "v FP8 unscaled", 1.0, control="positive"),
)
ARITHMETIC = (
    _fact("002-1a", "E4M3 reaches 448.", "e4m3 largest", 448, 448),
    _fact("002-1b", "E5M2 reaches 57344.", "e5m2 largest", 57344, 57344),
    _fact("002-1c", "E4M3 has 3 bits of mantissa: 8 steps in a binade.", "e4m3 steps in a binade", 8, 8),
    _fact("002-4", "The grain of FP8 near 1.0 is about 5e-3.", "grain below 1, fp8 1x128", 4e-3, 6e-3),
    _fact("002-5", "The grain of BF16 near 1.0 is about 4e-3 (2^-8).", "grain below 1, bf16", 3.8e-3, 4e-3),
    _fact(
        "002-6a", "An update of 1e-7 to a weight of 1: FP8 is four orders short.", "headroom of 1e-7, fp8", -4.5, -3.5
    ),
    _fact("002-6b", "BF16 is two orders short.", "headroom of 1e-7, bf16", -2.5, -1.5),
    _fact("002-6c", "FP32 has five orders of headroom.", "headroom of 1e-7, fp32", 4.5, 5.5),
    _fact("002-7a", "A softmax gap of 15 has a tail of 3e-7.", "tail of a gap of 15, fp32", 2.9e-7, 3.2e-7),
    _fact("002-7b", "FP8 loses it.", "tail of a gap of 15, fp8 / fp32", 0, 0),
    _fact("002-7c", "BF16 distorts it (by more than 1%).", "tail of a gap of 15, bf16 off by", 0.01, 1),
    _fact("002-8", "v in FP8 per block: a step of 3.93 instead of 1.34e-4.", "step, v fp8 1x128", 3.9, 4.0),
    _fact("002-9a", "The walk-through: a step of 1.341e-4.", "step", 1.3405e-4, 1.3415e-4),
    _fact("002-9b", "and a weight of 0.731287 after it.", "w", 0.7312865, 0.7312875),
    _fact("002-10a", "10,000 such steps move an FP8 master by nothing.", "moved in 10,000 steps, fp8", 0, 0),
    _fact("002-10b", "and an FP32 one by 1.3.", "moved in 10,000 steps, fp32", 1.25, 1.35),
    _fact("002-11a", "A BF16 master lands one such update in 20.", "updates landed, bf16", 0.025, 0.1),
    _fact(
        "002-13a",
        "The printed script prints a frozen FP8 master, 1.000000.",
        "script: fp8 master",
        0.9999995,
        1.0000005,
    ),
    _fact("002-13b", "It prints a v of 0.", "script: v", 0, 0),
    _fact("002-13c", "It prints a last probability of 0.00000.", "script: fp8 softmax of the last", 0, 5e-6),
    _fact(
        "002-14",
        "An FP8 master of 1 follows updates above 5e-3.",
        "least update that moves an fp8 master of 1",
        4e-3,
        6e-3,
    ),
)
TRAINED = (
    value("002-3", "Masters in FP8 freeze: every update is lost.", "lost_updates", "masters FP8 1x128", "above", 0.999),
    _harm("002-10c", "Masters in FP8 cost held-out loss.", "masters FP8 1x128"),
    _harm("002-11b", "Masters in BF16 cost 0.05 nats or more.", "masters BF16", 0.05),
    value(
        "002-12",
        "The harm is silent: training with BF16 masters goes on to its last step.",
        "completed",
        "masters BF16",
        "within",
        1.0,
        1.0,
    ),
    value(
        "002-8b",
        "v underflows in FP8 with a scale per block: at least 1% of it becomes 0.",
        "lost_second",
        "v FP8 1x128",
        "above",
        0.01,
    ),
    _harm("002-8c", "v in FP8 with a scale per block costs held-out loss.", "v FP8 1x128"),
    _harm("002-8d", "v in FP8 with one scale costs held-out loss.", "v FP8 tensor"),
    _harm("002-17a", "m and v have to be in FP32: in BF16 they cost held-out loss.", "m and v BF16"),
    _harm("002-17b", "m in FP8 costs held-out loss.", "m FP8 1x128"),
    _harm("002-17c", "With β₂ = 0.999, v in BF16 costs held-out loss.", "β₂ 0.999, v BF16", against=SLOW_PLAIN),
    _harm("002-17d", "With β₂ = 0.999, v in FP8 costs held-out loss.", "β₂ 0.999, v FP8 1x128", against=SLOW_PLAIN),
    _harm("002-7d", "Softmax in FP8 costs held-out loss.", "softmax FP8", against=WIDE),
    _harm("002-16a", "Attention scores in FP8 cost held-out loss.", "scores FP8", against=WIDE),
    _harm("000-10", "FP8 attention costs held-out loss.", "attention FP8", against=WIDE),
    _harm("002-16b", "The mean of squares of RMSNorm in FP8 costs held-out loss.", "norm FP8"),
    _harm("002-16c", "The router in FP8 costs held-out loss.", "router FP8"),
    _harm("002-27", "The residual in FP8 costs held-out loss (2 layers here).", "residual FP8"),
    _harm("002-28", "The embedding in FP8 costs held-out loss.", "embedding FP8"),
    _harm("002-16d", "The output head in FP8 costs held-out loss.", "head FP8"),
)


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


def draw(measurement: Measurement) -> Mapping[str, Figure]:
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
    claims=(*CONTROLS, *ARITHMETIC, *TRAINED),
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
