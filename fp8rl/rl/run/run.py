"""A live run: the stack that computes, the record of the run, and the changes that gates have made."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from fp8rl.rl.experiment import Experiment
from fp8rl.rl.experiment.contents import contents
from fp8rl.rl.guard.capsule import cut_capsules, export_weights, remove_superfluous, write_capsule
from fp8rl.rl.guard.guard import GateState, Verdict
from fp8rl.rl.record.console import CONSOLE, StepConsole, run_log
from fp8rl.rl.record.history import Event, append_event, append_session, cut_events, this_session
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.rl.record.trackers import Tracked
from fp8rl.rl.record.trackers.to_wandb import leet
from fp8rl.rl.record.tracking import BackgroundTrackers, RunTracker, Samples
from fp8rl.rl.run.checkpoints import Checkpoints, begins_anew, check_contents, end_without_ray, with_older
from fp8rl.rl.run.events import ENGINES_REPLACED, STALE_RESYNCS, SYNCS_REPEATED, Events
from fp8rl.rl.run.feed.conversations import ENVIRONMENT_FAILURES
from fp8rl.rl.run.feed.judging import REWARD_FAILURES
from fp8rl.rl.run.feed.state import FeedState
from fp8rl.rl.run.interrupts import ShutdownStack
from fp8rl.rl.run.stack import Stack
from fp8rl.rl.run.step import StepPass
from fp8rl.trainer.checkpoint.files import DamagedCheckpointError
from fp8rl.weight_sync.bridge import SyncReport

RESUMED = "tracking/resumed"
TRACKER_LOST = "tracking/tracker_lost"
BEFORE_THE_FIRST = -1
"""In place of the step to resume after, if there is no checkpoint: everything is repeated, also the row of step 0."""
_WORST = 8
"""How many worst sequences a capsule has. For a value that is not finite, all rows that it came from precede them."""
_ACTIONS = {
    ENGINES_REPLACED: "replace_engine",
    STALE_RESYNCS: "resync",
    SYNCS_REPEATED: "resync",
    RESUMED: "resume",
    ENVIRONMENT_FAILURES: "go_on",
    REWARD_FAILURES: "go_on",
    TRACKER_LOST: "go_on",
}


class LiveRun:
    """A run from its start to its end."""

    def __init__(
        self,
        experiment: Experiment,
        files: RunDir,
        outer: ShutdownStack | None = None,
        stack: Stack | None = None,
        lost: str = "",
        notes: Sequence[str] = (),
    ) -> None:
        """Start all parts; on a failure end the parts that were started. A run with checkpoints resumes from the last.

        outer: closes the stack, if it is to outlive the run. stack: of an earlier attempt, whose trainer was lost.
        lost: why it was lost, in words. notes: remarks on the input, for log and report.
        """
        self.experiment, self.files = experiment, files
        self.manifest: Path | None = None
        """Digests of the weights that the engines hold, as the last sync verified them."""
        self.recoveries: Counter[str] = Counter()
        """Counts of recoveries in this step, by metric: engines replaced, syncs repeated, failed user functions."""
        with ShutdownStack() as closing:
            closing.enter_context(run_log(files.log))
            resume_step = max(files.checkpoint_steps(), default=None)
            if stack is not None and resume_step is None:
                resume_step = BEFORE_THE_FIRST
            self.step = step = max(resume_step or 0, 0)
            """The step that is under way, 0 before the first."""
            self.console = console = StepConsole(experiment.run.steps, done=step, limit=experiment.rollout.limit)
            held = contents(experiment)
            changed = check_contents(files, held, accept=True) if stack is not None and step else []
            self._greet(closing.enter_context(console), notes, changed)
            self.gate_state = GateState.of_checkpoint(files, step or None)
            """Changes that gates have made."""
            events = Events() if stack is None else stack.events
            events.subscribe(lambda metric, count, text: console.note(text))
            numerics = self.gate_state.numerics(experiment.numerics_config())
            if stack is None:
                lost_ray = partial(end_without_ray, files)
                stack = Stack(experiment, numerics, files.path, outer or closing, console.note, events, lost_ray)
            else:
                console.note("starting another trainer beside the engines")
                stack.restart_trainer(numerics)
            self.stack = stack
            self._load(resume_step)
            trackers = self._start_trackers(resume_step is not None)
            every = experiment.tracking.rollouts == "all"
            tracker = RunTracker(files, trackers, all_rollouts=every, resume_step=resume_step)
            self.tracker = closing.enter_context(tracker)
            self.checkpoints = closing.enter_context(Checkpoints(files, experiment, held))
            self.feed = FeedState.of_checkpoint(files.checkpoint(step)) if step else None
            """The feed's state in the checkpoint that the run goes on from."""
            self._directory, self._began, self.session = files.path.stat(), time.monotonic(), this_session(notes)
            append_session(files.sessions, self.session)
            events.subscribe(self.note, console.progress)
            if resume_step is not None:
                why = f"lost the trainer ({lost}), and " if lost else ""
                anew = begins_anew(files, step) if step else ""
                self.note(RESUMED, 1, f"{why}resumed after step {step}{anew}")
            self._closing = closing.pop_all()

    def _greet(self, console: StepConsole, notes: Sequence[str], changed: Sequence[str]) -> None:
        """Print what the run is. notes: remarks on its input. changed: files of the input that differ from before."""
        experiment = self.experiment
        for note in notes:
            CONSOLE.info(f"note: {note}")
        digest = experiment.numerics_config().spec.digest()
        for line in (
            f"run {self.files.path}",
            f"quantization {experiment.numerics.preset}, digest {digest}; seed {experiment.run.seed}",
            experiment.formula,
            *(f"note: {note}" for note in experiment.algorithm.notes()),
            *changed,
        ):
            console.note(line)

    def _start_trackers(self, resumed: bool) -> BackgroundTrackers:
        """Start the trackers of the run, and say how to watch it in wandb."""
        tracking, files = self.experiment.tracking, self.files
        if "wandb" in tracking.recorded:
            self.console.note(f"live     {leet(files)}    (in a second terminal)")
        run = Tracked(
            folder=str(files.path.absolute()),
            name=files.name,
            project=tracking.wandb.project,
            config=self.experiment.to_dict(),
            resumed=resumed,
            last_step=self.experiment.run.steps,
            online=tracking.wandb.mode == "online",
        )
        return BackgroundTrackers(tracking.recorded, run, lost=partial(self.stack.events.add, TRACKER_LOST, 1))

    def _load(self, step: int | None) -> None:
        """Load the checkpoint of the step that the run resumes from, cut later records, and wait for the engines."""
        files, stack = self.files, self.stack
        if step is not None and step > 0:
            try:
                stack.trainer.load(files.checkpoint(step))
            except DamagedCheckpointError as error:
                raise with_older(error, files, step) from None
        last = BEFORE_THE_FIRST if step is None else step  # an earlier start in this directory may have reached no step
        cut_events(files.events, last)
        cut_capsules(files, last)
        files.cut(last)
        if stack.engines:
            stack.wait_for_engines()
            self.console.note("the engine is up; its report matches the spec")
            if (teacher := self.experiment.teacher) is not None:
                self.console.note(f"the teacher is up; it holds the quantized weights of {teacher.path}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is not None:
                why = "an interrupt" if kind is KeyboardInterrupt else f"{kind.__name__}: {error}".splitlines()[0]
                with suppress(OSError):  # of a full disk, which is what ends the run and what is said
                    self.end(why)
        finally:
            self._closing.__exit__(kind, error, trace)

    def end(self, why: str = "") -> None:
        """Record the end of this session. why: the reason, before the last step. A second call does nothing."""
        if self.session.ended is None:
            self.session = replace(self.session, ended=self.session.started + time.monotonic() - self._began, why=why)
            append_session(self.files.sessions, self.session)

    def steps(self) -> Iterator[int]:
        """Go from step to step, up to the last. Raises FileNotFoundError: the run's directory was deleted, renamed or
        replaced before a step."""
        while self.step < self.experiment.run.steps:
            self.step += 1
            check_directory(self.files.path, self._directory, self.step)
            yield self.step

    @property
    def capsule(self) -> str:
        """Return where this step's worst sequences are kept, below the run's directory."""
        return str(self.files.capsule(self.step).relative_to(self.files.path))

    def sync(self) -> SyncReport:
        """Send the trainer's weights to the engines, verified, and keep the step's manifest."""
        self.manifest = self.files.manifest(self.step)
        return self.stack.syncing.sync(self.manifest)

    def fall_back_to_bf16(self) -> None:
        """Change both sides to BF16 for the rest of the run. A sync has to follow."""
        self.gate_state.bf16 = True
        self.stack.switch(self.gate_state.numerics(self.stack.numerics))

    def keep(self, verdict: Verdict, passed: StepPass | None) -> None:
        """Announce the events of a verdict, and if there are any, keep the pass's worst sequences as a capsule.

        The trainer must still have the weights that it scored with, and the engines must be synced to them.
        """
        scored = None if passed is None else passed.monitored
        if verdict.events and passed is not None and scored is not None and self.manifest is not None:
            faulty = () if passed.fault is None else passed.fault.rows
            worst = scored.worst_rows(_WORST)
            export = partial(export_weights, self.stack.trainer, self.experiment.adapter)
            write_capsule(
                self.files.capsule(self.step),
                scored,
                export if self.experiment.guard.capsule_weights else None,
                step=self.step,
                why=verdict.why,
                rows=list(dict.fromkeys([*faulty, *worst])),
                numerics=self.stack.numerics,
                experiment=self.files.experiment,
                manifest=self.manifest,
                held=self.stack.engines.held(),
            )
            remove_superfluous(self.files, self.experiment.guard.capsules)
        for event in verdict.events:
            self.announce(event)
        if scored is not None and not bool(scored.fresh.any()):
            text = "found no token of the trainer's own weights to compare"
            self.announce(Event(self.step, "mismatch/tokens", 0.0, "at least 1", "go_on", None, text))

    def record(self, metrics: Mapping[str, float], samples: Samples, checkpointed: bool) -> dict[str, float]:
        """Log the step and return its metrics as logged. From then on a checkpoint of the step counts."""
        written = self.tracker.log(self.step, metrics, samples)
        self.console.step(self.step, written)
        if checkpointed:
            self.tracker.wait()
        self.checkpoints.recorded()
        self.stack.events.deliver()
        return written

    def note(self, metric: str, count: int, text: str) -> None:
        """Announce an event of the stream, and count it for the step's row."""
        self.recoveries[metric] += count
        action = _ACTIONS[metric] if count else "go_on"
        self.announce(Event(self.step, metric, float(count), "above 0", action, None, text))

    def recovery_metrics(self) -> dict[str, float]:
        """Return the counts of recoveries since the last call, as metrics."""
        counts: dict[str, int] = {}
        if self.stack.engines:
            counts = dict.fromkeys((ENGINES_REPLACED, STALE_RESYNCS, SYNCS_REPEATED, REWARD_FAILURES), 0)
        if self.stack.sampling.conversations is not None:
            counts[ENVIRONMENT_FAILURES] = 0
        counts |= self.recoveries
        self.recoveries.clear()
        return {name: float(count) for name, count in counts.items()}

    def announce(self, event: Event) -> None:
        """Show an event on the console, append it to events.jsonl, and tell the trackers."""
        self.console.note(event.said, style="bold yellow")
        append_event(self.files.events, event)
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
