"""`fp8rl rescore`: score the sequences of a capsule again, in one fresh process, and compare with what was recorded."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from fp8rl.diagnose.measure import one_trainer, score_recorded
from fp8rl.diagnose.report import grid
from fp8rl.diagnose.subject import load_architecture_of
from fp8rl.numerics.core.errors import user_error
from fp8rl.numerics.core.reading import check_path
from fp8rl.rl.guard.capsule import Capsule, read_capsule
from fp8rl.rl.guard.scored_batch import ScoredBatch
from fp8rl.rl.record.console import format_difference
from fp8rl.weight_sync.frozen import would_hold
from fp8rl.weight_sync.manifest import Manifest

NATIVE_TOLERANCE = 0.01
"""Mean difference in nats up to which native log-probabilities count as the same, since the libraries' own ops round
differently in another batch. BF16 against BF16 was measured at 0.01 between trainer and engine."""

WORST_TOKENS = 12


@dataclasses.dataclass(frozen=True)
class Rescored:
    """A capsule, and its sequences scored again.

    rescored: the capsule's sequences with the new scores. metrics: the `mismatch/...` metrics of the new scores.
    """

    capsule: Capsule
    rescored: ScoredBatch
    metrics: dict[str, float]

    @property
    def changes(self) -> Tensor:
        """abs(rescored - recorded trainer logprob) of each sampled token, float64 [tokens]; NaN equals NaN."""
        mask = self.capsule.scored.batch.loss_mask
        recorded, rescored = self.capsule.scored.logprobs[mask], self.rescored.logprobs[mask]
        same = (recorded == rescored) | (recorded.isnan() & rescored.isnan())
        change = (recorded.double() - rescored.double()).abs().nan_to_num(torch.inf, torch.inf)
        return torch.where(same, 0.0, change)

    @property
    def reproduced(self) -> bool:
        """Exact mode: every logprob and every metric is equal. Native mode: the mean change is within tolerance."""
        if self.capsule.numerics.mode == "exact":
            return not bool(self.changes.any()) and self.capsule.metrics.items() <= self.metrics.items()
        return self.changes.mean().item() <= NATIVE_TOLERANCE

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values; a number that is not finite becomes None."""
        capsule, changes = self.capsule, self.changes
        return {
            "capsule": str(capsule.path),
            "step": capsule.step,
            "why": capsule.why,
            "mode": capsule.numerics.mode,
            "weight_version": capsule.scored.version,
            "sequences": len(capsule.rows),
            "tokens": changes.numel(),
            "equal_tokens": int((changes == 0).sum()),
            "mean_change": _finite(changes.mean().item()),
            "largest_change": _finite(changes.max().item()),
            "metrics": {
                name: {"recorded": capsule.metrics.get(name), "rescored": self.metrics.get(name)}
                for name in dict.fromkeys([*capsule.metrics, *self.metrics])
            },
            "reproduced": self.reproduced,
        }


def rescore(path: Path, model: Path | None = None) -> Rescored:
    """Score a capsule's sequences with the capsule's numerics, and its weights or the weights in `model`. Raises
    UserError: the capsule is damaged or incomplete, or the weights are not the weights in the manifest."""
    capsule = read_capsule(path)
    load_architecture_of(capsule.experiment)
    if model is not None:
        check_path(model, "--model")
    if (weights := model or capsule.weights) is None:
        raise user_error(
            "--model",
            found="nothing, for a capsule without weights",
            expected=f"the weights of version {capsule.scored.version} as a Hugging Face directory",
            remedy="Give --model DIR, or set guard.capsule_weights=true in runs to come.",
        )
    with one_trainer(
        weights,
        capsule.numerics,  # they carry the reduction order of the run's layout
        micro_batch_tokens=capsule.experiment.trainer.micro_batch_tokens,
        longest=capsule.experiment.rollout.context_length,
        adapter=capsule.beginning(weights).adapter,
    ) as trainer:
        _check_weights(capsule, trainer, weights)
        scored = score_recorded(trainer, capsule.scored.batch)
    rescored = dataclasses.replace(capsule.scored, logprobs=scored.logprobs, routes=scored.routes, draws=scored.draws)
    return Rescored(capsule, rescored, rescored.metrics() | rescored.drift())


def print_rescored(result: Rescored, console: Console) -> None:
    """Print the worst tokens, the metrics that differ, and the verdict."""
    capsule, scored, rescored = result.capsule, result.capsule.scored, result.rescored
    console.print(f"capsule of step {capsule.step}, weight version {scored.version}, {capsule.numerics.mode} mode")
    for line in capsule.why:
        console.print(f"  {line}")
    rows = []
    size = scored.abs_differences()
    sampled = ((row, at) for row, at in scored.batch.loss_mask.nonzero().tolist())
    for row, position in sorted(sampled, key=lambda where: -size[where])[:WORST_TOKENS]:
        token, mine = int(scored.batch.tokens[row, position]), scored.logprobs[row, position].item()
        theirs = scored.batch.fields["rollout_logprobs"][row, position].item()
        again = rescored.logprobs[row, position].item()
        numbers = (f"{theirs:.6f}", f"{mine:.6f}", f"{again:.6f}", format_difference(mine - theirs))
        rows.append((str(capsule.rows[row]), str(position), str(token), *numbers))
    columns = ("row", "position", "token", "rollout", "trainer", "rescored", "d")
    console.print(grid(columns, rows, title="largest |d|"))
    facts = result.to_dict()
    for name, values in facts["metrics"].items():
        if values["recorded"] != values["rescored"]:
            console.print(f"{name}: recorded {values['recorded']}, rescored {values['rescored']}")
    equal = f"{facts['equal_tokens']:,} of {facts['tokens']:,} trainer logprobs are equal bit for bit"
    change = "" if facts["equal_tokens"] == facts["tokens"] else f", the largest change is {facts['largest_change']}"
    console.print(f"{'reproduced' if result.reproduced else 'NOT reproduced'}: {equal}{change}", style="bold")


def _check_weights(capsule: Capsule, trainer: Any, weights: Path) -> None:
    """Check that the weights, quantized as they were for the engine, have the manifest's digests."""
    manifest = capsule.manifest
    spec = capsule.numerics.rollout_spec
    sent = would_hold(trainer, spec, capsule.experiment.rollout.tp)
    found = Manifest.merged(int(manifest.version), spec, [sent])
    differing = sorted(manifest.mismatched(found.entries))
    if differing:
        raise user_error(
            "weights",
            found=f"{weights} with {len(differing)} tensors of other digests, {differing[0]} among them",
            expected=f"the {len(manifest.entries)} digests of the manifest, weight version {manifest.version}",
            remedy="Give the weights that scored these sequences, in BF16, with --model DIR.",
        )


def _finite(value: float) -> float | None:
    return value if value < torch.inf else None
