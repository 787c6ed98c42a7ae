"""Every metric of a run: its unit and what it means. Gates, the report and wandb read this table.

A name is `group/name`. Groups: `rollout/` sampling and rewards, `train/` the optimizer steps, `critic/` the critic's,
`mismatch/` trainer against engine on tokens that the trainer's own weights have sampled, `drift/` the same on older
ones, `gates/` what followed from it, `sync/` weight synchronisation, `perf/` time, `eval/` held-out problems,
`tracking/` the log itself. Unless said otherwise a metric describes one step, those of `train/` and `critic/` as means
over its updates; d is trainer minus rollout logprob of a sampled token, rho = e^d.

The denominator of a mean or fraction over tokens is `mismatch/tokens`, over sequences `mismatch/sequences`, unless its
meaning names another. `p50` and `p99` are percentiles by nearest rank. Exponents are clamped to ±20.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from dataclasses import dataclass

from rl.mismatch.breakdown import POSITION_STARTS
from rl.mismatch.drift import OLDEST


@dataclass(frozen=True)
class Metric:
    """Unit (empty for a plain ratio) and meaning of a metric."""

    unit: str
    meaning: str


def _distribution(name: str, unit: str, of: str) -> dict[str, Metric]:
    statistics = {"mean": "Mean", "p50": "Median", "p99": "99th percentile", "max": "Maximum"}
    return {f"{name}_{suffix}": Metric(unit, f"{word} of {of}.") for suffix, word in statistics.items()}


METRICS: dict[str, Metric] = {
    "rollout/reward_mean": Metric("", "Mean reward of the sampled trajectories."),
    "rollout/reward_std": Metric("", "Standard deviation of the reward over all sampled trajectories."),
    "rollout/reward_failures": Metric("calls", "Calls of reward functions that failed; each counts as a reward of 0."),
    "rollout/environment_failures": Metric("answers", "Answers whose environment failed; nothing is learnt from them."),
    "rollout/turns_mean": Metric("turns", "Mean turns of the model per trajectory, in a run with an environment."),
    "rollout/environment_tokens_mean": Metric("tokens", "Mean tokens per trajectory that its environment wrote."),
    "rollout/equal_reward_groups": Metric("", "Fraction of groups whose rewards are all equal: they teach nothing."),
    "rollout/finished_fraction": Metric("", "Fraction of trajectories that ended by themselves within the limit."),
    "rollout/response_tokens_mean": Metric("tokens", "Mean generated tokens per trajectory."),
    "rollout/response_tokens_max": Metric("tokens", "Longest generation."),
    "rollout/tokens": Metric("tokens", "Generated tokens of the step."),
    "rollout/trajectories": Metric("trajectories", "Sampled trajectories of the step."),
    "rollout/dropped_groups": Metric("groups", "Groups that the algorithm did not keep; others took their place."),
    "rollout/dropped_tokens_mean": Metric("tokens", "Mean generated tokens of their answers; absent where none was."),
    "rollout/dropped_reward_mean": Metric(
        "", "Their mean reward: high where they are solved, low where they are too hard."
    ),
    "rollout/engines_replaced": Metric("engines", "Engines that died in the step and were replaced."),
    "rollout/staleness_max": Metric("versions", "Largest trainer version minus the version that sampled a token."),
    "train/loss": Metric("", "Loss over the whole batch."),
    "train/grad_norm": Metric("", "Global gradient norm before clipping."),
    "train/lr": Metric("", "Learning rate of the step's last update."),
    "train/entropy": Metric("nats", "Mean entropy of the distributions the target tokens were scored under."),
    "train/kl": Metric(
        "nats",
        "Mean of e^-x - 1 + x over the used tokens, x being policy minus reference logprob: their KL divergence.",
    ),
    "train/ratio_mean": Metric("", "Mean policy ratio, trained over scoring weights; 1 in an on-policy step."),
    "train/clip_fraction": Metric("", "Fraction of used tokens whose clipped term is the loss, so without gradient."),
    "train/clip_fraction_low": Metric("", "Fraction of used tokens that the clip's lower bound changed."),
    "train/clip_fraction_high": Metric("", "Fraction of used tokens that its upper bound changed, or the dual clip."),
    "train/tis_weight_mean": Metric("", "Mean importance weight of the used tokens; a rejected one counts as 0."),
    "train/rejected_tokens": Metric("", "Fraction of the used tokens that the rejection masks."),
    "train/rejected_sequences": Metric("", "Fraction of the sequences that the rejection leaves without a token."),
    "train/teacher_kl": Metric(
        "nats", "Mean of the trainer's logprob minus the teacher's, an estimate of KL(policy || teacher); opd only."
    ),
    "train/dropped_tokens": Metric("tokens", "Target tokens left out because their rollout logprob is not finite."),
    "train/tokens": Metric("tokens", "Target tokens of the step."),
    "critic/loss": Metric("", "The critic's loss over the whole batch."),
    "critic/grad_norm": Metric("", "Its global gradient norm before clipping."),
    "critic/lr": Metric("", "Its learning rate in the step's last update."),
    "critic/values_mean": Metric("", "Mean value of the used tokens."),
    "critic/returns_mean": Metric("", "Mean return of the used tokens, which the values are to foresee."),
    "critic/explained_variance": Metric(
        "",
        "1 - variance(return - value) / variance(return), values from before the update: 1 foresees all, 0 the mean.",
    ),
    "critic/clip_fraction": Metric("", "Fraction of used tokens whose value's move the clip has bounded."),
    "mismatch/tokens": Metric("tokens", "Sampled tokens with finite d: the denominator of the token metrics."),
    "mismatch/nonfinite_count": Metric("tokens", "Sampled tokens whose d is not finite; dropped from the others."),
    "mismatch/sequences": Metric("sequences", "Sequences with a token of finite d: the denominator over sequences."),
    "mismatch/nonfinite_sequences": Metric("sequences", "Sequences with a token whose d is not finite."),
    **_distribution("mismatch/train_rollout_logprob_abs_diff", "nats", "abs(d)"),
    **_distribution(
        "mismatch/token_mult_prob_error", "", "e^abs(d), the factor between the two probabilities; ideal 1"
    ),
    **_distribution("mismatch/rho", "", "rho, the importance ratio; its mean estimates 1"),
    **_distribution("mismatch/tis_weight", "", "min(rho, C), the truncated importance weight before any rejection"),
    "mismatch/tis_clipfrac": Metric(
        "",
        "Fraction of tokens with rho > C, the TIS cap as configured (2 where TIS is off), not as a gate tightened it.",
    ),
    "mismatch/tis_clipfrac_two_sided": Metric("", "Fraction of tokens with rho > C or rho < 1/C."),
    "mismatch/extreme_frac_2": Metric(
        "", "Fraction of tokens with abs(d) > ln 2: one probability is over twice the other."
    ),
    "mismatch/extreme_frac_10": Metric("", "Fraction of tokens with abs(d) > ln 10."),
    "mismatch/k1_kl": Metric("nats", "Mean of -d, an estimate of KL(rollout || trainer)."),
    "mismatch/k2_kl": Metric("nats^2", "Mean of d^2 / 2, for small d an estimate of KL(rollout || trainer)."),
    "mismatch/k3_kl": Metric("nats", "Mean of rho - 1 - d, a non-negative estimate of KL(rollout || trainer)."),
    "mismatch/chi2_token": Metric("", "Mean of rho^2 over the tokens, minus 1: the chi-squared divergence of a token."),
    "mismatch/ess": Metric("", "Effective sample size of the tokens weighted by rho, over their number; ideal 1."),
    "mismatch/pearson": Metric("", "Correlation of the tokens' two probabilities; absent where one side is constant."),
    "mismatch/exact_frac": Metric("", "Fraction of tokens with d == 0."),
    "mismatch/near_exact_frac": Metric("", "Fraction of tokens with abs(d) <= 1e-6."),
    "mismatch/redraw_frac": Metric(
        "",
        "Fraction of `mismatch/redraw_tokens` at which the trainer draws the sampled token again; 1 in exact mode.",
    ),
    "mismatch/redraw_tokens": Metric(
        "tokens", "Tokens that the trainer drew again, from its own logits and the seeds of their answers."
    ),
    **_distribution("mismatch/ppl_ratio", "", "a sequence's trainer over its rollout perplexity, e^(mean of -d)"),
    **_distribution("mismatch/geometric_ratio", "", "a sequence's e^(mean of d), the geometric mean of its rho"),
    "mismatch/chi2_sequence": Metric(
        "", "Mean of e^(2 sum of d) over the sequences, minus 1: their chi-squared divergence."
    ),
    "mismatch/ess_sequence": Metric(
        "", "Effective sample size of the sequences weighted by e^(sum of d), over their number."
    ),
    "mismatch/router_pairs": Metric(
        "pairs", "Pairs of a token, prompts included, and a layer whose experts both sides report."
    ),
    "mismatch/router_tokens": Metric("tokens", "Tokens with at least one such pair."),
    "mismatch/router_unknown_pairs": Metric("pairs", "The other pairs of a token and a layer; left out."),
    "mismatch/router_agreement": Metric("", "Mean over the pairs of the experts that both sides chose, over top-k."),
    "mismatch/router_differ_frac": Metric("", "Fraction of the pairs in which the chosen experts differ."),
    "mismatch/router_token_differ_frac": Metric("", "Fraction of `mismatch/router_tokens` that differ in any layer."),
    "drift/tokens": Metric(
        "tokens", "Trained tokens that older weights than the trainer's have sampled, with finite d."
    ),
    "drift/logprob_abs_diff_mean": Metric("nats", "Mean of abs(d) of these tokens: the change of the policy since."),
    "drift/logprob_abs_diff_max": Metric("nats", "Largest abs(d) of these tokens."),
    "drift/k3_kl": Metric("nats", "Mean of rho - 1 - d of these tokens, an estimate of KL(older || current policy)."),
    "gates/fired": Metric("gates", "Gates that fired in the step."),
    "gates/withheld": Metric("", "1 if the batch was not trained on, or not to its last update, else 0."),
    "gates/tis_cap": Metric("", "Cap of the importance weight in force; absent where TIS is off."),
    "gates/router_replay": Metric("", "1 while the trainer takes the engine's experts, else 0."),
    "gates/bf16": Metric("", "1 once a gate has made both sides fall back to BF16, else 0."),
    "gates/stale_resyncs": Metric("", "Samplings of the step that were repeated for stale weights."),
    "sync/bytes": Metric("bytes", "Bytes sent to one engine."),
    "sync/weight_bytes": Metric(
        "bytes", "Bytes of the weights that an engine holds after it, of which sync.delta sends some."
    ),
    "sync/seconds": Metric("s", "Time of the weight sync, digests and verification included."),
    "sync/send_seconds": Metric("s", "Of which export, quantization, digests and loading."),
    "sync/verify_seconds": Metric("s", "Of which the engines' refresh and digests, and the comparison."),
    "sync/verified_tensors": Metric("tensors", "Engine tensors whose digest equals the trainer's."),
    "sync/repeated": Metric("syncs", "Syncs of the step that failed although every engine lived, and were done again."),
    "sync/mismatched_tensors": Metric("tensors", "Engine tensors whose digest differs; the run does not go on."),
    "perf/step_seconds": Metric("s", "Wall time of the whole step."),
    "perf/rollout_seconds": Metric("s", "Time that the trainer waited for trajectories."),
    "perf/sampling_seconds": Metric("s", "From asking for the first group of the step to its last answer."),
    "perf/reward_seconds": Metric(
        "s", "Wait for rewards, and the teacher, once the answers are there; both begin as these come in."
    ),
    "perf/engine_idle_seconds": Metric(
        "s", "Mean over the engines of the time of the step in which it sampled nothing."
    ),
    "perf/engine_balance": Metric("", "Tokens that the idlest engine generated in the step over those of the busiest."),
    "perf/groups_in_flight": Metric("groups", "Groups of later steps that are being answered when a step has its own."),
    "perf/groups_ahead": Metric("groups", "Groups of later steps that are answered by then."),
    "perf/train_seconds": Metric("s", "Time of forward, backward and optimizer step."),
    "perf/monitor_seconds": Metric("s", "Time of the mismatch metrics and the gates, with a capsule where one fired."),
    "perf/eval_seconds": Metric("s", "Wait for the evaluation, on steps with one."),
    "perf/checkpoint_seconds": Metric("s", "Wait for the checkpoint before and for the copy, on steps with one."),
    "perf/overhead_seconds": Metric("s", "Step without all of the other parts."),
    "perf/rollout_tokens_per_second": Metric("tokens/s", "Generated tokens of the step over its sampling time."),
    "perf/train_tokens_per_second": Metric("tokens/s", "Tokens of the batch, prompts included, over the train time."),
    "eval/accuracy": Metric(
        "", "Mean of the first reward over greedy answers to held-out problems: the fraction solved, if it says that."
    ),
    "eval/problems": Metric("problems", "Held-out problems evaluated."),
    "eval/at_step": Metric("", "Step whose weights were evaluated, where that goes on beside the next step."),
    "tracking/resumed": Metric("", "1 in the first step after a resume; absent in others."),
    "tracking/wandb_lost": Metric("", "1 from the step after wandb was lost; absent before."),
    "tracking/nonfinite_dropped": Metric("", "Metrics of this step left out because they were not finite."),
}


@dataclass(frozen=True)
class Family:
    """Metrics that differ by a number at the end of their name.

    unit, meaning: of each member, `{n}` in the meaning standing for its number.
    numbers: that members can have.
    """

    unit: str
    meaning: str
    numbers: Collection[int]


_AGES = range(OLDEST + 1)
_LAYERS = range(1 << 16)

REWARD_PARTS = "rollout/reward/"
"""Metrics that the reward functions of an experiment name."""
OUTCOMES = "rollout/outcome/"
"""Metrics that its environment names."""

FAMILIES: dict[str, Family] = {
    "rollout/tokens_age_": Family(
        "tokens",
        f"Generated tokens sampled {{n}} weight versions before the trainer's; {OLDEST} stands for that and more.",
        _AGES,
    ),
    "drift/tokens_age_": Family("tokens", "`drift/tokens` of age {n}.", _AGES[1:]),
    "drift/abs_diff_mean_age_": Family("nats", "Mean of abs(d) of the tokens of age {n}.", _AGES[1:]),
    "mismatch/abs_diff_mean_pos_": Family("nats", "Mean of abs(d) in the bucket from position {n}.", POSITION_STARTS),
    "mismatch/abs_diff_max_pos_": Family("nats", "Largest abs(d) in the bucket from position {n}.", POSITION_STARTS),
    "mismatch/tokens_pos_": Family(
        "tokens",
        "Tokens with finite d in the bucket from position {n} of the generated tokens; buckets begin at "
        f"{', '.join(map(str, POSITION_STARTS))}.",
        POSITION_STARTS,
    ),
    "mismatch/router_agreement_layer_": Family(
        "", "As `mismatch/router_agreement`, of MoE layer {n}, counted from 0.", _LAYERS
    ),
}
"""By the members' name without its number."""


_OF_A_SET: dict[str, Metric] = {
    "accuracy": Metric("", "Mean of the first reward over all answers of the set."),
    "problems": Metric("problems", "Problems of the set that were evaluated."),
    "finished_fraction": Metric("", "Fraction of its answers that ended by themselves within the limit."),
    "response_tokens_mean": Metric("tokens", "Mean generated tokens of its answers."),
    "avg@": Metric("", "Its accuracy, by the name of the field: the mean over {n} answers to each problem."),
    "pass@": Metric("", "Mean chance that one of {n} answers to a problem is right, estimated without bias."),
}
"""Of `eval/NAME/...`, the metrics of an evaluation set."""


def describe(name: str) -> Metric | None:
    """The metric of this name, fixed or member of a family; None if a run has no such metric."""
    if name in METRICS:
        return METRICS[name]
    if name.startswith(REWARD_PARTS):
        return Metric("", f"Mean of `{name.removeprefix(REWARD_PARTS)}`, a part of the reward, unweighted.")
    if name.startswith(OUTCOMES):
        return Metric("", f"Mean of `{name.removeprefix(OUTCOMES)}`, which the environment returned.")
    if of_a_set := re.fullmatch(r"eval/[^/]+/([a-z_]+@?)([1-9]\d*)?", name):
        member = _OF_A_SET.get(of_a_set[1])
        counted = of_a_set[1].endswith("@") == (of_a_set[2] is not None)
        return Metric(member.unit, member.meaning.format(n=of_a_set[2])) if member and counted else None
    match = re.fullmatch(r"(.*_)(0|[1-9]\d*)", name)
    family = FAMILIES.get(match[1]) if match else None
    if match is None or family is None or int(match[2]) not in family.numbers:
        return None
    return Metric(family.unit, family.meaning.format(n=match[2]))


def nearest_metric(name: str) -> str:
    """The metric whose name is most like `name`; a family stands by its first member that is like it."""
    members = [f"{prefix}{number}" for prefix, family in FAMILIES.items() for number in [*family.numbers][:16]]
    (nearest,) = difflib.get_close_matches(name, [*METRICS, *members], n=1, cutoff=0.0)
    return nearest


def metric(name: str) -> Metric:
    """The declared metric, or a blank one for a name outside the tables."""
    return describe(name) or Metric("", "")
