"""The mismatch of two implementations of one model, trainer and rollout, in expectation; and beside a live engine."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp8rl.models.tiny import TinyModel
from fp8rl.numerics.config import NumericsConfig, RolloutPrecision, TrainerPrecision
from fp8rl.trainer.step.batch import TokenBatch
from lab.studies.harness import live
from lab.studies.harness.subjects import TRAIN, random_model

if TYPE_CHECKING:
    from fp8rl.trainer.distributed.layout import Layout
    from fp8rl.trainer.scorer import Scorer

SEQUENCES, LENGTH = 16, live.LONGEST
ENTROPY = 2.0
"""Mean entropy of the next token in nats, to which the logits of every model are scaled; of 128 tokens it is 4.85 at
most."""
PROMPTS, ANSWERS = 16, 4
"""Prompts of each seed beside an engine, and answers to each."""
POW2, FP32 = "fp8_block_pow2", "fp8_block_fp32"


@dataclass(frozen=True)
class Pair:
    """What the two sides compute with: a precision, and a preset. native: the trainer has Megatron's own ops."""

    trainer: TrainerPrecision
    rollout: RolloutPrecision
    rollout_spec: str = POW2
    native: bool = True


PAIRS = {
    "BF16/BF16": Pair("bf16", "bf16"),
    "BF16/FP8": Pair("bf16", "fp8"),
    "FP8/FP8": Pair("fp8", "fp8"),
    "FP8/FP8, mixed scales": Pair("fp8", "fp8", rollout_spec=FP32),
    "FP8/FP8, same ops": Pair("fp8", "fp8", native=False),
}
"""Trainer / rollout."""


@dataclass(frozen=True)
class Found:
    """What was found of one model: its parameters, and the mean abs d of each pair in nats."""

    parameters: int
    abs_d: dict[str, float]


def mismatch(shape: TinyModel, seed: int, scratch: Path) -> Found:
    """The expected abs d of a token that the rollout would sample, for every pair, on a random model.

    In each of many random contexts the expectation over the vocabulary is taken, instead of one token. The logits are
    divided by the number that gives the BF16 rollout `ENTROPY`, in FP32: weights of the head divided by it would give
    the same, as rounding is relative.
    """
    path = random_model(scratch, shape, seed)
    generator = torch.Generator().manual_seed(seed)
    contexts = torch.randint(0, shape.vocab, (SEQUENCES, LENGTH), generator=generator)
    nothing = torch.zeros(contexts.shape, dtype=torch.bool)
    batch = TokenBatch(contexts, torch.full((SEQUENCES,), LENGTH), nothing)
    with live.world() as layout:
        sides = {native: _side(path, layout, native) for native in (False, True)}
        parameters = sum(parameter.numel() for parameter in sides[True].model.parameters())
        batch = replace(batch, temperature=temperature_for(live.log_policy(sides[False], batch)))
        abs_d = {}
        for name, pair in PAIRS.items():
            sides[pair.native].set_numerics(_numerics(pair.trainer, POW2, pair.native))
            trainer = live.log_policy(sides[pair.native], batch)
            sides[False].set_numerics(_numerics(pair.rollout, pair.rollout_spec, False))
            abs_d[name] = expected_abs_d(trainer, live.log_policy(sides[False], batch))
    shutil.rmtree(path)
    return Found(parameters, abs_d)


def beside_engine(shape: TinyModel, seeds: Sequence[int], scratch: Path) -> dict[str, dict[str, list[list[float]]]]:
    """abs d of tokens that a live native FP8 engine samples, by sequence and seed: to the engine's log-probabilities,
    and to those that the shared ops give them. By arm, then metric; a seed has prompts of its own."""
    path = random_model(scratch, shape, seeds[0])
    with live.world() as layout:
        contexts = live.chain_batch(TRAIN, 0, SEQUENCES)
        temperature = temperature_for(live.log_policy(_side(path, layout, native=False), contexts))
    with live.beside_engine(path, "native") as stack:
        batches = [live.sampled_by_engine(stack, seed, PROMPTS, ANSWERS, temperature).batch for seed in seeds]
        trainers = {
            pair: [
                stack.trainer.apply(partial(_logprobs, precision=PAIRS[pair].trainer), batch)[0] for batch in batches
            ]
            for pair in ("BF16/FP8", "FP8/FP8")
        }
    with live.world() as layout:
        shared = _side(path, layout, native=False)
        shared.set_numerics(_numerics("fp8", POW2, False))
        stand_in = [live.logprobs(shared, batch) for batch in batches]
    engine = [batch.fields["rollout_logprobs"] for batch in batches]
    return {
        f"{name}: {pair}": {
            "abs d": [
                live.by_sequence((mine - theirs).abs(), batch)
                for mine, theirs, batch in zip(trainer, rollout, batches, strict=True)
            ]
        }
        for pair, trainer in trainers.items()
        for name, rollout in (("live", engine), ("stand-in", stand_in))
    }


def _logprobs(trainer: Scorer, batch: TokenBatch, *, precision: TrainerPrecision) -> Tensor:
    trainer.set_numerics(replace(trainer.numerics, trainer=precision))
    return live.logprobs(trainer, batch)


def expected_abs_d(trainer: Tensor, rollout: Tensor) -> float:
    """The mean of abs(trainer - rollout) over log-probabilities [..., V], weighted by the rollout's probability, in
    nats."""
    theirs = rollout.double()
    return float((theirs.exp() * (trainer.double() - theirs).abs()).sum(-1).mean())


def entropy(logits: Tensor) -> float:
    """The mean entropy of the softmax of [..., V], in nats."""
    logprobs = logits.double().log_softmax(-1)
    return float(-(logprobs.exp() * logprobs).sum(-1).mean())


def temperature_for(logits: Tensor) -> float:
    """The temperature at which logits have the mean entropy `ENTROPY`, found by halving."""
    low, high = -20.0, 20.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if entropy(logits / 2**middle) > ENTROPY else (middle, high)
    return float(2**middle)


def _side(path: Path, layout: Layout, native: bool) -> Scorer:
    from fp8rl.trainer.scorer import Scorer

    numerics = _numerics("bf16", POW2, native)
    return Scorer(path, live.ONE_RANK, numerics, layout, max_sequence_length=LENGTH)


def _numerics(precision: TrainerPrecision, spec: str, native: bool) -> NumericsConfig:
    return replace(live.exact(spec, precision), mode="native" if native else "exact")
