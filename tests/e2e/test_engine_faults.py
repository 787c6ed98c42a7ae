"""Engines that die and hang while they sample and while they are synced: the others go on, and no token changes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from fp8rl.models import read_shape
from fp8rl.rl.experiment import load_experiment
from fp8rl.rl.run.feed.feed import to_groups
from fp8rl.rl.run.feed.problems import to_prompts
from fp8rl.rl.run.feed.sampling import PendingGroup
from fp8rl.rl.run.interrupts import BoundedExitStack
from fp8rl.rl.run.run import Run
from fp8rl.rollout.tasks.data import load_problems
from fp8rl.rollout.types import Group, Trajectory
from fp8rl.trainer.state_bytes import state_bytes
from fp8rl.weight_sync.served import served_bytes
from tests.support import wire
from tests.support.paths import ROOT
from tests.support.rig import Rig
from tests.support.servers import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

HUNG_AFTER_S = 15.0
"""Of a machine that does other things, too."""
START_S = 120.0
"""Of the same machine, at most."""


@pytest.fixture(scope="module")
def stack(rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A trainer and two engines, synced, which take turns if they are asked to."""
    settings = ["rollout.engines=2", f"rollout.hung_after_s={HUNG_AFTER_S}", "rollout.max_new_tokens=60"]
    settings += ["rollout.sleep=true", "sync.bucket_mib=1"]  # several buckets
    experiment = load_experiment(ROOT / "examples/arithmetic.yaml", settings)
    folder = tmp_path_factory.mktemp("stack")
    rig.only_ray()
    with BoundedExitStack() as closing:
        stack = Run(experiment, experiment.numerics_config(), folder, closing, print)
        stack.wait_for_engines()
        stack.syncing.sync()
        yield stack


@pytest.fixture
def told(stack: Run) -> Iterator[list[str]]:
    """What the stack says of its recoveries; afterwards both engines serve again."""
    said: list[str] = []
    stack.events.subscribe(lambda metric, count, text: said.append(text))
    yield said
    both_up(stack)
    stack.syncing.sync()


@pytest.fixture(scope="module")
def asked(stack: Run) -> list[Group]:
    problems = load_problems(stack.experiment.data.training[0])[:16]
    return to_groups(to_prompts(stack.tokenizer, problems), 4, run_seed=0, step=1)


@pytest.fixture(scope="module")
def undisturbed(stack: Run, asked: list[Group]) -> list[Trajectory]:
    return stack.sampling.sample(asked, 1.0)


def both_up(stack: Run) -> None:
    assert wait_until(lambda: len(stack.engines.up()) == 2, START_S)


def server_of(stack: Run, index: int) -> psutil.Process:
    return psutil.Process(ray.get(stack.engines.slots[index].actor.__ray_call__.remote(lambda engine: engine.pid)))


def scheduler_of(server: psutil.Process) -> psutil.Process:
    return next(child for child in server.children(recursive=True) if "scheduler" in " ".join(child.cmdline()))


def begin(stack: Run, asked: list[Group], *stopped: psutil.Process) -> list[PendingGroup]:
    """Groups under way on both engines. stopped: processes without which an engine answers none, however slow this
    one is."""
    for process in stopped:
        process.send_signal(signal.SIGSTOP)
    admitted = stack.sampling.admit(asked, stack.sampling.at(1.0))
    assert wait_until(lambda: all(slot.answers for slot in stack.engines.slots), START_S)
    time.sleep(0.2)
    return admitted


def collected(stack: Run, admitted: list[PendingGroup]) -> list[Trajectory]:
    return [answer for group in stack.sampling.collect(admitted) for answer in group]


def bits(answers: list[Trajectory]) -> list[Any]:
    return [(answer.token_ids, answer.logprobs, answer.seed) for answer in answers]


def test_an_engine_that_is_killed_costs_no_token_and_serves_again_once_it_is_verified(
    stack: Run, told: list[str], asked: list[Group], undisturbed: list[Trajectory]
) -> None:
    server = server_of(stack, 1)
    admitted = begin(stack, asked, scheduler_of(server))
    server.kill()
    assert bits(collected(stack, admitted)) == bits(undisturbed)
    assert len(told) == 1 and told[0].startswith("engine 1 is lost and replaced")
    both_up(stack)
    stack.sampling.sample(asked[:2], 1.0)  # whenever the loop waits for answers, engines that wait are synced
    assert stack.engines.slots[1].serving
    assert bits(stack.sampling.sample(asked, 1.0)) == bits(undisturbed)


def test_engines_that_hang_are_told_from_dead_ones_and_replaced(
    stack: Run, told: list[str], asked: list[Group], undisturbed: list[Trajectory]
) -> None:
    """The one in its server, the other in its scheduler."""
    assert wait_until(lambda: all(server_of(stack, engine).children() for engine in (0, 1)), START_S)
    one, other = (server_of(stack, engine) for engine in (0, 1))
    processes = [one, *one.children(recursive=True), other, *other.children(recursive=True)]
    admitted = begin(stack, asked, one, scheduler_of(other))
    assert bits(collected(stack, admitted)) == bits(undisturbed)
    assert sum("has not answered for" in line and "though its process is there" in line for line in told) == 2
    assert wait_until(lambda: not any(process.is_running() for process in processes), START_S), "one was left"


def test_engines_wake_as_they_were_and_one_that_dies_asleep_is_replaced_once_they_wake(
    stack: Run, told: list[str], asked: list[Group], undisturbed: list[Trajectory]
) -> None:
    shape = read_shape(Path(stack.experiment.model.path))
    state = state_bytes(shape, stack.experiment.trainer, stack.numerics, "torch", 0)
    moved = sum(part.gradients + part.masters + part.moments for part in state.values())
    cache = shape.kv_bytes() * (stack.experiment.rollout.cache_tokens + 1)
    stack.metrics()
    with stack.turn("train"):
        metrics = stack.metrics()
        server_of(stack, 1).kill()
        assert wait_until(lambda: stack.engines.slots[1].endpoint is None, START_S)
        assert metrics["memory/engine_released_bytes"] > cache + served_bytes(shape, stack.numerics.rollout_spec)
        assert not stack.engines.slots[0].serving
    assert bits(stack.sampling.sample(asked, 1.0)) == bits(undisturbed)
    assert len(told) == 1 and told[0].startswith("engine 1 is lost and replaced")
    metrics = stack.metrics()
    assert metrics["memory/trainer_moved_bytes"] == moved


def test_a_sync_in_which_a_bit_flips_is_done_again(
    stack: Run, told: list[str], asked: list[Group], undisturbed: list[Trajectory]
) -> None:
    """Connections that break and stall, and bits that flip every time, are `python -m lab.bench.faults wires`."""
    with engine_behind(stack, wire.flipped_in_memory(trainer_of(stack))):
        with stack.turn("train"):
            pass  # the sync has to wake them
        report = stack.syncing.sync()
    assert (report.mismatched_tensors, len(told)) == (0, 1)
    assert "a sync failed and is retried" in told[0] and "are not what the trainer sent" in told[0]
    assert bits(stack.sampling.sample(asked, 1.0)) == bits(undisturbed)


def trainer_of(stack: Run) -> int:
    (pid,) = stack.trainer.apply(lambda trainer: os.getpid())
    return pid


@contextmanager
def engine_behind(stack: Run, touch: wire.Touch) -> Iterator[None]:
    """Weights reach engine 1 through a proxy."""
    slot = stack.engines.slots[1]
    true = slot.endpoint
    assert true is not None
    with wire.proxied(true.url, touch) as url:
        slot.endpoint = replace(true, url=url)
        try:
            yield
        finally:
            slot.endpoint = true
