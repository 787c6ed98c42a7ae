"""The four cases of unified FP8 on a sampled batch: how far each precision of the trainer is from the rollout and from
BF16, token by token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp8rl.numerics.config import NumericsConfig, TrainerPrecision
from fp8rl.numerics.spec import QuantSpec
from fp8rl.trainer.step.batch import TokenBatch
from lab.studies.harness import live

if TYPE_CHECKING:
    from fp8rl.trainer.trainer import Trainer

CAPS = (2.0, 1.2, 1.05)
POW2 = QuantSpec.preset("fp8_block_pow2")
CASES: dict[str, TrainerPrecision] = {"case 1": "bf16", "case 2": "fp8_forward", "case 3": "fp8"}
SequenceMetrics = dict[str, dict[str, list[float]]]
"""A number for each sequence, by case, then metric."""


def snapshot(trainer: Trainer, batch: TokenBatch) -> SequenceMetrics:
    """Every case on one sampled batch: by case, then metric, a number for each sequence. The trainer stays as it was.

    batch: sampled by an FP8 rollout, by whose log-probabilities, its field `rollout_logprobs`, d is taken.
    """
    tokens = by_token(trainer, batch, cases_of(trainer.numerics))
    return {case: by_sequence(values, batch) for case, values in tokens.items()}


def cases_of(numerics: NumericsConfig) -> dict[str, NumericsConfig]:
    """The trainer's numerics in each case, with scales that are powers of two; BF16 is the first."""
    return {case: replace(numerics, spec=POW2, trainer=precision) for case, precision in CASES.items()}


def by_token(trainer: Trainer, batch: TokenBatch, cases: Mapping[str, NumericsConfig]) -> dict[str, dict[str, Tensor]]:
    """Metrics of a batch under each numerics: by case, then metric, fp64 [B, S]. The trainer stays as it was.

    kl: of the policy to that of the first case, over the whole vocabulary. abs_d, k3 (Schulman's estimate of the KL of
    the rollout to the trainer), clips: of the tokens, against the batch's field `rollout_logprobs`.
    """
    before, reference, found = trainer.numerics, None, {}
    for case, numerics in cases.items():
        policy = _policy(trainer, batch, numerics)
        reference = policy if reference is None else reference
        found[case] = _metrics(policy, reference, batch)
    trainer.set_numerics(before)
    return found


def by_sequence(metrics: Mapping[str, Tensor], batch: TokenBatch) -> dict[str, list[float]]:
    """Means of metrics [B, S] over each row's answer."""
    return {name: live.by_sequence(values, batch) for name, values in metrics.items()}


def _policy(trainer: Trainer, batch: TokenBatch, numerics: NumericsConfig) -> Tensor:
    trainer.set_numerics(numerics)
    return live.log_policy(trainer, batch)


def _metrics(policy: Tensor, reference: Tensor, batch: TokenBatch) -> dict[str, Tensor]:
    logprobs = policy.gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)
    d = logprobs.double() - batch.fields["rollout_logprobs"][:, 1:].double()
    kl = torch.stack([_kl(*row) for row in zip(policy, reference, strict=True)])  # a row at a time fits any vocabulary
    clips = {f"clip_{cap:g}": (d.exp() > cap).double() for cap in CAPS}
    per_token = {"kl": kl, "abs_d": d.abs(), "k3": d.expm1() - d, **clips}
    return {name: torch.nn.functional.pad(values, (1, 0)) for name, values in per_token.items()}


def _kl(policy: Tensor, reference: Tensor) -> Tensor:
    """KL(policy || reference) of log-probabilities [..., V], nats."""
    wide, ref = policy.double(), reference.double()
    return (wide.exp() * (wide - ref)).sum(-1)
