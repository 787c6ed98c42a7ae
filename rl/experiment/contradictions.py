"""Settings that cannot mean what they say: against each other, or against the rest of the spec."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from fp8rl.numerics.errors import UserError, user_error
from fp8rl.rl.algorithms.policy_gradient import PolicyGradient
from fp8rl.rl.experiment.features import missing
from fp8rl.rl.experiment.gates import SEVERITY, WITHHOLDING, GateSection
from fp8rl.rl.record.metrics import metric
from fp8rl.rollout.environments.config import SINGLE_TURN
from fp8rl.weight_sync.config import reason_to_send

if TYPE_CHECKING:
    from fp8rl.rl.experiment.experiment import Experiment


def check_environment(experiment: Experiment) -> None:
    """Raise `UserError` if a reward asks for what an environment said, and there is none that says anything."""
    asks = [config.label for config in experiment.rewards.functions if config.function == "environment"]
    if asks and experiment.environment.function == SINGLE_TURN:
        raise user_error(
            "environment",
            found=f"{SINGLE_TURN} with the reward {asks[0]}, which is what the environment returns",
            expected="an environment that returns numbers",
            remedy="Name one (environment: guess), or another reward.",
        )


def check_staleness(experiment: Experiment) -> None:
    """Raise `UserError` if what the spec says of sampling ahead of training cannot be had with the rest of it."""
    rollout, numerics = experiment.rollout, experiment.numerics
    if experiment.sync.pause == "in_place" and numerics.mode == "exact":
        raise user_error(
            "sync.pause",
            found="in_place with numerics.mode=exact",
            expected="retract or abort: keys of old weights under new ones are of no weights that a trainer could hold",
            remedy="Set sync.pause=retract, or numerics.mode=native.",
        )
    if rollout.staleness and not experiment.algorithm.samples:
        raise user_error(
            "rollout.staleness",
            found=f"{rollout.staleness} with algorithm.name={experiment.algorithm.name}",
            expected="0, as nothing is sampled that could be ahead",
            remedy="Remove rollout.staleness.",
        )
    if rollout.staleness and numerics.router_replay != "off":
        raise user_error(
            "numerics.router_replay",
            found=f"{numerics.router_replay} with rollout.staleness={rollout.staleness}",
            expected="off: an answer that goes on under new weights has its experts recorded anew, also for old tokens",
            remedy="Set numerics.router_replay=off, which exact mode does without, or rollout.staleness=0.",
        )


def check_ranks(experiment: Experiment) -> None:
    """Raise `UserError` if the sides would add up the parts of a product in different orders."""
    trainer, engine = experiment.trainer.tp, experiment.rollout.tp
    if experiment.numerics.mode == "exact" and 1 not in (trainer, engine) and trainer != engine:
        raise user_error(
            "rollout.tp",
            found=f"{engine} with trainer.tp={trainer}",
            expected="1 or trainer.tp in exact mode: sums of as many parts on both sides",
            remedy=f"Set rollout.tp={trainer}, or one of both to 1.",
        )


def check_sync(experiment: Experiment) -> None:
    """Raise `UserError` if weights cannot travel as the spec says."""
    if experiment.sync.delta and experiment.sync.transport == "disk":
        raise user_error(
            "sync.delta",
            found="true with sync.transport=disk",
            expected="false: a directory that an engine loads holds every tensor",
            remedy="Set sync.transport=tensor or distributed, or remove sync.delta.",
        )


def check_adapter(experiment: Experiment) -> None:
    """Raise `UserError` if adapters cannot be had in this mode."""
    if experiment.adapter is not None and experiment.numerics.mode == "native":
        raise user_error(
            "adapter",
            found="an adapter with numerics.mode=native",
            expected="numerics.mode=exact, whose products take adapters on both sides",
            remedy="Set numerics.mode=exact, or remove the adapter section.",
        )
    if experiment.adapter is not None and experiment.trainer.router_bias_rate:
        raise user_error(
            "trainer.router_bias_rate",
            found=f"{experiment.trainer.router_bias_rate:g} with an adapter",
            expected="0: everything but the adapters stays as it is",
            remedy="Set trainer.router_bias_rate=0, or remove the adapter section.",
        )


def check_shared_base(experiment: Experiment) -> None:
    """Raise `UserError` if engines cannot read frozen weights where the trainer has them."""
    if not experiment.sync.shared_base:
        return
    numerics = experiment.numerics_config()
    if experiment.adapter is None or experiment.adapter.mode == "merged":
        reason: str | None = "no frozen weights are served: there is no adapter, or it is merged into them"
    else:
        reason = reason_to_send(
            experiment.sync.transport, experiment.rollout.tp, numerics.rollout_spec, numerics.trainer_spec
        )
    if reason is not None:
        raise user_error(
            "sync.shared_base",
            found=f"true, and {reason}",
            expected="separate adapters, one spec on both sides, engines of one rank, and sync.transport=tensor",
            remedy="Set sync.shared_base=false: engines are sent the weights once, and hold a copy.",
        )


def check_sleep(experiment: Experiment) -> None:
    """Raise `UserError` if engines that sleep could not be woken, or would be needed while they do."""
    rollout, sync = experiment.rollout, experiment.sync
    if not rollout.sleep:
        return
    if rollout.staleness:
        raise user_error(
            "rollout.sleep",
            found=f"true with rollout.staleness={rollout.staleness}",
            expected="rollout.staleness=0: an engine that samples ahead works while the trainer does",
            remedy="Set rollout.sleep=false, or rollout.staleness=0.",
        )
    if sync.delta:
        raise user_error(
            "rollout.sleep",
            found="true with sync.delta=true",
            expected="a sync that sends everything: an engine that wakes has nothing that a change could be made to",
            remedy="Remove sync.delta, or rollout.sleep.",
        )
    if sync.engines_own_gpus:
        raise user_error(
            "rollout.sleep",
            found=f"true with sync.transport={sync.transport}",
            expected="tensor or disk: with this transport engines have GPUs of their own, where they make room for "
            "nobody",
            remedy="Set sync.transport=tensor, or remove rollout.sleep.",
        )


def check_speculation(experiment: Experiment) -> None:
    """Raise `UserError` if drafts could change what is drawn, or engines cannot say what is asked of them."""
    drafts = experiment.rollout.speculation
    if drafts is None:
        return
    if experiment.numerics.mode != "exact":
        raise user_error(
            "rollout.speculation",
            found=f"drafts={drafts.drafts} with numerics.mode=native",
            expected="null, or numerics.mode=exact: in native mode the tokens computed beside one change its logits",
            remedy="Remove rollout.speculation, or set numerics.mode=exact.",
        )
    if experiment.carries_supports:
        raise user_error(
            "rollout.speculation",
            found=f"drafts={drafts.drafts} with rollout.top_p, top_k or min_p, and tokens of older weights",
            expected="null: SGLang does not say what a token was drawn from where it drafts, which a trainer at other "
            "weights has to know",
            remedy="Remove rollout.speculation; or set rollout.staleness=0 and one update for a batch.",
        )


def check_teacher(experiment: Experiment) -> None:
    """Raise `UserError` if the algorithm and the teacher are not both there, or cannot be at one temperature."""
    name, teacher = experiment.algorithm.name, experiment.teacher
    if experiment.algorithm.needs.teacher and teacher is None:
        raise user_error(
            "teacher",
            found=f"null with algorithm.name={name}",
            expected="the model that it learns from",
            remedy="Give teacher.path=DIR, a Hugging Face directory with the tokenizer of model.path.",
        )
    if teacher is not None and not experiment.algorithm.needs.teacher:
        raise user_error(
            "teacher",
            found=f"{teacher.path} with algorithm.name={name}, which asks no teacher",
            expected="null, or an algorithm that does: opd",
            remedy="Set algorithm.name=opd, or remove the teacher section (teacher=null).",
        )
    if teacher is not None and experiment.rollout.temperature != 1.0:
        raise user_error(
            "rollout.temperature",
            found=f"{experiment.rollout.temperature:g} with a teacher",
            expected="1: SGLang applies no temperature where it scores given tokens, so policy and teacher would be "
            "compared at two",
            remedy="Set rollout.temperature=1.0.",
        )


def check_updates(experiment: Experiment) -> None:
    """Raise `UserError` if a batch has not enough groups for its updates."""
    algorithm, prompts = experiment.algorithm, experiment.rollout.prompts_per_step
    parts = algorithm.updates_per_batch if isinstance(algorithm, PolicyGradient) else 1
    if parts > prompts:
        raise user_error(
            "algorithm.updates_per_batch",
            found=f"{parts} with rollout.prompts_per_step={prompts}",
            expected=f"at most {prompts}, as each update takes whole groups",
            remedy="Lower it, or give a step more prompts.",
        )


def check_groups(experiment: Experiment) -> None:
    """Raise `UserError` if a group of one answer could teach nothing."""
    algorithm = experiment.algorithm
    if experiment.rollout.group_size > 1 or not isinstance(algorithm, PolicyGradient):
        return
    if algorithm.dynamic_sampling or algorithm.least_group > 1:
        why = "with algorithm.dynamic_sampling=true" if algorithm.dynamic_sampling else f"with {algorithm.name}"
        raise user_error(
            "rollout.group_size",
            found=f"1 {why}",
            expected="at least 2: a single answer of its prompt has no others to be measured by, and teaches nothing",
            remedy="Raise rollout.group_size, or choose algorithm.name=reinforce++ without dynamic_sampling.",
        )


def check_gates(experiment: Experiment) -> None:
    """Raise `UserError` for the first gate that contradicts another one or another section."""
    if not experiment.algorithm.samples and experiment.guard.nonfinite_loss == "skip":
        raise user_error(
            "guard.nonfinite_loss",
            found="skip",
            expected="stop: a supervised run keeps no capsule of what it would skip",
            remedy="Remove guard.nonfinite_loss, and look at the examples that the error names.",
        )
    for index, rule in enumerate(experiment.gates):
        problem = _against_the_spec(f"gates.{index}", rule, experiment)
        if problem is not None:
            raise problem
    for (first, one), (second, other) in combinations(enumerate(experiment.gates), 2):
        problem = _against_each_other(first, one, second, other)
        if problem is not None:
            raise problem


def _against_the_spec(key: str, rule: GateSection, experiment: Experiment) -> UserError | None:
    numerics, algorithm = experiment.numerics, experiment.algorithm
    action = rule.action
    if not algorithm.samples and action != "warn":
        return user_error(
            f"{key}.action",
            found=action,
            expected=f"warn, as the {algorithm.name} algorithm samples nothing that another action could mend",
            remedy="Set it to warn, or remove the gate.",
        )
    measured = metric(rule.metric)
    if (unmet := missing(measured, experiment)) is not None:
        return user_error(
            f"{key}.metric",
            found=f"{rule.metric} with {unmet.setting(experiment)}",
            expected=f"{unmet.expected}, without which there is no such metric",
            remedy="Choose another metric, or set what it needs.",
        )
    if measured.flat_at_first and algorithm.updates > 1:
        return user_error(
            f"{key}.metric",
            found=f"{rule.metric} with {algorithm.updates} updates of a batch",
            expected="another: a gate sees the first pass of a step, whose policy is the one that the batch was scored "
            "with",
            remedy="Choose another metric, such as train/grad_norm, or set algorithm.updates_per_batch=1 and epochs=1.",
        )
    may_be_late = [other for other in SEVERITY if other not in WITHHOLDING or other == "checkpoint_and_stop"]
    if measured.late and action not in may_be_late:
        return user_error(
            f"{key}.action",
            found=f"{action} on {rule.metric}, which is measured after a step's decision",
            expected=f"{', '.join(may_be_late[:-1])} or {may_be_late[-1]}, as it may never recover without updates",
            remedy="Choose one of these actions, or a metric that is measured before the update.",
        )
    alike = numerics.mode == "exact" and numerics.trainer == numerics.rollout
    if _asks_for_equality(rule) and not alike and action in ("skip_step", "resync"):
        numbers = f"numerics.mode={numerics.mode}, trainer={numerics.trainer}, rollout={numerics.rollout}"
        return user_error(
            key,
            found=f"{action} on {rule.metric} {rule.bound} with {numbers}",
            expected="a bound that allows for the difference of such a run, which otherwise trains on no batch",
            remedy="Give one beyond what `fp8rl preflight` measures, or run exact mode with both sides alike.",
        )
    if action == "tighten_tis":
        if algorithm.cap is None or rule.cap >= algorithm.cap:
            return user_error(
                f"{key}.tis_cap",
                found=rule.cap,
                expected=f"less than algorithm.tis_cap={algorithm.cap}, the cap that it tightens",
                remedy="Give a lower cap, or set algorithm.tis_cap above it.",
            )
    if action == "enable_r3" and numerics.router_replay != "record":
        return user_error(
            f"{key}.action",
            found=f"enable_r3 with numerics.router_replay={numerics.router_replay}",
            expected="numerics.router_replay=record, so that there are routes to replay from some step on",
            remedy="Set numerics.router_replay=record, or choose another action.",
        )
    if action == "bf16_both" and not numerics.quantizes:
        return user_error(
            f"{key}.action",
            found="bf16_both with both sides in BF16",
            expected="a side in FP8 to fall back from",
            remedy="Choose another action, or set numerics.trainer or numerics.rollout to fp8.",
        )
    return None


def _asks_for_equality(rule: GateSection) -> bool:
    differs = "abs_diff" in rule.metric and rule.above == 0.0
    return differs or (rule.metric == "mismatch/exact_frac" and rule.below == 1.0)


def _against_each_other(first: int, one: GateSection, second: int, other: GateSection) -> UserError | None:
    if one.metric != other.metric:
        return None
    if (one.above, one.below, one.action) == (other.above, other.below, other.action):
        return user_error(
            f"gates.{second}",
            found=f"{other.action} on {other.metric} {other.bound}",
            expected=f"another condition or action than gates.{first}",
            remedy="Remove one of the two.",
        )
    above = one.above if one.above is not None else other.above
    below = one.below if one.below is not None else other.below
    if above is not None and below is not None and below > above:
        return user_error(
            f"gates.{second}",
            found=f"{other.metric} {other.bound}, while gates.{first} has {one.bound}",
            expected="a value between the two bounds that satisfies both",
            remedy=f"Set below to at most {above}, or above to at least {below}.",
        )
    return None
