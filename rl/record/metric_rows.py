"""The rows of the registry: every metric that has a fixed name. `rl.record.metrics` says what the names mean."""

from __future__ import annotations

from fp8rl.rl.record.metric import Metric, distribution, rows

TIME = "Time per step"
"""The chart that the parts of a step's time are stacked in."""

ANSWERS = "the step's answers"
_USED = "target tokens whose rollout logprob is finite"

_ROLLOUT = {
    "reward_mean": Metric("", "Mean reward of the answers.", ANSWERS, chart=("Reward", "mean reward")),
    "reward_std": Metric("", "Standard deviation of the reward over all answers.", ANSWERS),
    "environment_failures": Metric(
        "answers", "Answers whose environment failed; nothing is learnt from them.", late=True, needs=("environment",)
    ),
    "turns_mean": Metric("turns", "Mean turns of the model.", ANSWERS, needs=("environment",)),
    "environment_tokens_mean": Metric(
        "tokens", "Mean tokens that the environment wrote.", ANSWERS, needs=("environment",)
    ),
    "branches": Metric("rows", "Rows that conversations opened beside their first.", needs=("environment",)),
    "equal_reward_groups": Metric(
        "",
        "Fraction of groups whose rewards are all equal: they teach nothing.",
        "groups",
        chart=("Groups of equal rewards", "share"),
    ),
    "finished_fraction": Metric("", "Fraction that ended by themselves within the limit.", ANSWERS),
    "response_tokens_mean": Metric("tokens", "Mean generated tokens.", ANSWERS, chart=("Response length", "mean")),
    "response_tokens_max": Metric("tokens", "Longest generation.", chart=("Response length", "longest")),
    "tokens": Metric("tokens", "Generated tokens of the step."),
    "trajectories": Metric("answers", "Answers of the step."),
    "dropped_groups": Metric("groups", "Groups that the algorithm did not keep; others took their place."),
    "dropped_tokens_mean": Metric(
        "tokens", "Mean generated tokens of dropped groups.", "dropped answers", at_times=True
    ),
    "dropped_reward_mean": Metric(
        "",
        "Mean reward of dropped groups: high where they are solved, low where they are too hard.",
        "dropped answers",
        at_times=True,
    ),
    "staleness_max": Metric("versions", "Largest trainer version minus the version that sampled a token."),
}

_FAULTS = {
    "reward_failures": Metric("calls", "Calls of reward functions that failed; each counts as a reward of 0."),
    "engines_replaced": Metric("engines", "Engines that died in the step and were replaced."),
}

_TRAIN = {
    "loss": Metric("", "Loss over the whole batch.", chart=("Loss", "loss")),
    "grad_norm": Metric("", "Global gradient norm before clipping.", chart=("Gradient norm", "gradient norm")),
    "lr": Metric("", "Learning rate of the step's last update.", late=True, chart=("Learning rate", "lr")),
    "update_survival": Metric(
        "",
        "Cosine of what merged adapters add to the weights and what that changes of them after quantization: 1 where "
        "all of an update survives, near 0 where it is lost in the grid's steps. Absent while they add nothing.",
        late=True,
        needs=("merged",),
        at_times=True,
        chart=("Merged updates", "cosine after quantization"),
    ),
    "entropy": Metric(
        "nats",
        "Mean entropy of the distributions the target tokens were scored under: after top-p, top-k and min-p.",
        _USED,
        chart=("Entropy", "entropy"),
    ),
    "tokens": Metric("tokens", "Target tokens of the step."),
}

_UPDATES = {
    "dropped_tokens": Metric("tokens", "Target tokens left out because their rollout logprob is not finite."),
    "kl": Metric(
        "nats",
        "Mean of e^-x - 1 + x, x being policy minus reference logprob: their KL divergence.",
        _USED,
        needs=("reference",),
        chart=("KL to other models", "reference"),
    ),
    "teacher_kl": Metric(
        "nats",
        "Mean of the trainer's logprob minus the teacher's, an estimate of KL(policy || teacher).",
        _USED,
        needs=("teacher",),
        chart=("KL to other models", "teacher"),
    ),
    "ratio_mean": Metric(
        "", "Mean policy ratio, trained over scoring weights; 1 in an on-policy step.", _USED, flat_at_first=True
    ),
    "clip_fraction": Metric(
        "", "Fraction of tokens whose clipped term is the loss, so without gradient.", _USED, flat_at_first=True
    ),
    "clip_fraction_low": Metric(
        "",
        "Fraction of tokens that the clip's lower bound changed.",
        _USED,
        flat_at_first=True,
        chart=("Clipped tokens", "low"),
    ),
    "clip_fraction_high": Metric(
        "",
        "Fraction of tokens that its upper bound changed, or the dual clip.",
        _USED,
        flat_at_first=True,
        chart=("Clipped tokens", "high"),
    ),
    "tis_weight_mean": Metric(
        "",
        "Mean importance weight; that of a rejected token counts as 0.",
        _USED,
        needs=("weights",),
        chart=("Importance weight", "mean"),
    ),
    "rejected_tokens": Metric(
        "", "Fraction of tokens that the rejection masks.", _USED, needs=("rejection",), chart=("Rejected", "tokens")
    ),
    "rejected_sequences": Metric(
        "",
        "Fraction of the sequences that the rejection leaves without a token.",
        "sequences with used tokens",
        needs=("rejection",),
        chart=("Rejected", "sequences"),
    ),
}

_CRITIC = {
    "loss": Metric("", "The critic's loss over the whole batch.", chart=("The critic's loss", "loss")),
    "grad_norm": Metric("", "Its global gradient norm before clipping.", chart=("Gradient norm", "critic")),
    "lr": Metric("", "Its learning rate in the step's last update.", late=True, chart=("Learning rate", "critic")),
    "values_mean": Metric("", "Mean value.", _USED, chart=("Values and returns", "value")),
    "returns_mean": Metric(
        "", "Mean return, which the values are to foresee.", _USED, chart=("Values and returns", "return")
    ),
    "explained_variance": Metric(
        "",
        "1 - variance(return - value) / variance(return), values from before the update: 1 foresees all, 0 the mean.",
        _USED,
        late=True,
        chart=("The critic", "explained variance"),
    ),
    "clip_fraction": Metric("", "Fraction of tokens whose value's move the clip has bounded.", _USED),
}

_MISMATCH = {
    "tokens": Metric("tokens", "Compared tokens: of the trainer's version, with finite d."),
    "nonfinite_count": Metric("tokens", "Tokens of the trainer's version whose d is not finite; left out."),
    "sequences": Metric("sequences", "Sequences with a compared token."),
    "nonfinite_sequences": Metric("sequences", "Sequences with a token whose d is not finite."),
}

_BY_TOKEN = {
    **distribution("train_rollout_logprob_abs_diff", "nats", "abs(d)", "Mismatch |d|"),
    **distribution("token_mult_prob_error", "", "e^abs(d), the factor between the two probabilities; ideal 1"),
    **distribution("rho", "", "rho, the importance ratio; its mean estimates 1"),
    **distribution("tis_weight", "", "min(rho, C), the truncated importance weight before any rejection"),
    "tis_clipfrac": Metric(
        "",
        "Fraction of tokens with rho > C, the TIS cap as configured (2 where TIS is off), not as a gate tightened it.",
        chart=("Tokens outside the TIS range", "ρ > C"),
    ),
    "tis_clipfrac_two_sided": Metric(
        "", "Fraction of tokens with rho > C or rho < 1/C.", chart=("Tokens outside the TIS range", "ρ > C or ρ < 1/C")
    ),
    "extreme_frac_2": Metric("", "Fraction of tokens with abs(d) > ln 2: one probability is over twice the other."),
    "extreme_frac_10": Metric("", "Fraction of tokens with abs(d) > ln 10."),
    "k1_kl": Metric(
        "nats", "Mean of -d, an estimate of KL(rollout || trainer).", chart=("KL(rollout ‖ trainer)", "k1")
    ),
    "k2_kl": Metric("nats^2", "Mean of d^2 / 2, for small d an estimate of KL(rollout || trainer)."),
    "k3_kl": Metric(
        "nats",
        "Mean of rho - 1 - d, a non-negative estimate of KL(rollout || trainer).",
        chart=("KL(rollout ‖ trainer)", "k3"),
    ),
    "chi2_token": Metric("", "Mean of rho^2, minus 1: the chi-squared divergence of a token."),
    "ess": Metric(
        "",
        "Effective sample size of the tokens weighted by rho, over their number; ideal 1.",
        chart=("Effective sample size", "tokens"),
    ),
    "pearson": Metric(
        "", "Correlation of the tokens' two probabilities; absent where one side is constant.", at_times=True
    ),
    "exact_frac": Metric("", "Fraction of tokens with d == 0.", chart=("Exact tokens", "d = 0")),
    "near_exact_frac": Metric("", "Fraction of tokens with abs(d) <= 1e-6."),
}

_REDRAWN = {
    "redraw_frac": Metric(
        "", "Fraction at which the trainer draws the sampled token again; 1 in exact mode.", "mismatch/redraw_tokens"
    ),
    "redraw_tokens": Metric(
        "tokens", "Tokens that the trainer drew again, from its own logits and the seeds of their answers."
    ),
}

_BY_SEQUENCE = {
    **distribution("ppl_ratio", "", "a sequence's trainer over its rollout perplexity, e^(mean of -d)"),
    **distribution("geometric_ratio", "", "a sequence's e^(mean of d), the geometric mean of its rho"),
    "chi2_sequence": Metric("", "Mean of e^(2 sum of d), minus 1: the sequences' chi-squared divergence."),
    "ess_sequence": Metric(
        "",
        "Effective sample size of the sequences weighted by e^(sum of d), over their number.",
        chart=("Effective sample size", "sequences"),
    ),
}

_ROUTER = {
    "router_pairs": Metric("pairs", "Pairs of a token, prompts included, and a layer whose experts both sides report."),
    "router_tokens": Metric("tokens", "Tokens with at least one such pair."),
    "router_unknown_pairs": Metric("pairs", "The other pairs of a token and a layer; left out."),
    "router_agreement": Metric(
        "",
        "Mean of the experts that both sides chose, over top-k.",
        "mismatch/router_pairs",
        chart=("Routing", "experts that both chose"),
    ),
    "router_differ_frac": Metric(
        "", "Fraction of the pairs in which the chosen experts differ.", "mismatch/router_pairs"
    ),
    "router_token_differ_frac": Metric(
        "",
        "Fraction of the tokens that differ in any layer.",
        "mismatch/router_tokens",
        chart=("Routing", "tokens that differ in any layer"),
    ),
}

_DRIFT = {
    "tokens": Metric("tokens", "Trained tokens that older weights than the trainer's have sampled, finite d."),
    "logprob_abs_diff_mean": Metric(
        "nats",
        "Mean of abs(d): the change of the policy since these tokens were sampled.",
        "drift/tokens",
        chart=("Drift of older tokens |d|", "mean"),
    ),
    "logprob_abs_diff_max": Metric("nats", "Largest abs(d).", chart=("Drift of older tokens |d|", "maximum")),
    "k1_kl": Metric(
        "nats",
        "Mean of -d, an estimate of KL(older || current policy).",
        "drift/tokens",
        chart=("KL(older ‖ current policy)", "k1"),
    ),
    "k3_kl": Metric(
        "nats",
        "Mean of rho - 1 - d, a non-negative estimate of KL(older || current policy).",
        "drift/tokens",
        chart=("KL(older ‖ current policy)", "k3"),
    ),
    "ess": Metric(
        "",
        "Effective sample size of these tokens weighted by rho, over their number; 1 where the policy stands still.",
        "drift/tokens",
        chart=("Effective sample size", "older tokens"),
    ),
}

_GATES = {
    "fired": Metric("gates", "Gates that fired in the step."),
    "withheld": Metric("", "1 if the batch was not trained on, or not to its last update, else 0."),
    "tis_cap": Metric("", "Cap of the importance weight in force.", needs=("cap",)),
    "router_replay": Metric("", "1 while the trainer takes the engine's experts, else 0."),
    "bf16": Metric("", "1 once a gate has made both sides fall back to BF16, else 0."),
    "stale_resyncs": Metric("", "Samplings of the step that were repeated for stale weights.", needs=("engines",)),
}

_SYNC = {
    "bytes": Metric("bytes", "Bytes sent to one engine.", chart=("Bytes sent", "bytes")),
    "weight_bytes": Metric(
        "bytes", "Bytes of the weights that an engine holds after it, of which sync.delta sends some."
    ),
    "seconds": Metric("s", "Time of the weight sync, digests and verification included.", chart=(TIME, "sync")),
    "send_seconds": Metric("s", "Of which export, quantization, digests and loading."),
    "verify_seconds": Metric("s", "Of which the engines' refresh and digests, and the comparison."),
    "verified_tensors": Metric(
        "tensors", "Engine tensors whose digest equals the trainer's.", chart=("Tensors", "verified")
    ),
    "mismatched_tensors": Metric(
        "tensors", "Engine tensors whose digest differs; the run does not go on.", chart=("Tensors", "mismatched")
    ),
}

_REPEATED = {
    "repeated": Metric("syncs", "Syncs of the step that failed although every engine lived, and were done again.")
}

_CANARY = {
    "canary_diff": Metric(
        "nats",
        "Largest difference between engine and trainer on the canary of the syncs since the step before.",
        "the canary's tokens, in each engine",
    )
}

_STEP = {"step_seconds": Metric("s", "Wall time of the whole step.")}

_SAMPLING = {
    "rollout_seconds": Metric("s", "Time that the trainer waited for answers.", chart=(TIME, "rollout")),
    "sampling_seconds": Metric("s", "From asking for the first group of the step to its last answer."),
    "reward_seconds": Metric(
        "s", "Wait for rewards, and the teacher, once the answers are there; both begin as these come in."
    ),
    "rollout_tokens_per_second": Metric(
        "tokens/s",
        "Generated tokens of the step over its sampling time; absent where a checkpoint brought all answers.",
        "perf/sampling_seconds",
        at_times=True,
        chart=("Throughput", "rollout"),
    ),
    "groups_in_flight": Metric(
        "groups", "Groups of later steps that are being answered when a step has its own.", needs=("staleness",)
    ),
    "groups_ahead": Metric("groups", "Groups of later steps that are answered by then.", needs=("staleness",)),
}

_PERF = {
    "train_seconds": Metric("s", "Time of forward, backward and optimizer step.", chart=(TIME, "train")),
    "monitor_seconds": Metric("s", "Time of the mismatch metrics and the gates, with a capsule where one fired."),
    "eval_seconds": Metric(
        "s", "Wait for the evaluation.", needs=("evaluation",), at_times=True, chart=(TIME, "evaluation")
    ),
    "checkpoint_seconds": Metric(
        "s", "Wait for the checkpoint before and for the copy.", at_times=True, chart=(TIME, "checkpoint")
    ),
    "overhead_seconds": Metric("s", "Step without all of the other parts."),
    "train_tokens_per_second": Metric(
        "tokens/s",
        "Tokens of the batch, prompts included, over the train time.",
        "perf/train_seconds",
        chart=("Throughput", "train"),
    ),
    "engine_idle_seconds": Metric(
        "s", "Mean time of the step in which an engine sampled nothing.", "engines", needs=("engines",)
    ),
    "engine_balance": Metric(
        "",
        "Tokens that the idlest engine generated in the step over those of the busiest.",
        needs=("several_engines",),
        at_times=True,
    ),
}

_DRAFTS = {
    "accepted_per_forward": Metric(
        "tokens",
        "Tokens that a forward pass brought an answer, its own and the drafts that were right; 1 without drafts.",
        "forward passes of all answers",
        chart=("Tokens of a forward pass", "accepted"),
    ),
    "drafted_per_forward": Metric(
        "tokens",
        "Tokens drafted to an answer for a forward pass; 0 where no draft promised to pay.",
        "forward passes of all answers",
        chart=("Tokens of a forward pass", "drafted"),
    ),
}

_TURNS = {
    "turn_seconds": Metric(
        "s", "Time in which engines went to sleep and the trainer's optimizer moved; the rest of waking is in the sync."
    ),
}

_MEMORY = {
    "engine_released_bytes": Metric(
        "bytes", "Weights and KV cache that the fullest rank of an engine gave up.", chart=("Memory by turns", "engine")
    ),
    "behind_bytes": Metric(
        "bytes",
        "In use on the GPU of a sleeping engine before the trainer's part comes back, whoever uses it; on a CPU by the "
        "engine's process.",
        chart=("Memory by turns", "stays behind"),
    ),
    "behind_growth_bytes": Metric("bytes", "`memory/behind_bytes` beyond that of the first time in this start."),
    "trainer_moved_bytes": Metric(
        "bytes",
        "Masters, moments and gradients of the fullest trainer rank that left for the engines' turn.",
        chart=("Memory by turns", "trainer"),
    ),
    "trainer_stays_bytes": Metric("bytes", "Weights, quantized ones and others that stay on the GPU of that rank."),
}

_EVAL = {
    "accuracy": Metric(
        "",
        "Mean of the first reward over greedy answers to held-out problems: the fraction solved, if it says that.",
        "eval/problems",
        chart=("Held-out accuracy", "accuracy"),
    ),
    "problems": Metric("problems", "Held-out problems evaluated."),
    "at_step": Metric(
        "", "Step whose weights were evaluated, where that goes on beside the next step.", needs=("staleness",)
    ),
}

_TRACKING = {
    "resumed": Metric("", "1 in the first step after a resume; absent in others.", at_times=True),
    "wandb_lost": Metric("", "1 from the step after wandb was lost; absent before.", at_times=True),
    "tracker_lost": Metric("", "1 from the step after another tracker was lost; absent before.", at_times=True),
    "nonfinite_dropped": Metric("", "Metrics of this step left out because they were not finite."),
}

METRICS: dict[str, Metric] = {
    **rows("rollout/", _ROLLOUT, needs=("samples",)),
    **rows("rollout/", _FAULTS, late=True, needs=("engines",)),
    **rows("train/", _TRAIN),
    **rows("train/", _UPDATES, needs=("samples",)),
    **rows("critic/", _CRITIC, needs=("samples", "critic")),
    **rows("mismatch/", _MISMATCH, needs=("samples",)),
    **rows("mismatch/", _BY_TOKEN, over="mismatch/tokens", needs=("samples",)),
    **rows("mismatch/", _REDRAWN, needs=("samples", "redraws")),
    **rows("mismatch/", _BY_SEQUENCE, over="mismatch/sequences", needs=("samples",)),
    **rows("mismatch/", _ROUTER, needs=("samples", "routes")),
    **rows("drift/", _DRIFT, needs=("samples", "staleness"), at_times=True),
    **rows("gates/", _GATES, late=True),
    **rows("perf/", _STEP, late=True),
    **rows("perf/", _SAMPLING, late=True, needs=("samples",)),
    **rows("perf/", _PERF, late=True),
    **rows("perf/", _DRAFTS, late=True, needs=("speculation",), at_times=True),
    **rows("perf/", _TURNS, late=True, needs=("sleep",), at_times=True),
    **rows("memory/", _MEMORY, late=True, needs=("sleep",), at_times=True),
    **rows("sync/", _SYNC, late=True, needs=("engines",), at_times=True),
    **rows("sync/", _REPEATED, late=True, needs=("engines",)),
    **rows("sync/", _CANARY, needs=("engines", "canary"), at_times=True),
    **rows("eval/", _EVAL, late=True, needs=("evaluation",), at_times=True),
    **rows("tracking/", _TRACKING, late=True),
}
