"""Surroundings that fail a run: a clock that is set, memory that others take, an engine that gets little of its core,
disks that fill up (a small tmpfs), and bits flipped in what a run has written."""

from __future__ import annotations

import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from fp8rl.rl.record.history import sessions_found
from fp8rl.rl.record.run_dir import RunDir
from lab.bench.faults.lab import GONE_WITHIN_S, STEPS, Found, Lab, expect, processes_of, reach
from tests.support.cli_runs import wait_until_gone
from tests.support.paths import EXAMPLES
from tests.support.wire import flip

GIB, SIZE_MIB = 1 << 30, 64
HOUR = 3600
STEP = 4
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
    run.driver().send_signal(signal.SIGSTOP)  # small steps would be over before the memory is taken
    missing = threshold - (memory.total - psutil.virtual_memory().available)
    take = f"taken = b'x' * {max(missing, 0) + GIB // 2}; import time; time.sleep(600)"
    ballast = subprocess.Popen([sys.executable, "-c", take])
    try:
        left = wait_until_gone(actors[:1], GONE_WITHIN_S) and wait_until_gone(actors[1:], GONE_WITHIN_S)
        expect(not left, "found Ray's memory monitor idle")
    finally:
        ballast.kill()
        ballast.wait()
        run.driver().send_signal(signal.SIGCONT)
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


def full_disk_under_the_record(lab: Lab) -> Found:
    """A tmpfs for run.dir that another file fills to the last byte."""
    return _filled_up(lab, "full_record", 0)


def full_disk_under_a_checkpoint(lab: Lab) -> Found:
    """The same with a MiB left: metrics and samples fit, a checkpoint does not."""
    return _filled_up(lab, "full_checkpoint", 1 << 20)


def checkpoint_flipped(lab: Lab) -> Found:
    """A bit of the newest checkpoint, of a run that was killed."""
    run = lab.start_at(6, "checkpoint_flipped")
    run.process.kill()
    run.ends()
    *_, older, step = RunDir(run.path).checkpoint_steps()
    newest = RunDir(run.path).checkpoint(step)
    flip(max((file for file in newest.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size))
    since = time.monotonic()
    refused = lab.start(run.path.name, "--resume")
    expect(refused.ends() == 2, f"found no refusal:\n{refused.console()}")
    seconds = time.monotonic() - since
    expect(f"Delete {newest}: the next older one, of step {older}, is whole" in refused.console(), refused.console())
    shutil.rmtree(newest)
    resumed = lab.resumes(run)
    return Found(
        "exit code 2 with the file, and the older checkpoint that is whole; from that, the same bits",
        {"refusal": seconds, "resumed": resumed},
    )


def dataset_line_damaged(lab: Lab) -> Found:
    """A byte of line 40 of the training data, before the start."""
    data = _copy_of_the_data(lab.folder / "damaged.jsonl")
    _damage(data, 40)
    since = time.monotonic()
    run = lab.start("dataset_line", f"data.train={data}")
    expect(run.ends() == 2, f"found no refusal:\n{run.console()}")
    expect(f"data.train: line 40 of {data}" in run.console(), run.console())
    expect(not run.path.exists(), "found something started")
    return Found("exit code 2, file and line, before anything starts", {"refusal": time.monotonic() - since})


def dataset_line_damaged_meanwhile(lab: Lab) -> Found:
    """The same in step 4: every line that later steps draw from."""
    data = _copy_of_the_data(lab.folder / "meanwhile.jsonl")
    run = lab.start_at(STEP, "dataset_meanwhile", f"data.train={data}")
    since = time.monotonic()
    for number in range(1, 100):
        _damage(data, number)
    seconds = lab.goes_on(run, since)
    return Found("read whole and checked at the start; the same bits", {"next step": seconds})


def _filled_up(lab: Lab, name: str, left: int) -> Found:
    with _tmpfs(lab.folder / f"{name}_disk") as disk:
        run = lab.start(name, f"run.dir={disk}")
        run.path = disk / name  # what it says goes elsewhere
        reach(run, STEP)
        ballast = disk / "ballast"
        _fill(ballast)
        if left:
            with ballast.open("r+b") as file:
                file.truncate(ballast.stat().st_size - left)
        stopped = lab.stops(run, time.monotonic(), str(run.path), "expected room")
        ballast.unlink()
        return Found(
            "one sentence with the file; --resume: the same bits", {"end": stopped, "resumed": lab.resumes(run)}
        )


@contextmanager
def _tmpfs(path: Path) -> Iterator[Path]:
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "tmpfs", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


def _fill(path: Path) -> None:
    """Write until the disk takes not even a byte more."""
    size = 1 << 20
    with path.open("ab", buffering=0) as file:
        while size:
            try:
                whole = file.write(bytes(size)) == size
            except OSError:
                whole = False
            size = size if whole else size // 2


def _copy_of_the_data(path: Path) -> Path:
    return Path(shutil.copy(EXAMPLES / "data/arithmetic_train.jsonl", path))


def _damage(data: Path, number: int) -> None:
    lines = data.read_bytes().splitlines(keepends=True)
    lines[number - 1] = b"\xff" + lines[number - 1][1:]
    data.write_bytes(b"".join(lines))
