"""Sums up a run from the rows of its metrics.jsonl: in a few numbers, and in a few sentences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fp8rl.rl.record.history import Event
from fp8rl.rl.record.metrics import held_out_is
from fp8rl.rl.record.metrics_log import Row

ABS_DIFF_MAX = "mismatch/train_rollout_logprob_abs_diff_max"
ABS_DIFF_MEAN = "mismatch/train_rollout_logprob_abs_diff_mean"
DRIFT_MAX, DRIFT_MEAN = "drift/logprob_abs_diff_max", "drift/logprob_abs_diff_mean"
EQUAL = "rollout/equal_reward_groups"
GRADIENT = "train/grad_norm"
_FAR_OUTSIDE = 100
_COMPARED = {ABS_DIFF_MAX, ABS_DIFF_MEAN, "mismatch/exact_frac", "mismatch/tokens"}
"""Metrics of a step with compared tokens. A row counts only if it has all of them; a damaged row may lack some."""
_DRIFTED = {DRIFT_MAX, DRIFT_MEAN, "drift/tokens"}
"""Metrics of a step with tokens of older weights; a row counts only if it has all of them."""
_ENDED = {"rollout/trajectories", "rollout/finished_fraction"}
"""Metrics of how a step's answers ended; a row counts only if it has all of them."""


@dataclass(frozen=True)
class RunSummary:
    """The outcome of a run. A value that the run did not measure is None."""

    steps: int
    """Completed steps."""
    accuracy_before: float | None
    """First held-out accuracy; None unless there are two evaluations."""
    accuracy_after: float | None
    """Last held-out accuracy; None without an evaluation."""
    accuracy_after_step: int | None
    """The step of the last held-out accuracy."""
    reward_first: float | None
    """Mean reward of the first step."""
    reward_last: float | None
    """Mean reward of the last step."""
    equal_reward_groups: float | None
    """Share of groups whose rewards were all equal, over all steps."""
    compared_steps: int
    """Steps with a mismatch measurement."""
    compared_tokens: int
    """Tokens of the trainer's version with a finite difference d, over all steps."""
    nonfinite_tokens: int
    """Tokens of the trainer's version whose difference d is not finite."""
    largest_abs_diff: float | None
    """Largest abs(d) of the run, in nats."""
    largest_abs_diff_step: int | None
    """The step of the largest abs(d)."""
    mean_abs_diff: float | None
    """Mean abs(d) over `compared_tokens`."""
    exact_fraction: float | None
    """Fraction of `compared_tokens` with d == 0."""
    syncs: int
    verified_syncs: int
    """Weight syncs in which every tensor was verified."""
    mismatched_tensors: int
    """Tensors that differed, over all syncs."""
    step_seconds: float | None
    """Median wall time of a step."""
    older_tokens: int = 0
    """Number of trained tokens that older weights had sampled, over all steps."""
    mean_drift: float | None = None
    """Mean abs(d) over `older_tokens`, in nats; None if there are none."""
    largest_drift: float | None = None
    """Largest abs(d) over `older_tokens`, in nats; None if there are none."""
    evaluated_problems: int = 0
    """Held-out problems of the last evaluation."""
    held_out: str = "accuracy"
    """What the held-out figures are, `accuracy` or `reward`."""
    accuracy_change: tuple[float, float] | None = None
    """The 95% interval of the change of accuracy; None if accuracy is no fraction of solved problems."""
    answers: int = 0
    cut_answers: int = 0
    """Answers that a length limit ended."""
    withheld_steps: int = 0
    """Steps whose batch was not trained on."""
    warnings: Sequence[Event] = ()
    """Firings of gates that only warn."""
    interventions: Sequence[Event] = ()
    """Firings of other gates, losses that were not finite, engines replaced or synced again."""
    outlying_gradient: tuple[int, float, float] | None = None
    """Step and norm of the largest gradient, and the median norm; None if the largest is below 100 · median."""

    @property
    def bitwise_equal(self) -> bool:
        """True if every step was measured and every token of the trainer's version had d == 0."""
        complete = self.compared_steps == self.steps > 0 and self.nonfinite_tokens == 0
        return complete and self.largest_abs_diff == 0.0 and self.exact_fraction == 1.0


def evaluated_at(row: Row) -> int:
    """Return the step whose weights a row's evaluation used; an evaluation in the background uses an earlier step's."""
    return int(row["eval/at_step"] if "eval/at_step" in row else row["step"])


def summarize(rows: Sequence[Row], events: Sequence[Event] = ()) -> RunSummary:
    """Summarize metric rows in step order, and the run's events. Row 0 holds what was measured before training."""
    steps = [row for row in rows if row["step"] > 0]
    evaluations = [row for row in rows if "eval/accuracy" in row]
    rewards = [row["rollout/reward_mean"] for row in steps if "rollout/reward_mean" in row]
    equal = [row[EQUAL] for row in steps if EQUAL in row]
    compared = [row for row in steps if _COMPARED <= row.keys() and row["mismatch/tokens"] >= 1]
    tokens = sum(int(row["mismatch/tokens"]) for row in compared)
    worst = max(compared, key=lambda row: row[ABS_DIFF_MAX], default=None)
    syncs = [row for row in rows if "sync/verified_tensors" in row]
    told = [event for event in events if event.action not in ("resume", "go_on")]
    older = [row for row in steps if _DRIFTED <= row.keys()]
    older_tokens = sum(int(row["drift/tokens"]) for row in older)
    ended = [row for row in steps if _ENDED <= row.keys()]
    seconds = [row["perf/step_seconds"] for row in steps if "perf/step_seconds" in row]
    return RunSummary(
        steps=len(steps),
        accuracy_before=evaluations[0]["eval/accuracy"] if len(evaluations) > 1 else None,
        accuracy_after=evaluations[-1]["eval/accuracy"] if evaluations else None,
        accuracy_after_step=evaluated_at(evaluations[-1]) if evaluations else None,
        reward_first=rewards[0] if rewards else None,
        reward_last=rewards[-1] if rewards else None,
        equal_reward_groups=statistics.fmean(equal) if equal else None,
        compared_steps=len(compared),
        compared_tokens=tokens,
        nonfinite_tokens=sum(int(row.get("mismatch/nonfinite_count", 0)) for row in steps),
        largest_abs_diff=worst[ABS_DIFF_MAX] if worst else None,
        largest_abs_diff_step=worst["step"] if worst else None,
        mean_abs_diff=_token_mean(compared, ABS_DIFF_MEAN, tokens),
        exact_fraction=_token_mean(compared, "mismatch/exact_frac", tokens),
        syncs=len(syncs),
        verified_syncs=sum(
            row["sync/verified_tensors"] > 0 and row.get("sync/mismatched_tensors") == 0 for row in syncs
        ),
        mismatched_tensors=sum(int(row.get("sync/mismatched_tensors", 0)) for row in syncs),
        step_seconds=statistics.median(seconds) if seconds else None,
        answers=sum(round(row["rollout/trajectories"]) for row in ended),
        cut_answers=sum(round((1.0 - row["rollout/finished_fraction"]) * row["rollout/trajectories"]) for row in ended),
        withheld_steps=sum(row.get("gates/withheld") == 1.0 for row in steps),
        older_tokens=older_tokens,
        mean_drift=_token_mean(older, DRIFT_MEAN, older_tokens, "drift/tokens"),
        largest_drift=max((row[DRIFT_MAX] for row in older), default=None),
        evaluated_problems=int(evaluations[-1].get("eval/problems", 0)) if evaluations else 0,
        held_out=held_out_is(*evaluations),
        accuracy_change=_change(evaluations),
        warnings=[event for event in told if event.action == "warn"],
        interventions=[event for event in told if event.action != "warn"],
        outlying_gradient=_outlying({row["step"]: row[GRADIENT] for row in steps if GRADIENT in row}),
    )


def _outlying(norms: Mapping[int, float]) -> tuple[int, float, float] | None:
    """Return step and value of the largest gradient norm, and the median, if the largest is far above the median."""
    finite = {step: norm for step, norm in norms.items() if math.isfinite(norm)}
    step = max(finite, key=finite.__getitem__, default=None)
    if step is None or not (median := statistics.median(finite.values())) or finite[step] < _FAR_OUTSIDE * median:
        return None
    return step, finite[step], median


def _change(evaluations: Sequence[Row]) -> tuple[float, float] | None:
    """The 95% interval of last minus first accuracy, by Newcombe's method (1998, number 10) from two Wilson intervals.

    It treats the two evaluations as independent samples. They have the same problems, so an interval from paired
    answers would be narrower; but the rows of metrics hold only accuracies, not single answers.
    """
    if len(evaluations) < 2 or held_out_is(*evaluations) != "accuracy":
        return None
    pairs = [(row["eval/accuracy"], row.get("eval/problems", 0)) for row in (evaluations[0], evaluations[-1])]
    if any(problems < 1 for _, problems in pairs):
        return None
    (first, _), (last, _) = pairs
    (first_low, first_high), (last_low, last_high) = (_wilson(*pair) for pair in pairs)
    down, up = math.hypot(last - last_low, first_high - first), math.hypot(last_high - last, first - first_low)
    return last - first - down, last - first + up


def _wilson(share: float, count: float) -> tuple[float, float]:
    """The 95% score interval of a share of `count` (Wilson 1927)."""
    squared = _Z**2 / count
    center = (share + squared / 2) / (1 + squared)
    reach = math.sqrt(squared * share * (1 - share) + squared**2 / 4) / (1 + squared)
    return center - reach, center + reach


_Z = statistics.NormalDist().inv_cdf(0.975)


def _token_mean(rows: Sequence[Row], name: str, tokens: int, weight: str = "mismatch/tokens") -> float | None:
    """Return a metric's mean over all tokens of the run. Each row has its mean over the row's `weight` tokens."""
    if tokens == 0:
        return None
    if all(row[name] == 1.0 for row in rows):  # free of rounding: "all" must stay exactly 1
        return 1.0
    return float(sum(row[name] * row[weight] for row in rows) / tokens)


# The sentences, which a run's end, the report and `fp8rl.Run` print.


def verdict(summary: RunSummary) -> list[str]:
    """Describe the run in one or two sentences each: learning, agreement, weight syncs, warnings, interventions."""
    sentences = [_learning(summary), _agreement(summary), _syncs(summary)]
    if summary.outlying_gradient is not None:
        step, norm, median = summary.outlying_gradient
        sentence = f"The gradient of step {step} had a norm of {norm:,.4g}, where the median is {median:.3g}"
        if summary.largest_abs_diff and summary.largest_abs_diff_step == step:
            sentence += ", and the step has the run's largest mismatch: algorithm.tis_cap and algorithm.clip_dual"
            sentence += " bound what one token can do"
        sentences.append(f"{sentence}.")
    if summary.cut_answers * 2 > summary.answers:
        sentences.append(
            f"{summary.cut_answers:,} of {counted(summary.answers, 'answer')} had no room left "
            "(rollout.max_new_tokens, rollout.context_length)."
        )
    withheld = f", {counted(summary.withheld_steps, 'step')} not trained on"
    for events, kind, rest in ((summary.interventions, "intervention", withheld), (summary.warnings, "warning", "")):
        if events:
            first = f"step {events[0].step}: {events[0].text}"
            sentences.append(f"{counted(len(events), kind)}{rest}. The first, {first}.")
    return sentences


def _learning(summary: RunSummary) -> str:
    steps, held_out = counted(summary.steps, "step"), f"Held-out {summary.held_out}"
    if summary.accuracy_before is not None and summary.accuracy_after is not None:
        before, after = summary.accuracy_before, summary.accuracy_after
        if before == after:
            return f"{held_out} stayed at {after:.3f} in {steps}."
        went = f"{held_out} went from {before:.3f} to {after:.3f} in {steps}"
        if summary.accuracy_change is None:
            return f"{went}."
        low, high = summary.accuracy_change
        problems = counted(summary.evaluated_problems, "problem")
        if low <= 0.0 <= high:
            return f"{went}, which {problems} cannot tell from no change."
        moved = "rose" if after > before else "fell"
        return f"{held_out} {moved} from {before:.3f} to {after:.3f} in {steps} on {problems}."
    if summary.accuracy_after is not None:
        return f"{held_out} is {summary.accuracy_after:.3f} at step {summary.accuracy_after_step}."
    if summary.reward_first is not None:
        return f"Mean reward went from {summary.reward_first:.3f} to {summary.reward_last:.3f} in {steps}."
    return f"{steps} completed, without an evaluation."


def _agreement(summary: RunSummary) -> str:
    if summary.largest_abs_diff is None and summary.nonfinite_tokens == 0:
        return "No sampled tokens were compared between trainer and engine."
    tokens = f"{counted(summary.compared_tokens, 'token')} of the trainer's version"
    steps, parts = counted(summary.steps, "step"), []
    if summary.bitwise_equal:
        parts.append(f"Trainer and engine agree bit for bit: d = 0 on all {tokens} in {steps}")
    elif summary.largest_abs_diff == 0.0 and summary.exact_fraction == 1.0:
        parts.append(f"Trainer and engine agree bit for bit on the {tokens} that were compared")
    elif summary.largest_abs_diff is not None:
        parts.append(
            f"Trainer and engine differ: the largest mismatch |d| is {summary.largest_abs_diff:.3g} nats "
            f"(step {summary.largest_abs_diff_step}), the mean {summary.mean_abs_diff:.3g} over {tokens}"
        )
    if summary.nonfinite_tokens:
        parts.append(f"{counted(summary.nonfinite_tokens, 'token')} had a non-finite log-probability")
    if summary.compared_steps < summary.steps:
        parts.append(f"{summary.steps - summary.compared_steps} of {steps} were not compared")
    if summary.older_tokens:
        parts[-1] += (
            f"; {summary.older_tokens:,} trained tokens of older weights had drifted by {summary.mean_drift:.3g} nats "
            f"on average, {summary.largest_drift:.3g} at most"
        )
    return ". ".join(parts) + "."


def _syncs(summary: RunSummary) -> str:
    if summary.syncs == 0:
        return "No weight sync was recorded."
    syncs, tensors = counted(summary.syncs, "weight sync"), counted(summary.mismatched_tensors, "tensor")
    if summary.verified_syncs == summary.syncs:
        return f"All {syncs} verified: no tensor in the engine differed from the trainer's."
    return f"{summary.syncs - summary.verified_syncs} of {syncs} did not verify; {tensors} differed."


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
