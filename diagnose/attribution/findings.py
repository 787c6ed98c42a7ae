"""Makes a ranked answer of the clues.

Proof comes first: a weight whose digest differs, then a temperature that explains the record, then a record that this
engine does not reproduce, then ops that differ on equal inputs, the largest difference first, and last the causes that
were switched off one at a time.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeVar

from fp8rl.diagnose.attribution.attribution_report import Cause, ExpertDifference, Finding, OpDifference
from fp8rl.diagnose.attribution.compare import TemperatureFit
from fp8rl.models import Model
from fp8rl.models.tensors import SCALE_SUFFIX
from fp8rl.numerics.config import Mode, NumericsConfig
from fp8rl.weight_sync.manifest import Manifest

NATIVE_FLOOR = 2.0**-7
"""Relative RMS that two correct definitions of an op stay below: twice the spacing of BF16 numbers."""

NAMED_OWNERS = 8
"""Weights of more ops or experts than this are one finding."""

CLOSER = 0.5
"""A cause is a finding if without it mean |d| is at most this fraction of what it was."""

SELF_FLOOR: dict[Mode, float] = {"exact": 1e-5, "native": 0.05}
"""Mean |d| up to which an engine gives its own record again: in exact mode an ulp, in native mode what another
composition of the batch makes of FP8. A temperature that leaves more explains nothing: some temperature always flattens
the differences of a broken engine."""

TEMPERATURE_STEP = 0.005
"""Relative change of temperature below which two are the same."""

Owner = tuple[int | None, str, int | None]
"""Layer, op and expert that a tensor is a weight of."""

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Clues:
    """What the ranking looks at.

    model: whose ops and weights they are.
    expected, held: the weights that the engine must hold, and those that it holds.
    temperature: that the batch gives. fit: of the engine's own logits to the record; None without a record.
    reproduced, live: mean |d| over the same sampled tokens, between engine and record, and between trainer and engine.
    nonfinite: recorded log-probabilities that are not finite.
    settings: (name, trainer's, engine's) of each constant that differs, by the op that it belongs to.
    """

    model: Model
    numerics: NumericsConfig
    expected: Manifest
    held: dict[str, str]
    temperature: float
    fit: TemperatureFit | None = None
    reproduced: float = 0.0
    live: float = 0.0
    nonfinite: int = 0
    ops: Sequence[OpDifference] = ()
    experts: Sequence[ExpertDifference] = ()
    settings: dict[str, tuple[str, float, float]] = dataclasses.field(default_factory=dict)
    causes: Sequence[Cause] = ()


def rank(clues: Clues) -> tuple[Finding, ...]:
    """The findings, the answer first; none if nothing differs by more than the mode's floor."""
    by_owner = _differing_weights(clues)
    sampler = _sampler(clues)
    return (
        *_weights(clues, by_owner),
        *sampler,
        *([] if sampler else _state(clues)),
        *_ops(clues, explained=by_owner.keys()),
        *_switched(clues.causes),
    )


def one_side_quantizes(numerics: NumericsConfig) -> bool:
    """Whether one side multiplies in FP8 and the other in BF16."""
    return _precision(numerics.trainer) != _precision(numerics.rollout)


def uncommitted(expected: Manifest, found: dict[str, str]) -> bool:
    """Return whether the engine's last update was never committed: it holds no digest of quantized weights then."""
    return any("@" in digest and "@" not in found.get(name, "@") for name, digest in expected.entries.items())


def _differing_weights(clues: Clues) -> dict[Owner, list[str]]:
    owners: dict[Owner, list[str]] = defaultdict(list)
    for name in sorted(clues.expected.mismatched(clues.held)):
        row = clues.model.tensors[name]
        owners[row.layer, row.op, row.expert].append(name)
    return owners


def _weights(clues: Clues, by_owner: dict[Owner, list[str]]) -> list[Finding]:
    version, total = clues.expected.version, len(clues.expected.entries)
    names = tuple(name for group in by_owner.values() for name in group)
    if uncommitted(clues.expected, clues.held):
        text = "the engine's last weight update was not committed: it computes with no weights until a sync succeeds"
        return [Finding("weights", text, tensors=names)]
    if len(by_owner) > NAMED_OWNERS:
        layers = tuple(sorted({layer for layer, _, _ in by_owner if layer is not None}))
        text = f"{len(names)} of {total} weights in the engine are not those of version {version}"
        return [Finding("weights", text, layers=layers, tensors=names)]
    sizes = {where: _size(clues, where) for where in by_owner}
    return [_weight_finding(where, by_owner[where], sizes[where], version) for where in _descending(sizes)]


def _weight_finding(where: Owner, names: list[str], size: float, version: str) -> Finding:
    layer, op, expert = where
    subject = _place(layer, op) + ("" if expert is None else f": expert {expert}")
    held = ", ".join(_short(name) for name in names)
    text = f"{subject} differs (relative RMS {size:.2g}): in the engine, {held} are not those of version {version}"
    return Finding(
        "weights",
        text,
        op=op,
        layers=() if layer is None else (layer,),
        experts=() if expert is None else (expert,),
        tensors=tuple(names),
    )


def explains(fit: TemperatureFit | None, temperature: float, abs_diff_mean: float, mode: Mode) -> bool:
    """Whether a fit differs from the temperature that was given, with mean |d| there, and leaves no more than noise."""
    if fit is None or abs(fit.temperature / temperature - 1) < TEMPERATURE_STEP:
        return False
    return fit.abs_diff_mean <= min(CLOSER * abs_diff_mean, SELF_FLOOR[mode])


def _sampler(clues: Clues) -> list[Finding]:
    fit, said = clues.fit, clues.temperature
    if fit is None or not explains(fit, said, clues.reproduced, clues.numerics.mode):
        return []
    text = (
        f"sampler: the rollout's log-probabilities are those of temperature {fit.temperature:.4g}, and the batch says "
        f"{said:.4g} (mean |d| between engine and record {clues.reproduced:.3g}, and {fit.abs_diff_mean:.3g} at "
        f"{fit.temperature:.4g})"
    )
    return [Finding("sampler", text, op="logprobs")]


def _state(clues: Clues) -> list[Finding]:
    """The engine of now does not give what was recorded, and agrees with the trainer better than the record does."""
    if clues.nonfinite:
        said = f"{clues.nonfinite} recorded log-probabilities are not finite"
    elif clues.reproduced > max(clues.live / CLOSER, SELF_FLOOR[clues.numerics.mode]):
        said = f"the engine does not give the recorded log-probabilities again (mean |d| {clues.reproduced:.3g})"
    else:
        return []
    text = (
        f"state: {said}, and trainer and engine agree to {clues.live:.3g} now: what sampled these tokens had other "
        "weights, or another sampler"
    )
    return [Finding("state", text)]


def _ops(clues: Clues, explained: Iterable[Owner]) -> list[Finding]:
    """One finding for each op that differs where no weight explains it, with all layers in which it does.

    Products of which one side alone quantizes are one finding together. In native mode an op that stays below the floor
    is a finding only if all do, and it is the largest of them.
    """
    known = {(layer, op) for layer, op, _ in explained}
    unexplained = [d for d in clues.ops if d.relative_rms > 0 and (d.layer, d.op) not in known]
    groups = _by_op(d for d in unexplained if d.relative_rms > _floor(clues))
    if unexplained and not groups:
        worst = _worst(unexplained)
        return [_op_finding(clues, _by_op(unexplained)[worst.op], "; no op differs by more than roundings do")]
    quantized: list[Finding] = []
    if one_side_quantizes(clues.numerics):
        quantizable = {row.op for row in clues.model.tensors.rows.values() if row.kind}
        products = [op for op in groups if op in quantizable]
        quantized = [_quantization(clues, {op: groups.pop(op) for op in products})] if products else []
    sizes = {op: _worst(group).relative_rms for op, group in groups.items()}
    return quantized + [_op_finding(clues, groups[op]) for op in _descending(sizes)]


def _floor(clues: Clues) -> float:
    return NATIVE_FLOOR if clues.numerics.mode == "native" else 0.0


def _by_op(differences: Iterable[OpDifference]) -> dict[str, list[OpDifference]]:
    groups: dict[str, list[OpDifference]] = defaultdict(list)
    for difference in differences:
        groups[difference.op].append(difference)
    return groups


def _quantization(clues: Clues, groups: dict[str, list[OpDifference]]) -> Finding:
    named = ", ".join(f"{op} by {_worst(group).relative_rms:.2g}" for op, group in groups.items())
    layers = tuple(sorted({d.layer for group in groups.values() for d in group if d.layer is not None}))
    text = (
        f"quantization: the trainer multiplies in {_precision(clues.numerics.trainer)} and the engine in "
        f"{_precision(clues.numerics.rollout)} (relative RMS of {named})"
    )
    return Finding("quantization", text, layers=layers)


def _op_finding(clues: Clues, group: list[OpDifference], remark: str = "") -> Finding:
    worst = _worst(group)
    op, layers = worst.op, tuple(d.layer for d in group if d.layer is not None)
    experts = _experts_that_differ(clues, layers) if op == "experts" else ()
    subject = f"expert{'s' * (len(experts) > 1)} {', '.join(map(str, experts))}" if experts else op
    verb = "differ" if subject.startswith(("experts", "logprobs")) else "differs"
    text = (
        f"{subject} {verb}{_where(clues, op, layers)} on equal inputs (relative RMS {worst.relative_rms:.2g}, "
        f"{worst.differing:.0%} of the elements{_definition(clues, op)})"
    )
    if op in clues.settings:
        name, ours, theirs = clues.settings[op]
        text += f": {name} is {ours:g} in the trainer and {theirs:g} in the engine"
    return Finding("op", text + remark, op=op, layers=layers, experts=experts)


def _definition(clues: Clues, op: str) -> str:
    """What both sides should have called."""
    form = next(place.op.form for place in clues.model.forward.places() if place.op.name == op)
    return f"; in exact mode it is {form.defined_by}" if clues.numerics.mode == "exact" and form.definition else ""


def _precision(configured: str) -> str:
    return "BF16" if configured == "bf16" else "FP8"


def _worst(group: Sequence[OpDifference]) -> OpDifference:
    return max(group, key=lambda difference: difference.relative_rms)


def _where(clues: Clues, op: str, layers: Sequence[int]) -> str:
    if len(layers) > 1 and len(layers) == sum(d.op == op for d in clues.ops):
        return " in every layer"
    return f" in layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}" if layers else ""


def _experts_that_differ(clues: Clues, layers: Sequence[int]) -> tuple[int, ...]:
    """The experts behind a difference that spares most; none where many experts differ."""
    floor = _floor(clues)
    seen = [expert for expert in clues.experts if expert.layer in layers and expert.tokens]
    differing = {expert.expert for expert in seen if expert.relative_rms > floor}
    return tuple(sorted(differing)) if 2 * len(differing) <= len({expert.expert for expert in seen}) else ()


def _switched(causes: Sequence[Cause]) -> list[Finding]:
    telling = [c for c in causes if c.name in ("routing", "quantization", "op definitions")]
    telling = sorted((c for c in telling if c.after <= CLOSER * c.before and c.before > 0), key=lambda c: c.after)
    return [Finding(c.name, f"{c.name}: {c.note} takes mean |d| from {c.before:.3g} to {c.after:.3g}") for c in telling]


def _size(clues: Clues, where: Owner) -> float:
    """Relative RMS of what an op or expert puts out."""
    layer, op, expert = where
    if expert is not None:
        found = [e.relative_rms for e in clues.experts if (e.layer, e.expert) == (layer, expert)]
    else:
        found = [d.relative_rms for d in clues.ops if (d.layer, d.op) == (layer, op)]
    return found[0] if found else 0.0


def _descending(sizes: dict[T, float]) -> list[T]:
    """Sorted by size, the largest first; equal ones in their order."""
    return sorted(sizes, key=lambda item: -sizes[item])


def _place(layer: int | None, op: str) -> str:
    return op if layer is None else f"layer {layer} {op}"


def _short(name: str) -> str:
    """`q_proj` or `q_proj scales` of an HF name."""
    plain = name.removesuffix(SCALE_SUFFIX)
    return plain.removesuffix(".weight").rpartition(".")[2] + (" scales" if plain != name else "")
