"""Every metric of a run: its unit and what it means. The report, the console and the documentation read this table.

A name is `group/name`. Groups: `rollout/` sampling and rewards, `train/` the optimizer step, `mismatch/` trainer
against engine, `sync/` weight synchronisation, `perf/` time, `eval/` held-out problems, `tracking/` the log itself.
Unless said otherwise a metric describes one step; d is trainer minus rollout logprob of a sampled token, rho = e^d.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """Unit (empty for a plain ratio) and meaning of a metric."""

    unit: str
    meaning: str


METRICS: dict[str, Metric] = {
    "rollout/reward_mean": Metric("", "Mean reward of the sampled trajectories."),
    "rollout/reward_std": Metric("", "Standard deviation of the reward over all sampled trajectories."),
    "rollout/equal_reward_groups": Metric("", "Fraction of groups whose rewards are all equal: they teach nothing."),
    "rollout/finished_fraction": Metric("", "Fraction of trajectories that ended by themselves within the limit."),
    "rollout/response_tokens_mean": Metric("tokens", "Mean generated tokens per trajectory."),
    "rollout/response_tokens_max": Metric("tokens", "Longest generation."),
    "rollout/tokens": Metric("tokens", "Generated tokens of the step."),
    "rollout/trajectories": Metric("trajectories", "Sampled trajectories of the step."),
    "rollout/staleness_max": Metric("versions", "Largest trainer version minus the version that sampled a token."),
    "train/loss": Metric("", "Loss over the whole batch."),
    "train/grad_norm": Metric("", "Global gradient norm before clipping."),
    "train/lr": Metric("", "Learning rate of the step."),
    "train/entropy": Metric("nats", "Mean entropy of the distributions the target tokens were scored under."),
    "train/ratio_mean": Metric("", "Mean policy ratio, trained over scoring weights; 1 in an on-policy step."),
    "train/clip_fraction": Metric("", "Fraction of used tokens whose clipped term is the loss, so without gradient."),
    "train/tis_weight_mean": Metric("", "Mean truncated importance weight min(rho, C) of the used tokens."),
    "train/dropped_tokens": Metric("tokens", "Target tokens left out because their rollout logprob is not finite."),
    "train/tokens": Metric("tokens", "Target tokens of the step."),
    "mismatch/train_rollout_logprob_abs_diff_mean": Metric("nats", "Mean of abs(d)."),
    "mismatch/train_rollout_logprob_abs_diff_p99": Metric("nats", "99th percentile (nearest rank) of abs(d)."),
    "mismatch/train_rollout_logprob_abs_diff_max": Metric("nats", "Largest abs(d)."),
    "mismatch/tis_clipfrac": Metric("", "Fraction of tokens with rho > C, the TIS cap (2 where TIS is off)."),
    "mismatch/tis_clipfrac_two_sided": Metric("", "Fraction of tokens with rho > C or rho < 1/C."),
    "mismatch/k1_kl": Metric("nats", "Mean of -d, an estimate of KL(rollout || trainer)."),
    "mismatch/k3_kl": Metric("nats", "Mean of rho - 1 - d, a non-negative estimate of KL(rollout || trainer)."),
    "mismatch/exact_frac": Metric("", "Fraction of tokens with d == 0."),
    "mismatch/nonfinite_count": Metric("tokens", "Sampled tokens whose d is not finite; dropped from the others."),
    "mismatch/tokens": Metric("tokens", "Sampled tokens with finite d: the denominator of the mismatch metrics."),
    "sync/bytes": Metric("bytes", "Bytes of weights sent to one engine."),
    "sync/seconds": Metric("s", "Time of the weight sync, digests and verification included."),
    "sync/send_seconds": Metric("s", "Of which export, quantization, digests and loading."),
    "sync/verify_seconds": Metric("s", "Of which the engines' refresh and digests, and the comparison."),
    "sync/verified_tensors": Metric("tensors", "Engine tensors whose digest equals the trainer's."),
    "sync/mismatched_tensors": Metric("tensors", "Engine tensors whose digest differs; the run does not go on."),
    "perf/step_seconds": Metric("s", "Wall time of the whole step."),
    "perf/rollout_seconds": Metric("s", "Time until all trajectories of the step had arrived."),
    "perf/train_seconds": Metric("s", "Time of forward, backward and optimizer step."),
    "perf/eval_seconds": Metric("s", "Time of the evaluation, on steps with one."),
    "perf/checkpoint_seconds": Metric("s", "Time of writing the checkpoint, on steps with one."),
    "perf/overhead_seconds": Metric("s", "Step without rollout, train, sync, evaluation and checkpoint."),
    "perf/rollout_tokens_per_second": Metric("tokens/s", "Generated tokens over the rollout time."),
    "perf/train_tokens_per_second": Metric("tokens/s", "Tokens of the batch, prompts included, over the train time."),
    "eval/accuracy": Metric("", "Fraction of the held-out problems solved with greedy decoding."),
    "eval/problems": Metric("problems", "Held-out problems evaluated."),
    "tracking/nonfinite_dropped": Metric("", "Metrics of this step left out because they were not finite."),
}


def metric(name: str) -> Metric:
    """The declared metric, or a blank one for a name outside the table."""
    return METRICS.get(name, Metric("", ""))
