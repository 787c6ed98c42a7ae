"""Processes that are killed, stopped and slowed: signals."""

from __future__ import annotations

import time
from contextlib import suppress

import psutil

from lab.bench.faults.lab import GONE_WITHIN_S, Found, Lab, expect, processes_of
from tests.support.cli_runs import LiveRun, wait_until_gone

SAMPLING = 4
"""The step in which faults happen."""
RAY_AGENTS = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}


def engine_killed(lab: Lab) -> Found:
    """SIGKILL of the only engine's server while it samples."""
    run = lab.start_at(SAMPLING, "engine_killed")
    since = time.monotonic()
    run.engine().kill()
    seconds = lab.goes_on(run, since)
    expect("engine 0 is lost and replaced" in run.console(), "found no word of the engine")
    return Found("another engine, synced; the same bits", {"next step": seconds})


def engine_hung(lab: Lab) -> Found:
    """SIGSTOP of the only engine's scheduler while it samples."""
    run = lab.start_at(SAMPLING, "engine_hung")
    since = time.monotonic()
    processes_of(run, "sglang::scheduler")[0].suspend()
    seconds = lab.goes_on(run, since)
    expect("has not answered for 6 s" in run.console(), "found no word of the engine")
    return Found("noticed after rollout.hung_after_s (6 s), replaced, synced; the same bits", {"next step": seconds})


def trainer_killed(lab: Lab) -> Found:
    """SIGKILL of the trainer's rank."""
    run = lab.start_at(SAMPLING, "trainer_killed")
    since = time.monotonic()
    processes_of(run, "ray::TrainerActor")[0].kill()
    return Found("another trainer from the last checkpoint; the same bits", {"next step": lab.goes_on(run, since)})


def trainer_hung(lab: Lab) -> Found:
    """SIGSTOP of the trainer's rank."""
    run = lab.start_at(SAMPLING, "trainer_hung")
    since = time.monotonic()
    processes_of(run, "ray::TrainerActor")[0].suspend()
    seconds = lab.goes_on(run, since)
    return Found("noticed after trainer.hung_after_s (6 s), then as a killed one", {"next step": seconds})


def driver_killed(lab: Lab) -> Found:
    """SIGKILL of `fp8rl train`."""
    run = lab.start_at(SAMPLING, "driver_killed")
    since = time.monotonic()
    run.process.kill()
    run.ends()
    return _gone_and_resumed(lab, run, since)


def everything_killed(lab: Lab) -> Found:
    """SIGKILL of every process at once, as when a machine loses its power."""
    run = lab.start_at(SAMPLING, "everything_killed")
    since = time.monotonic()
    for process in run.family():
        with suppress(psutil.NoSuchProcess):  # it died with another
            process.kill()
    run.ends()
    return _gone_and_resumed(lab, run, since)


def ray_head_killed(lab: Lab) -> Found:
    """SIGKILL of Ray's head process, the GCS."""
    return _ray_killed(lab, "gcs_server")


def ray_node_killed(lab: Lab) -> Found:
    """SIGKILL of the node's raylet."""
    return _ray_killed(lab, "raylet")


def wandb_killed(lab: Lab) -> Found:
    """SIGKILL of wandb's process."""
    run = lab.start_at(SAMPLING, "wandb_killed")
    since = time.monotonic()
    processes_of(run, "wandb-core")[0].kill()
    seconds = lab.goes_on(run, since)
    expect("wandb is lost" in run.console(), "found no word of wandb")
    return Found("the run goes on without it and says so; the same bits", {"next step": seconds})


def _gone_and_resumed(lab: Lab, run: LiveRun, since: float) -> Found:
    """Every process must end; Ray's agents look for its server for another minute."""
    left = wait_until_gone([process for process in run.family() if process.name() not in RAY_AGENTS], GONE_WITHIN_S)
    expect(not left, f"found processes left: {left}")
    gone = time.monotonic() - since
    return Found("every process ends; --resume: the same bits", {"gone": gone, "resumed": lab.resumes(run)})


def _ray_killed(lab: Lab, name: str) -> Found:
    run = lab.start_at(SAMPLING, f"{name}_killed")
    since = time.monotonic()
    processes_of(run, name)[0].kill()
    stopped = lab.stops(run, since, "Ray")
    return Found("one sentence, exit code 3; --resume: the same bits", {"end": stopped, "resumed": lab.resumes(run)})
