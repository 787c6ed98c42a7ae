"""Scores the sequences of a capsule again, and checks that the trainer's recorded log-probabilities come out again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Group, RenderableType
from torch import Tensor

from fp8rl.diagnose.explain.differences import difference
from fp8rl.diagnose.measure import score_recorded
from fp8rl.diagnose.report import Finding, grid
from fp8rl.numerics.core.errors import user_error
from fp8rl.rl.guard.capsule import Capsule
from fp8rl.rl.guard.scored_batch import ScoredBatch
from fp8rl.rl.record.console import format_difference
from fp8rl.trainer.step.batch import Scored, TokenBatch
from fp8rl.weight_sync.frozen import would_hold
from fp8rl.weight_sync.manifest import Manifest

NATIVE_TOLERANCE = 0.01
"""Native log-probabilities count as the same up to this mean difference in nats, because the libraries' ops round
differently in another batch. Between trainer and engine 0.01 was measured with BF16 on both sides."""

WORST_TOKENS = 12


@dataclasses.dataclass(frozen=True)
class Rescored:
    """A capsule, and its sequences scored again."""

    capsule: Capsule
    rescored: ScoredBatch
    """The capsule's sequences with the new scores."""
    metrics: dict[str, float]
    """The `mismatch/...` and `drift/...` metrics of the new scores."""

    @property
    def changes(self) -> Tensor:
        """abs(rescored - recorded trainer logprob) of each sampled token, float64 [tokens]; 0 if both are NaN."""
        mask = self.capsule.scored.batch.loss_mask
        change = difference(self.capsule.scored.logprobs[mask], self.rescored.logprobs[mask])
        return change.abs().nan_to_num(torch.inf, torch.inf)

    @property
    def reproduced(self) -> bool:
        """Exact mode: every logprob and every metric is equal. Native mode: the mean change is within tolerance."""
        if self.capsule.numerics.mode == "exact":
            return not bool(self.changes.any()) and self.capsule.about.metrics.items() <= self.metrics.items()
        return self.changes.mean().item() <= NATIVE_TOLERANCE

    @property
    def finding(self) -> Finding:
        """Say whether the trainer reproduces its recorded log-probabilities."""
        changes = self.changes
        equal, tokens = int((changes == 0).sum()), changes.numel()
        found = f"{equal:,} of {tokens:,} recorded log-probabilities come out again bit for bit"
        if equal < tokens:
            found += f"; mean change {changes.mean().item():.3g}, largest {changes.max().item():.3g}"
        bound = f"a mean change of at most {NATIVE_TOLERANCE:g}"
        return Finding(
            key="trainer",
            found=found,
            expected="all of them, and the metrics over them" if self.capsule.numerics.mode == "exact" else bound,
            remedy="Look for what changed the trainer's numerics or weights during the run.",
            grade="ok" if self.reproduced else "error",
        )

    def facts(self) -> dict[str, Any]:
        capsule, changes = self.capsule, self.changes
        return {
            "step": capsule.about.step,
            "why": capsule.about.why,
            "mode": capsule.numerics.mode,
            "weight_version": capsule.scored.version,
            "sequences": len(capsule.about.rows),
            "tokens": changes.numel(),
            "equal_tokens": int((changes == 0).sum()),
            "mean_change": changes.mean().item(),
            "largest_change": changes.max().item(),
            "metrics": {
                name: {"recorded": capsule.about.metrics.get(name), "rescored": self.metrics.get(name)}
                for name in dict.fromkeys([*capsule.about.metrics, *self.metrics])
            },
        }

    def table(self) -> RenderableType:
        """Render the reason for the capsule, the worst tokens, and the metrics that differ."""
        capsule, scored, rescored = self.capsule, self.capsule.scored, self.rescored
        rows = []
        size = scored.abs_differences()
        sampled = ((row, at) for row, at in scored.batch.loss_mask.nonzero().tolist())
        for row, position in sorted(sampled, key=lambda where: -size[where])[:WORST_TOKENS]:
            token, mine = int(scored.batch.tokens[row, position]), scored.logprobs[row, position].item()
            theirs = scored.batch.fields["rollout_logprobs"][row, position].item()
            again = rescored.logprobs[row, position].item()
            numbers = (f"{theirs:.6f}", f"{mine:.6f}", f"{again:.6f}", format_difference(mine - theirs))
            rows.append((str(capsule.about.rows[row]), str(position), str(token), *numbers))
        columns = ("row", "position", "token", "rollout", "trainer", "again", "d")
        return Group(
            f"capsule of step {capsule.about.step}, weight version {scored.version}, {capsule.numerics.mode} mode",
            *(f"  {line}" for line in capsule.about.why),
            grid(columns, rows, title="largest |d|"),
            *(
                f"{name}: recorded {each['recorded']}, again {each['rescored']}"
                for name, each in self.facts()["metrics"].items()
                if each["recorded"] != each["rescored"]
            ),
        )


def rescore(capsule: Capsule, apply: Callable[..., list[Any]]) -> Rescored:
    """Score a capsule's sequences with a trainer of one rank, in the capsule's numerics. apply: calls a function with
    the trainer and further arguments. Raises UserError: the trainer does not hold the weights of the manifest."""
    manifest, spec = capsule.manifest, capsule.numerics.rollout_spec
    sent = apply(would_hold, spec, capsule.experiment.rollout.tp)  # the weights, quantized as for the engine
    if differing := list(manifest.differences(Manifest.merged(int(manifest.version), spec, sent).entries)):
        found = f"{len(differing)} tensors of other digests, {differing[0]} among them"
        expected = f"the {len(manifest.entries)} digests of the manifest, weight version {manifest.version}"
        remedy = "Give the weights that scored these sequences, in BF16, with --model DIR."
        raise user_error("weights", found, expected, remedy)
    scored: Scored = apply(score_recorded, capsule.scored.batch)[0]
    rescored = dataclasses.replace(capsule.scored, logprobs=scored.logprobs, routes=scored.routes, draws=scored.draws)
    return Rescored(capsule, rescored, rescored.metrics() | rescored.drift())


def recorded(capsule: Capsule) -> TokenBatch:
    """Return a capsule's tokens with both sides' log-probabilities. Tokens of older weights are not in the loss mask,
    because they should differ."""
    scored = capsule.scored
    fields = scored.batch.fields | {"train_logprobs": scored.logprobs}
    return dataclasses.replace(scored.batch, loss_mask=scored.fresh, fields=fields)
