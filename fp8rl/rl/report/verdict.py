"""Sums up a run in a few sentences, which its end, the report and `fp8rl.Run` print."""

from __future__ import annotations

from fp8rl.rl.report.summary import RunSummary


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


def _agreement(summary: RunSummary) -> str:
    if summary.largest_abs_diff is None and summary.nonfinite_tokens == 0:
        return "No sampled tokens were compared between trainer and engine."
    tokens = f"{_count(summary.compared_tokens, 'token')} of the trainer's version"
    steps, parts = _count(summary.steps, "step"), []
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
        parts.append(f"{_count(summary.nonfinite_tokens, 'token')} had a non-finite log-probability")
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
