"""Processes of a study: an interrupt ends them all; and a study of a live trainer, on a few answers."""

import subprocess
import sys
from pathlib import Path

import pytest

from lab.studies import precision_cases
from lab.studies.harness.lab import in_own_process
from lab.studies.harness.subjects import MODEL
from lab.studies.precision_cases import MIXED
from tests.support.servers import wait_until

STUDY = """
import sys, time
from pathlib import Path
from fp8rl.rl.run.interrupts import interruptible
from lab.studies.harness.lab import Lab
def open_for_an_hour(folder, job):
    try:
        (Path(folder) / f"{job} opened").touch()
        time.sleep(3600)
    finally:
        (Path(folder) / f"{job} closed").touch()

if __name__ == "__main__":
    with interruptible():
        Lab(True, (0,), Path("."), print).each(open_for_an_hour, [(sys.argv[1], n) for n in range(4)], "jobs")
"""


@pytest.mark.slow
def test_an_interrupt_ends_the_jobs_under_way_and_starts_no_more(tmp_path: Path) -> None:
    """It reaches the study alone, as SIGTERM does, and not its jobs, as Ctrl-C would."""
    (tmp_path / "study.py").write_text(STUDY)
    folder = tmp_path / "jobs"
    folder.mkdir()
    command = [sys.executable, tmp_path / "study.py", folder]
    study = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
    assert wait_until(lambda: all((folder / f"{job} opened").exists() for job in range(2)), 180)
    study.terminate()
    assert b"KeyboardInterrupt" in study.communicate(timeout=60)[1]
    assert sorted(path.name for path in folder.iterdir()) == ["0 closed", "0 opened", "1 closed", "1 opened"]


@pytest.mark.slow
@pytest.mark.usefixtures("warm_jobs")
def test_the_cases_on_a_sample() -> None:
    found = in_own_process(precision_cases._exact_snapshots, "M", MODEL, [0], 1)
    cases = {name.removeprefix("M exact: "): {m: values[0] for m, values in of.items()} for name, of in found.items()}
    assert cases["case 2"]["abs_d"] == cases["case 3"]["abs_d"] == [0.0] * 8, "the trainer has sampled them itself"
    assert cases["case 1"]["kl"] == [0.0] * 8 and min(cases["case 1"]["abs_d"]) > 0
    assert cases["case 2"]["kl"] == cases["case 3"]["kl"] and min(cases["case 3"]["kl"]) > 0
    assert sum(cases[MIXED]["abs_d"]) > sum(cases["case 1"]["abs_d"]) > 0
