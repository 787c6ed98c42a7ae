"""Gates that a spec may not have: those that can never see their metric, or act on it, and two that contradict.

A condition says when a run has what a metric needs (fp8rl/rl/record/metrics.md names it); a rule, what is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

from fp8rl.numerics.core.errors import Rule, check_rules
from fp8rl.rl.algorithms.policy_gradient import PolicyGradient
from fp8rl.rl.experiment.gate_sections import SEVERITY, WITHHOLDING, GateSection
from fp8rl.rl.record.metrics import Metric, metric
from fp8rl.rollout.tasks.environments.config import SINGLE_TURN

if TYPE_CHECKING:
    from fp8rl.rl.experiment.experiment import Experiment


def check_gates(experiment: Experiment) -> None:
    """Raise `UserError` for the first rule that a gate breaks, alone or with another one."""
    gates = [NumberedGate(index, gate, experiment) for index, gate in enumerate(experiment.gates)]
    for each in gates:
        check_rules(GATE_RULES, each)
    for pair in combinations(gates, 2):
        check_rules(PAIR_RULES, pair)


@dataclass(frozen=True)
class Condition:
    """A condition that some metrics have: the run must meet it."""

    holds: Callable[[Experiment], bool]
    setting: Callable[[Experiment], str]
    """The settings that decide, with their values."""
    expected: str
    """In words, where it does not hold."""


def _algorithm(experiment: Experiment) -> str:
    return f"algorithm.name={experiment.algorithm.name}"


def _problems(experiment: Experiment) -> str:
    return f"{_algorithm(experiment)}, eval.problems={experiment.eval.problems}"


def _correction(experiment: Experiment) -> str:
    algorithm = experiment.algorithm
    if not isinstance(algorithm, PolicyGradient):
        return _algorithm(experiment)
    return f"algorithm.tis_cap={algorithm.tis_cap}, ratio={algorithm.ratio}, rejection={algorithm.rejection}"


CONDITIONS: dict[str, Condition] = {
    "samples": Condition(lambda e: e.algorithm.samples, _algorithm, "an algorithm that samples answers"),
    "engines": Condition(lambda e: e.needs_engines, _problems, "a run that samples answers or evaluates"),
    "canary": Condition(
        lambda e: e.sync.canary and e.needs_engines,
        lambda e: f"sync.canary={str(e.sync.canary).lower()}",
        "sync.canary=true",
    ),
    "evaluation": Condition(lambda e: e.eval.problems > 0, _problems, "eval.problems above 0"),
    "environment": Condition(
        lambda e: e.environment.function != SINGLE_TURN,
        lambda e: f"environment={e.environment.function}",
        "an environment",
    ),
    "staleness": Condition(
        lambda e: e.rollout.staleness > 0,
        lambda e: f"rollout.staleness={e.rollout.staleness}",
        "rollout.staleness above 0",
    ),
    "several_engines": Condition(
        lambda e: e.rollout.engines > 1, lambda e: f"rollout.engines={e.rollout.engines}", "rollout.engines above 1"
    ),
    "sleep": Condition(
        lambda e: e.rollout.sleep and e.needs_engines,
        lambda e: f"rollout.sleep={str(e.rollout.sleep).lower()}",
        "rollout.sleep=true",
    ),
    "routes": Condition(
        lambda e: e.numerics.router_replay != "off",
        lambda e: f"numerics.router_replay={e.numerics.router_replay}",
        "numerics.router_replay=record or replay",
    ),
    "redraws": Condition(
        lambda e: e.redraws > 0,
        lambda e: f"numerics.mode={e.numerics.mode}, guard.redraws={e.guard.redraws}",
        "exact mode and guard.redraws above 0",
    ),
    "prefix_sharing": Condition(
        lambda e: e.trainer.prefix_sharing,
        lambda e: f"trainer.prefix_sharing={str(e.trainer.prefix_sharing).lower()}",
        "trainer.prefix_sharing=true",
    ),
    "fp8_kv": Condition(lambda e: e.numerics.kv == "fp8", lambda e: f"numerics.kv={e.numerics.kv}", "numerics.kv=fp8"),
    "merged": Condition(
        lambda e: e.adapter is not None and e.adapter.mode == "merged" and e.numerics.trainer != "bf16",
        lambda e: f"adapter.mode={e.adapter.mode if e.adapter else None}, numerics.trainer={e.numerics.trainer}",
        "adapter.mode=merged and a trainer that quantizes",
    ),
    "weights": Condition(
        lambda e: e.algorithm.correction.weighs,
        _correction,
        "an algorithm with an importance weight",
    ),
    "tis_cap": Condition(
        lambda e: "tis_cap" in type(e.algorithm).model_fields and e.algorithm.correction.tis_cap is not None,
        _correction,
        "an importance weight with algorithm.tis_cap",
    ),
    "rejection": Condition(
        lambda e: e.algorithm.correction.rejects,
        _correction,
        "algorithm.rejection or algorithm.veto",
    ),
    "reference": Condition(lambda e: e.algorithm.needs.reference, _algorithm, "a coefficient of algorithm.kl above 0"),
    "teacher": Condition(lambda e: e.algorithm.needs.teacher, _algorithm, "an algorithm that asks a teacher"),
    "critic": Condition(lambda e: e.algorithm.needs.critic, _algorithm, "an algorithm with a critic"),
}


def missing(metric: Metric, experiment: Experiment) -> Condition | None:
    """Return the first condition of a metric that an experiment does not meet; None if it measures the metric."""
    unmet = (CONDITIONS[need] for need in metric.needs if not CONDITIONS[need].holds(experiment))
    return next(unmet, None)


_OF_NUMBER = re.compile(r"mismatch/.+_pos_(?P<position>\d+)|(?:rollout/tokens|drift/.+)_age_(?P<age>\d+)")


@dataclass(frozen=True)
class NumberedGate:
    """A gate of an experiment, by its place in `gates:`."""

    index: int
    gate: GateSection
    experiment: Experiment

    @property
    def action(self) -> str:
        """The key of its action."""
        return f"gates.{self.index}.action"

    @property
    def said(self) -> str:
        """The gate's metric with its bound, for messages."""
        return f"{self.gate.metric} {self.gate.bound}"

    @property
    def unmet(self) -> Condition | None:
        """The first condition of its metric that the experiment does not meet."""
        return missing(metric(self.gate.metric), self.experiment)

    @property
    def beyond(self) -> str:
        """The setting with which the position or the age in its metric's name never occurs; empty: it may occur."""
        found, rollout = _OF_NUMBER.fullmatch(self.gate.metric), self.experiment.rollout
        if found is None:
            return ""
        if found["position"] and int(found["position"]) >= rollout.max_new_tokens:
            return f"rollout.max_new_tokens={rollout.max_new_tokens}"
        return "rollout.staleness=0" if int(found["age"] or 0) and not rollout.staleness else ""

    @property
    def asks_for_equality(self) -> bool:
        """True if any difference of the two sides fires it."""
        gate = self.gate
        differs = "abs_diff" in gate.metric and gate.above == 0.0
        return differs or (gate.metric == "mismatch/exact_frac" and gate.below == 1.0)


_MAY_BE_LATE = [action for action in SEVERITY if action not in WITHHOLDING or action == "checkpoint_and_stop"]


def _sides_differ(experiment: Experiment) -> bool:
    return experiment.numerics.mode != "exact" or experiment.numerics.trainer != experiment.numerics.rollout


def _numbers(experiment: Experiment) -> str:
    numerics = experiment.numerics
    return f"numerics.mode={numerics.mode}, trainer={numerics.trainer}, rollout={numerics.rollout}"


GATE_RULES: tuple[Rule[NumberedGate], ...] = (
    Rule(
        lambda g: g.action,
        lambda g: not g.experiment.algorithm.samples and g.gate.action != "warn",
        lambda g: g.gate.action,
        lambda g: f"warn, as the {g.experiment.algorithm.name} algorithm samples nothing, so no other action applies",
        "Set it to warn, or remove the gate.",
    ),
    Rule(
        lambda g: f"gates.{g.index}.metric",
        lambda g: g.unmet,
        lambda g: f"{g.gate.metric} with {g.unmet and g.unmet.setting(g.experiment)}",
        lambda g: f"{g.unmet and g.unmet.expected}, without which there is no such metric",
        "Choose another metric, or set what it needs.",
    ),
    Rule(
        lambda g: f"gates.{g.index}.metric",
        lambda g: g.beyond,
        lambda g: f"{g.gate.metric} with {g.beyond}",
        "a number in its name that occurs in such a run",
        "Choose a lower one, or another metric.",
    ),
    Rule(
        lambda g: f"gates.{g.index}.metric",
        lambda g: metric(g.gate.metric).flat_at_first and g.experiment.algorithm.updates > 1,
        lambda g: f"{g.gate.metric} with {g.experiment.algorithm.updates} updates of a batch",
        "another metric: gates see the first pass of a step, in which the policy still equals the one that scored the "
        "batch",
        "Choose another metric, such as train/grad_norm, or set algorithm.updates_per_batch=1 and algorithm.epochs=1.",
    ),
    Rule(
        lambda g: g.action,
        lambda g: metric(g.gate.metric).late and g.gate.action not in _MAY_BE_LATE,
        lambda g: f"{g.gate.action} on {g.gate.metric}, which is measured after a step's decision",
        f"{', '.join(_MAY_BE_LATE[:-1])} or {_MAY_BE_LATE[-1]}, because it may never recover without updates",
        "Choose one of these actions, or a metric that is measured before the update.",
    ),
    Rule(
        lambda g: f"gates.{g.index}",
        lambda g: g.asks_for_equality and _sides_differ(g.experiment) and g.gate.action in ("skip_step", "resync"),
        lambda g: f"{g.gate.action} on {g.said} with {_numbers(g.experiment)}",
        "a bound above the difference that such a run always has; otherwise no batch is trained on",
        "Set a bound above the value that `fp8rl preflight` measures, or use exact mode with one precision on both "
        "sides.",
    ),
    Rule(
        lambda g: f"gates.{g.index}.tis_cap",
        lambda g: (
            g.gate.action == "tighten_tis"
            and (g.gate.tis_cap or 1.0) >= (g.experiment.algorithm.correction.tis_cap or 0.0)
        ),
        lambda g: g.gate.tis_cap or 1.0,
        lambda g: f"less than algorithm.tis_cap={g.experiment.algorithm.correction.tis_cap}, the cap that it tightens",
        "Give a lower cap, or set algorithm.tis_cap above it.",
    ),
    Rule(
        lambda g: g.action,
        lambda g: g.gate.action == "enable_r3" and g.experiment.numerics.router_replay != "record",
        lambda g: f"enable_r3 with numerics.router_replay={g.experiment.numerics.router_replay}",
        "numerics.router_replay=record, so that there are routes to replay from some step on",
        "Set numerics.router_replay=record, or choose another action.",
    ),
    Rule(
        lambda g: g.action,
        lambda g: g.gate.action == "bf16_both" and not g.experiment.numerics.quantizes,
        "bf16_both with both sides in BF16",
        "a side in FP8 to fall back from",
        "Choose another action, or set numerics.trainer or numerics.rollout to fp8.",
    ),
)

Pair = tuple[NumberedGate, NumberedGate]


def _bounds(pair: Pair) -> tuple[float, float] | None:
    """Return the bounds above and below of two gates on one metric, if both are there and no value satisfies both."""
    (one, other) = (each.gate for each in pair)
    above = one.above if one.above is not None else other.above
    below = one.below if one.below is not None else other.below
    empty = one.metric == other.metric and above is not None and below is not None and below > above
    return (above, below) if empty and above is not None and below is not None else None


PAIR_RULES: tuple[Rule[Pair], ...] = (
    Rule(
        lambda p: f"gates.{p[1].index}",
        lambda p: (p[0].said, p[0].gate.action) == (p[1].said, p[1].gate.action),
        lambda p: f"{p[1].gate.action} on {p[1].said}",
        lambda p: f"another condition or action than gates.{p[0].index}",
        "Remove one of the two.",
    ),
    Rule(
        lambda p: f"gates.{p[1].index}",
        _bounds,
        lambda p: f"{p[1].said}, while gates.{p[0].index} has {p[0].gate.bound}",
        "a value between the two bounds that satisfies both",
        lambda p: "Set below to at most {}, or above to at least {}.".format(*_bounds(p) or ()),
    ),
)
