"""What the guard makes of firings and faults; the real run is in tests/e2e/test_gates.py."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl.guard.capsule import read_capsule
from rl.guard.events import read_events
from rl.guard.evidence import Evidence
from rl.guard.judge import Attempt, Guard, Verdict
from rl.guard.standing import Standing
from rl.spec import parse_spec
from tests.rl.test_capsule import VALUES, a_stack, evidence
from trainer.errors import NonFiniteLossError
from trainer.result import PassResult

TIS, EXACT, NORM = "mismatch/tis_clipfrac", "mismatch/exact_frac", "train/grad_norm"
FINE = {TIS: 0.0, EXACT: 1.0, NORM: 1.0}
GATES = [
    {"metric": TIS, "above": 0.1, "action": "tighten_tis", "tis_cap": 1.5},
    {"metric": TIS, "above": 0.3, "action": "enable_r3"},
    {"metric": TIS, "above": 0.5, "action": "bf16_both"},
    {"metric": EXACT, "below": 1.0, "action": "skip_step"},
    {"metric": NORM, "above": 9.0, "action": "checkpoint_and_stop"},
]


class Run:
    """A guard on a stack that takes notes."""

    def __init__(self, folder: Path, **guard: Any) -> None:
        self.said: list[str] = []
        self.stack = a_stack(folder, capsule_weights=False, **guard)
        self.stack.spec = parse_spec(
            {**VALUES, "numerics": {"router_replay": "record"}, "gates": GATES, "guard": guard}
        )
        self.stack.standing = Standing()
        self.stack.warn = self.said.append
        self.guard = Guard(self.stack, self.stack.spec.algorithm)

    def judge(self, step: int, fault: NonFiniteLossError | None = None, **metrics: float) -> Verdict:
        named = {{"tis": TIS, "exact": EXACT, "norm": NORM}[name]: value for name, value in metrics.items()}
        return self.guard.judge(step, FINE | named, attempt(evidence([0.1], [0.2]), fault))


def attempt(seen: Evidence, fault: NonFiniteLossError | None = None) -> Attempt:
    loss = 1.0 if fault is None else math.nan
    return Attempt(PassResult(seen.logprobs, {}, loss, loss, 0.0, seen.routes), seen, fault)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_good_step_is_trained_on_and_leaves_nothing(run: Run) -> None:
    assert run.judge(1) == Verdict(
        fired=0, why=(), withheld=False, repeat=False, resync=False, fall_back=False, stop=""
    )
    assert run.said == [] and not run.stack.run.events.exists() and not run.stack.run.capsules.exists()


def test_a_tightened_cap_repeats_the_pass_once_and_stays(run: Run) -> None:
    assert run.guard.algorithm.tis_cap == run.guard.measured_cap == 2.0
    first = run.judge(1, tis=0.2)
    assert first.repeat and not first.withheld
    assert run.guard.algorithm.tis_cap == 1.5 and run.guard.measured_cap == 2.0
    assert not run.judge(2).repeat
    again = run.judge(3, tis=0.2)
    assert (again.fired, again.repeat) == (1, False), "there is nothing to change any more"
    assert run.guard.metrics(again)["gates/tis_cap"] == 1.5


def test_replayed_routes_repeat_the_pass_and_stay(run: Run) -> None:
    first = run.judge(1, tis=0.4)
    assert first.repeat and run.stack.standing.router_replay
    assert run.guard.metrics(first)["gates/router_replay"] == 1.0
    run.judge(2)
    assert not run.judge(3, tis=0.4).repeat


def test_what_is_withheld_needs_no_second_pass_but_the_change_lasts(run: Run) -> None:
    verdict = run.judge(1, tis=0.2, exact=0.5)
    assert (verdict.fired, verdict.withheld, verdict.repeat, verdict.resync) == (2, True, False, False)
    assert run.guard.algorithm.tis_cap == 1.5
    assert run.judge(2, exact=0.9).withheld, "until the metric has recovered"
    assert not run.judge(3).withheld


def test_both_sides_fall_back_once(run: Run) -> None:
    verdict = run.judge(1, tis=0.9)
    assert verdict.fall_back and verdict.resync and verdict.withheld
    run.stack.standing.bf16 = True
    run.judge(2)
    again = run.judge(3, tis=0.9)
    assert not again.fall_back and again.resync and again.withheld


def test_several_firings_share_a_capsule_and_come_mildest_first(run: Run) -> None:
    verdict = run.judge(4, tis=0.9, exact=0.5, norm=10.0)
    assert verdict.stop == "checkpoint_and_stop: train/grad_norm = 10 is above 9.0 (capsules/step_4)"
    events = read_events(run.stack.run.events)
    assert [e.action for e in events] == ["tighten_tis", "enable_r3", "skip_step", "bf16_both", "checkpoint_and_stop"]
    assert {(event.step, event.capsule) for event in events} == {(4, "capsules/step_4")}
    assert run.said == [f"{event.text} (capsules/step_4)" for event in events]


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_loss_that_is_not_finite_is_never_trained_on(policy: str, tmp_path: Path) -> None:
    run = Run(tmp_path, nonfinite_loss=policy)
    verdict = run.judge(3, fault=NonFiniteLossError("gradient norm: found a value that is not finite", [0]))
    assert verdict.withheld and verdict.fired == 0
    (event,) = read_events(run.stack.run.events)
    action = "checkpoint_and_stop" if policy == "stop" else "skip_step"
    assert event.text == f"{action}: the gradient norm over 1 rows is not finite"
    assert verdict.stop == ("" if policy == "skip" else f"{event.text} (capsules/step_3)")


def test_a_repeated_pass_may_meet_a_fault_too(run: Run) -> None:
    verdict = run.judge(1, tis=0.2)
    seen = evidence([0.1], [0.2])
    fine = run.guard.recheck(1, verdict, {NORM: 2.0}, attempt(seen))
    assert verdict.repeat and (fine.fired, fine.withheld, fine.stop) == (1, False, "")
    again = run.guard.recheck(1, verdict, {NORM: math.nan}, attempt(seen, NonFiniteLossError("loss: ...", [1])))
    assert again.withheld and again.stop == "checkpoint_and_stop: the loss over 1 rows is not finite (capsules/step_1)"
    events = read_events(run.stack.run.events)
    assert [event.action for event in events] == ["tighten_tis", "checkpoint_and_stop"]
    assert read_capsule(run.stack.run.capsule(1)).why == [event.text for event in events], "of both passes"


def test_a_repeated_pass_that_breaks_a_bound_is_not_trained_on(run: Run) -> None:
    verdict = run.judge(1, tis=0.2)
    again = run.guard.recheck(1, verdict, {NORM: 10.0}, attempt(evidence([0.1], [0.2])))
    assert (again.fired, again.withheld, again.repeat) == (2, True, False)
    assert again.stop == "checkpoint_and_stop: train/grad_norm = 10 is above 9.0 (capsules/step_1)"
    assert [event.action for event in read_events(run.stack.run.events)] == ["tighten_tis", "checkpoint_and_stop"]


def test_an_engine_without_a_finite_logprob_is_named_as_the_cause(tmp_path: Path) -> None:
    run = Run(tmp_path, nonfinite_loss="skip")
    seen = evidence([0.1], [0.2, 0.3])
    seen.batch.fields["rollout_logprobs"][:] = math.nan
    run.stack.trainer.weight_version = 3
    run.stack.trainer.score_routed = lambda batch: SimpleNamespace(logprobs=seen.logprobs, routes=seen.routes)
    verdict = run.guard.judge(2, {}, run.guard.attempt(seen.batch, seen.versions))
    (event,) = read_events(run.stack.run.events)
    assert verdict.withheld and (event.metric, event.value) == ("mismatch/nonfinite_count", 3.0)
    assert event.text == "skip_step: found no finite rollout logprob, so check the engine"


def test_sampling_at_stale_weights_is_recorded_with_its_step(run: Run) -> None:
    run.judge(1)
    run.stack.standing.stale_resyncs += 1
    verdict = run.judge(2)
    (event,) = read_events(run.stack.run.events)
    assert (event.step, event.action, event.value) == (2, "resync", 1.0)
    assert not verdict.withheld and run.guard.metrics(verdict)["gates/stale_resyncs"] == 1.0
    assert run.guard.metrics(run.judge(3))["gates/stale_resyncs"] == 0.0, "of the step, not of the run"
    assert len(read_events(run.stack.run.events)) == 1


def test_gates_and_changes_go_on_in_a_resumed_run(run: Run, tmp_path: Path) -> None:
    run.judge(1, tis=0.2, exact=0.5)
    resumed = Run(tmp_path / "resumed")
    resumed.stack.standing = Standing(**run.stack.standing.to_dict())
    resumed.guard = Guard(resumed.stack, resumed.stack.spec.algorithm)
    assert resumed.guard.algorithm.tis_cap == 1.5
    verdict = resumed.judge(2, tis=0.2, exact=0.5)
    assert (verdict.fired, verdict.withheld) == (0, True)
    assert not resumed.judge(3).withheld


def test_rows_that_a_fault_names_come_before_the_worst(tmp_path: Path) -> None:
    run = Run(tmp_path, capsule_sequences=1)
    run.guard.judge(1, FINE, attempt(evidence([0.1], [0.9], [0.0]), NonFiniteLossError("loss: ...", [2])))
    capsule = read_capsule(run.stack.run.capsule(1))
    assert capsule.rows == [2, 1] and torch.equal(capsule.evidence.batch.lengths, torch.tensor([3, 3]))
