"""Disks that fill up, and files whose bytes change: a small tmpfs, and bits flipped in what a run has written."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fp8rl.rl.record.run_dir import RunDir
from lab.bench.faults.lab import Found, Lab, expect, reach
from tests.support.paths import EXAMPLES
from tests.support.wire import flip

SIZE_MIB = 64
STEP = 4


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
