"""Each benchmark in a process of its own, up to its limit; what it has measured by then is kept.

`python -m lab.bench.runner JSON` is such a process, which `measure_all` starts.
"""

from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from lab.bench.journal import Journal

_FAMILY = "FP8RL_BENCH_PART"


@dataclass(frozen=True)
class Job:
    """A function to call in a process of its own, which says lines of the journal."""

    name: str
    call: str
    """`module:function`; it is called with the journal's `say` and the arguments."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """JSON values."""
    limit_s: int | None = None
    """After which the process is killed, with all that it has started."""
    environment: Mapping[str, str] = field(default_factory=dict)


def measure_all(jobs: Sequence[Job], journal: Path, ended: Callable[[], object] = lambda: None) -> None:
    """Run the jobs one by one, and call `ended` after each; their lines are appended to the journal as they come."""
    start = time.monotonic()
    for job in jobs:
        print(f"{time.monotonic() - start:4.0f} s  {job.name}", file=sys.stderr, flush=True)
        _measure(job, journal)
        ended()


def _measure(job: Job, journal: Path) -> None:
    mark, began, say = uuid.uuid4().hex, time.monotonic(), Journal(journal, job.name).say
    asked = {"name": job.name, "call": job.call, "arguments": job.arguments, "journal": str(journal)}
    process = subprocess.Popen(
        [sys.executable, "-m", "lab.bench.runner", json.dumps(asked)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **job.environment, _FAMILY: mark},
        start_new_session=True,
    )
    try:
        code = process.wait(job.limit_s)
        if code:
            say({"failed": f"its process ended with code {code}"})
    except subprocess.TimeoutExpired:
        say({"failed": f"it was ended at its limit of {job.limit_s} s"})
    finally:
        _end(process, mark)
    say({"seconds": round(time.monotonic() - began, 1)})


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """Kill the job's process and whatever it has started, also what its parent has left behind."""
    if process.poll() is None:
        process.kill()
    for each in [each for each in psutil.process_iter() if _stems_from(each, mark)]:
        with suppress(psutil.NoSuchProcess):
            for child in each.children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            each.kill()
    process.wait()


def _stems_from(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(_FAMILY) == mark
    except psutil.Error:
        return False


def yielded(say: Callable[[dict[str, Any]], object], calls: Sequence[str]) -> None:
    """Say each result that functions, as `module:function`, yield, as soon as it is measured."""
    for call in calls:
        for result in pkgutil.resolve_name(call)():
            say({"result": asdict(result)})


def main() -> int:
    """Call the function of one job in this process."""
    import torch

    asked = json.loads(sys.argv[1])
    journal = Journal(Path(asked["journal"]), asked["name"])
    torch.set_num_threads(1)
    try:
        pkgutil.resolve_name(asked["call"])(journal.say, **asked["arguments"])
    except Exception as error:
        traceback.print_exc()
        first = (str(error).splitlines() or [""])[0]
        journal.say({"failed": f"{type(error).__name__}: {first}"})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
