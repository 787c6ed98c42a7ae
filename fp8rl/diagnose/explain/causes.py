"""Ranks the possible causes of a difference, and says what to do about each.

Proven causes come first. A record is the log-probabilities that a side has recorded. The order is: scales that
reproduce a record; a weight whose digest differs; a temperature that explains the record; a record that the engine does
not reproduce; ops that differ on equal inputs, the largest difference first; the routing, if removing it helps.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from fp8rl.diagnose.explain.differences import ExpertDifference, OpDifference, TemperatureFit
from fp8rl.diagnose.report import Finding
from fp8rl.models import Model
from fp8rl.models.tensors import base_name
from fp8rl.numerics.config import NumericsConfig
from fp8rl.weight_sync.manifest import Manifest

NAMED_OWNERS = 8
"""If the weights of more than this many ops or experts differ, they are one finding."""

CLOSER = 0.5
"""A cause is a finding if removing it reduces mean |d| to at most this fraction."""

SELF_FLOOR = 1e-5
"""A side reproduces its record if mean |d| is at most this, about an ulp. A temperature that leaves a larger mean
explains nothing, because some temperature always reduces the differences of a broken engine."""

TEMPERATURE_STEP = 0.005
"""Relative difference below which two temperatures count as the same."""

Owner = tuple[int | None, str, int | None]
"""Layer, op and expert of a weight."""

EXPERTS = "experts"
"""The op of the routed experts."""

REMEDIES: dict[str, str] = {
    "scales": "Give both sides the scales of the run's spec.",
    "weights": "Sync again (gate action `resync`). If they differ again, compare both sides' versions of sglang.",
    "sampler": "Correct the temperature of the request to the engine, or of the batch.",
    "state": "Keep sync.canary on, which replaces such an engine, and compare the versions of sglang of both sides.",
    "quantization": "Set numerics.trainer=fp8, or numerics.rollout=bf16: a BF16 trainer and an FP8 engine never agree.",
    "op": "Compare the op's constants in both configs, and its weights with the synced weights.",
    "routing": "Set numerics.router_replay=replay.",
}
"""What to do about each cause."""


@dataclasses.dataclass(frozen=True)
class Cause:
    """One cause, with mean |d| before and after it was removed, on the same tokens."""

    name: Literal["sampler", "routing", "scales"]
    before: float
    after: float
    note: str
    """The change that removes the cause."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What was measured on a trainer and an engine. d is a token's trainer minus rollout log-probability, in nats."""

    model: Model
    numerics: NumericsConfig
    expected: Manifest
    """The weights that the engine must hold."""
    held: dict[str, str]
    """Digests of the weights that the engine holds."""
    temperature: float
    """Temperature of the batch."""
    fit: TemperatureFit | None = None
    """The temperature at which the engine's logits fit the record; None without a record."""
    wrong: Sequence[str] | None = None
    """Tensors that were wrong in the engine that sampled the batch; None: not known."""
    tokens: int = 0
    abs_diff_mean: float = 0.0
    """Mean recorded |d| over the `tokens` sampled tokens."""
    nonfinite: int = 0
    """Recorded log-probabilities that are not finite."""
    traced_tokens: int = 0
    live_abs_diff_mean: float = 0.0
    """Mean |d| between trainer and engine as they compute now, over the `traced_tokens`."""
    reproduced: float = 0.0
    """Mean |d| between engine and record, over the same tokens."""
    ops: Sequence[OpDifference] = ()
    experts: Sequence[ExpertDifference] = ()
    settings: dict[str, tuple[str, float, float]] = dataclasses.field(default_factory=dict)
    """For each op with a constant that differs: the constant's name, the trainer's value, the engine's value."""
    causes: Sequence[Cause] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings, the likeliest cause first; none if both sides agree. Their keys are keys of `REMEDIES`."""
        by_owner: dict[Owner, list[str]] = defaultdict(list)
        for name in sorted(self.expected.differences(self.held).keys() | {base_name(x)[0] for x in self.wrong or ()}):
            row = self.model.tensors.get(name)  # none of the adapters' scale
            by_owner[(None, name, None) if row is None else (row.layer, row.op, row.expert)].append(name)
        return (
            *_scales(self),
            *_weights(self, by_owner),
            *_record(self),
            *_ops(self, explained=() if self.wrong else by_owner.keys()),
            *(
                _finding("routing", f"{cause.note} changes mean |d| from {cause.before:.3g} to {cause.after:.3g}")
                for cause in self.causes
                if cause.name == "routing" and 0 < cause.before and cause.after <= CLOSER * cause.before
            ),
        )

    @property
    def differs(self) -> bool:
        """Trainer and engine differ in recorded or in new log-probabilities. Records under truncation are rounded."""
        return self.live_abs_diff_mean > 0 or self.abs_diff_mean > SELF_FLOOR or self.nonfinite > 0

    def facts(self) -> dict[str, Any]:
        """Return the facts for a report, without those that the subject has."""
        left_out = ("model", "numerics", "expected", "held", "temperature")
        return {name: value for name, value in vars(self).items() if name not in left_out}


def explains(fit: TemperatureFit | None, temperature: float, abs_diff_mean: float) -> bool:
    """Return whether another temperature fits to within noise. abs_diff_mean: mean |d| at `temperature`."""
    if fit is None or abs(fit.temperature / temperature - 1) < TEMPERATURE_STEP:
        return False
    return fit.abs_diff_mean <= min(CLOSER * abs_diff_mean, SELF_FLOOR)


def _finding(cause: str, found: str, names: Iterable[str] = ()) -> Finding:
    return Finding(cause, found, remedy=REMEDIES[cause], names=tuple(names))


def _scales(found: Comparison) -> Iterator[Finding]:
    """Yield a finding for each choice of scales, other than the spec's, that reproduces a side's record."""
    for cause in found.causes:
        if cause.name == "scales" and cause.after <= SELF_FLOOR:
            text = f"{cause.note} reproduce its record (the spec has {found.numerics.spec.weight.scale} scales)"
            yield _finding("scales", f"{text}: mean |d| {cause.before:.3g} without them, {cause.after:.3g} with them")


def _weights(found: Comparison, by_owner: dict[Owner, list[str]]) -> Iterator[Finding]:
    """Yield a finding for each op or expert with weights that differ, or one finding for all if they are many."""
    version, are = found.expected.version, "were" if found.wrong else "are"
    if len(by_owner) > NAMED_OWNERS:
        names = [name for group in by_owner.values() for name in group]
        of = f"{len(names)} of {len(found.expected.entries)} weights in the engine"
        yield _finding("weights", f"{of} {are} not the weights of version {version}", names)
        return
    sizes: dict[Owner, float] = {(each.layer, each.op, None): each.relative_rms for each in found.ops}
    sizes |= {(each.layer, EXPERTS, each.expert): each.relative_rms for each in found.experts}
    for owner in sorted(by_owner, key=lambda owner: -sizes.get(owner, 0.0)):
        layer, op, expert = owner
        subject = (op if layer is None else f"layer {layer} {op}") + ("" if expert is None else f", expert {expert}")
        differs = f"{subject} differs (relative RMS {sizes[owner]:.2g})" if sizes.get(owner) else subject
        text = f"{differs}: weights in the engine {are} not the weights of version {version}"
        yield _finding("weights", text, by_owner[owner])


def _record(found: Comparison) -> Iterator[Finding]:
    """Yield a finding if the record is of another temperature, or if the engine does not reproduce it. The latter
    counts only if the engine as it computes now agrees better with the trainer than with the record."""
    fit, given = found.fit, found.temperature
    if fit is not None and explains(fit, given, found.reproduced):
        yield _finding(
            "sampler",
            f"the rollout's log-probabilities fit the temperature {fit.temperature:.4g}, but the batch says "
            f"{given:.4g} (mean |d| between engine and record {found.reproduced:.3g}, and {fit.abs_diff_mean:.3g} at "
            f"{fit.temperature:.4g})",
        )
        return
    said = ""
    if found.nonfinite:
        said = f"{found.nonfinite} recorded log-probabilities are not finite"
    elif found.reproduced > max(found.live_abs_diff_mean / CLOSER, SELF_FLOOR):
        said = f"the engine does not reproduce the recorded log-probabilities (mean |d| {found.reproduced:.3g})"
    by = "other weights, stale operands of former weights or another sampler produced these tokens"
    if found.wrong == [] and not found.nonfinite:
        by = (
            "by their digests the engine held the right weights, so either it computed with stale operands, keys, "
            "values or states, or another sampler produced these tokens"
        )
    if said:
        yield _finding("state", f"{said}, and trainer and engine agree to {found.live_abs_diff_mean:.3g} now: {by}")


def _ops(found: Comparison, explained: Iterable[Owner]) -> Iterator[Finding]:
    """Yield a finding for each op that differs where no weight explains it, the largest difference first. It names all
    such layers. Products that only one side quantizes are one finding."""
    known = {(layer, op) for layer, op, _ in explained}
    groups: dict[str, list[OpDifference]] = defaultdict(list)
    for each in sorted(found.ops, key=lambda each: -each.relative_rms):
        if each.relative_rms > 0 and (each.layer, each.op) not in known:
            groups[each.op].append(each)
    trainer, engine = ("BF16" if each == "bf16" else "FP8" for each in (found.numerics.trainer, found.numerics.rollout))
    quantizable = {row.op for row in found.model.tensors.rows.values() if row.kind} if trainer != engine else set()
    products = [groups.pop(op) for op in list(groups) if op in quantizable]
    if products:
        named = ", ".join(f"{group[0].op} by {group[0].relative_rms:.2g}" for group in products)
        text = f"the trainer multiplies in {trainer} and the engine in {engine} (relative RMS of {named})"
        yield _finding(
            "quantization", text, (each.place for each in found.ops if any(each in group for group in products))
        )
    for op, group in groups.items():
        worst, layers = group[0], {each.layer for each in group}
        text = f"the op {op} differs on equal inputs (relative RMS {worst.relative_rms:.2g}, "
        text += f"{worst.differing:.0%} of the elements)"
        if op in found.settings:
            name, ours, theirs = found.settings[op]
            text += f": {name} is {ours:g} in the trainer and {theirs:g} in the engine"
        seen = [each for each in found.experts if each.layer in layers and each.tokens] if op == EXPERTS else []
        differing = [each for each in seen if each.relative_rms > 0]
        few = differing if 2 * len(differing) <= len(seen) else []  # experts are named if most are spared
        yield _finding("op", text, (each.place for each in few or found.ops if each in few or each in group))
