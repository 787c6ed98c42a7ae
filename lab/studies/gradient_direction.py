"""How far does FP8 turn the gradient: in the forward or the backward pass, in supervised learning or in RL?"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

from torch import Tensor

from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.spec import QuantSpec
from fp8rl.trainer.step.batch import TokenBatch
from lab.studies.harness import figures, live
from lab.studies.harness.claims import claims_of
from lab.studies.harness.gradient import gradients, objective, turned, with_advantages
from lab.studies.harness.lab import Lab
from lab.studies.harness.study import Measurement, Study, TextTable, by_arm
from lab.studies.harness.subjects import MODEL, TRAIN

if TYPE_CHECKING:
    from fp8rl.trainer.trainer import Trainer

PROMPTS, QUICK_PROMPTS, ANSWERS = 64, 16, 8
ENGINE = "GRPO vs rollout: live engine"
LOSSES = {"SFT": "SFT", "GRPO": "GRPO on policy", "GRPO vs rollout": "GRPO against rollout log-probabilities"}
SPEC = QuantSpec.preset("fp8_block_pow2")
E5M2_GRADIENTS = SPEC.override({"gradient": {"format": "e5m2"}})
E5M2 = SPEC.override({"weight": {"format": "e5m2"}, "activation": {"format": "e5m2"}})


@dataclass(frozen=True)
class Arm:
    """A gradient, and the one that it is compared with."""

    numerics: NumericsConfig
    against: NumericsConfig


BF16 = live.exact(SPEC, "bf16")
ARMS = {
    "again": Arm(BF16, BF16),
    "forward": Arm(live.exact(SPEC, "fp8_forward"), BF16),
    "both": Arm(live.exact(SPEC, "fp8"), BF16),
    "backward": Arm(live.exact(SPEC, "fp8"), live.exact(SPEC, "fp8_forward")),
    "backward E5M2": Arm(live.exact(E5M2_GRADIENTS, "fp8"), live.exact(SPEC, "fp8_forward")),
    "forward E5M2": Arm(live.exact(E5M2, "fp8_forward"), BF16),
}


def measure(lab: Lab) -> Measurement:
    """Every gradient of one live trainer, on the same batches."""
    lab.specs |= {"E4M3": SPEC.digest(), "E5M2 gradients": E5M2_GRADIENTS.digest(), "E5M2": E5M2.digest()}
    prompts = QUICK_PROMPTS if lab.quick else PROMPTS
    by_seed = lab.each(_turned, [(seed, prompts) for seed in lab.seeds], "seeds")
    if not lab.quick:
        lab.say("beside a live engine")
        for found, angles in zip(by_seed, lab.alone(_beside_engine, lab.seeds, prompts), strict=True):
            found[ENGINE] = angles
    return Measurement(
        values=by_arm(by_seed),
        subject=f"M, 1.0M parameters, {prompts * ANSWERS} chains or answers, exact mode",
        details={"layers": sorted({name for found in by_seed[0].values() for name in found if name != "turned"})},
    )


def _turned(seed: int, prompts: int) -> dict[str, dict[str, float]]:
    """Angles of gradients, by arm `LOSS: what`, then metric: `turned`, of the whole gradient, and of each
    part of the model."""
    found: dict[str, dict[str, float]] = {}
    with live.world() as layout:
        trainer = live.trainer_of(MODEL, live.exact(SPEC), layout)
        sample = live.sampled(trainer, seed, prompts, ANSWERS)  # as an FP8 engine samples
        taught = live.chain_batch(TRAIN, seed, prompts * ANSWERS)
        for loss in LOSSES:
            batch = taught if loss == "SFT" else with_advantages(sample)
            gradient = cache(partial(_gradient, trainer, batch, loss))
            for name, arm in ARMS.items():
                again = _gradient(trainer, batch, loss, BF16) if name == "again" else None
                found[f"{loss}: {name}"] = _angles(again or gradient(arm.numerics), gradient(arm.against))
            found[f"{loss}: halves"] = _angles(*_halves(trainer, loss, batch))
            if loss == "GRPO vs rollout":
                on_policy = _gradient(trainer, batch, "GRPO", BF16)
                found[f"{loss}: mixed"] = _angles(gradient(BF16), on_policy)
    return found


def _beside_engine(seeds: Sequence[int], prompts: int) -> list[dict[str, float]]:
    """Angles between the gradient of a live engine's answers and that of the trainer's own, by seed."""
    with live.world() as layout:
        trainer = live.trainer_of(MODEL, live.exact(SPEC), layout)
        own = [with_advantages(live.sampled(trainer, seed, prompts, ANSWERS)) for seed in seeds]
    with live.beside_engine(MODEL) as stack:
        engines = [with_advantages(live.sampled_by_engine(stack, seed, prompts, ANSWERS)) for seed in seeds]
        return [stack.trainer.apply(_between, *pair)[0] for pair in zip(own, engines, strict=True)]


def _between(trainer: Trainer, *batches: TokenBatch) -> dict[str, float]:
    return _angles(*(_gradient(trainer, x, "GRPO vs rollout", trainer.numerics) for x in batches))


def _gradient(trainer: Trainer, batch: TokenBatch, loss: str, numerics: NumericsConfig) -> dict[str, Tensor]:
    return gradients(trainer, numerics, batch, objective(loss, batch))


def _halves(trainer: Trainer, loss: str, batch: TokenBatch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """BF16 gradients of the first and the last half of the batch's prompts."""
    half = batch.rows // 2
    first, second = batch.select(list(range(half))), batch.select(list(range(half, batch.rows)))
    return _gradient(trainer, first, loss, BF16), _gradient(trainer, second, loss, BF16)


def _angles(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict[str, float]:
    parts: dict[str, list[str]] = {"turned": list(first)}
    for name in first:
        parts.setdefault(_part(name), []).append(name)
    return {
        part: turned([first[name] for name in names], [second[name] for name in names]) for part, names in parts.items()
    }


def _part(name: str) -> str:
    layer = re.search(r"layers\.(\d+)\.", name)
    return f"layer {layer[1]}" if layer else "embedding" if "embedding" in name else "head"


def draw(measurement: Measurement) -> Mapping[str, figures.Figure]:
    drawn = figures.figure("1 − cos of the gradient to that of BF16", width=7.5, height=3.8)
    shown = ("halves", "forward", "both", "backward", "backward E5M2")
    series = {what: [measurement.of(f"{loss}: {what}", "turned") for loss in LOSSES] for what in shown}
    figures.bars(drawn.axes[0], list(LOSSES), series, label="1 − cos", log=True)
    return {"gradient_direction": drawn}


def tables(measurement: Measurement) -> Sequence[TextTable]:
    parts = measurement.details["layers"]
    rows = [[arm, *(f"{measurement.mean(arm, part):.3g}" for part in ("turned", *parts))] for arm in measurement.values]
    return [TextTable("1 − cos, mean over the seeds", ("arm", "whole", *parts), rows)]


STUDY = Study(
    name="gradient_direction",
    question="How far does FP8 turn the gradient, in which pass, and further in RL than in SFT?",
    seeds=5,
    claims=claims_of("gradient_direction"),
    measure=measure,
    draw=draw,
    tables=tables,
    units={"turned": "(1 - cos)"},
)
