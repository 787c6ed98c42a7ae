"""Runs to break, and what must hold of each afterwards: the bits of a run that nobody disturbed."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import psutil

from tests.support.cli_runs import SMALL, StartedRun, wait_until_gone

STEPS = 7
SETTINGS = (*SMALL, f"run.steps={STEPS}", "eval.problems=0", "trainer.hung_after_s=6", "rollout.hung_after_s=6")
GONE_WITHIN_S = 30.0
BESIDE = ("perf/", "tracking/", "sync/seconds", "sync/send_seconds", "sync/verify_seconds")
MENDED = ("rollout/engines_replaced", "sync/repeated")
"""Metrics that a fault may change: time, and how often something was mended. All others are the same bits."""


class Wrong(AssertionError):
    """A fault did not end as it must."""


@dataclass(frozen=True)
class Found:
    """The end of a fault.

    happened: in words. seconds: from the fault to what the name says.
    """

    happened: str
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class Outcome:
    """injected: how, in words. found: what came of it. wrong: how it did not end as it must; empty if it did."""

    injected: str
    found: Found
    wrong: str = ""


Subject = TypeVar("Subject")


def tried(
    faults: Iterable[Callable[[Subject], Found]], subject: Subject, say: Callable[[str], object]
) -> dict[str, Outcome]:
    """The outcome of each fault, which is called as its function is, and described as its docstring does."""
    outcomes = {}
    for fault in faults:
        found, wrong = Found("", {}), ""
        try:
            found = fault(subject)
        except AssertionError as error:  # Wrong, and what `StartedRun` raises
            wrong = str(error)
        say(f"{fault.__name__}: {wrong or f'{found.happened} {dict(found.seconds)}'}")
        outcomes[fault.__name__.replace("_", " ")] = Outcome(fault.__doc__ or "", found, wrong)
    return outcomes


@dataclass
class Lab:
    """A folder for runs. Use it as a context manager, which ends what is left of them.

    settings: of all runs, besides `SETTINGS`.
    """

    folder: Path
    settings: tuple[str, ...] = ()
    _runs: list[StartedRun] = field(default_factory=list)
    _undisturbed: StartedRun | None = None

    def start(self, name: str, *settings: str, folder: Path | None = None, **options: Any) -> StartedRun:
        """`fp8rl train` of the example in small, whose steps take less than a second."""
        self._runs.append(StartedRun(folder or self.folder, *SETTINGS, *self.settings, *settings, name=name, **options))
        return self._runs[-1]

    def start_at(self, step: int, name: str, *settings: str, **options: Any) -> StartedRun:
        """The same, once `step` is under way."""
        run = self.start(name, *settings, **options)
        reach(run, step)
        return run

    def goes_on(self, run: StartedRun, since: float) -> float:
        """The run must recover by itself, and end as an undisturbed one; seconds from `since` to its next step."""
        seconds = next_step(run, since)
        self.same(run)
        return seconds

    def stops(self, run: StartedRun, since: float, *said: str) -> float:
        """The run must stop in one sentence that says so, and leave no process; seconds from `since` until then."""
        code, seconds = run.ends(), time.monotonic() - since
        console = run.console()
        expect(code == 3, f"found exit code {code}, expected 3:\n{console}")
        (sentence,) = [line for line in console.splitlines() if line.startswith("error: ")] or [""]
        expect(all(word in sentence for word in said), f"found {sentence!r}, expected {said}:\n{console}")
        expect("Traceback" not in console, f"found a traceback:\n{console}")
        expect(f"resume   fp8rl train {run.path}/spec.yaml --resume" in console, f"found no way to go on:\n{console}")
        expect(not wait_until_gone(run.family(), GONE_WITHIN_S), f"found processes left: {run.family()}")
        run.rows()  # whole lines
        return seconds

    def resumes(self, run: StartedRun, *settings: str) -> float:
        """`--resume` must end as an undisturbed run; seconds from its start to its first new step."""
        again = self.start(run.path.name, *settings, "--resume", folder=run.path.parent)
        seconds = next_step(again, again.started)
        self.same(again)
        return seconds

    def same(self, run: StartedRun) -> None:
        """A run must end well, leave no process, and have the metrics, samples and weights of an undisturbed one."""
        expect(run.ends() == 0, run.console())
        expect(not wait_until_gone(run.family(), GONE_WITHIN_S), f"found processes left: {run.family()}")
        found, expected = bits(run), bits(self.undisturbed())
        differ = [what for what in expected if found[what] != expected[what]]
        expect(not differ, f"{run.path.name}: found other {', '.join(differ)} than in the undisturbed run")
        expect({row.get("mismatch/exact_frac", 1.0) for row in run.rows()[1:]} == {1.0}, "found d other than 0")

    def undisturbed(self) -> StartedRun:
        if self._undisturbed is None:
            self._undisturbed = self.start("undisturbed")
            expect(self._undisturbed.ends() == 0, self._undisturbed.console())
        return self._undisturbed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for run in self._runs:
            run.destroy()


def expect(holds: object, otherwise: str) -> None:
    if not holds:
        raise Wrong(otherwise)


def reach(run: StartedRun, step: int) -> None:
    """Wait until the step before it is done, and a little."""
    run.wait_for(f"step {step - 1}/{STEPS}")
    time.sleep(0.1)


def next_step(run: StartedRun, since: float) -> float:
    """Wait for the next step that the run says it has done; seconds from `since`."""
    done = steps_said(run)
    run.wait_until(lambda: steps_said(run) > done, "next step")
    return time.monotonic() - since


def steps_said(run: StartedRun) -> int:
    return len(re.findall(rf"^step +\d+/{STEPS}", run.console(), re.MULTILINE))


def processes_of(run: StartedRun, name: str, count: int = 1) -> list[psutil.Process]:
    """The run's processes that are called `name`, of which there must be so many."""
    named = [process for process in run.family() if process.name() == name]
    expect(len(named) == count, f"found {len(named)} processes of {name}, expected {count}")
    return named


def bits(run: StartedRun) -> dict[str, object]:
    """The bits that every run of one spec leaves, whatever dies on the way."""
    rows = [{k: v for k, v in row.items() if not k.startswith(BESIDE) and k not in MENDED} for row in run.rows()]
    return {
        "metrics": rows,
        "samples": [(run.path / f"rollouts/step_{step}.jsonl").read_bytes() for step in range(1, STEPS + 1)],
        "weights": (run.path / "model/model.safetensors").read_bytes(),
        "manifests": [json.loads((run.path / f"manifests/step_{s}.json").read_text()) for s in range(STEPS + 1)],
    }
