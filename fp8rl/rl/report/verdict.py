"""Sums up a run in a few sentences, which its end, the report and `fp8rl.Run` print."""

from __future__ import annotations

from fp8rl.rl.report.summary import RunSummary


def verdict(summary: RunSummary) -> list[str]:
    """Describe the run in one or two sentences each: learning, agreement, weight syncs, warnings, interventions."""
    sentences = [_learning(summary), _agreement(summary), _syncs(summary)]
    if summary.outlying_gradient is not None:
        sentences.append(_gradient(summary, *summary.outlying_gradient))
    if summary.cut_answers * 2 > summary.answers:
        sentences.append(
            f"{summary.cut_answers:,} of {_count(summary.answers, 'answer')} had no room left "
            "(rollout.max_new_tokens, rollout.context_length)."
        )
    if summary.first_intervention is not None:
        times, withheld = _count(summary.interventions, "intervention"), _count(summary.withheld_steps, "step")
        sentences.append(f"{times}, {withheld} not trained on. The first, {summary.first_intervention}.")
    if summary.first_warning is not None:
        sentences.append(f"{_count(summary.warnings, 'warning')}. The first, {summary.first_warning}.")
    return sentences


def _learning(summary: RunSummary) -> str:
    steps, held_out = _count(summary.steps, "step"), f"Held-out {summary.held_out}"
    if summary.accuracy_before is not None and summary.accuracy_after is not None:
        before, after = summary.accuracy_before, summary.accuracy_after
        if before == after:
            return f"{held_out} stayed at {after:.3f} in {steps}."
        if summary.accuracy_change is None:
            return f"{held_out} went from {before:.3f} to {after:.3f} in {steps}."
        low, high = summary.accuracy_change
        problems = _count(summary.evaluated_problems, "problem")
        if low <= 0.0 <= high:
            return (
                f"{held_out} went from {before:.3f} to {after:.3f} in {steps}, which {problems} cannot tell "
                "from no change."
            )
        moved = "rose" if after > before else "fell"
        return f"{held_out} {moved} from {before:.3f} to {after:.3f} in {steps} on {problems}."
    if summary.accuracy_after is not None:
        return f"{held_out} is {summary.accuracy_after:.3f} at step {summary.accuracy_after_step}."
    if summary.reward_first is not None:
        return f"Mean reward went from {summary.reward_first:.3f} to {summary.reward_last:.3f} in {steps}."
    return f"{steps} completed, without an evaluation."


def _gradient(summary: RunSummary, step: int, norm: float, median: float) -> str:
    sentence = f"The gradient of step {step} had a norm of {norm:,.4g}, where the median is {median:.3g}"
    if summary.largest_abs_diff and summary.largest_abs_diff_step == step:
        sentence += (
            ", and the step has the run's largest mismatch: algorithm.tis_cap and algorithm.clip_dual bound what one "
            "token can do"
        )
    return f"{sentence}."


def _agreement(summary: RunSummary) -> str:
    if summary.largest_abs_diff is None and summary.nonfinite_tokens == 0:
        return "No sampled tokens were compared between trainer and engine."
    if summary.bitwise_equal:
        tokens, steps = _count(summary.compared_tokens, "token"), _count(summary.steps, "step")
        sentence = f"Trainer and engine agree bit for bit: d = 0 on all {tokens} of the trainer's version in {steps}"
    else:
        sentence = " ".join(_difference(summary)).rstrip(".")
    if summary.older_tokens:
        sentence += (
            f"; {summary.older_tokens:,} trained tokens of older weights had drifted by {summary.mean_drift:.3g} nats "
            f"on average, {summary.largest_drift:.3g} at most"
        )
    return f"{sentence}."


def _difference(summary: RunSummary) -> list[str]:
    """Return why the run cannot be called bitwise equal."""
    tokens, parts = f"{_count(summary.compared_tokens, 'token')} of the trainer's version", []
    if summary.largest_abs_diff == 0.0 and summary.exact_fraction == 1.0:
        parts.append(f"Trainer and engine agree bit for bit on the {tokens} that were compared.")
    elif summary.largest_abs_diff is not None:
        parts.append(
            f"Trainer and engine differ: the largest mismatch |d| is {summary.largest_abs_diff:.3g} nats "
            f"(step {summary.largest_abs_diff_step}), the mean {summary.mean_abs_diff:.3g} over {tokens}."
        )
    if summary.nonfinite_tokens:
        parts.append(f"{_count(summary.nonfinite_tokens, 'token')} had a non-finite log-probability.")
    if summary.compared_steps < summary.steps:
        parts.append(f"{summary.steps - summary.compared_steps} of {_count(summary.steps, 'step')} were not compared.")
    return parts


def _syncs(summary: RunSummary) -> str:
    if summary.syncs == 0:
        return "No weight sync was recorded."
    if summary.verified_syncs == summary.syncs:
        return (
            f"All {_count(summary.syncs, 'weight sync')} verified: no tensor in the engine differed from the trainer's."
        )
    return (
        f"{summary.syncs - summary.verified_syncs} of {_count(summary.syncs, 'weight sync')} did not verify; "
        f"{_count(summary.mismatched_tensors, 'tensor')} differed."
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
