from dataclasses import replace
from typing import Any

import pytest

from fp8rl.rl.record.console import step_line
from fp8rl.rl.record.history import Event
from fp8rl.rl.report.charts import overlaid, sections
from fp8rl.rl.report.page import Charts, Section
from fp8rl.rl.report.summary import summarize, verdict

PREFIX = "mismatch/train_rollout_logprob_abs_diff"


def row(step: int, mean: float = 0.0, largest: float = 0.0, exact: float = 1.0, tokens: int = 100, **more: Any) -> Any:
    values = {"step": step, "rollout/reward_mean": 0.5 + step / 100, "perf/step_seconds": float(step)}
    values |= {f"{PREFIX}_mean": mean, f"{PREFIX}_max": largest, "mismatch/exact_frac": exact}
    values |= {"mismatch/tokens": tokens, "mismatch/nonfinite_count": 0}
    values |= {"sync/verified_tensors": 7, "sync/mismatched_tensors": 0}
    return values | {name.replace("__", "/"): value for name, value in more.items()}


def start(accuracy: float) -> dict[str, Any]:
    return {"step": 0, "eval/accuracy": accuracy, "sync/verified_tensors": 7, "sync/mismatched_tensors": 0}


def test_a_gradient_far_outside_the_others_is_named_with_its_mismatch() -> None:
    """As a run with a BF16 trainer had it: one token's ratio grew without bound."""

    def sentences(norms: list[float], largest: list[float]) -> list[str]:
        steps = [row(i + 1, largest=d, train__grad_norm=g) for i, (g, d) in enumerate(zip(norms, largest, strict=True))]
        return [said for said in verdict(summarize(steps)) if "gradient" in said]

    assert sentences([1.5, 8241.7, 1.7], [0.5, 10.85, 1.2]) == [
        "The gradient of step 2 had a norm of 8,242, where the median is 1.7, and the step has the run's largest "
        "mismatch: algorithm.tis_cap and algorithm.clip_dual bound what one token can do."
    ]
    elsewhere = ["The gradient of step 2 had a norm of 150, where the median is 1.5."]
    assert sentences([1.5, 150.0, 1.4], [10.0, 0.5, 0.5]) == elsewhere == sentences([1.5, 150.0, 1.4], [0.0, 0.0, 0.0])
    for norms in ([1.5, 149.0, 1.4], [0.0, 150.0, 0.0], [1.5, float("nan"), 1.5], [float("nan")] * 3):
        assert sentences(norms, [1.0] * 3) == []
    assert not [said for said in verdict(summarize([row(1)])) if "gradient" in said]


def test_a_run_that_agrees_bit_for_bit() -> None:
    summary = summarize([start(0.25), row(1), row(2), row(3, eval__accuracy=0.75)])
    assert (summary.accuracy_before, summary.accuracy_after, summary.accuracy_after_step) == (0.25, 0.75, 3)
    assert (summary.reward_first, summary.reward_last, summary.step_seconds) == (0.51, 0.53, 2.0)
    assert summary.bitwise_equal
    learning, agreement, syncs = verdict(summary)
    assert learning == "Held-out accuracy went from 0.250 to 0.750 in 3 steps."
    assert agreement.startswith("Trainer and engine agree bit for bit: d = 0 on all 300 tokens of the trainer's")
    assert syncs.startswith("All 4 weight syncs verified")


def test_a_run_that_differs_is_weighted_by_tokens() -> None:
    # 300 tokens of mean 0.01 and 100 of mean 0.05: (3 + 5) / 400 = 0.02. Exact: (0.5 * 300 + 0.1 * 100) / 400 = 0.4.
    first, second = row(1, mean=0.01, largest=0.3, exact=0.5, tokens=300), row(2, mean=0.05, largest=0.2, exact=0.1)
    summary = summarize([first, second])
    assert abs(summary.mean_abs_diff - 0.02) < 1e-15 and abs(summary.exact_fraction - 0.4) < 1e-15
    assert (summary.largest_abs_diff, summary.largest_abs_diff_step) == (0.3, 1)
    assert not summary.bitwise_equal
    assert "the largest mismatch |d| is 0.3 nats (step 1), the mean 0.02 over 400 tokens" in verdict(summary)[1]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([row(1), {"step": 2, "mismatch/tokens": 0, "mismatch/nonfinite_count": 0}], "1 of 2 steps were not compared."),
        ([row(1), row(2, mismatch__nonfinite_count=3)], "3 tokens had a non-finite log-probability."),
        ([row(1, largest=1e-9, mean=1e-16, exact=1 - 1e-7, tokens=10_000_000)], "the largest mismatch |d| is 1e-09"),
        ([row(1, tokens=0)], "No sampled tokens were compared between trainer and engine."),
    ],
)
def test_what_forbids_the_claim_of_equality(rows: list[dict[str, Any]], said: str) -> None:
    summary = summarize(rows)
    assert not summary.bitwise_equal and said in verdict(summary)[1]


def test_a_sync_that_did_not_verify_is_named() -> None:
    summary = summarize([start(0.5), row(1, **{"sync/mismatched_tensors": 2}), row(2, **{"sync/verified_tensors": 0})])
    assert (summary.syncs, summary.verified_syncs) == (3, 1)
    assert verdict(summary)[2] == "2 of 3 weight syncs did not verify; 2 tensors differed."


def drawn(found: list[Section]) -> list[dict[str, Any]]:
    return [chart for each in found for block in each.blocks if isinstance(block, Charts) for chart in block.charts]


def test_an_evaluation_belongs_to_the_step_that_it_is_of() -> None:
    rows = [start(0.25), row(1), row(2, eval__accuracy=0.5, eval__at_step=1)]
    assert summarize(rows).accuracy_after_step == 1
    (chart,) = [chart for chart in drawn(sections(rows)) if chart["title"] == "Held-out accuracy"]
    assert chart["traces"][0]["x"] == [0, 1]


def test_accuracy_that_falls_or_stays_is_said_to() -> None:
    many = {"eval/problems": 2000}
    fell = summarize([start(0.5) | many, row(1, eval__accuracy=0.4) | many])
    assert "fell from 0.500 to 0.400 in 1 step on 2,000 problems." in verdict(fell)[0]
    assert "stayed from" not in verdict(summarize([start(0.5), row(1, eval__accuracy=0.5)]))[0]
    assert verdict(summarize([row(1, eval__accuracy=0.5)]))[0] == "Held-out accuracy is 0.500 at step 1."
    assert verdict(summarize([row(1), row(2)]))[0] == "Mean reward went from 0.510 to 0.520 in 2 steps."


def test_interventions_are_counted_and_the_first_is_told() -> None:
    because = "resync: mismatch/exact_frac = 0.5 is below 1.0"
    events = [
        Event(2, "mismatch/exact_frac", 0.5, "below 1.0", "resync", None, because),
        Event(3, "train/loss", None, "not finite", "skip_step", None, "skip_step: the loss is not finite"),
    ]
    rows = [row(1, gates__withheld=0.0), row(2, gates__withheld=1.0), row(3, gates__withheld=1.0)]
    summary = summarize(rows, events)
    assert (summary.interventions, summary.withheld_steps) == (events, 2)
    assert verdict(summary)[3:] == [f"2 interventions, 2 steps not trained on. The first, step 2: {because}."]
    warnings = [replace(events[0], action="warn")]
    warned = summarize([row(1), row(2)], warnings)
    assert (warned.interventions, warned.warnings) == ([], warnings)
    assert verdict(warned)[3:] == [f"1 warning. The first, step 2: {because}."]


def test_what_the_problems_cannot_tell_from_no_change_is_no_verdict() -> None:
    asked = {"eval/problems": 256}
    summary = summarize([start(0.387) | asked, row(1, eval__accuracy=0.402) | asked])
    low, high = summary.accuracy_change or (0, 0)
    assert low < 0 < high and high - low == pytest.approx(0.168, abs=2e-3)
    said = verdict(summary)
    assert "went from 0.387 to 0.402 in 1 step, which 256 problems cannot tell from no change." in said[0]
    assert len(said) == 3 and "interval" not in " ".join(said), "the report's tile has it"
    few = {"eval/problems": 40}
    seen = summarize([start(0.0) | few, row(1, eval__accuracy=0.025) | few])
    assert "cannot tell" in verdict(seen)[0]
    scored = summarize([start(1.5) | asked, row(1, eval__accuracy=2.5) | asked])
    assert verdict(scored)[0] == "Held-out reward went from 1.500 to 2.500 in 1 step.", "no fraction of solved ones"


def test_the_interval_is_newcombe_s() -> None:
    """The examples (a) to (d) of his table II: 56/70 - 48/80, 9/10 - 3/10, 10/10 - 0/20 and 10/10 - 0/10."""
    published = {(48, 80, 56, 70): (0.0524, 0.3339), (3, 10, 9, 10): (0.1705, 0.8090)}
    published |= {(0, 20, 10, 10): (0.6791, 1.0), (0, 10, 10, 10): (0.6075, 1.0)}
    for (before, n, after, m), interval in published.items():
        rows = [{"step": 0, "eval/accuracy": before / n, "eval/problems": n}]
        rows += [{"step": 1, "eval/accuracy": after / m, "eval/problems": m}]
        assert summarize(rows).accuracy_change == pytest.approx(interval, abs=5e-5)


def test_older_tokens_are_not_among_those_that_agree() -> None:
    older = {"drift/tokens": 300, "drift/logprob_abs_diff_mean": 0.02, "drift/logprob_abs_diff_max": 1.5}
    more = {"drift/tokens": 100, "drift/logprob_abs_diff_mean": 0.06, "drift/logprob_abs_diff_max": 3.1}
    summary = summarize([row(1, tokens=16), row(2, tokens=16) | older, row(3, tokens=16) | more])
    assert verdict(summary)[1] == (
        "Trainer and engine agree bit for bit: d = 0 on all 48 tokens of the trainer's version in 3 steps; 400 trained "
        "tokens of older weights had drifted by 0.03 nats on average, 3.1 at most."
    )


def test_answers_that_were_mostly_cut_are_a_sentence() -> None:
    ended = {"rollout__trajectories": 8.0, "rollout__finished_fraction": 0.25}
    told = verdict(summarize([row(1, **ended), row(2, **ended)]))
    assert told[3] == "12 of 16 answers had no room left (rollout.max_new_tokens, rollout.context_length)."
    assert len(verdict(summarize([row(1, rollout__trajectories=8.0, rollout__finished_fraction=0.5)]))) == 3


def test_only_rewards_of_0_and_1_are_called_an_accuracy() -> None:
    before, after = ({"step": step, "eval/accuracy": 0.25 + step / 4, "eval/problems": 40.0} for step in (0, 1))
    for graded, word in ((False, "accuracy"), (True, "reward")):
        rows = [{**row, **({"eval/graded": 3.0} if graded else {})} for row in (before, after)]
        summary = summarize(rows)
        told = " ".join(verdict(summary))
        assert summary.held_out == word and f"Held-out {word} " in told and ("accuracy" in told) is not graded
        assert (summary.accuracy_change is None) is graded
        assert ("accuracy" in step_line(1, 2, rows[1]).plain) is not graded
        (chart,) = [each for each in drawn(sections(rows)) if "Held-out" in each["title"]]
        assert chart["title"] == f"Held-out {word}" and chart["traces"][0]["name"] == word
        (chart,) = [each for each in drawn(overlaid({"a": rows, "b": rows})) if "Held-out" in each["title"]]
        assert chart["title"] == f"Held-out {word}" and [trace["name"] for trace in chart["traces"]] == ["a", "b"]
    assert summarize([{**before, "eval/accuracy": 1.5}]).held_out == "reward", "of a run before there was eval/graded"
