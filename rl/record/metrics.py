"""Every metric of a run. Gates, reports, the reference page, wandb and the tests of real runs read this registry.

A name is `group/name`. Groups: `rollout/` sampling and rewards, `train/` the optimizer steps, `critic/` the critic's,
`mismatch/` trainer against engine on tokens that the trainer's own weights have sampled, `drift/` the same on trained
tokens that older ones have sampled, `gates/` what followed from it, `sync/` weight synchronisation, `perf/` time,
`eval/` held-out problems, `tracking/` the log itself. Unless said otherwise a metric describes one step, those of
`train/` and `critic/` as means over its updates; d is trainer minus rollout logprob of a sampled token, rho = e^d.
`p50` and `p99` are percentiles by nearest rank. Exponents are clamped to ±20.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import replace
from functools import cache

from rl.mismatch.breakdown import POSITION_STARTS
from rl.mismatch.drift import OLDEST
from rl.record.metric import Family, Metric, distribution, named, rows

TIME = "Time per step"
"""The chart that the parts of a step's time are stacked in."""

AGE = "Age of the tokens"
"""The chart of the tokens by the age of the weights that sampled them."""

_ANSWERS = "the step's answers"
_USED = "target tokens whose rollout logprob is finite"

_ROLLOUT = {
    "rollout/reward_mean": Metric("", "Mean reward of the answers.", over=_ANSWERS, chart=("Reward", "mean reward")),
    "rollout/reward_std": Metric("", "Standard deviation of the reward over all answers.", over=_ANSWERS),
    "rollout/environment_failures": Metric(
        "answers", "Answers whose environment failed; nothing is learnt from them.", late=True, needs=("environment",)
    ),
    "rollout/turns_mean": Metric("turns", "Mean turns of the model.", over=_ANSWERS, needs=("environment",)),
    "rollout/environment_tokens_mean": Metric(
        "tokens", "Mean tokens that the environment wrote.", over=_ANSWERS, needs=("environment",)
    ),
    "rollout/equal_reward_groups": Metric(
        "",
        "Fraction of groups whose rewards are all equal: they teach nothing.",
        over="groups",
        chart=("Groups of equal rewards", "share"),
    ),
    "rollout/finished_fraction": Metric("", "Fraction that ended by themselves within the limit.", over=_ANSWERS),
    "rollout/response_tokens_mean": Metric(
        "tokens", "Mean generated tokens.", over=_ANSWERS, chart=("Response length", "mean")
    ),
    "rollout/response_tokens_max": Metric("tokens", "Longest generation.", chart=("Response length", "longest")),
    "rollout/tokens": Metric("tokens", "Generated tokens of the step."),
    "rollout/trajectories": Metric("answers", "Answers of the step."),
    "rollout/dropped_groups": Metric("groups", "Groups that the algorithm did not keep; others took their place."),
    "rollout/dropped_tokens_mean": Metric(
        "tokens", "Mean generated tokens of dropped groups.", over="dropped answers", at_times=True
    ),
    "rollout/dropped_reward_mean": Metric(
        "",
        "Mean reward of dropped groups: high where they are solved, low where they are too hard.",
        over="dropped answers",
        at_times=True,
    ),
    "rollout/staleness_max": Metric("versions", "Largest trainer version minus the version that sampled a token."),
}

_TRAIN = {
    "train/loss": Metric("", "Loss over the whole batch.", chart=("Loss", "loss")),
    "train/grad_norm": Metric("", "Global gradient norm before clipping.", chart=("Gradient norm", "gradient norm")),
    "train/lr": Metric("", "Learning rate of the step's last update.", late=True, chart=("Learning rate", "lr")),
    "train/entropy": Metric(
        "nats",
        "Mean entropy of the distributions the target tokens were scored under.",
        over=_USED,
        chart=("Entropy", "entropy"),
    ),
    "train/tokens": Metric("tokens", "Target tokens of the step."),
    **rows(
        {
            "train/dropped_tokens": Metric(
                "tokens", "Target tokens left out because their rollout logprob is not finite."
            ),
            "train/kl": Metric(
                "nats",
                "Mean of e^-x - 1 + x, x being policy minus reference logprob: their KL divergence.",
                over=_USED,
                needs=("reference",),
                chart=("KL to other models", "reference"),
            ),
            "train/teacher_kl": Metric(
                "nats",
                "Mean of the trainer's logprob minus the teacher's, an estimate of KL(policy || teacher).",
                over=_USED,
                needs=("teacher",),
                chart=("KL to other models", "teacher"),
            ),
            "train/ratio_mean": Metric(
                "",
                "Mean policy ratio, trained over scoring weights; 1 in an on-policy step.",
                over=_USED,
                flat_at_first=True,
            ),
            "train/clip_fraction": Metric(
                "",
                "Fraction of tokens whose clipped term is the loss, so without gradient.",
                over=_USED,
                flat_at_first=True,
            ),
            "train/clip_fraction_low": Metric(
                "",
                "Fraction of tokens that the clip's lower bound changed.",
                over=_USED,
                flat_at_first=True,
                chart=("Clipped tokens", "low"),
            ),
            "train/clip_fraction_high": Metric(
                "",
                "Fraction of tokens that its upper bound changed, or the dual clip.",
                over=_USED,
                flat_at_first=True,
                chart=("Clipped tokens", "high"),
            ),
            "train/tis_weight_mean": Metric(
                "",
                "Mean importance weight; that of a rejected token counts as 0.",
                over=_USED,
                needs=("weights",),
                chart=("Importance weight", "mean"),
            ),
            "train/rejected_tokens": Metric(
                "",
                "Fraction of tokens that the rejection masks.",
                over=_USED,
                needs=("rejection",),
                chart=("Rejected", "tokens"),
            ),
            "train/rejected_sequences": Metric(
                "",
                "Fraction of the sequences that the rejection leaves without a token.",
                over="sequences with used tokens",
                needs=("rejection",),
                chart=("Rejected", "sequences"),
            ),
        },
        needs=("samples",),
    ),
}

_CRITIC = {
    "critic/loss": Metric("", "The critic's loss over the whole batch.", chart=("The critic's loss", "loss")),
    "critic/grad_norm": Metric("", "Its global gradient norm before clipping.", chart=("Gradient norm", "critic")),
    "critic/lr": Metric(
        "", "Its learning rate in the step's last update.", late=True, chart=("Learning rate", "critic")
    ),
    "critic/values_mean": Metric("", "Mean value.", over=_USED, chart=("Values and returns", "value")),
    "critic/returns_mean": Metric(
        "", "Mean return, which the values are to foresee.", over=_USED, chart=("Values and returns", "return")
    ),
    "critic/explained_variance": Metric(
        "",
        "1 - variance(return - value) / variance(return), values from before the update: 1 foresees all, 0 the mean.",
        over=_USED,
        late=True,
        chart=("The critic", "explained variance"),
    ),
    "critic/clip_fraction": Metric("", "Fraction of tokens whose value's move the clip has bounded.", over=_USED),
}

_MISMATCH = {
    "mismatch/tokens": Metric("tokens", "Compared tokens: of the trainer's version, with finite d."),
    "mismatch/nonfinite_count": Metric("tokens", "Tokens of the trainer's version whose d is not finite; left out."),
    "mismatch/sequences": Metric("sequences", "Sequences with a compared token."),
    "mismatch/nonfinite_sequences": Metric("sequences", "Sequences with a token whose d is not finite."),
}

_BY_TOKEN = {
    **distribution("mismatch/train_rollout_logprob_abs_diff", "nats", "abs(d)", "Mismatch |d|"),
    **distribution("mismatch/token_mult_prob_error", "", "e^abs(d), the factor between the two probabilities; ideal 1"),
    **distribution("mismatch/rho", "", "rho, the importance ratio; its mean estimates 1"),
    **distribution("mismatch/tis_weight", "", "min(rho, C), the truncated importance weight before any rejection"),
    "mismatch/tis_clipfrac": Metric(
        "",
        "Fraction of tokens with rho > C, the TIS cap as configured (2 where TIS is off), not as a gate tightened it.",
        chart=("Tokens outside the TIS range", "ρ > C"),
    ),
    "mismatch/tis_clipfrac_two_sided": Metric(
        "", "Fraction of tokens with rho > C or rho < 1/C.", chart=("Tokens outside the TIS range", "ρ > C or ρ < 1/C")
    ),
    "mismatch/extreme_frac_2": Metric(
        "", "Fraction of tokens with abs(d) > ln 2: one probability is over twice the other."
    ),
    "mismatch/extreme_frac_10": Metric("", "Fraction of tokens with abs(d) > ln 10."),
    "mismatch/k1_kl": Metric(
        "nats", "Mean of -d, an estimate of KL(rollout || trainer).", chart=("KL(rollout ‖ trainer)", "k1")
    ),
    "mismatch/k2_kl": Metric("nats^2", "Mean of d^2 / 2, for small d an estimate of KL(rollout || trainer)."),
    "mismatch/k3_kl": Metric(
        "nats",
        "Mean of rho - 1 - d, a non-negative estimate of KL(rollout || trainer).",
        chart=("KL(rollout ‖ trainer)", "k3"),
    ),
    "mismatch/chi2_token": Metric("", "Mean of rho^2, minus 1: the chi-squared divergence of a token."),
    "mismatch/ess": Metric(
        "",
        "Effective sample size of the tokens weighted by rho, over their number; ideal 1.",
        chart=("Effective sample size", "tokens"),
    ),
    "mismatch/pearson": Metric(
        "", "Correlation of the tokens' two probabilities; absent where one side is constant.", at_times=True
    ),
    "mismatch/exact_frac": Metric("", "Fraction of tokens with d == 0.", chart=("Exact tokens", "d = 0")),
    "mismatch/near_exact_frac": Metric("", "Fraction of tokens with abs(d) <= 1e-6."),
}

_REDRAWN = {
    "mismatch/redraw_frac": Metric(
        "",
        "Fraction at which the trainer draws the sampled token again; 1 in exact mode.",
        over="mismatch/redraw_tokens",
    ),
    "mismatch/redraw_tokens": Metric(
        "tokens", "Tokens that the trainer drew again, from its own logits and the seeds of their answers."
    ),
}

_BY_SEQUENCE = {
    **distribution("mismatch/ppl_ratio", "", "a sequence's trainer over its rollout perplexity, e^(mean of -d)"),
    **distribution("mismatch/geometric_ratio", "", "a sequence's e^(mean of d), the geometric mean of its rho"),
    "mismatch/chi2_sequence": Metric("", "Mean of e^(2 sum of d), minus 1: the sequences' chi-squared divergence."),
    "mismatch/ess_sequence": Metric(
        "",
        "Effective sample size of the sequences weighted by e^(sum of d), over their number.",
        chart=("Effective sample size", "sequences"),
    ),
}

_ROUTER = {
    "mismatch/router_pairs": Metric(
        "pairs", "Pairs of a token, prompts included, and a layer whose experts both sides report."
    ),
    "mismatch/router_tokens": Metric("tokens", "Tokens with at least one such pair."),
    "mismatch/router_unknown_pairs": Metric("pairs", "The other pairs of a token and a layer; left out."),
    "mismatch/router_agreement": Metric(
        "",
        "Mean of the experts that both sides chose, over top-k.",
        over="mismatch/router_pairs",
        chart=("Routing", "experts that both chose"),
    ),
    "mismatch/router_differ_frac": Metric(
        "", "Fraction of the pairs in which the chosen experts differ.", over="mismatch/router_pairs"
    ),
    "mismatch/router_token_differ_frac": Metric(
        "",
        "Fraction of the tokens that differ in any layer.",
        over="mismatch/router_tokens",
        chart=("Routing", "tokens that differ in any layer"),
    ),
}

_DRIFT = {
    "drift/tokens": Metric("tokens", "Trained tokens that older weights than the trainer's have sampled, finite d."),
    "drift/logprob_abs_diff_mean": Metric(
        "nats",
        "Mean of abs(d): the change of the policy since these tokens were sampled.",
        over="drift/tokens",
        chart=("Drift of older tokens |d|", "mean"),
    ),
    "drift/logprob_abs_diff_max": Metric("nats", "Largest abs(d).", chart=("Drift of older tokens |d|", "maximum")),
    "drift/k1_kl": Metric(
        "nats",
        "Mean of -d, an estimate of KL(older || current policy).",
        over="drift/tokens",
        chart=("KL(older ‖ current policy)", "k1"),
    ),
    "drift/k3_kl": Metric(
        "nats",
        "Mean of rho - 1 - d, a non-negative estimate of KL(older || current policy).",
        over="drift/tokens",
        chart=("KL(older ‖ current policy)", "k3"),
    ),
    "drift/ess": Metric(
        "",
        "Effective sample size of these tokens weighted by rho, over their number; 1 where the policy stands still.",
        over="drift/tokens",
        chart=("Effective sample size", "older tokens"),
    ),
}

_GATES = {
    "gates/fired": Metric("gates", "Gates that fired in the step."),
    "gates/withheld": Metric("", "1 if the batch was not trained on, or not to its last update, else 0."),
    "gates/tis_cap": Metric("", "Cap of the importance weight in force.", needs=("cap",)),
    "gates/router_replay": Metric("", "1 while the trainer takes the engine's experts, else 0."),
    "gates/bf16": Metric("", "1 once a gate has made both sides fall back to BF16, else 0."),
    "gates/stale_resyncs": Metric(
        "", "Samplings of the step that were repeated for stale weights.", needs=("engines",)
    ),
}

_SYNC = {
    "sync/bytes": Metric("bytes", "Bytes sent to one engine.", chart=("Bytes sent", "bytes")),
    "sync/weight_bytes": Metric(
        "bytes", "Bytes of the weights that an engine holds after it, of which sync.delta sends some."
    ),
    "sync/seconds": Metric("s", "Time of the weight sync, digests and verification included.", chart=(TIME, "sync")),
    "sync/send_seconds": Metric("s", "Of which export, quantization, digests and loading."),
    "sync/verify_seconds": Metric("s", "Of which the engines' refresh and digests, and the comparison."),
    "sync/verified_tensors": Metric(
        "tensors", "Engine tensors whose digest equals the trainer's.", chart=("Tensors", "verified")
    ),
    "sync/mismatched_tensors": Metric(
        "tensors", "Engine tensors whose digest differs; the run does not go on.", chart=("Tensors", "mismatched")
    ),
}

_PERF = {
    "perf/step_seconds": Metric("s", "Wall time of the whole step."),
    **rows(
        {
            "perf/rollout_seconds": Metric("s", "Time that the trainer waited for answers.", chart=(TIME, "rollout")),
            "perf/sampling_seconds": Metric("s", "From asking for the first group of the step to its last answer."),
            "perf/reward_seconds": Metric(
                "s", "Wait for rewards, and the teacher, once the answers are there; both begin as these come in."
            ),
            "perf/rollout_tokens_per_second": Metric(
                "tokens/s",
                "Generated tokens of the step over its sampling time; absent where a checkpoint brought all answers.",
                over="perf/sampling_seconds",
                at_times=True,
                chart=("Throughput", "rollout"),
            ),
            "perf/groups_in_flight": Metric(
                "groups", "Groups of later steps that are being answered when a step has its own.", needs=("staleness",)
            ),
            "perf/groups_ahead": Metric(
                "groups", "Groups of later steps that are answered by then.", needs=("staleness",)
            ),
        },
        needs=("samples",),
    ),
    "perf/train_seconds": Metric("s", "Time of forward, backward and optimizer step.", chart=(TIME, "train")),
    "perf/monitor_seconds": Metric("s", "Time of the mismatch metrics and the gates, with a capsule where one fired."),
    "perf/eval_seconds": Metric(
        "s", "Wait for the evaluation.", needs=("evaluation",), at_times=True, chart=(TIME, "evaluation")
    ),
    "perf/checkpoint_seconds": Metric(
        "s", "Wait for the checkpoint before and for the copy.", at_times=True, chart=(TIME, "checkpoint")
    ),
    "perf/overhead_seconds": Metric("s", "Step without all of the other parts."),
    "perf/train_tokens_per_second": Metric(
        "tokens/s",
        "Tokens of the batch, prompts included, over the train time.",
        over="perf/train_seconds",
        chart=("Throughput", "train"),
    ),
    "perf/engine_idle_seconds": Metric(
        "s", "Mean time of the step in which an engine sampled nothing.", over="engines", needs=("engines",)
    ),
    "perf/engine_balance": Metric(
        "",
        "Tokens that the idlest engine generated in the step over those of the busiest.",
        needs=("several_engines",),
        at_times=True,
    ),
}

_EVAL = {
    "eval/accuracy": Metric(
        "",
        "Mean of the first reward over greedy answers to held-out problems: the fraction solved, if it says that.",
        over="eval/problems",
        chart=("Held-out accuracy", "accuracy"),
    ),
    "eval/problems": Metric("problems", "Held-out problems evaluated."),
    "eval/at_step": Metric(
        "", "Step whose weights were evaluated, where that goes on beside the next step.", needs=("staleness",)
    ),
}

_TRACKING = {
    "tracking/resumed": Metric("", "1 in the first step after a resume; absent in others.", at_times=True),
    "tracking/wandb_lost": Metric("", "1 from the step after wandb was lost; absent before.", at_times=True),
    "tracking/nonfinite_dropped": Metric("", "Metrics of this step left out because they were not finite."),
}

METRICS: dict[str, Metric] = {
    **rows(_ROLLOUT, needs=("samples",)),
    "rollout/reward_failures": Metric(
        "calls", "Calls of reward functions that failed; each counts as a reward of 0.", late=True, needs=("engines",)
    ),
    "rollout/engines_replaced": Metric(
        "engines", "Engines that died in the step and were replaced.", late=True, needs=("engines",)
    ),
    **_TRAIN,
    **rows(_CRITIC, needs=("samples", "critic")),
    **rows(_MISMATCH, needs=("samples",)),
    **rows(_BY_TOKEN, over="mismatch/tokens", needs=("samples",)),
    **rows(_REDRAWN, needs=("samples", "redraws")),
    **rows(_BY_SEQUENCE, over="mismatch/sequences", needs=("samples",)),
    **rows(_ROUTER, needs=("samples", "routes")),
    **rows(_DRIFT, needs=("samples", "staleness"), at_times=True),
    **rows(_GATES, late=True),
    **rows(_PERF, late=True),
    **rows(_SYNC, late=True, needs=("engines",), at_times=True),
    "sync/repeated": Metric(
        "syncs",
        "Syncs of the step that failed although every engine lived, and were done again.",
        late=True,
        needs=("engines",),
    ),
    **rows(_EVAL, late=True, needs=("evaluation",), at_times=True),
    **rows(_TRACKING, late=True),
}

REWARD_PARTS = "rollout/reward/"
"""Metrics that the reward functions of an experiment name."""
OUTCOMES = "rollout/outcome/"
"""Metrics that its environment names."""

_AGES = range(OLDEST + 1)
FAMILIES: dict[str, Family] = {
    "rollout/tokens_age_": Family(
        Metric(
            "tokens",
            f"Generated tokens sampled {{n}} weight versions before the trainer's; {OLDEST} stands for that and more.",
            needs=("samples",),
            at_times=True,
            chart=(AGE, "age {n}"),
        ),
        _AGES,
    ),
    "drift/tokens_age_": Family(
        Metric("tokens", "`drift/tokens` of age {n}.", needs=("samples", "staleness"), at_times=True), _AGES[1:]
    ),
    "drift/abs_diff_mean_age_": Family(
        Metric(
            "nats",
            "Mean of abs(d) of the tokens of age {n}.",
            over="drift/tokens_age_{n}",
            needs=("samples", "staleness"),
            at_times=True,
            chart=("Drift by age", "age {n}"),
        ),
        _AGES[1:],
    ),
    **{
        f"mismatch/{name}_pos_": Family(
            Metric(
                unit,
                f"{meaning} in the bucket from position {{n}} of the generated tokens; buckets begin at "
                f"{', '.join(map(str, POSITION_STARTS))}.",
                over=over,
                needs=("samples",),
                at_times=True,
            ),
            POSITION_STARTS,
        )
        for name, unit, meaning, over in (
            ("abs_diff_mean", "nats", "Mean of abs(d)", "mismatch/tokens_pos_{n}"),
            ("abs_diff_max", "nats", "Largest abs(d)", ""),
            ("tokens", "tokens", "Tokens with finite d", ""),
        )
    },
    "mismatch/router_agreement_layer_": Family(
        Metric(
            "",
            "As `mismatch/router_agreement`, of MoE layer {n}, counted from 0.",
            over="its pairs of this layer",
            needs=("samples", "routes"),
            at_times=True,
        ),
        range(1 << 16),
    ),
}
"""The families by their members' name without its number."""

_OF_A_SET: dict[str, Metric] = rows(
    {
        "accuracy": Metric("", "Mean of the first reward over all answers of the set.", over="the set's answers"),
        "problems": Metric("problems", "Problems of the set that were evaluated."),
        "finished_fraction": Metric("", "Fraction of its answers that ended by themselves within the limit."),
        "response_tokens_mean": Metric("tokens", "Mean generated tokens of its answers."),
        "avg@": Metric("", "Its accuracy, by the name of the field: the mean over {n} answers to each problem."),
        "pass@": Metric("", "Mean chance that one of {n} answers to a problem is right, estimated without bias."),
    },
    late=True,
    needs=("evaluation",),
    at_times=True,
)
"""The metrics of an evaluation set, `eval/NAME/...`."""


@cache
def describe(name: str) -> Metric | None:
    """The metric of this name, fixed or member of a family; None if a run has no such metric."""
    if name in METRICS:
        return METRICS[name]
    if name.startswith(REWARD_PARTS):
        part = name.removeprefix(REWARD_PARTS)
        meaning = f"Mean of `{part}`, a part of the reward, unweighted."
        return Metric(
            "", meaning, over=_ANSWERS, needs=("samples",), at_times=True, chart=("Parts of the reward", part)
        )
    if name.startswith(OUTCOMES):
        part = name.removeprefix(OUTCOMES)
        meaning, chart = f"Mean of `{part}`, which the environment returned.", ("Outcomes of the environment", part)
        return Metric("", meaning, over=_ANSWERS, needs=("samples", "environment"), at_times=True, chart=chart)
    if of_a_set := re.fullmatch(r"eval/([^/]+)/([a-z_]+@?)([1-9]\d*)?", name):
        member = _OF_A_SET.get(of_a_set[2])
        counted = of_a_set[2].endswith("@") == (of_a_set[3] is not None)
        if member is None or not counted:
            return None
        drawn = ("Held-out accuracy", name.removeprefix("eval/")) if of_a_set[2] in ("accuracy", "pass@") else None
        return replace(named(member, of_a_set[3] or ""), chart=drawn)
    match = re.fullmatch(r"(.*_)(0|[1-9]\d*)", name)
    family = FAMILIES.get(match[1]) if match else None
    if match is None or family is None or int(match[2]) not in family.numbers:
        return None
    return family.member(int(match[2]))


def nearest_metric(name: str) -> str:
    """The metric whose name is most like `name`; a family stands by its first member that is like it."""
    members = [f"{prefix}{number}" for prefix, family in FAMILIES.items() for number in [*family.numbers][:16]]
    (nearest,) = difflib.get_close_matches(name, [*METRICS, *members], n=1, cutoff=0.0)
    return nearest


def metric(name: str) -> Metric:
    """The declared metric, or a blank one for a name outside the tables."""
    return describe(name) or Metric("", "")
