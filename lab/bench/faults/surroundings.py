"""What a run stands in: a clock that is set, memory that others take, and an engine that gets little of its core."""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from fp8rl.rl.record.events import sessions_found
from lab.bench.faults.lab import GONE_WITHIN_S, STEPS, Found, Lab, expect, processes_of, reach
from tests.support.cli_runs import wait_until_gone

GIB = 1 << 30
HOUR = 3600
PULLED = (
    "rollout.engines=2",
    "rollout.prompts_per_step=32",
    "rollout.context_length=128",
    "rollout.max_total_tokens=512",
)
"""More groups than two engines take at once, so that who is done gets the next one."""


def clock_set(lab: Lab) -> Found:
    """What Python's `time` says is an hour ahead in every process from step 3 on, and an hour late from step 5 on."""
    library, skew = lab.folder / "clock.so", lab.folder / "skew"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, Path(__file__).with_name("clock.c")], check=True)
    skew.write_text("0")
    run = lab.start_at(3, "clock_set", environment={"LD_PRELOAD": str(library), "CLOCK_SKEW": str(skew)})
    skew.write_text(f"{HOUR}")
    reach(run, 5)
    skew.write_text(f"-{HOUR}")
    lab.same(run)
    times = [value for row in run.rows() for name, value in row.items() if name.endswith("_seconds")]
    expect(0 <= min(times) <= max(times) < HOUR / 2, f"found times of {min(times):g} to {max(times):g} s")
    (session,), _ = sessions_found(run.path / "sessions.jsonl")
    expect(session.seconds is not None and 0 < session.seconds < HOUR / 2, f"found a session of {session.seconds} s")
    longest = max(row["perf/step_seconds"] for row in run.rows()[2:])
    return Found("no recorded duration shows it; the same bits", {"longest step": longest})


def memory_short(lab: Lab) -> Found:
    """A process takes memory until Ray's memory monitor, set to 8 GiB more than is in use, ends an actor."""
    memory = psutil.virtual_memory()
    threshold = memory.total - memory.available + 8 * GIB
    run = lab.start_at(3, "memory_short", environment={"RAY_memory_usage_threshold": f"{threshold / memory.total:.4f}"})
    actors = [*processes_of(run, "ray::TrainerActor"), *processes_of(run, "ray::Engine")]
    since = time.monotonic()
    run.process.send_signal(signal.SIGSTOP)  # small steps would be over before the memory is taken
    missing = threshold - (memory.total - psutil.virtual_memory().available)
    take = f"taken = b'x' * {max(missing, 0) + GIB // 2}; import time; time.sleep(600)"
    ballast = subprocess.Popen([sys.executable, "-c", take])
    try:
        left = wait_until_gone(actors[:1], GONE_WITHIN_S) and wait_until_gone(actors[1:], GONE_WITHIN_S)
        expect(not left, "found Ray's memory monitor idle")
    finally:
        ballast.kill()
        ballast.wait()
        run.process.send_signal(signal.SIGCONT)
    seconds = lab.goes_on(run, since)
    lost = "engine" if "is lost and replaced" in run.console() else "trainer"
    return Found(f"Ray ends the {lost}'s actor, and another takes its place; the same bits", {"next step": seconds})


def engine_slow(lab: Lab) -> Found:
    """SIGSTOP and SIGCONT of one of two schedulers in turn: it computes a fifth of the time."""
    run = lab.start("engine_slow", *PULLED)
    reach(run, 4)
    process = processes_of(run, "sglang::scheduler", 2)[1]
    over = threading.Event()

    def slow_down() -> None:
        with suppress(psutil.NoSuchProcess):  # the run is over
            while not over.is_set():
                process.suspend()
                over.wait(0.4)
                process.resume()
                over.wait(0.1)

    thread = threading.Thread(target=slow_down)
    thread.start()
    try:
        expect(run.ends() == 0, run.console())
    finally:
        over.set()
        thread.join()
    rows = run.rows()
    expect("is lost" not in run.console(), "found a slow engine taken for a hung one")
    expect({row["mismatch/exact_frac"] for row in rows[1:]} == {1.0}, "found d other than 0")
    before, after = (
        statistics.median(row["perf/engine_balance"] for row in part) for part in (rows[1:4], rows[5 : STEPS + 1])
    )
    expect(
        after < before - 0.2, f"found a balance of {after:.2f} after {before:.2f}: no group went to the other engine"
    )
    seconds = {"step": _step_seconds(rows[4:]), "undisturbed step": _step_seconds(rows[:4])}
    return Found(f"kept; perf/engine_balance {before:.2f} → {after:.2f}: the other one gets the groups", seconds)


def _step_seconds(rows: list[dict[str, float]]) -> float:
    return statistics.median(row["perf/step_seconds"] for row in rows[1:])
