"""Processes that are killed, stopped and slowed: signals."""

from __future__ import annotations

import signal
import time
from contextlib import suppress

import psutil

from lab.bench.faults.lab import GONE_WITHIN_S, STEPS, Found, Lab, expect, processes_of
from tests.support.cli_runs import StartedRun, wait_until_gone

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
    run.member("TrainerActor").kill()
    seconds = lab.goes_on(run, since)
    expect("lost (TrainerDiedError: trainer rank 0" in run.console(), "found no word of the trainer")
    return Found("the run starts again from the last checkpoint; the same bits", {"next step": seconds})


def trainer_hung(lab: Lab) -> Found:
    """SIGSTOP of the trainer's rank."""
    run = lab.start_at(SAMPLING, "trainer_hung")
    since = time.monotonic()
    run.member("TrainerActor").suspend()
    seconds = lab.goes_on(run, since)
    return Found("noticed after trainer.hung_after_s (6 s), then as a killed one", {"next step": seconds})


def trainer_lost_too_often(lab: Lab) -> Found:
    """SIGKILL of the trainer's rank where none may be started again; then --resume in another layout."""
    run = lab.start_at(SAMPLING, "trainer_lost_too_often", "run.restarts=0")
    since = time.monotonic()
    run.member("TrainerActor").kill()
    seconds = lab.stops(run, since, "trainer rank", "found its process ended")
    again = lab.start(run.path.name, "trainer.dp=2", "trainer.ep=2", "--resume", folder=run.path.parent)
    expect(again.ends() == 0, again.console())
    expect("resuming with another layout" in again.console(), "found no word of the layout")
    rows = again.rows()
    expect([row["step"] for row in rows] == list(range(STEPS + 1)), f"found the steps {[row['step'] for row in rows]}")
    expect({row["mismatch/exact_frac"] for row in rows[1:]} == {1.0}, "found d other than 0")
    expect(not wait_until_gone(again.family(), GONE_WITHIN_S), f"found processes left: {again.family()}")
    return Found("one sentence, exit code 3; --resume in another layout: d = 0", {"end": seconds})


def interrupted_once(lab: Lab) -> Found:
    """SIGINT, once, while it samples."""
    run = lab.start_at(SAMPLING, "interrupted_once")
    since = time.monotonic()
    _interrupt(run, times=1)
    return _gone_and_resumed(lab, run, since)


def interrupted_twice(lab: Lab) -> Found:
    """SIGINT while it samples, and again 2.5 seconds later, while it ends."""
    run = lab.start_at(SAMPLING, "interrupted_twice")
    since = time.monotonic()
    run.signal_all(signal.SIGINT)
    time.sleep(2.5)
    expect(run.process.poll() is None, "found the run ended before the second signal")
    run.signal_all(signal.SIGINT)
    expect(run.ends() == 130, run.console())
    expect("interrupted again: killing every process that was started" in run.console(), run.console())
    return _gone_and_resumed(lab, run, since)


def interrupted(lab: Lab) -> Found:
    """SIGINT, four times, to the whole foreground group while it samples, as from an impatient user."""
    run = lab.start_at(SAMPLING, "interrupted")
    since = time.monotonic()
    _interrupt(run)
    expect(f"resume   fp8rl train {run.path}/spec.yaml --resume" in run.console(), "found no way to go on")
    return _gone_and_resumed(lab, run, since)


def interrupted_while_ray_starts(lab: Lab) -> Found:
    """SIGINT, four times, a second after the console said what is quantized."""
    return _start_interrupted(lab, "interrupted_while_ray_starts", "\nquantization ", 1.0)


def interrupted_while_both_sides_start(lab: Lab) -> Found:
    """SIGINT, four times, three seconds after the console said that the engine is started."""
    return _start_interrupted(lab, "interrupted_while_both_sides_start", "starting the engine", 3.0)


def hung_end(lab: Lab) -> Found:
    """SIGINT, with the run's own process stopped, and again three seconds later."""
    run = lab.start_at(SAMPLING, "hung_end")
    since = time.monotonic()
    run.driver().suspend()
    for _ in range(2):
        run.signal_all(signal.SIGINT)
        time.sleep(3.0)
    expect(run.ends() == 130, run.console())
    expect("interrupted again: killing every process that was started" in run.console(), run.console())
    return _gone_and_resumed(lab, run, since)


def terminal_closed(lab: Lab) -> Found:
    """SIGHUP of `fp8rl train`, as from a terminal that closes."""
    run = lab.start_at(SAMPLING, "terminal_closed")
    since = time.monotonic()
    run.signal_all(signal.SIGHUP)
    expect(run.ends() == 130, run.console())
    return _gone_and_resumed(lab, run, since)


def run_killed(lab: Lab) -> Found:
    """SIGKILL of the run's own process, the child of `fp8rl train`."""
    run = lab.start_at(SAMPLING, "run_killed")
    since = time.monotonic()
    run.driver().kill()
    expect(run.ends() == 137, run.console())
    return _gone_and_resumed(lab, run, since)


def driver_killed(lab: Lab) -> Found:
    """SIGKILL of `fp8rl train`."""
    run = lab.start_at(SAMPLING, "driver_killed")
    since = time.monotonic()
    run.process.kill()
    run.ends()
    return _gone_and_resumed(lab, run, since)


def driver_killed_within_a_checkpoint(lab: Lab) -> Found:
    """SIGKILL of `fp8rl train` while the checkpoint of step 4 is written."""
    run = lab.start("driver_killed_within_a_checkpoint")
    run.wait_until(lambda: list(run.path.glob("checkpoints/.*step_4*")), "unfinished checkpoint")
    since = time.monotonic()
    run.process.kill()
    run.ends()
    found = _gone_and_resumed(lab, run, since)
    left = [path.name for path in (run.path / "checkpoints").iterdir() if not path.name.startswith("step_")]
    expect(not left, f"found half-written checkpoints: {left}")
    return found


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


def _interrupt(run: StartedRun, times: int = 4) -> None:
    for _ in range(times):
        run.signal_all(signal.SIGINT)
        time.sleep(0.3)
    expect(run.ends() == 130, run.console())
    expect("every process that was started is stopped" in run.console(), f"found no word of it:\n{run.console()}")
    expect("Traceback" not in run.console(), f"found a traceback:\n{run.console()}")


def _start_interrupted(lab: Lab, name: str, seen: str, later_s: float) -> Found:
    run = lab.start(name)
    run.wait_for(seen)
    time.sleep(later_s)
    since = time.monotonic()
    _interrupt(run)
    seconds = time.monotonic() - since
    expect(not wait_until_gone(run.family(), GONE_WITHIN_S), f"found processes left: {run.family()}")
    expect("the run had not begun: the same command begins again" in run.console(), run.console())
    return Found("exit code 130; no process is left, and the same command begins again", {"end": seconds})


def _gone_and_resumed(lab: Lab, run: StartedRun, since: float) -> Found:
    """Every process must end; Ray's agents, which look for its server for another minute, until the resumed run has."""
    left = wait_until_gone([process for process in run.family() if process.name() not in RAY_AGENTS], GONE_WITHIN_S)
    expect(not left, f"found processes left: {left}")
    gone, resumed = time.monotonic() - since, lab.resumes(run)
    expect(not wait_until_gone(run.family(), GONE_WITHIN_S), f"found processes left: {run.family()}")
    return Found("every process ends; --resume: the same bits", {"gone": gone, "resumed": resumed})


def _ray_killed(lab: Lab, name: str) -> Found:
    run = lab.start_at(SAMPLING, f"{name}_killed")
    since = time.monotonic()
    processes_of(run, name)[0].kill()
    seconds = lab.goes_on(run, since)
    expect("lost (found Ray's" in run.console(), "found no word of Ray")
    return Found("the run starts again from the last checkpoint; the same bits", {"next step": seconds})
