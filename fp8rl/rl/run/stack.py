"""The two sides and the bridge between them: what computes in a run, in a preflight, in an attribution."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from fp8rl.models import read_model
from fp8rl.numerics.config import NumericsConfig
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.experiment.budget.fit import with_own_cache
from fp8rl.rl.run.cluster.cluster import end_at_once, ray_cluster
from fp8rl.rl.run.cluster.reservations import Reservations
from fp8rl.rl.run.engines.canary import Canary
from fp8rl.rl.run.engines.engines import Engines
from fp8rl.rl.run.engines.serving import Serving, engine_adapter, engine_maker
from fp8rl.rl.run.engines.teacher import Teacher
from fp8rl.rl.run.events import Events
from fp8rl.rl.run.feed.conversations import Conversations
from fp8rl.rl.run.feed.judging import Judge
from fp8rl.rl.run.feed.sampling import Sampling
from fp8rl.rl.run.interrupts import ShutdownStack
from fp8rl.rl.run.syncing import DeviceTurns, Side, Syncing
from fp8rl.rollout.tasks.environments.config import SINGLE_TURN
from fp8rl.rollout.types import NO_WEIGHTS
from fp8rl.trainer.actor import TrainerGroup
from fp8rl.trainer.config import TrainerSpec
from fp8rl.weight_sync.bridge import Bridge
from fp8rl.weight_sync.frozen import write_base
from fp8rl.weight_sync.served import write_description


@dataclass
class Stack:
    """Trainer and engines of one experiment, which run the same numerics and change them together."""

    experiment: Experiment
    numerics: NumericsConfig
    """The numerics of both sides now."""
    folder: Path
    """For engines' logs and for the description that they start from."""
    closing: ShutdownStack
    """Ends both sides."""
    tokenizer: PreTrainedTokenizerBase
    reservations: Reservations
    """The nodes and GPUs of both sides."""
    trainer: TrainerGroup
    engines: Engines
    """Empty (`Engines.none()`) in a run that samples nothing."""
    teacher: Teacher | None
    """The model that the policy learns from, if there is one."""
    syncing: Syncing
    sampling: Sampling
    events: Events
    turns: DeviceTurns

    @classmethod
    def open(
        cls,
        experiment: Experiment,
        numerics: NumericsConfig,
        folder: Path,
        closing: ShutdownStack,
        say: Callable[[str], object],
        events: Events | None = None,
        lost: Callable[[str], object] = end_at_once,
    ) -> Stack:
        """Start Ray and both sides, to be ended by `closing`. The engines may still be coming up: `wait_for_engines()`.

        say: shows what is going on. events: the stream of what happens to engines and sampling. lost: see
        `ray_cluster`.

        Raises:
            UserError: the model, the layout and the sizes do not fit together, or not onto the nodes of the cluster.
        """
        if (sized := with_own_cache(experiment)) is not experiment:
            say(f"an engine caches {sized.rollout.max_total_tokens:,} tokens, for which its GPU has room")
            experiment = sized
        closing.enter_context(ray_cluster(folder / "ray_logs", lost))
        say(f"starting {'the engine and ' if experiment.needs_engines else ''}the trainer")
        reservations = Reservations(experiment, folder)
        closing.callback(reservations.close)
        closing.callback(shutil.rmtree, folder / "served", ignore_errors=True)
        events = events or Events()
        engines, rollout = Engines.none(), experiment.rollout
        if experiment.needs_engines:  # they come up while the trainer does, unless they take turns
            serving = _serving(experiment, numerics, reservations, folder)
            engines = Engines(rollout.engines, serving, rollout, events, awake=not rollout.sleep)
        closing.callback(engines.stop)
        teacher = Teacher.start(experiment, reservations, folder, events)
        if teacher is not None:
            closing.callback(teacher.engines.stop)
        trainer = _start_trainer(experiment, numerics, reservations)
        closing.callback(trainer.shutdown)
        tokenizer = AutoTokenizer.from_pretrained(experiment.model.directory, trust_remote_code=False)
        judge = Judge(experiment.rewards, tokenizer, teacher=teacher)
        closing.callback(judge.close)
        conversations = None
        if experiment.environment.function != SINGLE_TURN:  # one turn is asked for by groups, which is faster
            conversations = Conversations(
                experiment.environment, tokenizer, engines.admit, experiment.rollout.context_length
            )
            closing.callback(conversations.close)
        turns = DeviceTurns((engines, trainer) if rollout.sleep and engines else None)
        bridge = _bridge(experiment, numerics, trainer, folder)
        syncing = Syncing(bridge, engines, events, turns, canary_of(experiment, numerics))
        carries = experiment.carries_supports
        sampling = Sampling(rollout, tokenizer, engines, conversations, judge, syncing, events, turns, carries)
        return cls(
            experiment=experiment,
            numerics=numerics,
            folder=folder,
            closing=closing,
            tokenizer=tokenizer,
            reservations=reservations,
            trainer=trainer,
            engines=engines,
            teacher=teacher,
            syncing=syncing,
            sampling=sampling,
            events=events,
            turns=turns,
        )

    def wait_for_engines(self) -> None:
        """Wait until every engine answers and has passed the handshake. Raises what went wrong at the first start."""
        if self.engines:
            with self.turn("rollout"):
                self.engines.wait()
        if self.teacher is not None:
            self.teacher.engines.wait()

    def restart_trainer(self, numerics: NumericsConfig) -> None:
        """Start other ranks in place of lost ones, at the weights that the experiment starts from, in `numerics`.

        The engines stay up, and have to be synced before anything is sampled.
        """
        self.trainer.shutdown()
        if self.turns.shared:
            self.engines.sleep()
        self.trainer.restart(self.reservations.trainer())
        _share_base(self.experiment, self.trainer)
        self._renew_bridge()
        with self.turn("train"):  # in which it has come up
            pass
        if numerics != self.numerics:
            self.switch(numerics)

    @property
    def replays(self) -> bool:
        """Return whether the experiment has the trainer take the engine's experts."""
        return self.numerics.router_replay == "replay"

    def switch(self, numerics: NumericsConfig) -> None:
        """Run other numerics of the same mode on both sides: the trainer as it stands, the engines as new ones.

        Their handshake says what they run. A sync has to bring them the weights.
        """
        self.trainer.set_numerics(numerics)
        self.numerics = numerics
        self._renew_bridge()
        serving = _serving(self.experiment, numerics, self.reservations, self.folder)
        with self.turn("rollout"):
            self.engines.switch(serving)

    def turn(self, side: Side) -> AbstractContextManager[None]:
        """Give the device to one side for a block; see `DeviceTurns.turn`."""
        return self.turns.turn(side)

    def metrics(self) -> dict[str, float]:
        """`perf/...` of the engines, and `memory/...` of turns, since the last call."""
        return self.engines.metrics() | self.turns.metrics()

    def _renew_bridge(self) -> None:
        bridge = _bridge(self.experiment, self.numerics, self.trainer, self.folder)
        self.syncing.renew(bridge, canary_of(self.experiment, self.numerics))


def _serving(experiment: Experiment, numerics: NumericsConfig, reservations: Reservations, folder: Path) -> Serving:
    """Write the served model without its weights, and return how engines are started from that."""
    description = folder / "served" / "start"
    write_description(experiment.model.directory, description, numerics.rollout_spec)
    return Serving(engine_maker(experiment, "policy", reservations, folder, numerics), description, NO_WEIGHTS)


def _bridge(experiment: Experiment, numerics: NumericsConfig, trainer: TrainerGroup, folder: Path) -> Bridge:
    source, wakes = experiment.model.directory, experiment.rollout.sleep
    scratch, adapter = folder / "served", engine_adapter(experiment)
    return Bridge(trainer, numerics.rollout_spec, experiment.sync, source, scratch, wakes, adapter)


def canary_of(experiment: Experiment, numerics: NumericsConfig) -> Canary | None:
    """Choose the canary of engines in these numerics, asked for after each sync of a run; None: nothing."""
    if not (experiment.sync.canary and experiment.needs_engines):
        return None
    vocabulary = read_model(experiment.model.directory).sizes.vocab_size
    equal = numerics.mode == "exact" and numerics.trainer_spec == numerics.rollout_spec
    return Canary.of(experiment.run.seed, vocabulary, experiment.rollout.context_length, equal)


def _start_trainer(experiment: Experiment, numerics: NumericsConfig, reservations: Reservations) -> TrainerGroup:
    algorithm = experiment.algorithm
    spec = TrainerSpec(
        experiment.model.directory,
        experiment.trainer,
        numerics,
        seed=experiment.run.seed,
        total_steps=algorithm.policy_updates(experiment.run.steps),
        max_sequence_length=experiment.rollout.context_length,
        reference=algorithm.needs.reference,
        critic=algorithm.critic_config(experiment.trainer),
        critic_steps=experiment.run.steps * algorithm.updates,
        adapter=experiment.adapter,
        shared_base=experiment.base_spec is not None,
        architecture=experiment.model.architecture,
    )
    trainer = TrainerGroup.start(spec, reservations.trainer())
    _share_base(experiment, trainer)
    return trainer


def _share_base(experiment: Experiment, trainer: TrainerGroup) -> None:
    """Have a trainer that shares its frozen weights with engines write and adopt them."""
    if experiment.base_spec is not None:
        try:
            write_base(trainer, experiment.base_spec)
        except BaseException:
            trainer.shutdown()
            raise


@contextmanager
def open_pair(
    experiment: Experiment, numerics: NumericsConfig | None = None, say: Callable[[str], object] = print
) -> Iterator[Stack]:
    """Both sides with one engine, up and with the handshake passed but unsynced; all of it ends with the block.

    There is no canary: whoever measures how far an engine is from the trainer wants to keep it.

    numerics: if they are not those that the experiment gives its layout.

    Raises HandshakeError, and what the start of either side raises.
    """
    alone = {"engines": 1, "port": None}
    changes = {
        "rollout": experiment.rollout.model_copy(update=alone),
        "sync": experiment.sync.model_copy(update={"canary": False}),
        "teacher": None,
    }
    experiment = experiment.model_copy(update=changes)
    with ShutdownStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="fp8rl-pair-")))
        stack = Stack.open(experiment, numerics or experiment.numerics_config(), folder, closing, say)
        stack.wait_for_engines()
        yield stack
