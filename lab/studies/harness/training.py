"""Trained arms: the demo model taught right chains for 100 steps under one numerics, and what it knows then."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Protocol

import torch

from fp8rl.numerics.config import NumericsConfig
from fp8rl.rl.algorithms.sft import SftObjective
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.step.batch import NonFiniteLossError
from lab.studies.harness import live
from lab.studies.harness.subjects import HELD_OUT, MODEL, TRAIN

if TYPE_CHECKING:
    from fp8rl.trainer.distributed.layout import Layout
    from fp8rl.trainer.trainer import Trainer

STEPS, QUICK_STEPS = 100, 20
CHAINS_PER_STEP = 64
HELD_OUT_CHAINS, QUICK_HELD_OUT_CHAINS = 512, 128
RATE = TrainerSection(lr=3e-4, min_lr=0.0, warmup_steps=5, decay="linear")
NOISE = 0.0005
"""Nats of held-out loss that make no difference: seeds scatter by 0.0003."""
LOST = 5.0
"""The largest held-out loss that is told apart, nats; a guess among M's 128 tokens has 4.85. Also that of a model whose
loss or gradients stopped being finite."""

Change = Callable[["Trainer"], AbstractContextManager[None]]
"""Makes a live trainer other than it is, as long as the block lasts."""


class AfterStep(Protocol):
    """Called when an update is done."""

    noted: dict[str, list[float]]
    """Numbers of the steps so far, by name."""

    def __call__(self, trainer: Trainer) -> None: ...


@dataclass(frozen=True)
class TrainedArm:
    """A way to teach a model. Every part can be pickled: functions are a module's own."""

    numerics: NumericsConfig = field(default_factory=live.exact)
    config: TrainerSection = RATE
    """Of optimizer and rate; the rate falls to 0 over the run."""
    change: Change | None = None
    """Of the trainer, from before the first step until after the evaluation."""
    after_step: AfterStep | None = None
    model: Path = MODEL
    dtype: torch.dtype = torch.bfloat16
    """Of the model's weights."""


@dataclass(frozen=True)
class Taught:
    """A model that was taught, in numbers."""

    nll: float
    """Held-out negative log-likelihood per token, nats, at most LOST, as where training broke down."""
    losses: list[float]
    """Of each step, before its update; shorter where training broke down."""
    noted: dict[str, float]
    """What `after_step` noted, means over the steps."""


def teach(arm: TrainedArm, seed: int, quick: bool) -> Taught:
    """Train on right chains, other ones for each seed and the same for every arm."""
    with live.world(arm.config) as layout:
        return taught(arm, seed, quick, layout)


def taught(
    arm: TrainedArm, seed: int, quick: bool, layout: Layout, evaluate: Callable[..., float] = live.nll
) -> Taught:
    """`teach` on this rank. evaluate: as `live.nll`, where several ranks score their own rows."""
    steps = QUICK_STEPS if quick else STEPS
    held_out = live.chain_batch(HELD_OUT, 0, QUICK_HELD_OUT_CHAINS if quick else HELD_OUT_CHAINS)
    losses: list[float] = []
    config, dtype = arm.config, arm.dtype
    trainer = live.trainer_of(arm.model, arm.numerics, layout, config=config, steps=steps, dtype=dtype)
    with arm.change(trainer) if arm.change else nullcontext():
        try:
            for step in range(steps):
                batch = live.chain_batch(TRAIN, seed * STEPS + step, CHAINS_PER_STEP)
                losses.append(trainer.train_step(batch, SftObjective.of(batch)).result.loss)
                if arm.after_step:
                    arm.after_step(trainer)
            found = evaluate(trainer, held_out)
        except NonFiniteLossError:
            found = math.nan
    noted = {name: fmean(values) for name, values in arm.after_step.noted.items()} if arm.after_step else {}
    return Taught(min(found, LOST) if math.isfinite(found) else LOST, losses, noted)


def smoothed(losses: Iterable[float], over: int = 10) -> list[float]:
    """Means of each `over` steps, for curves."""
    known = list(losses)
    return [sum(known[at : at + over]) / len(known[at : at + over]) for at in range(0, len(known), over)]
