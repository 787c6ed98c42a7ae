"""Faults injected into a live run: each is caught in the step it happens in, and none of it is trained on.

One run of the arithmetic example meets them one after the other, is stopped by the last, and resumes.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8rl.rl.algorithms.grpo import Grpo
from fp8rl.rl.experiment import load_experiment
from fp8rl.rl.guard.capsule import read_capsule
from fp8rl.rl.loop import train
from fp8rl.rl.record.history import Event, read_events
from fp8rl.rl.record.metrics_log import read_metrics
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.rl.run.batching import RolloutBatch
from fp8rl.rl.run.ending import finish
from fp8rl.rl.run.feed.feed import Feed
from fp8rl.rl.run.feed.judging import JudgedAnswer
from fp8rl.rl.run.run import Run, open_run
from fp8rl.rollout.engine.server.client import EngineClient
from fp8rl.rollout.types import Trajectory
from fp8rl.weight_sync.served import served_tensors, write_served_checkpoint
from fp8rl.weight_sync.transports.tensor import TensorTransport
from tests.support.cli_runs import SMALL
from tests.support.commands import by_the_command, report_of, result_of
from tests.support.faults import MATRIX, Named, Tampered
from tests.support.live_runs import prepared
from tests.support.ranks import in_a_fork
from tests.support.rig import Rig
from tests.support.servers import use, wait_until
from tests.support.syncs import push

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

REPLAYED, CORRUPTED, STALE, OLD, NAN, OVERFLOW, SCALED, MANY_NAN, DIVERGING, STOPPED = 2, 3, 5, 6, 7, 8, 9, 10, 11, 12
"""The step of each fault; 4 has none."""
TIGHTENED, LAST = 13, 14
"""Of the run that resumes."""

WITHHELD = {CORRUPTED, OLD, NAN, OVERFLOW, SCALED, MANY_NAN, STOPPED}
GATES = [
    {"metric": "mismatch/exact_frac", "below": 1.0, "action": "resync"},
    {"metric": "mismatch/nonfinite_count", "above": 0.0, "action": "skip_step"},
    {"metric": "mismatch/nonfinite_sequences", "above": 4.0, "action": "bf16_both"},
    {"metric": "rollout/reward_mean", "below": 0.05, "action": "checkpoint_and_stop"},
    {"metric": "mismatch/router_agreement", "below": 0.5, "action": "enable_r3"},
]
LATER_GATES = [{"metric": "mismatch/tis_clipfrac", "above": 0.5, "action": "tighten_tis"}]

Before = Callable[[Run], None]
After = Callable[[list[Trajectory]], list[Trajectory]]


def corrupt_a_weight(stack: Run) -> None:
    """In the engine, after the verified sync: a tampered tensor, committed at the same version."""
    transport = Tampered(TensorTransport(1 << 20), flipped_bits)
    version = stack.trainer.weight_version
    push(stack.trainer, transport, stack.numerics.rollout_spec, stack.engines.up(), version)
    at_each_engine(stack, EngineClient.resume)  # a sync that does not verify leaves it paused


def flipped_bits(tensors: Iterable[Named]) -> Iterator[Named]:
    """The lowest bit of every FP8 code of MATRIX."""
    for name, tensor in tensors:
        yield name, (tensor.view(torch.uint8) ^ 1).view(tensor.dtype) if name == MATRIX else tensor


def score_with_other_scales(stack: Run) -> None:
    """In the trainer alone, in its next pass."""
    trainer, numerics = stack.trainer, stack.numerics
    spec = numerics.spec.override({role: {"scale": "fp32"} for role in ("weight", "activation")})
    forward_backward = trainer.forward_backward

    def once(*arguments: Any) -> Any:
        trainer.forward_backward = forward_backward  # type: ignore[method-assign]
        trainer.set_numerics(dataclasses.replace(numerics, spec=spec))
        result = forward_backward(*arguments)
        trainer.set_numerics(numerics)
        return result

    trainer.forward_backward = once  # type: ignore[method-assign]


def at_each_engine(stack: Run, action: Callable[[EngineClient], Any]) -> list[Any]:
    return [use(endpoint, action) for endpoint in stack.engines.up()]


@dataclasses.dataclass
class OldWeights:
    """Those of the step in which `keep` is called, loaded into the engine in a later one."""

    folder: Path

    def keep(self, stack: Run) -> None:
        bridge, folder = stack.syncing.bridge, self.folder
        spec, source = bridge.spec, bridge.model_path

        def write(trainer: Any) -> None:
            tensors = served_tensors(trainer.weights.share(trainer.model), spec, trainer.definition)
            write_served_checkpoint(tensors, source, folder, spec)

        stack.trainer.apply(write)

    def load(self, age: int) -> Before:
        """Under the trainer's version less `age`."""

        async def send(engine: EngineClient, version: int) -> None:
            await engine.update_weights_from_disk(self.folder)
            await engine.flush()
            await engine.commit(version)

        return lambda stack: at_each_engine(stack, lambda engine: send(engine, stack.trainer.weight_version - age))


def nan_logprobs(rows: int) -> After:
    """The engine answers NaN for every token of the first `rows` answers."""

    def spoil(answers: list[Trajectory]) -> list[Trajectory]:
        return [dataclasses.replace(a, logprobs=[math.nan] * len(a.logprobs)) for a in answers[:rows]] + answers[rows:]

    return spoil


def too_sure(answers: list[Trajectory]) -> list[Trajectory]:
    """The engine reports every token as e times less probable than it was: rho = e."""
    return [dataclasses.replace(a, logprobs=[x - 1.0 for x in a.logprobs]) for a in answers]


def other_experts(answers: list[Trajectory]) -> list[Trajectory]:
    """The engine reports each token's experts as those that follow them."""
    return [dataclasses.replace(a, routed_experts=(a.routed_experts + 1) % 8) for a in answers]


def diverge(stack: Run) -> None:
    stack.trainer.apply(set_learning_rate, 3.0)  # from now on


def set_learning_rate(trainer: Any, lr: float) -> None:
    for group in trainer.optimizer.inner.param_groups:
        group["max_lr"] = lr


class Faults:
    """Stands around the loop's sampling: what happens right before it in a step, and to what it returns."""

    def __init__(
        self, patch: pytest.MonkeyPatch, stack: Run, before: dict[int, Before], after: dict[int, After], first: int
    ) -> None:
        self.step = first - 1
        self.passes: dict[int, list[tuple[bool, float | None]]] = {}
        self._stack, self._before, self._after, self._patch = stack, before, after, patch
        take, work, advantages = Feed.take, Feed._rollouts, Grpo.advantages
        patch.setattr(Feed, "take", lambda feed, *arguments: self.take(partial(take, feed, *arguments)))
        patch.setattr(Feed, "_rollouts", lambda feed, groups, version: work(feed, self.spoilt(groups), version))
        patch.setattr(Grpo, "advantages", lambda grpo, *arguments: advantages(grpo, *arguments) + self.overflow)

    def take(self, work: Callable[[], RolloutBatch]) -> RolloutBatch:
        stack = self._stack
        if not self.passes:
            self._note_passes(stack)
        self.step += 1
        self.passes[self.step] = []
        canaries = [slot.canary_task for slot in stack.engines.slots]
        assert wait_until(lambda: all(task is None or task.done() for task in canaries), 60), "faults come after these"
        self._before.get(self.step, lambda _: None)(stack)
        return work()

    def spoilt(self, groups: list[list[JudgedAnswer]]) -> list[list[JudgedAnswer]]:
        after = self._after.get(self.step, lambda answers: answers)
        trajectories = iter(after([answer.trajectory for group in groups for answer in group]))
        return [[dataclasses.replace(answer, trajectory=next(trajectories)) for answer in group] for group in groups]

    def _note_passes(self, stack: Run) -> None:
        """Of each step, whether the routes were replayed and under which cap."""
        forward_backward = stack.trainer.forward_backward

        def noted(batch: Any, objective: Any) -> Any:
            self.passes[self.step].append((batch.replay, objective.correction.tis_cap))
            return forward_backward(batch, objective)

        self._patch.setattr(stack.trainer, "forward_backward", noted)

    @property
    def overflow(self) -> float:
        """Added to advantages: so large in step OVERFLOW that their sum is not finite."""
        return 3e38 if self.step == OVERFLOW else 0.0


@pytest.fixture(scope="module")
def run(faulty: tuple[RunDir, Faults]) -> RunDir:
    """The run up to where it is stopped."""
    return faulty[0]


@pytest.fixture(scope="module")
def faulty(rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, Faults]:
    folder = tmp_path_factory.mktemp("gates")
    settings, run = prepared(
        folder,
        *SMALL,
        *(f"run.steps={LAST}", "eval.problems=0", "numerics.router_replay=record"),
        *(f"gates={json.dumps(GATES)}", "guard.nonfinite_loss=skip", "guard.capsules=10"),
    )
    old = OldWeights(folder / "old")
    before = {
        1: old.keep,
        CORRUPTED: corrupt_a_weight,
        STALE: old.load(age=1),
        OLD: old.load(age=0),
        SCALED: score_with_other_scales,
        DIVERGING: diverge,
    }
    after = {REPLAYED: other_experts, NAN: nan_logprobs(1), MANY_NAN: nan_logprobs(8)}
    rig.only_ray()
    with pytest.MonkeyPatch.context() as patch, open_run(settings, run) as live:
        faults = Faults(patch, live, before, after, first=1)
        stopped = train(live)
        finish(live.record, stopped)
    assert stopped.startswith("checkpoint_and_stop: rollout/reward_mean")
    return run, faults


def row(run: RunDir, step: int) -> dict[str, Any]:
    return next(row for row in read_metrics(run.metrics) if row["step"] == step)


def events(run: RunDir, step: int) -> list[Event]:
    return [event for event in read_events(run.events) if event.step == step]


def actions(run: RunDir, step: int) -> list[str]:
    return [event.action for event in events(run, step)]


def test_what_is_out_of_bounds_is_not_trained_on_and_everything_else_is(run: RunDir) -> None:
    rows = {step: row(run, step) for step in range(1, STOPPED + 1)}
    assert {step for step, found in rows.items() if found["gates/withheld"] == 1.0} == WITHHELD
    assert {step for step, found in rows.items() if "train/lr" not in found} == WITHHELD
    assert {event.step for event in read_events(run.events)} == WITHHELD | {STALE, REPLAYED}
    for step in rows.keys() - WITHHELD - {1}:
        assert rows[step]["mismatch/exact_frac"] == 1.0, f"step {step} is as good as before the faults"
        assert rows[step]["mismatch/nonfinite_count"] == 0


def test_a_corrupted_weight_and_old_ones_are_synced_away_whatever_version_they_claim(run: RunDir) -> None:
    (event,) = events(run, CORRUPTED)
    assert (event.action, event.metric, event.bound) == ("resync", "mismatch/exact_frac", "below 1.0")
    assert event.value == row(run, CORRUPTED)["mismatch/exact_frac"] < 1.0
    assert read_capsule(run.capsule(CORRUPTED)).about.wrong == [MATRIX], "from which an explanation names it"
    assert row(run, CORRUPTED)["sync/verified_tensors"] > 100
    manifests = [json.loads(run.manifest(step).read_text()) for step in (CORRUPTED - 1, CORRUPTED)]
    assert manifests[0] == manifests[1], "the same weights, at the same version"
    assert actions(run, STALE) == ["resync"] and row(run, STALE)["gates/stale_resyncs"] == 1.0
    assert row(run, STALE)["rollout/staleness_max"] == 0.0
    assert actions(run, OLD) == ["resync"] and row(run, OLD)["mismatch/exact_frac"] < 1.0


def test_logprobs_and_a_loss_that_are_not_finite_cost_the_step_and_are_pinned(run: RunDir) -> None:
    assert actions(run, NAN) == ["skip_step"]
    assert 0 < row(run, NAN)["mismatch/nonfinite_count"] < row(run, NAN)["rollout/tokens"]
    assert "sync/seconds" not in row(run, NAN), "there is nothing new to send"
    (event,) = events(run, OVERFLOW)
    assert (event.action, event.metric, event.value) == ("skip_step", "train/loss", None)
    assert "train/loss" not in row(run, OVERFLOW) and row(run, OVERFLOW)["tracking/nonfinite_dropped"] == 2
    about = json.loads((run.capsule(OVERFLOW) / "capsule.json").read_text())
    assert sorted(about["rows"]) == list(range(32)), "every row of the micro-batch"


def test_both_sides_fall_back_to_bf16_and_still_agree(run: RunDir) -> None:
    assert actions(run, MANY_NAN) == ["skip_step", "bf16_both"], "the milder action first"
    assert [row(run, step)["gates/bf16"] for step in (NAN, MANY_NAN, DIVERGING)] == [0.0, 1.0, 1.0]
    served = [json.loads(run.manifest(step).read_text()) for step in (OLD, MANY_NAN)]
    assert served[0]["spec_digest"] != served[1]["spec_digest"]
    assert not any(name.endswith("_scale_inv") for name in served[1]["entries"])
    assert row(run, MANY_NAN)["sync/verified_tensors"] == len(served[1]["entries"]) < len(served[0]["entries"])


def test_a_diverging_run_is_stopped_in_order(run: RunDir) -> None:
    assert actions(run, STOPPED) == ["checkpoint_and_stop"]
    assert row(run, STOPPED)["rollout/reward_mean"] < 0.05
    assert max(run.checkpoint_steps()) == STOPPED and not run.model.exists()
    page = run.report.read_text()
    for event in read_events(run.events):
        assert event.text in page.replace("&#39;", "'")
    log = run.log.read_text()
    assert "not trained on" in log and f"stopped: {events(run, STOPPED)[0].text} (capsules/step_{STOPPED})" in log


def rescored(capsule: Path) -> str:
    result = result_of("explain", "--quick", capsule, "--json")
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("step", [CORRUPTED, STOPPED], ids=["fp8", "bf16"])
def test_a_capsule_is_rescored_bit_for_bit_in_another_process(run: RunDir, tmp_path: Path, step: int) -> None:
    report = report_of(in_a_fork(tmp_path, partial(rescored, run.capsule(step))))
    facts = report.facts["scored_again"]
    assert [(each.key, each.grade) for each in report.findings] == [("trainer", "ok"), ("mismatch/bias", "ok")]
    assert facts["mode"] == "exact" and facts["sequences"] == 8
    assert facts["equal_tokens"] == facts["tokens"] >= 8 and facts["largest_change"] == 0
    assert all(values["recorded"] == values["rescored"] for values in facts["metrics"].values())
    recorded = {name: values["recorded"] for name, values in facts["metrics"].items()}
    assert "mismatch/router_agreement" in recorded
    assert (recorded["mismatch/exact_frac"] == 1.0) == (step == STOPPED)


def test_a_capsule_is_explained_by_the_command(run: RunDir, stacks: None) -> None:
    report, recorded = by_the_command(run.capsule(SCALED)), read_capsule(run.capsule(SCALED)).about.metrics
    found = report.facts["compared"]
    mean = recorded["mismatch/train_rollout_logprob_abs_diff_mean"]
    assert mean > 0 and found["abs_diff_mean"] == pytest.approx(mean)
    says = "scales: fp32 scales of weight and activation in the trainer reproduce its record"
    assert str(report.findings[0]).startswith(says)
    ending = [(each.key, each.grade) for each in report.findings[-2:]]
    assert ending == [("trainer", "error"), ("mismatch/bias", "ok")]
    assert found["live_abs_diff_mean"] == 0 and found["wrong"] == [], "the engine's weights were those of the sync"


def test_routes_are_replayed_from_the_step_on_in_which_they_differ(faulty: tuple[RunDir, Faults]) -> None:
    run, faults = faulty
    assert actions(run, REPLAYED) == ["enable_r3"]
    assert row(run, REPLAYED)["mismatch/router_agreement"] < 0.5, "of the first pass"
    assert faults.passes[REPLAYED - 1] == [(False, 2.0)]
    assert faults.passes[REPLAYED] == [(False, 2.0), (True, 2.0)]
    assert faults.passes[REPLAYED + 1] == faults.passes[STOPPED] == [(True, 2.0)]
    assert [row(run, step)["gates/router_replay"] for step in (1, REPLAYED, STOPPED)] == [0.0, 1.0, 1.0]


def test_the_stopped_run_resumes_with_what_gates_have_changed(run: RunDir, stacks: None) -> None:
    settings = load_experiment(run.experiment, [f"gates={json.dumps(LATER_GATES)}"])
    with pytest.MonkeyPatch.context() as patch, open_run(settings, run) as live:
        faults = Faults(patch, live, {}, {TIGHTENED: too_sure}, first=STOPPED + 1)
        assert train(live) == ""
        (report,) = at_each_engine(live, EngineClient.report)
        assert report.numerics["rollout"] == "bf16"
    assert [event.action for event in read_events(run.events) if event.step > STOPPED] == ["tighten_tis"]
    assert faults.passes == {TIGHTENED: [(True, 2.0), (True, 1.0)], LAST: [(True, 1.0)]}
    later = [row(run, step) for step in (TIGHTENED, LAST)]
    assert later[0]["train/tis_weight_mean"] == pytest.approx(1.0), "not 2"
    assert later[0]["mismatch/tis_clipfrac"] > 0.5, "measured with the cap of the spec"
    assert later[1]["mismatch/exact_frac"] == 1.0
    for found in later:
        assert (found["gates/tis_cap"], found["gates/router_replay"], found["gates/bf16"]) == (1.0, 1.0, 1.0)
        assert found["gates/withheld"] == 0.0 and "train/lr" in found
    assert run.model.is_dir()
