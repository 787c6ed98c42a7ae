"""Rules between sections: settings that contradict each other, or that would have no effect.

`rl.experiment.gate_rules` has the rules of gates. `rl.experiment.preconditions.rules` has the rules that need the
model's sizes and the machines.
"""

from __future__ import annotations

from collections.abc import Iterator

from fp8rl.numerics.core.errors import UserError, user_error
from fp8rl.rl.algorithms.policy_gradient import PolicyGradient
from fp8rl.rl.experiment.experiment import Experiment
from fp8rl.weight_sync.config import reason_to_send


def refusals(e: Experiment) -> Iterator[UserError]:
    """Yield an error for each rule between sections that a spec breaks, in the order of the checks."""
    yield from _sampling(e)
    yield from _sleep(e)
    yield from _adapter(e)
    yield from _teacher(e)


def _sampling(e: Experiment) -> Iterator[UserError]:
    algorithm, rollout, exact = e.algorithm, e.rollout, e.numerics.mode == "exact"
    asked = [config.label for config in e.rewards.functions if config.function == "environment"]
    if asked and not e.has_environment:
        found = f"{e.environment.function} with the reward {asked[0]}, which reads what the environment returns"
        remedy = "Name one (environment: mine.py:play), or another reward."
        yield user_error("environment", found, "an environment that returns numbers", remedy)
    if e.sync.pause == "in_place" and exact:
        expected = "retract or abort: with keys of old weights no trainer can compute the same log-probabilities"
        remedy = "Set sync.pause=retract, or numerics.mode=native."
        yield user_error("sync.pause", "in_place with numerics.mode=exact", expected, remedy)
    if rollout.staleness and not algorithm.samples:
        found = f"{rollout.staleness} with algorithm.name={algorithm.name}"
        expected = "0, because this algorithm samples nothing"
        yield user_error("rollout.staleness", found, expected, "Remove rollout.staleness.")
    if rollout.staleness and e.numerics.router_replay != "off":
        found = f"{e.numerics.router_replay} with rollout.staleness={rollout.staleness}"
        expected = "off: when an answer continues under new weights, the experts of its old tokens are recorded again"
        remedy = "Set numerics.router_replay=off (exact mode needs no replay), or rollout.staleness=0."
        yield user_error("numerics.router_replay", found, expected, remedy)
    if exact and max(e.trainer.tp, rollout.tp) % min(e.trainer.tp, rollout.tp):
        found = f"{rollout.tp} with trainer.tp={e.trainer.tp}"
        expected = "a divisor or a multiple of trainer.tp in exact mode, so that both sides add the same partial sums"
        remedy = f"Set rollout.tp=1 or trainer.tp=1. On GPUs rollout.tp is 1; on CPUs it may be {e.trainer.tp}, too."
        yield user_error("rollout.tp", found, expected, remedy)
    if isinstance(algorithm, PolicyGradient):
        if algorithm.centering is not None and rollout.truncation.cuts:
            expected = "no top-p, top-k or min-p: the expectation is over the whole vocabulary"
            remedy = "Remove rollout.top_p, top_k and min_p, or algorithm.centering."
            yield user_error("algorithm.centering", f"{algorithm.centering} with truncation", expected, remedy)
        prompts = rollout.prompts_per_step
        if algorithm.updates_per_batch > prompts:
            found = f"{algorithm.updates_per_batch} with rollout.prompts_per_step={prompts}"
            expected = f"at most {prompts}, as each update takes whole groups"
            yield user_error("algorithm.updates_per_batch", found, expected, "Lower it, or give a step more prompts.")
        if rollout.group_size == 1 and (algorithm.dynamic_sampling or algorithm.least_group > 1):
            found = f"1 with {'algorithm.dynamic_sampling=true' if algorithm.dynamic_sampling else algorithm.name}"
            expected = "at least 2: a single answer has no other answer to compare with, so nothing is learnt from it"
            remedy = "Raise rollout.group_size, or choose algorithm.name=reinforce++ without dynamic_sampling."
            yield user_error("rollout.group_size", found, expected, remedy)
    if e.sync.delta and e.sync.transport == "disk":
        expected = "false: by this transport a sync writes every tensor"
        remedy = "Set sync.transport=tensor or distributed, or remove sync.delta."
        yield user_error("sync.delta", "true with sync.transport=disk", expected, remedy)
    if not algorithm.samples and e.guard.nonfinite_loss == "skip":
        expected = "stop: a supervised run would write no capsule of a skipped batch"
        remedy = "Remove guard.nonfinite_loss, and look at the examples that the error names."
        yield user_error("guard.nonfinite_loss", "skip", expected, remedy)


def _sleep(e: Experiment) -> Iterator[UserError]:
    if not e.rollout.sleep:
        return
    if e.rollout.staleness:
        found = f"true with rollout.staleness={e.rollout.staleness}"
        expected = "rollout.staleness=0: otherwise engines sample while the trainer works"
        yield user_error("rollout.sleep", found, expected, "Set rollout.sleep=false, or rollout.staleness=0.")
    if e.sync.delta:
        expected = "a full sync: an engine that wakes has no weights to apply a delta to"
        remedy = "Remove sync.delta, or rollout.sleep."
        yield user_error("rollout.sleep", "true with sync.delta=true", expected, remedy)
    if e.sync.engines_own_gpus:
        found = f"true with sync.transport={e.sync.transport}"
        expected = (
            "tensor or disk: with this transport engines have GPUs of their own, so sleeping frees no memory for the "
            "trainer"
        )
        yield user_error("rollout.sleep", found, expected, "Set sync.transport=tensor, or remove rollout.sleep.")


def _adapter(e: Experiment) -> Iterator[UserError]:
    if e.adapter is not None and e.numerics.mode == "native":
        expected = "numerics.mode=exact, whose products take adapters on both sides"
        remedy = "Set numerics.mode=exact, or remove the adapter section."
        yield user_error("adapter", "an adapter with numerics.mode=native", expected, remedy)
    if e.adapter is not None and e.trainer.router_bias_rate:
        found = f"{e.trainer.router_bias_rate:g} with an adapter"
        remedy = "Set trainer.router_bias_rate=0, or remove the adapter section."
        yield user_error("trainer.router_bias_rate", found, "0: only the adapters are trained", remedy)
    if e.sync.shared_base:
        numerics = e.numerics_config()
        why = reason_to_send(e.sync.transport, e.rollout.tp, numerics.rollout_spec, numerics.trainer_spec)
        if e.adapter is None or e.adapter.mode == "merged":
            why = "no frozen weights are served: there is no adapter, or it is merged into them"
        if why is not None:  # engines cannot read frozen weights in the trainer's memory
            expected = "separate adapters, one spec on both sides, engines of one rank, and sync.transport=tensor"
            remedy = "Set sync.shared_base=false: each engine then gets its own copy of the weights, once."
            yield user_error("sync.shared_base", f"true, and {why}", expected, remedy)


def _teacher(e: Experiment) -> Iterator[UserError]:
    name, teacher = e.algorithm.name, e.teacher
    if teacher is None:
        if e.algorithm.needs.teacher:
            remedy = "Give teacher.path=DIR, a Hugging Face directory with the tokenizer of model.path."
            yield user_error("teacher", f"null with algorithm.name={name}", "a teacher to learn from", remedy)
        return
    if not e.algorithm.needs.teacher:
        found = f"{teacher.path} with algorithm.name={name}, which uses no teacher"
        remedy = "Set algorithm.name=opd, or remove the teacher section (teacher=null)."
        yield user_error("teacher", found, "null, or an algorithm that uses one: opd", remedy)
    if e.rollout.temperature != 1.0:
        found = f"{e.rollout.temperature:g} with a teacher"
        expected = "1: SGLang scores a teacher's tokens at temperature 1, and the policy must have the same"
        yield user_error("rollout.temperature", found, expected, "Set rollout.temperature=1.0.")
