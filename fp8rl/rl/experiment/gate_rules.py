"""Refuses gates on metrics that the run does not measure, gates that can never act, and contradicting gates.

A `Condition` says whether a run has what a metric needs; fp8rl/rl/record/metrics.md names each metric's conditions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from fp8rl.numerics.core.errors import UserError, user_error
from fp8rl.rl.algorithms.policy_gradient import PolicyGradient
from fp8rl.rl.experiment.experiment import Experiment
from fp8rl.rl.experiment.gate_sections import SEVERITY, WITHHOLDING, GateSection
from fp8rl.rl.record.metrics import REWARD_PARTS, Metric, metric
from fp8rl.rollout.tasks.rewards.builtin import BUILT_IN


def gate_refusals(experiment: Experiment) -> Iterator[UserError]:
    """Yield an error for each rule that the gates of a spec break: first single gates, then pairs."""
    for index, gate in enumerate(experiment.gates):
        yield from _alone(index, gate, experiment)
    for (first, one), (second, other) in combinations(enumerate(experiment.gates), 2):
        if one.metric != other.metric:
            continue
        if (one.bound, one.action) == (other.bound, other.action):
            found = f"{other.action} on {other.metric} {other.bound}"
            expected = f"another condition or action than gates.{first}"
            yield user_error(f"gates.{second}", found, expected, "Remove one of the two.")
        above = one.above if one.above is not None else other.above
        below = one.below if one.below is not None else other.below
        if above is not None and below is not None and below > above:
            found = f"{other.metric} {other.bound}, while gates.{first} has {one.bound}"
            expected = "a value between the two bounds that satisfies both"
            remedy = f"Set below to at most {above}, or above to at least {below}."
            yield user_error(f"gates.{second}", found, expected, remedy)


@dataclass(frozen=True)
class Condition:
    """Whether an experiment meets a condition that some metrics need."""

    holds: bool
    setting: str
    """The settings that decide whether the condition holds, with their values."""
    expected: str
    """The message's words after "expected", if the condition does not hold."""


def conditions(e: Experiment) -> dict[str, Condition]:
    """Return every condition that a metric may need, by the condition's name."""
    algorithm, numerics, correction = e.algorithm, e.numerics, e.algorithm.correction
    name = f"algorithm.name={algorithm.name}"
    problems = f"{name}, eval.problems={e.eval.problems}"
    corrects = name
    if isinstance(algorithm, PolicyGradient):
        corrects = f"algorithm.tis_cap={algorithm.tis_cap}, ratio={algorithm.ratio}, rejection={algorithm.rejection}"
    capped = "tis_cap" in type(algorithm).model_fields and correction.tis_cap is not None
    merged = e.adapter is not None and e.adapter.mode == "merged" and numerics.trainer != "bf16"
    mode = e.adapter.mode if e.adapter else None
    return {
        "samples": Condition(algorithm.samples, name, "an algorithm that samples answers"),
        "engines": Condition(e.needs_engines, problems, "a run that samples answers or evaluates"),
        "canary": _switch("sync.canary", e.sync.canary, e.needs_engines),
        "evaluation": Condition(e.eval.problems > 0, problems, "eval.problems above 0"),
        "environment": Condition(e.has_environment, f"environment={e.environment.function}", "an environment"),
        "staleness": _above("rollout.staleness", e.rollout.staleness, 0),
        "several_engines": _above("rollout.engines", e.rollout.engines, 1),
        "sleep": _switch("rollout.sleep", e.rollout.sleep, e.needs_engines),
        "routes": Condition(
            numerics.router_replay != "off",
            f"numerics.router_replay={numerics.router_replay}",
            "numerics.router_replay=record or replay",
        ),
        "redraws": Condition(
            e.redraws > 0,
            f"numerics.mode={numerics.mode}, guard.redraws={e.guard.redraws}",
            "exact mode and guard.redraws above 0",
        ),
        "prefix_sharing": _switch("trainer.prefix_sharing", e.trainer.prefix_sharing),
        "fp8_kv": Condition(numerics.kv == "fp8", f"numerics.kv={numerics.kv}", "numerics.kv=fp8"),
        "merged": Condition(
            merged,
            f"adapter.mode={mode}, numerics.trainer={numerics.trainer}",
            "adapter.mode=merged and a trainer that quantizes",
        ),
        "weights": Condition(correction.weighs, corrects, "an algorithm with an importance weight"),
        "tis_cap": Condition(capped, corrects, "an importance weight with algorithm.tis_cap"),
        "rejection": Condition(correction.rejects, corrects, "algorithm.rejection or algorithm.veto"),
        "reference": Condition(algorithm.needs.reference, name, "a coefficient of algorithm.kl above 0"),
        "teacher": Condition(algorithm.needs.teacher, name, "an algorithm that asks a teacher"),
        "critic": Condition(algorithm.needs.critic, name, "an algorithm with a critic"),
    }


def _switch(key: str, on: bool, also: bool = True) -> Condition:
    return Condition(on and also, f"{key}={str(on).lower()}", f"{key}=true")


def _above(key: str, value: int, least: int) -> Condition:
    return Condition(value > least, f"{key}={value}", f"{key} above {least}")


def missing(metric: Metric, experiment: Experiment) -> Condition | None:
    """Return the first condition of a metric that an experiment does not meet; None if the run measures the metric."""
    known = conditions(experiment)
    return next((known[need] for need in metric.needs if not known[need].holds), None)


_OF_NUMBER = re.compile(r"mismatch/.+_pos_(?P<position>\d+)|(?:rollout/tokens|drift/.+)_age_(?P<age>\d+)")
_MAY_BE_LATE = [action for action in SEVERITY if action not in WITHHOLDING or action == "checkpoint_and_stop"]


def _alone(index: int, gate: GateSection, e: Experiment) -> Iterator[UserError]:
    key, action, measured = f"gates.{index}", gate.action, metric(gate.metric)
    if not e.algorithm.samples and action != "warn":
        expected = f"warn, as the {e.algorithm.name} algorithm samples nothing, so no other action applies"
        yield user_error(f"{key}.action", action, expected, "Set it to warn, or remove the gate.")
    if (unmet := missing(measured, e)) is not None:
        found = f"{gate.metric} with {unmet.setting}"
        expected = f"{unmet.expected}, without which there is no such metric"
        yield user_error(f"{key}.metric", found, expected, "Choose another metric, or set what it needs.")
    if (known := _known(gate.metric, e)) is not None:
        expected = f"one of {', '.join(known)}" if known else "another metric: this run has none of that kind"
        yield user_error(f"{key}.metric", gate.metric, expected, "Correct the name, or remove the gate.")
    if (number := _OF_NUMBER.fullmatch(gate.metric)) is not None:
        setting = "rollout.staleness=0" if int(number["age"] or 0) and not e.rollout.staleness else ""
        if int(number["position"] or 0) >= e.rollout.max_new_tokens:
            setting = f"rollout.max_new_tokens={e.rollout.max_new_tokens}"
        if setting:
            expected = "a name whose number occurs in this run"
            remedy = "Choose a lower one, or another metric."
            yield user_error(f"{key}.metric", f"{gate.metric} with {setting}", expected, remedy)
    if measured.flat_at_first and e.algorithm.updates > 1:
        found = f"{gate.metric} with {e.algorithm.updates} updates of a batch"
        expected = (
            "another metric: gates see the first pass of a step, in which the policy still equals the one that scored "
            "the batch"
        )
        remedy = (
            "Choose another metric, such as train/grad_norm, or set algorithm.updates_per_batch=1 and "
            "algorithm.epochs=1."
        )
        yield user_error(f"{key}.metric", found, expected, remedy)
    if measured.late and action not in _MAY_BE_LATE:
        found = f"{action} on {gate.metric}, which is measured after a step's decision"
        allowed = f"{', '.join(_MAY_BE_LATE[:-1])} or {_MAY_BE_LATE[-1]}"
        expected = f"{allowed}, because the metric may never recover without updates"
        remedy = "Choose one of these actions, or a metric that is measured before the update."
        yield user_error(f"{key}.action", found, expected, remedy)
    numerics = e.numerics
    differ = numerics.mode != "exact" or numerics.trainer != numerics.rollout
    equality = ("abs_diff" in gate.metric and gate.above == 0.0) or (
        gate.metric == "mismatch/exact_frac" and gate.below == 1.0
    )
    if equality and differ and action in ("skip_step", "resync"):
        sides = f"numerics.mode={numerics.mode}, trainer={numerics.trainer}, rollout={numerics.rollout}"
        expected = "a bound above the difference that such a run always has; otherwise no batch is trained on"
        remedy = (
            "Set a bound above the value that `fp8rl doctor SPEC` measures, or use exact mode with one precision on "
            "both sides."
        )
        yield user_error(key, f"{action} on {gate.metric} {gate.bound} with {sides}", expected, remedy)
    cap, whole = gate.tis_cap or 1.0, e.algorithm.correction.tis_cap
    if action == "tighten_tis" and cap >= (whole or 0.0):
        expected = f"less than algorithm.tis_cap={whole}, the cap that the gate tightens"
        yield user_error(f"{key}.tis_cap", cap, expected, "Give a lower cap, or set algorithm.tis_cap above it.")
    if action == "enable_r3" and numerics.router_replay != "record":
        found = f"enable_r3 with numerics.router_replay={numerics.router_replay}"
        expected = "numerics.router_replay=record, so that the gate has routes to replay"
        remedy = "Set numerics.router_replay=record, or choose another action."
        yield user_error(f"{key}.action", found, expected, remedy)
    if action == "bf16_both" and not numerics.quantizes:
        found, expected = "bf16_both with both sides in BF16", "a side in FP8 to fall back from"
        remedy = "Choose another action, or set numerics.trainer or numerics.rollout to fp8."
        yield user_error(f"{key}.action", found, expected, remedy)


def _known(name: str, experiment: Experiment) -> Sequence[str] | None:
    """Return None if the run may have the metric `name`; otherwise the metrics of this kind that the run has."""
    known: list[str] = []
    if name.startswith(REWARD_PARTS):
        functions = experiment.rewards.functions
        whole = {reward.function for reward in functions} <= BUILT_IN.keys() - {"http"}  # which may return several
        known = [REWARD_PARTS + reward.label for reward in functions] if len(functions) > 1 or not whole else []
        name = "/".join(name.split("/")[:3])
    elif name.startswith("eval/") and name != "eval/at_step":
        if experiment.data.eval is not None:
            known += ["eval/accuracy", "eval/problems", "eval/graded"]
        for held_out in experiment.eval.sets:
            names = ["accuracy", "problems", "graded", "finished_fraction", "response_tokens_mean"]
            names += [f"avg@{held_out.samples}"] * (held_out.samples > 1) + [f"pass@{k}" for k in held_out.pass_at]
            known += [f"eval/{held_out.name}/{name}" for name in names]
    else:
        return None
    return None if name in known else known
