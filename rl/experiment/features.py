"""What a run has that some metrics need: it decides whether a gate can ever see them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fp8rl.rl.algorithms.policy_gradient import PolicyGradient
from fp8rl.rl.record.metrics import Metric
from fp8rl.rollout.environments.config import SINGLE_TURN

if TYPE_CHECKING:
    from fp8rl.rl.experiment.experiment import Experiment


@dataclass(frozen=True)
class Condition:
    """When a run has a feature.

    holds: of an experiment. setting: what of it decides, with its value. expected: in words, where it does not hold.
    """

    holds: Callable[[Experiment], bool]
    setting: Callable[[Experiment], str]
    expected: str


def _algorithm(experiment: Experiment) -> str:
    return f"algorithm.name={experiment.algorithm.name}"


def _problems(experiment: Experiment) -> str:
    return f"{_algorithm(experiment)}, eval.problems={experiment.eval.problems}"


def _correction(experiment: Experiment) -> str:
    algorithm = experiment.algorithm
    if not isinstance(algorithm, PolicyGradient):
        return _algorithm(experiment)
    return f"algorithm.tis_cap={algorithm.tis_cap}, ratio={algorithm.ratio}, rejection={algorithm.rejection}"


def _weighs(experiment: Experiment) -> bool:
    return isinstance(experiment.algorithm, PolicyGradient) and experiment.algorithm.correction.weighs


def _rejects(experiment: Experiment) -> bool:
    return isinstance(experiment.algorithm, PolicyGradient) and experiment.algorithm.correction.rejects


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
    "speculation": Condition(
        lambda e: e.rollout.speculation is not None and e.needs_engines,
        lambda e: f"rollout.speculation={'null' if e.rollout.speculation is None else 'given'}",
        "rollout.speculation",
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
    "merged": Condition(
        lambda e: e.adapter is not None and e.adapter.mode == "merged" and e.numerics.trainer != "bf16",
        lambda e: f"adapter.mode={e.adapter.mode if e.adapter else None}, numerics.trainer={e.numerics.trainer}",
        "adapter.mode=merged and a trainer that quantizes",
    ),
    "weights": Condition(_weighs, _correction, "an algorithm with an importance weight"),
    "cap": Condition(lambda e: e.algorithm.cap is not None, _correction, "an importance weight with algorithm.tis_cap"),
    "rejection": Condition(_rejects, _correction, "algorithm.rejection or algorithm.veto"),
    "reference": Condition(lambda e: e.algorithm.needs.reference, _algorithm, "a coefficient of algorithm.kl above 0"),
    "teacher": Condition(lambda e: e.algorithm.needs.teacher, _algorithm, "an algorithm that asks a teacher"),
    "critic": Condition(lambda e: e.algorithm.needs.critic, _algorithm, "an algorithm with a critic"),
}


def missing(metric: Metric, experiment: Experiment) -> Condition | None:
    """The first condition of a metric that an experiment does not meet; None if it measures the metric."""
    unmet = (CONDITIONS[feature] for feature in metric.needs if not CONDITIONS[feature].holds(experiment))
    return next(unmet, None)
