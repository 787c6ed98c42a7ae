"""What the guard makes of firings and faults; the real run is in tests/e2e/test_gates.py."""

from __future__ import annotations

import math

import pytest
from pydantic import TypeAdapter

from fp8rl.rl.guard.guard import Fault, GateState, Guard, Verdict
from tests.support.experiments import experiment

TIS, EXACT, NORM = "mismatch/tis_clipfrac", "mismatch/exact_frac", "train/grad_norm"
NAMES = {"tis": TIS, "exact": EXACT, "norm": NORM}
FINE = {TIS: 0.0, EXACT: 1.0, NORM: 1.0}
GATES = [
    {"metric": TIS, "above": 0.1, "action": "tighten_tis", "tis_cap": 1.5},
    {"metric": TIS, "above": 0.3, "action": "enable_r3"},
    {"metric": TIS, "above": 0.5, "action": "bf16_both"},
    {"metric": EXACT, "below": 1.0, "action": "skip_step"},
    {"metric": NORM, "above": 9.0, "action": "checkpoint_and_stop"},
]
CAPSULE = "capsules/step_N"
NORM_FAULT = Fault("train/loss", None, "not finite", "the gradient norm over 1 rows is not finite", (0,))


def a_guard(gate_state: GateState | None = None, **settings: object) -> Guard:
    run = experiment(numerics={"router_replay": "record"}, gates=GATES, guard=settings)
    return Guard(run, gate_state or GateState())


def judge(guard: Guard, step: int, fault: Fault | None = None, **metrics: float) -> Verdict:
    named = {NAMES[name]: value for name, value in metrics.items()}
    return guard.judge(step, FINE | named, fault, CAPSULE)


@pytest.fixture
def gate_state() -> GateState:
    return GateState()


@pytest.fixture
def guard(gate_state: GateState) -> Guard:
    return a_guard(gate_state)


def test_a_tightened_cap_repeats_the_pass_once_and_stays(guard: Guard) -> None:
    assert guard.algorithm.correction.tis_cap == guard.tis_cap == 2.0
    first = judge(guard, 1, tis=0.2)
    assert first.retry and not first.withheld
    assert guard.algorithm.correction.tis_cap == 1.5
    assert not judge(guard, 2).retry
    again = judge(guard, 3, tis=0.2)
    assert (again.fired, again.retry) == (1, False), "there is nothing to change any more"
    assert guard.metrics(again)["gates/tis_cap"] == 1.5


def test_replayed_routes_repeat_the_pass_and_stay(guard: Guard, gate_state: GateState) -> None:
    first = judge(guard, 1, tis=0.4)
    assert first.retry and gate_state.router_replay and guard.replays
    assert guard.metrics(first)["gates/router_replay"] == 1.0
    judge(guard, 2)
    assert not judge(guard, 3, tis=0.4).retry


def test_what_is_withheld_needs_no_second_pass_but_the_change_lasts(guard: Guard) -> None:
    verdict = judge(guard, 1, tis=0.2, exact=0.5)
    assert (verdict.fired, verdict.withheld, verdict.retry, verdict.resync) == (2, True, False, False)
    assert guard.algorithm.correction.tis_cap == 1.5
    assert judge(guard, 2, exact=0.9).withheld, "until the metric has recovered"
    assert not judge(guard, 3).withheld


def test_both_sides_fall_back_once(guard: Guard, gate_state: GateState) -> None:
    verdict = judge(guard, 1, tis=0.9)
    assert verdict.fall_back and verdict.resync and verdict.withheld
    gate_state.bf16 = True
    judge(guard, 2)
    again = judge(guard, 3, tis=0.9)
    assert not again.fall_back and again.resync and again.withheld


def test_several_firings_share_a_capsule_and_come_mildest_first(guard: Guard) -> None:
    verdict = judge(guard, 4, tis=0.9, exact=0.5, norm=10.0)
    assert verdict.stop == f"checkpoint_and_stop: train/grad_norm = 10 is above 9.0 ({CAPSULE})"
    actions = [event.action for event in verdict.events]
    assert actions == ["tighten_tis", "enable_r3", "skip_step", "bf16_both", "checkpoint_and_stop"]
    assert {(event.step, event.capsule) for event in verdict.events} == {(4, CAPSULE)}
    assert verdict.events[0].said == f"tighten_tis: {TIS} = 0.9 is above 0.1 ({CAPSULE})"


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_loss_that_is_not_finite_is_never_trained_on(policy: str) -> None:
    verdict = judge(a_guard(nonfinite_loss=policy), 3, NORM_FAULT)
    assert verdict.withheld and verdict.fired == 0
    (event,) = verdict.events
    action = "checkpoint_and_stop" if policy == "stop" else "skip_step"
    assert event.text == f"{action}: the gradient norm over 1 rows is not finite"
    assert verdict.stop == ("" if policy == "skip" else f"{event.text} ({CAPSULE})")


def test_a_repeated_pass_may_meet_a_fault_too(guard: Guard) -> None:
    verdict = judge(guard, 1, tis=0.2)
    fine = guard.recheck(1, verdict, {NORM: 2.0}, None, CAPSULE)
    assert verdict.retry and (fine.fired, fine.withheld, fine.stop) == (1, False, "")
    broken = guard.recheck(1, verdict, {NORM: 10.0}, None, CAPSULE)
    assert (broken.fired, broken.withheld, broken.retry) == (2, True, False)
    assert broken.stop == f"checkpoint_and_stop: train/grad_norm = 10 is above 9.0 ({CAPSULE})"
    again = guard.recheck(1, verdict, {NORM: math.nan}, NORM_FAULT, CAPSULE)
    assert again.withheld
    assert again.stop == f"checkpoint_and_stop: the gradient norm over 1 rows is not finite ({CAPSULE})"
    assert [event.action for event in again.events] == ["checkpoint_and_stop"], "the first pass's were announced"
    assert again.why == (verdict.events[0].text, again.events[0].text), "of both passes"


def test_gates_and_changes_go_on_in_a_resumed_run(guard: Guard, gate_state: GateState) -> None:
    judge(guard, 1, tis=0.2, exact=0.5)
    resumed = a_guard(TypeAdapter(GateState).validate_json(TypeAdapter(GateState).dump_json(gate_state)))
    assert resumed.algorithm.correction.tis_cap == 1.5
    verdict = judge(resumed, 2, tis=0.2, exact=0.5)
    assert (verdict.fired, verdict.withheld) == (0, True)
    assert not judge(resumed, 3).withheld
