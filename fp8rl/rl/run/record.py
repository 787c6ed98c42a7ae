"""The record of a run while it lives: log, console, metrics, trackers, events, sessions and checkpoints."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from fp8rl.rl.experiment import Experiment
from fp8rl.rl.experiment.contents import contents
from fp8rl.rl.guard.guard import GateState
from fp8rl.rl.record.console import CONSOLE, StepConsole, run_log
from fp8rl.rl.record.history import Event, Session, append_entry, cut_events, sessions_found, this_session
from fp8rl.rl.record.metrics_log import read_metrics
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.rl.record.trackers import Tracked
from fp8rl.rl.record.trackers.to_wandb import leet
from fp8rl.rl.record.tracking import BackgroundTrackers, RunTracker, Samples
from fp8rl.rl.run.checkpoints import Checkpoints, begins_anew
from fp8rl.rl.run.events import COUNTED, ENGINES_REPLACED, ENVIRONMENT_FAILURES, STALE_RESYNCS, SYNCS_REPEATED, Events
from fp8rl.rl.run.feed.state import FeedState
from fp8rl.rl.run.interrupts import BoundedExitStack

RESUMED = "tracking/resumed"
TRACKER_LOST = "tracking/tracker_lost"
_ACTIONS = {ENGINES_REPLACED: "replace_engine", STALE_RESYNCS: "resync", SYNCS_REPEATED: "resync", RESUMED: "resume"}
"""What a run does after an event of this metric; after others it goes on."""


class Record:
    """Everything that a run writes and shows. It knows the step that is under way, and begins where a checkpoint ends.

    Call `begin` once trainer and engines are up, so that a failed start leaves the record of an earlier start as it is.
    """

    checkpoints: Checkpoints
    tracker: RunTracker
    session: Session | None = None

    def __init__(
        self, experiment: Experiment, files: RunDir, closing: BoundedExitStack, notes: Sequence[str], again: bool
    ) -> None:
        """Open log and console, and print what the run is. notes: remarks on the input. again: after a loss."""
        self.experiment, self.files = experiment, files
        self._closing, self._notes, self.again = closing, notes, again
        closing.enter_context(run_log(files.log))
        self.step = max(files.checkpoint_steps(), default=0)
        """The step that is under way; before the first, the step of the last checkpoint, or 0 without one."""
        self.manifest: Path | None = None
        """Digests of the weights that the engines hold, as the last sync verified them."""
        self.gate_state = GateState.of_checkpoint(files, self.step or None)
        """Changes that gates have made."""
        self.feed = FeedState.of_checkpoint(files.checkpoint(self.step)) if self.step else None
        """The feed's state in the checkpoint that the run goes on from."""
        self._recoveries: Counter[str] = Counter()
        self._held = contents(experiment)
        self.console = console = StepConsole(experiment.run.steps, done=self.step, limit=experiment.rollout.limit)
        closing.enter_context(console)
        self.events = Events()
        self.events.subscribe(lambda metric, count, text: console.note(text))
        for note in notes:
            CONSOLE.info(f"note: {note}")
        for line in (
            f"run {files.path}",
            f"quantization {experiment.numerics.preset}, digest {experiment.numerics_config().spec.digest()}; "
            f"seed {experiment.run.seed}",
            experiment.formula,
            *(f"note: {note}" for note in experiment.algorithm.notes()),
        ):
            console.note(line)

    def begin(self) -> None:
        """Cut what a resumed run repeats, and start trackers, checkpoints and the session."""
        experiment, files, resumed = self.experiment, self.files, self.again or self.step > 0
        last = self.step or -1  # without a checkpoint all is repeated, also the row of step 0
        cut_events(files.events, last)
        files.cut(last)
        tracking, every = experiment.tracking, experiment.tracking.rollouts == "all"
        if "wandb" in tracking.recorded:
            self.console.note(f"live     {leet(files)}    (in a second terminal)")
        run = Tracked(files, experiment.to_dict(), resumed, experiment.run.steps, tracking.wandb)
        trackers = BackgroundTrackers(tracking.recorded, run, lost=partial(self.events.add, TRACKER_LOST, 1))
        tracker = RunTracker(files, trackers, all_rollouts=every, last=last)
        self.tracker = self._closing.enter_context(tracker)
        self.checkpoints = self._closing.enter_context(Checkpoints(files, experiment, self._held))
        sessions, _ = sessions_found(files.sessions)
        self._directory, self._began, self.session = files.path.stat(), time.monotonic(), this_session(self._notes)
        append_entry(files.sessions, self.session)
        self.events.subscribe(self.note)
        self.events.progress = self.console.progress
        if resumed:
            why = f" ({sessions[-1].why})" if sessions and sessions[-1].why else ""  # none if Ray has ended the process
            why = f"lost{why}, and " if self.again else ""
            anew = begins_anew(files, self.step) if self.step else ""
            self.note(RESUMED, 1, f"{why}resumed after step {self.step}{anew}")

    def end(self, why: str = "") -> None:
        """Record the end of this session. why: the reason for an early end. A second call does nothing."""
        if self.session is not None and self.session.ended is None:
            self.session = replace(self.session, ended=self.session.started + time.monotonic() - self._began, why=why)
            append_entry(self.files.sessions, self.session)

    def steps(self) -> Iterator[int]:
        """Go from step to step, up to the last. Raises FileNotFoundError: see `check_directory`."""
        while self.step < self.experiment.run.steps:
            self.step += 1
            check_directory(self.files.path, self._directory, self.step)
            yield self.step

    @property
    def last_row(self) -> dict[str, float]:
        """The row of the step before, empty before the first."""
        rows = read_metrics(self.files.metrics)
        return rows[-1] if rows else {}

    @property
    def capsule(self) -> str:
        """Return the path of this step's capsule, relative to the run's directory."""
        return str(self.files.capsule(self.step).relative_to(self.files.path))

    def row(self, metrics: Mapping[str, float], samples: Samples, checkpointed: bool) -> dict[str, float]:
        """Log the step and return its metrics as logged. From then on a resume may use a checkpoint of the step."""
        written = self.tracker.log(self.step, metrics, samples)
        self.console.step(self.step, written)
        if checkpointed:
            self.tracker.wait()
        self.checkpoints.recorded()
        self.events.deliver()
        return written

    def note(self, metric: str, count: int, text: str) -> None:
        """Announce an event of the stream, and count it for the step's row."""
        self._recoveries[metric] += count
        action = _ACTIONS.get(metric, "go_on") if count else "go_on"
        self.announce(Event(self.step, metric, float(count), "above 0", action, None, text))

    def recoveries(self) -> dict[str, float]:
        """Return, as metrics, how many events there were since the last call; possible ones are there also at 0."""
        counts = dict.fromkeys(COUNTED if self.experiment.needs_engines else (), 0)
        if self.experiment.has_environment:
            counts[ENVIRONMENT_FAILURES] = 0
        counts |= self._recoveries
        self._recoveries.clear()
        return {name: float(count) for name, count in counts.items()}

    def announce(self, event: Event) -> None:
        """Show an event on the console, append it to events.jsonl, and tell the trackers."""
        self.console.note(event.said, style="bold yellow")
        append_entry(self.files.events, event)
        self.tracker.alert(event.said)


def check_directory(path: Path, made: os.stat_result, step: int) -> None:
    """Raise FileNotFoundError if the run's directory is not the one that was `made`: further records would be lost."""
    try:
        same = os.path.samestat(made, path.stat())
    except FileNotFoundError:
        same = False
    if not same:
        raise FileNotFoundError(
            f"run.dir: found {path} deleted or renamed before step {step}, expected it in its place until the run "
            "ends. What was trained since its last checkpoint is lost"
        )
