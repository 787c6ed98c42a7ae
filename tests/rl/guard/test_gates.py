"""The automaton of a gate: when it fires, when it is armed again, and what it withholds meanwhile."""

import itertools
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fp8rl.rl.experiment.gate_sections import GateSection
from fp8rl.rl.guard.gates import Gates, late_metrics

METRIC = "mismatch/tis_clipfrac"
EXACT = "mismatch/exact_frac"


def gate(**fields: Any) -> GateSection:
    return GateSection(**{"metric": METRIC, "above": 0.05, **fields})


def fired(gates: Gates, values: list[float], first_step: int = 1) -> list[int]:
    """The steps in which a gate fires, step `first_step` having the first value."""
    return [step for step, value in enumerate(values, first_step) if gates.check(step, {METRIC: value})]


def test_a_gate_fires_once_after_enough_steps_in_a_row_and_arms_again() -> None:
    assert fired(Gates([gate(for_steps=2)]), [0.06, 0.04, 0.06, 0.07, 0.08, 0.05, 0.06, 0.06]) == [4, 8]


def test_the_bound_itself_is_fine_on_either_side() -> None:
    gates = Gates([gate(above=0.0), GateSection(metric=EXACT, below=1.0)])
    assert gates.check(1, {METRIC: 0.0, EXACT: 1.0}) == []
    events = [firing.event(2) for firing in gates.check(2, {METRIC: 1e-9, EXACT: 0.5})]
    assert [event.text.split("= ")[1] for event in events] == ["1e-09 is above 0.0", "0.5 is below 1.0"]
    assert [(e.step, e.metric, e.bound) for e in events] == [(2, METRIC, "above 0.0"), (2, EXACT, "below 1.0")]


def test_a_step_without_a_finite_value_changes_nothing() -> None:
    gates = Gates([gate(for_steps=2, action="skip_step")])
    assert gates.check(1, {METRIC: 0.06}) == []
    assert gates.check(2, {}) == gates.check(3, {METRIC: math.nan}) == gates.check(4, {METRIC: math.inf}) == []
    (firing,) = gates.check(5, {METRIC: 0.06})
    assert firing.event(5).text.endswith("is above 0.05 for 2 steps")
    assert gates.check(6, {}) == [] and gates.withholding()
    gates.check(7, {METRIC: 0.0})
    assert not gates.withholding()


def test_between_bound_and_recovery_it_neither_fires_nor_arms() -> None:
    assert fired(Gates([gate(recover=0.03)]), [0.06, 0.04, 0.06, 0.04, 0.03, 0.04, 0.06]) == [1, 7]
    lower = Gates([GateSection(metric=METRIC, below=0.5, recover=0.8)])
    assert fired(lower, [0.6, 0.4, 0.6, 0.4, 0.8, 0.4]) == [2, 6]


def test_a_cooldown_silences_and_withholds_all_the_same() -> None:
    gates = Gates([gate(cooldown_steps=3, action="skip_step")])
    seen = []
    for step, value in enumerate([0.06, 0.0, 0.06, 0.0, 0.06, 0.06], start=1):
        seen.append((bool(gates.check(step, {METRIC: value})), bool(gates.withholding())))
    # Fires at 1; silent at 3, though the batch is withheld; at 5 the cooldown of steps 2 to 4 is over.
    assert seen == [(True, True), (False, False), (False, True), (False, False), (True, True), (False, True)]


def test_what_a_cooldown_has_silenced_fires_when_it_is_over() -> None:
    assert fired(Gates([gate(cooldown_steps=2)]), [0.06, 0.0, 0.06, 0.06, 0.06]) == [1, 4]


def test_a_stop_is_judged_anew_by_the_run_that_resumes() -> None:
    gates = Gates([gate(action="checkpoint_and_stop", for_steps=2)])
    assert fired(gates, [1.0, 1.0]) == [2]
    assert fired(Gates([gate(action="checkpoint_and_stop", for_steps=2)], gates.state()), [1.0, 1.0], 3) == [4]


def test_a_repeated_pass_takes_the_place_of_the_first_and_counts_once() -> None:
    gates = Gates([gate(for_steps=2, action="skip_step"), gate(for_steps=2)])
    seen = []
    for step, (first, second) in enumerate([(0.06, 0.06), (0.0, 0.06)], start=1):
        fires = [gates.check(step, {METRIC: first}), gates.recheck(step, {METRIC: second})]
        seen.append([[firing.rule.action for firing in firings] for firings in fires])
    # The second pass of step 2 is the second beyond the bound in a row; warnings go by first passes.
    assert seen == [[[], []], [[], ["skip_step"]]] and gates.withholding()


def test_a_repeated_pass_without_the_metric_leaves_its_gate_alone() -> None:
    gates = Gates([gate(for_steps=2, action="skip_step")])
    assert gates.check(1, {METRIC: 0.06}) == gates.recheck(1, {EXACT: 0.0, METRIC: math.nan}) == []
    assert gates.check(2, {METRIC: 0.06})


def test_a_repeated_pass_within_the_bound_clears_the_first() -> None:
    gates = Gates([gate(for_steps=2, action="skip_step")])
    assert gates.check(1, {METRIC: 0.06}) == gates.recheck(1, {METRIC: 0.0}) == gates.check(2, {METRIC: 0.06}) == []


VALUES = st.lists(st.sampled_from([0.0, 0.04, 0.06, math.nan]), max_size=30)
STEPS = {"for_steps": st.integers(1, 3), "cooldown_steps": st.integers(0, 3)}
RULES = st.builds(gate, **STEPS, recover=st.sampled_from([None, 0.03]), action=st.sampled_from(["warn", "skip_step"]))


@given(rule=RULES, values=VALUES)
def test_between_two_firings_there_is_a_recovery_and_the_cooldown(rule: GateSection, values: list[float]) -> None:
    fires = fired(Gates([rule]), values)
    recovered = 0.05 if rule.recover is None else rule.recover
    for one, other in itertools.pairwise(fires):
        assert any(value <= recovered for value in values[one : other - 1])
        assert other - one > rule.cooldown_steps
    for step in fires:
        finite = [value for value in values[:step] if math.isfinite(value)]
        assert len(finite) >= rule.for_steps and all(value > 0.05 for value in finite[-rule.for_steps :])


@given(rule=RULES, values=VALUES, at=st.integers(0, 30))
def test_a_resumed_run_goes_on_where_the_gates_stood(rule: GateSection, values: list[float], at: int) -> None:
    whole, first = Gates([rule]), Gates([rule])
    early = fired(first, values[:at])
    assert early + fired(Gates([rule], first.state()), values[at:], len(values[:at]) + 1) == fired(whole, values)


def test_a_rule_that_the_saved_state_does_not_know_starts_anew() -> None:
    gates = Gates([gate()])
    gates.check(1, {METRIC: 1.0})
    assert fired(Gates([gate(above=0.04)], gates.state()), [1.0]) == [1]


def test_late_metrics_are_those_measured_after_the_decision() -> None:
    late = {"eval/accuracy": 0.5, "eval/hard/pass@4": 0.5, "sync/seconds": 1.0, "train/lr": 1e-4, "gates/withheld": 1.0}
    late |= {"rollout/reward_failures": 2.0, "rollout/engines_replaced": 1.0}
    assert late_metrics({**late, "mismatch/exact_frac": 1.0, "train/loss": 0.0}) == late
