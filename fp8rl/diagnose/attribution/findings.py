"""Ranks the findings that the clues support.

Proof comes first. The order is: scales that reproduce a record; a weight whose digest differs; a temperature that
explains the record; a record that its side does not reproduce; ops that differ on equal inputs, the largest difference
first; causes that were switched off one at a time.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from fp8rl.diagnose.attribution.attribution_report import Cause, ExpertDifference, Finding, OpDifference
from fp8rl.diagnose.attribution.compare import TemperatureFit
from fp8rl.models import Model
from fp8rl.models.tensors import SCALE_SUFFIX, base_name
from fp8rl.numerics.config import NumericsConfig
from fp8rl.weight_sync.manifest import Manifest

NAMED_OWNERS = 8
"""If weights of more ops or experts than this differ, they are one finding."""

CLOSER = 0.5
"""A cause is a finding if without it mean |d| is at most this fraction of what it was."""

SELF_FLOOR = 1e-5
"""Mean |d|, about an ulp, up to which a side counts as reproducing its own record. A temperature that leaves a larger
mean explains nothing: some temperature always flattens the differences of a broken engine."""

TEMPERATURE_STEP = 0.005
"""Relative difference below which two temperatures count as the same."""

Owner = tuple[int | None, str, int | None]
"""Layer, op and expert that a tensor is a weight of."""


@dataclasses.dataclass(frozen=True)
class Evidence:
    """The observations that are ranked."""

    model: Model
    numerics: NumericsConfig
    expected: Manifest
    """The weights that the engine must hold."""
    held: dict[str, str]
    """Digests of the weights that the engine holds."""
    temperature: float
    """Temperature of the batch."""
    fit: TemperatureFit | None = None
    """The fit of the engine's own logits to the record; None without a record."""
    wrong: Sequence[str] | None = None
    """Tensors that differed from the trainer's in the engine that sampled the batch; None: not known."""
    reproduced: float = 0.0
    """Mean |d| between engine and record."""
    rescored: float = 0.0
    """Mean |d| between trainer and its record."""
    live: float = 0.0
    """Mean |d| between trainer and engine, over the same sampled tokens."""
    nonfinite: int = 0
    """Recorded log-probabilities that are not finite."""
    ops: Sequence[OpDifference] = ()
    experts: Sequence[ExpertDifference] = ()
    settings: dict[str, tuple[str, float, float]] = dataclasses.field(default_factory=dict)
    """For each op with a constant that differs: the constant's name, the trainer's value, the engine's value."""
    causes: Sequence[Cause] = ()


def rank(clues: Evidence) -> tuple[Finding, ...]:
    """Return the findings, the answer first; none if nothing differs by more than the mode's floor."""
    by_owner: dict[Owner, list[str]] = defaultdict(list)
    for name in sorted(clues.expected.mismatched(clues.held) | {base_name(label)[0] for label in clues.wrong or ()}):
        row = clues.model.tensors.get(name)  # none of the adapters' scale
        by_owner[(None, name, None) if row is None else (row.layer, row.op, row.expert)].append(name)
    telling = [
        cause
        for cause in clues.causes
        if cause.name == "routing" and 0 < cause.before and cause.after <= CLOSER * cause.before
    ]
    return (
        *_scales(clues),
        *_weights(clues, by_owner),
        *_record(clues),
        *_ops(clues, explained=() if clues.wrong else by_owner.keys()),
        *(
            Finding(c.name, f"{c.name}: {c.note} takes mean |d| from {c.before:.3g} to {c.after:.3g}")
            for c in sorted(telling, key=lambda cause: cause.after)
        ),
    )


def explains(fit: TemperatureFit | None, temperature: float, abs_diff_mean: float) -> bool:
    """Return whether a fit leaves only noise, and differs from `temperature`, which leaves `abs_diff_mean`."""
    if fit is None or abs(fit.temperature / temperature - 1) < TEMPERATURE_STEP:
        return False
    return fit.abs_diff_mean <= min(CLOSER * abs_diff_mean, SELF_FLOOR)


def _scales(clues: Evidence) -> Iterator[Finding]:
    """Yield a finding for each choice of scales, other than the spec's, that reproduces a side's record."""
    for cause in clues.causes:
        if cause.name == "scales" and cause.after <= SELF_FLOOR:
            text = f"scales: {cause.note}, where the numerics say {clues.numerics.spec.weight.scale}, give its record"
            yield Finding("scales", f"{text} (mean |d| {cause.before:.3g} without them, {cause.after:.3g} with them)")


def _weights(clues: Evidence, by_owner: dict[Owner, list[str]]) -> list[Finding]:
    """Return a finding for each op or expert with weights that differ, or one finding for all if they are many."""
    version, total, are = clues.expected.version, len(clues.expected.entries), "were" if clues.wrong else "are"
    names = tuple(name for group in by_owner.values() for name in group)
    if len(by_owner) > NAMED_OWNERS:
        layers = tuple(sorted({layer for layer, _, _ in by_owner if layer is not None}))
        text = f"{len(names)} of {total} weights in the engine {are} not those of version {version}"
        return [Finding("weights", text, layers=layers, tensors=names)]

    def size(owner: Owner) -> float:
        """Return the relative RMS of the output of an op or expert."""
        layer, op, expert = owner
        if expert is not None:
            found = [e.relative_rms for e in clues.experts if (e.layer, e.expert) == (layer, expert)]
        else:
            found = [d.relative_rms for d in clues.ops if (d.layer, d.op) == (layer, op)]
        return found[0] if found else 0.0

    findings = []
    for owner in sorted(by_owner, key=size, reverse=True):
        layer, op, expert = owner
        subject = (op if layer is None else f"layer {layer} {op}") + ("" if expert is None else f": expert {expert}")
        held = ", ".join(_short(name) for name in by_owner[owner])
        differs = f"{subject} differs (relative RMS {size(owner):.2g}): " if size(owner) else f"{subject}: "
        text = f"{differs}in the engine, {held} {are} not those of version"
        findings.append(
            Finding(
                "weights",
                f"{text} {version}",
                op=op,
                layers=() if layer is None else (layer,),
                experts=() if expert is None else (expert,),
                tensors=tuple(by_owner[owner]),
            )
        )
    return findings


def _record(clues: Evidence) -> list[Finding]:
    """Return findings on a record of another temperature, or on a record that its side does not reproduce. The engine's
    record counts only if the engine as it is now agrees better with the trainer than with that record."""
    fit, given = clues.fit, clues.temperature
    if fit is not None and explains(fit, given, clues.reproduced):
        text = (
            f"sampler: the rollout's log-probabilities are those of temperature {fit.temperature:.4g}, and the batch "
            f"says {given:.4g} (mean |d| between engine and record {clues.reproduced:.3g}, and "
            f"{fit.abs_diff_mean:.3g} at {fit.temperature:.4g})"
        )
        return [Finding("sampler", text, op="logprobs")]
    said = ""
    if clues.nonfinite:
        said = f"{clues.nonfinite} recorded log-probabilities are not finite"
    elif clues.reproduced > max(clues.live / CLOSER, SELF_FLOOR):
        said = f"the engine does not reproduce the recorded log-probabilities (mean |d| {clues.reproduced:.3g})"
    texts = []
    if said:
        by = "other weights, stale operands of former weights or another sampler produced these tokens"
        if clues.wrong == [] and not clues.nonfinite:
            by = (
                "the engine held the right weights, by their digests, so it computed with stale operands of former "
                "weights, or with stale keys, values or states, or another sampler produced these tokens"
            )
        texts.append(f"{said}, and trainer and engine agree to {clues.live:.3g} now: {by}")
    if clues.rescored > SELF_FLOOR:
        texts.append(
            f"the trainer does not reproduce its recorded log-probabilities (mean |d| {clues.rescored:.3g}): it "
            "computed in other numerics or with other weights than the capsule says"
        )
    return [Finding("state", f"state: {text}") for text in texts]


def _ops(clues: Evidence, explained: Iterable[Owner]) -> list[Finding]:
    """Return a finding for each op that differs in layers where no weight explains it, with all these layers.

    Products that only one side quantizes are one finding together.
    """
    known = {(layer, op) for layer, op, _ in explained}
    groups: dict[str, list[OpDifference]] = defaultdict(list)
    for difference in clues.ops:
        if difference.relative_rms > 0 and (difference.layer, difference.op) not in known:
            groups[difference.op].append(difference)
    findings: list[Finding] = []
    if _precision(clues.numerics.trainer) != _precision(clues.numerics.rollout):
        quantizable = {row.op for row in clues.model.tensors.rows.values() if row.kind}
        products = {op: groups.pop(op) for op in list(groups) if op in quantizable}
        if products:
            named = ", ".join(f"{op} by {_worst(group).relative_rms:.2g}" for op, group in products.items())
            layers = {d.layer for group in products.values() for d in group if d.layer is not None}
            sides = (
                f"the trainer multiplies in {_precision(clues.numerics.trainer)} and the engine in "
                f"{_precision(clues.numerics.rollout)}"
            )
            text = f"quantization: {sides} (relative RMS of {named})"
            findings.append(Finding("quantization", text, layers=tuple(sorted(layers))))
    largest_first = sorted(groups.values(), key=lambda group: -_worst(group).relative_rms)
    return findings + [_op_finding(clues, group) for group in largest_first]


def _op_finding(clues: Evidence, group: list[OpDifference]) -> Finding:
    worst = _worst(group)
    op, layers = worst.op, tuple(d.layer for d in group if d.layer is not None)
    experts: tuple[int, ...] = ()
    if op == "experts":  # those behind a difference that spares most; none where many differ
        seen = [expert for expert in clues.experts if expert.layer in layers and expert.tokens]
        differing = {expert.expert for expert in seen if expert.relative_rms > 0}
        if 2 * len(differing) <= len({expert.expert for expert in seen}):
            experts = tuple(sorted(differing))
    subject = f"expert{'s' * (len(experts) > 1)} {', '.join(map(str, experts))}" if experts else op
    verb = "differ" if subject.startswith(("experts", "logprobs")) else "differs"
    where = f" in layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}" if layers else ""
    if len(layers) > 1 and len(layers) == sum(d.op == op for d in clues.ops):
        where = " in every layer"
    form = next(site.op.form for site in clues.model.forward.sites() if site.op.name == op)
    definition = f"; it is {form.defined_by}" if form.definition else ""
    text = (
        f"{subject} {verb}{where} on equal inputs (relative RMS {worst.relative_rms:.2g}, "
        f"{worst.differing:.0%} of the elements{definition})"
    )
    if op in clues.settings:
        name, ours, theirs = clues.settings[op]
        text += f": {name} is {ours:g} in the trainer and {theirs:g} in the engine"
    return Finding("op", text, op=op, layers=layers, experts=experts)


def _worst(group: Sequence[OpDifference]) -> OpDifference:
    return max(group, key=lambda difference: difference.relative_rms)


def _precision(configured: str) -> str:
    return "BF16" if configured == "bf16" else "FP8"


def _short(name: str) -> str:
    """Shorten an HF name to `q_proj` or `q_proj scales`."""
    plain = name.removesuffix(SCALE_SUFFIX)
    return plain.removesuffix(".weight").rpartition(".")[2] + (" scales" if plain != name else "")
