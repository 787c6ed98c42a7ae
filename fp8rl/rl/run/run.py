"""A run: trainer and engines of an experiment, the syncs between them, and the record of what they do."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from transformers import AutoTokenizer

from fp8rl.models.architecture import Role
from fp8rl.numerics.config import NumericsConfig
from fp8rl.rl.experiment import Experiment, with_keys
from fp8rl.rl.experiment.budget.fit import with_own_cache
from fp8rl.rl.guard.capsule import export_weights, remove_superfluous, write_capsule
from fp8rl.rl.guard.guard import Verdict
from fp8rl.rl.record.console import CONSOLE
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.rl.run.checkpoints import with_older
from fp8rl.rl.run.cluster.cluster import end_at_once, ray_cluster
from fp8rl.rl.run.cluster.reservations import Reservations
from fp8rl.rl.run.ending import say_failed
from fp8rl.rl.run.engines.canary import canary_of
from fp8rl.rl.run.engines.engines import Engines
from fp8rl.rl.run.engines.serving import Serving, engine_adapter, prepare_serving
from fp8rl.rl.run.events import Events
from fp8rl.rl.run.feed.conversations import Conversations
from fp8rl.rl.run.feed.judging import Judge
from fp8rl.rl.run.feed.sampling import Sampling
from fp8rl.rl.run.interrupts import SAYS, BoundedExitStack
from fp8rl.rl.run.record import Record
from fp8rl.rl.run.step import StepPass
from fp8rl.rl.run.syncing import DeviceTurns, Syncing
from fp8rl.trainer.actor import TrainerGroup
from fp8rl.trainer.checkpoint.files import DamagedCheckpointError
from fp8rl.trainer.config import TrainerSpec
from fp8rl.weight_sync.bridge import Bridge, SyncReport
from fp8rl.weight_sync.frozen import place_base

_WORST = 8
"""Number of worst sequences in a capsule. If there is a fault, all rows that it came from precede them."""


class Run:
    """Trainer and engines, which run the same numerics and change them together. See `open_run` and `open_pair`."""

    record: Record
    """The record of a run that trains; a pair has none."""

    def __init__(
        self,
        experiment: Experiment,
        numerics: NumericsConfig,
        folder: Path,
        closing: BoundedExitStack,
        say: Callable[[str], object],
        record: Record | None = None,
        lost: Callable[[str], object] = end_at_once,
    ) -> None:
        """Start Ray and both sides, which `closing` ends. Engines may still be starting: see `wait_for_engines`.

        folder: for engines' logs, and for the checkpoint that they start from. say: prints progress. record: gets the
        events of engines and sampling. lost: see `ray_cluster`.
        Raises UserError: the model, the layout and the sizes do not fit together, or not onto the nodes of the cluster.
        """
        if (sized := with_own_cache(experiment)) is not experiment:
            say(f"the KV cache of an engine gets {sized.rollout.max_total_tokens:,} tokens, as fit on its GPU")
            experiment = sized
        self.experiment, self.folder, self.closing = experiment, folder, closing
        self.numerics = numerics
        """The present numerics of both sides."""
        closing.enter_context(ray_cluster(folder / "ray_logs", lost))
        say(f"starting {'the engine and ' if experiment.needs_engines else ''}the trainer")
        self.reservations = Reservations(experiment, folder, again=record is not None and record.again)
        closing.callback(self.reservations.close)
        closing.callback(shutil.rmtree, folder / "served", ignore_errors=True)
        self.events, rollout = Events(), experiment.rollout
        if record is not None:
            self.record, self.events = record, record.events
        count = rollout.engines if experiment.needs_engines else 0
        # They come up while the trainer does, unless they take turns.
        policy = self._serving("policy", numerics)
        self.engines = Engines(count, policy, rollout, self.events)
        """The policy's engines; empty in a run that samples nothing."""
        closing.callback(self.engines.stop)
        self.teacher: Engines | None = None
        """The engines of the model that the policy learns from, if there is one; a lost engine is replaced."""
        if (section := experiment.teacher) is not None:
            teacher = self._serving("teacher", section.numerics(experiment))
            self.teacher = Engines(section.engines, teacher, section.engine(rollout), self.events)
            closing.callback(self.teacher.stop)
        self.trainer = TrainerGroup.start(trainer_spec(experiment, numerics), self.reservations.trainer())
        closing.callback(self.trainer.shutdown)
        if experiment.base_spec is not None:  # the trainer shares its frozen weights with engines
            self.trainer.apply(place_base, experiment.base_spec)
        self.tokenizer = AutoTokenizer.from_pretrained(experiment.model.directory, trust_remote_code=False)
        judge = Judge(experiment.rewards, self.tokenizer, teacher=self.teacher, events=self.events)
        closing.callback(judge.close)
        conversations = None
        if experiment.has_environment:  # one turn is asked for by groups, which is faster
            conversations = Conversations(
                experiment.environment, self.tokenizer, self.engines.admit, rollout.context_length, self.events
            )
            closing.callback(conversations.close)
        self.turns = DeviceTurns((self.engines, self.trainer) if rollout.sleep and self.engines else None)
        self.turn = self.turns.turn
        canary = canary_of(experiment, numerics)
        self.syncing = Syncing(self._bridge(), self.engines, self.events, self.turns, canary)
        self.sampling = Sampling(experiment, self.tokenizer, judge, self.syncing, conversations)

    def wait_for_engines(self) -> None:
        """Wait until every engine answers and has passed the handshake. Raises what went wrong at the first start."""
        if self.engines:
            with self.turn("rollout"):
                self.engines.wait()
        if self.teacher is not None:
            self.teacher.wait()

    def sync(self) -> SyncReport:
        """Send the trainer's weights to the engines, verified, and keep the step's manifest."""
        self.record.manifest = self.record.files.manifest(self.record.step)
        return self.syncing.sync(self.record.manifest)

    def fall_back_to_bf16(self) -> None:
        """Change both sides to BF16 for the rest of the run. A sync has to follow."""
        self.record.gate_state.bf16 = True
        self.switch(self.record.gate_state.numerics(self.numerics))

    def switch(self, numerics: NumericsConfig) -> None:
        """Change both sides to other numerics of the same mode: the trainer is kept, the engines are replaced.

        The handshake checks the new engines' numerics. A sync has to bring them the weights.
        """
        self.trainer.set_numerics(numerics)
        self.numerics = numerics
        self.syncing.bridge, self.syncing.canary = self._bridge(), canary_of(self.experiment, numerics)
        with self.turn("rollout"):
            self.engines.switch(self._serving("policy", numerics))
            self.engines.wait()

    def keep(self, verdict: Verdict, passed: StepPass | None) -> None:
        """Announce the events of a verdict, and if there are any, keep the pass's worst sequences as a capsule.

        The trainer must still have the weights that it scored with, and the engines must be synced to them.
        """
        record, guard = self.record, self.experiment.guard
        scored = None if passed is None else passed.monitored
        if verdict.events and passed is not None and scored is not None and record.manifest is not None:
            faulty = () if passed.fault is None else passed.fault.rows
            write_capsule(
                record.files.capsule(record.step),
                scored,
                partial(export_weights, self.trainer, self.experiment.adapter) if guard.capsule_weights else None,
                step=record.step,
                why=verdict.why,
                rows=list(dict.fromkeys([*faulty, *scored.worst_rows(_WORST)])),
                numerics=self.numerics,
                experiment=record.files.experiment,
                manifest=record.manifest,
                held=self.engines.held(),
            )
            remove_superfluous(record.files, guard.capsules)
        for event in verdict.events:
            record.announce(event)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of engines and of device turns since the last call."""
        return self.engines.metrics() | self.turns.metrics()

    def _serving(self, role: Role, numerics: NumericsConfig) -> Serving:
        return prepare_serving(self.experiment, role, numerics, self.reservations, self.folder)

    def _bridge(self) -> Bridge:
        e, spec = self.experiment, self.numerics.rollout_spec
        scratch, adapter = self.folder / "served", engine_adapter(e)
        return Bridge(self.trainer, spec, e.sync, e.model.directory, scratch, e.rollout.sleep, adapter)


@contextmanager
def open_run(
    experiment: Experiment, files: RunDir, notes: Sequence[str] = (), *, again: bool = False, left: int | None = None
) -> Iterator[Run]:
    """Start all parts of a run, from its last checkpoint if it has one. They end with the block.

    notes: remarks on the input, for log and report. again: the run was lost and is started again. left: how often it
    may be started again, if Ray's head is lost; None: no supervisor starts it.
    """

    def end_without_ray(why: str) -> None:
        """Without Ray nothing can be unwound; children end with this process. Ray may end it before this function."""
        code = say_failed(files, why, left)
        if left is not None:
            os.kill(os.getppid(), SAYS[code])
        with suppress(OSError):
            record.end(why)
        CONSOLE.error(why)
        os._exit(code)

    with BoundedExitStack() as closing:
        record = Record(experiment, files, closing, notes, again)
        numerics = record.gate_state.numerics(experiment.numerics_config())
        run = Run(experiment, numerics, files.path, closing, record.console.note, record, end_without_ray)
        if record.step:
            try:
                run.trainer.load(files.checkpoint(record.step))
            except DamagedCheckpointError as error:
                raise with_older(error, files, record.step) from None
        if run.engines:
            run.wait_for_engines()
            record.console.note("the engine is up; its report matches the spec")
        if experiment.teacher is not None:
            record.console.note(f"the teacher is up; it holds the quantized weights of {experiment.teacher.path}")
        record.begin()
        try:
            yield run
        except BaseException as error:
            why = "an interrupt" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
            with suppress(OSError):  # of a full disk, which is then the error that ends the run
                record.end(why.splitlines()[0])
            raise


@contextmanager
def open_pair(
    experiment: Experiment, numerics: NumericsConfig | None = None, say: Callable[[str], object] = print
) -> Iterator[Run]:
    """Start both sides, with one engine, until the block ends. The engine has passed the handshake, but is not synced.

    There is no canary: it would replace an engine that differs, but callers measure the difference.

    numerics: of both sides; None: the experiment's.

    Raises HandshakeError, and what the start of either side raises.
    """
    experiment = with_keys(
        experiment, {"rollout.engines": 1, "rollout.port": None, "sync.canary": False, "teacher": None}
    )
    with BoundedExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="fp8rl-pair-")))
        run = Run(experiment, numerics or experiment.numerics_config(), folder, closing, say)
        run.wait_for_engines()
        yield run


def trainer_spec(experiment: Experiment, numerics: NumericsConfig) -> TrainerSpec:
    """Return the specification that each rank of the trainer starts from."""
    algorithm = experiment.algorithm
    return TrainerSpec(
        experiment.model.directory,
        experiment.trainer,
        numerics,
        seed=experiment.run.seed,
        total_steps=algorithm.updates * sum(map(algorithm.learns, range(1, experiment.run.steps + 1))),
        max_sequence_length=experiment.rollout.context_length,
        reference=algorithm.needs.reference,
        critic=algorithm.critic_config(experiment.trainer),
        critic_steps=experiment.run.steps * algorithm.updates,
        adapter=experiment.adapter,
        shared_base=experiment.base_spec is not None,
        architecture=experiment.model.architecture,
    )
