"""Settings that cannot mean what they say, against each other or the rest of the spec: a row for each.

`rl.experiment.gate_rules` has those of gates, `rl.experiment.preconditions.rules` those that need the model's sizes and
the machines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8rl.numerics.core.errors import Rule
from fp8rl.rl.algorithms.policy_gradient import PolicyGradient
from fp8rl.rollout.tasks.environments.config import SINGLE_TURN
from fp8rl.weight_sync.config import reason_to_send

if TYPE_CHECKING:
    from fp8rl.rl.experiment.experiment import Experiment


def _asked_of_environment(experiment: Experiment) -> list[str]:
    return [config.label for config in experiment.rewards.functions if config.function == "environment"]


def _private_base(experiment: Experiment) -> str | None:
    """Return why engines cannot read frozen weights where the trainer has them; None: they can."""
    if experiment.adapter is None or experiment.adapter.mode == "merged":
        return "no frozen weights are served: there is no adapter, or it is merged into them"
    numerics = experiment.numerics_config()
    return reason_to_send(
        experiment.sync.transport, experiment.rollout.tp, numerics.rollout_spec, numerics.trainer_spec
    )


def _updates_per_batch(experiment: Experiment) -> int:
    return experiment.algorithm.updates_per_batch if isinstance(experiment.algorithm, PolicyGradient) else 1


def _dynamic(experiment: Experiment) -> bool:
    return isinstance(experiment.algorithm, PolicyGradient) and experiment.algorithm.dynamic_sampling


RULES: tuple[Rule[Experiment], ...] = (
    Rule(
        "environment",
        lambda e: _asked_of_environment(e) and e.environment.function == SINGLE_TURN,
        lambda e: (
            f"{SINGLE_TURN} with the reward {_asked_of_environment(e)[0]}, which reads what the environment returns"
        ),
        "an environment that returns numbers",
        "Name one (environment: guess), or another reward.",
    ),
    Rule(
        "sync.pause",
        lambda e: e.sync.pause == "in_place" and e.numerics.mode == "exact",
        "in_place with numerics.mode=exact",
        "retract or abort: with old keys under new weights no trainer's weights give the same log-probabilities",
        "Set sync.pause=retract, or numerics.mode=native.",
    ),
    Rule(
        "rollout.staleness",
        lambda e: e.rollout.staleness and not e.algorithm.samples,
        lambda e: f"{e.rollout.staleness} with algorithm.name={e.algorithm.name}",
        "0, as nothing is sampled that could be ahead",
        "Remove rollout.staleness.",
    ),
    Rule(
        "numerics.router_replay",
        lambda e: e.rollout.staleness and e.numerics.router_replay != "off",
        lambda e: f"{e.numerics.router_replay} with rollout.staleness={e.rollout.staleness}",
        "off: when an answer continues under new weights, its experts are recorded anew, also for old tokens",
        "Set numerics.router_replay=off (exact mode needs no replay), or rollout.staleness=0.",
    ),
    Rule(
        "rollout.tp",
        lambda e: e.numerics.mode == "exact" and len({1, e.trainer.tp, e.rollout.tp}) == 3,  # both are above 1
        lambda e: f"{e.rollout.tp} with trainer.tp={e.trainer.tp}",
        "1 or trainer.tp in exact mode, so that both sides add the same partial sums",
        lambda e: f"Set rollout.tp=1, as GPUs need it, or trainer.tp=1; on CPUs rollout.tp={e.trainer.tp} will do.",
    ),
    Rule(
        "algorithm.updates_per_batch",
        lambda e: _updates_per_batch(e) > e.rollout.prompts_per_step,
        lambda e: f"{_updates_per_batch(e)} with rollout.prompts_per_step={e.rollout.prompts_per_step}",
        lambda e: f"at most {e.rollout.prompts_per_step}, as each update takes whole groups",
        "Lower it, or give a step more prompts.",
    ),
    Rule(
        "rollout.group_size",
        lambda e: (
            e.rollout.group_size == 1
            and isinstance(e.algorithm, PolicyGradient)
            and (e.algorithm.dynamic_sampling or e.algorithm.least_group > 1)
        ),
        lambda e: f"1 with {'algorithm.dynamic_sampling=true' if _dynamic(e) else e.algorithm.name}",
        "at least 2: a single answer has no others to be compared with, and teaches nothing",
        "Raise rollout.group_size, or choose algorithm.name=reinforce++ without dynamic_sampling.",
    ),
    Rule(
        "sync.delta",
        lambda e: e.sync.delta and e.sync.transport == "disk",
        "true with sync.transport=disk",
        "false: a directory that an engine loads holds every tensor",
        "Set sync.transport=tensor or distributed, or remove sync.delta.",
    ),
    Rule(
        "rollout.sleep",
        lambda e: e.rollout.sleep and e.rollout.staleness,
        lambda e: f"true with rollout.staleness={e.rollout.staleness}",
        "rollout.staleness=0: an engine that samples ahead works while the trainer does",
        "Set rollout.sleep=false, or rollout.staleness=0.",
    ),
    Rule(
        "rollout.sleep",
        lambda e: e.rollout.sleep and e.sync.delta,
        "true with sync.delta=true",
        "a full sync: an engine that wakes has no weights to apply a delta to",
        "Remove sync.delta, or rollout.sleep.",
    ),
    Rule(
        "rollout.sleep",
        lambda e: e.rollout.sleep and e.sync.engines_own_gpus,
        lambda e: f"true with sync.transport={e.sync.transport}",
        "tensor or disk: with this transport engines have GPUs of their own, so sleeping frees no memory for the "
        "trainer",
        "Set sync.transport=tensor, or remove rollout.sleep.",
    ),
    Rule(
        "adapter",
        lambda e: e.adapter is not None and e.numerics.mode == "native",
        "an adapter with numerics.mode=native",
        "numerics.mode=exact, whose products take adapters on both sides",
        "Set numerics.mode=exact, or remove the adapter section.",
    ),
    Rule(
        "trainer.router_bias_rate",
        lambda e: e.adapter is not None and e.trainer.router_bias_rate,
        lambda e: f"{e.trainer.router_bias_rate:g} with an adapter",
        "0: only the adapters are trained",
        "Set trainer.router_bias_rate=0, or remove the adapter section.",
    ),
    Rule(
        "sync.shared_base",
        lambda e: e.sync.shared_base and _private_base(e),
        lambda e: f"true, and {_private_base(e)}",
        "separate adapters, one spec on both sides, engines of one rank, and sync.transport=tensor",
        "Set sync.shared_base=false: each engine then gets its own copy of the weights, once.",
    ),
    Rule(
        "teacher",
        lambda e: e.algorithm.needs.teacher and e.teacher is None,
        lambda e: f"null with algorithm.name={e.algorithm.name}",
        "a teacher to learn from",
        "Give teacher.path=DIR, a Hugging Face directory with the tokenizer of model.path.",
    ),
    Rule(
        "teacher",
        lambda e: e.teacher is not None and not e.algorithm.needs.teacher,
        lambda e: f"{e.teacher and e.teacher.path} with algorithm.name={e.algorithm.name}, which uses no teacher",
        "null, or an algorithm that uses one: opd",
        "Set algorithm.name=opd, or remove the teacher section (teacher=null).",
    ),
    Rule(
        "rollout.temperature",
        lambda e: e.teacher is not None and e.rollout.temperature != 1.0,
        lambda e: f"{e.rollout.temperature:g} with a teacher",
        "1: SGLang scores given tokens at temperature 1, so policy and teacher would be compared at two temperatures",
        "Set rollout.temperature=1.0.",
    ),
    Rule(
        "guard.nonfinite_loss",
        lambda e: not e.algorithm.samples and e.guard.nonfinite_loss == "skip",
        "skip",
        "stop: a supervised run keeps no capsule of what it would skip",
        "Remove guard.nonfinite_loss, and look at the examples that the error names.",
    ),
)
"""In the order in which they are checked."""
