"""Trainer, engines and the bridge between them, for a run, a preflight or an attribution."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from transformers import AutoTokenizer

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
from fp8rl.rollout.tasks.environments import SINGLE_TURN
from fp8rl.rollout.types import NO_WEIGHTS
from fp8rl.trainer.actor import TrainerGroup
from fp8rl.trainer.config import TrainerSpec
from fp8rl.weight_sync.bridge import Bridge
from fp8rl.weight_sync.frozen import write_base
from fp8rl.weight_sync.served import write_description


class Stack:
    """Trainer and engines of an experiment. Both run the same numerics, and change them together."""

    def __init__(
        self,
        experiment: Experiment,
        numerics: NumericsConfig,
        folder: Path,
        closing: ShutdownStack,
        say: Callable[[str], object],
        events: Events | None = None,
        lost: Callable[[str], object] = end_at_once,
    ) -> None:
        """Start Ray and both sides, which `closing` ends. Engines may still be starting: see `wait_for_engines`.

        folder: for engines' logs, and for the checkpoint that they start from. say: prints progress. events: gets the
        events of engines and sampling. lost: see `ray_cluster`.

        Raises:
            UserError: the model, the layout and the sizes do not fit together, or not onto the nodes of the cluster.
        """
        if (sized := with_own_cache(experiment)) is not experiment:
            say(f"an engine caches {sized.rollout.max_total_tokens:,} tokens, for which its GPU has room")
            experiment = sized
        self.experiment, self.folder, self.closing = experiment, folder, closing
        self.numerics = numerics
        """The present numerics of both sides."""
        closing.enter_context(ray_cluster(folder / "ray_logs", lost))
        say(f"starting {'the engine and ' if experiment.needs_engines else ''}the trainer")
        self.reservations = Reservations(experiment, folder)
        closing.callback(self.reservations.close)
        closing.callback(shutil.rmtree, folder / "served", ignore_errors=True)
        self.events, rollout = events or Events(), experiment.rollout
        self.engines = Engines.none()
        """The policy's engines; empty in a run that samples nothing."""
        if experiment.needs_engines:  # they come up while the trainer does, unless they take turns
            self.engines = Engines(rollout.engines, self._serving(), rollout, self.events, awake=not rollout.sleep)
        closing.callback(self.engines.stop)
        self.teacher = Teacher.start(experiment, self.reservations, folder, self.events)
        """The model that the policy learns from, if there is one."""
        if self.teacher is not None:
            closing.callback(self.teacher.engines.stop)
        self.trainer = TrainerGroup.start(trainer_spec(experiment, numerics), self.reservations.trainer())
        closing.callback(self.trainer.shutdown)
        self._share_base()
        self.tokenizer = AutoTokenizer.from_pretrained(experiment.model.directory, trust_remote_code=False)
        judge = Judge(experiment.rewards, self.tokenizer, teacher=self.teacher)
        closing.callback(judge.close)
        conversations = None
        if experiment.environment.function != SINGLE_TURN:  # one turn is asked for by groups, which is faster
            conversations = Conversations(
                experiment.environment, self.tokenizer, self.engines.admit, rollout.context_length
            )
            closing.callback(conversations.close)
        self.turns = DeviceTurns((self.engines, self.trainer) if rollout.sleep and self.engines else None)
        canary = canary_of(experiment, numerics)
        self.syncing = Syncing(self._bridge(), self.engines, self.events, self.turns, canary)
        parts = (self.engines, conversations, judge, self.syncing, self.events, self.turns)
        asked = experiment.carries_supports, experiment.algorithm.likeliest
        self.sampling = Sampling(rollout, self.tokenizer, *parts, *asked)

    def wait_for_engines(self) -> None:
        """Wait until every engine answers and has passed the handshake. Raises what went wrong at the first start."""
        if self.engines:
            with self.turn("rollout"):
                self.engines.wait()
        if self.teacher is not None:
            self.teacher.engines.wait()

    def restart_trainer(self, numerics: NumericsConfig) -> None:
        """Start new ranks in place of lost ones, in `numerics`, with the weights that the experiment starts from.

        The engines stay up, and have to be synced before anything is sampled.
        """
        self.trainer.shutdown()
        if self.turns.shared:
            self.engines.sleep()
        self.trainer.restart(self.reservations.trainer())
        self._share_base()
        self.syncing.renew(self._bridge(), canary_of(self.experiment, self.numerics))
        with self.turn("train"):  # in which it has come up
            pass
        if numerics != self.numerics:
            self.switch(numerics)

    @property
    def replays(self) -> bool:
        """Return whether the experiment has the trainer take the engine's experts."""
        return self.numerics.router_replay == "replay"

    def switch(self, numerics: NumericsConfig) -> None:
        """Change both sides to other numerics of the same mode: the trainer is kept, the engines are replaced.

        The handshake checks the new engines' numerics. A sync has to bring them the weights.
        """
        self.trainer.set_numerics(numerics)
        self.numerics = numerics
        self.syncing.renew(self._bridge(), canary_of(self.experiment, numerics))
        with self.turn("rollout"):
            self.engines.switch(self._serving())

    def turn(self, side: Side) -> AbstractContextManager[None]:
        """Give the device to one side for a block; see `DeviceTurns.turn`."""
        return self.turns.turn(side)

    def metrics(self) -> dict[str, float]:
        """Return `perf/...` of the engines and `memory/...` of turns since the last call."""
        return self.engines.metrics() | self.turns.metrics()

    def _serving(self) -> Serving:
        """Write the served model without its weights, and return the settings to start engines from it."""
        description = self.folder / "served" / "start"
        write_description(self.experiment.model.directory, description, self.numerics.rollout_spec)
        make = engine_maker(self.experiment, "policy", self.reservations, self.folder, self.numerics)
        return Serving(make, description, NO_WEIGHTS)

    def _bridge(self) -> Bridge:
        e, spec = self.experiment, self.numerics.rollout_spec
        scratch, adapter = self.folder / "served", engine_adapter(e)
        return Bridge(self.trainer, spec, e.sync, e.model.directory, scratch, e.rollout.sleep, adapter)

    def _share_base(self) -> None:
        """Have a trainer that shares its frozen weights with engines write the shared copy and adopt it."""
        if self.experiment.base_spec is not None:
            write_base(self.trainer, self.experiment.base_spec)


def canary_of(experiment: Experiment, numerics: NumericsConfig) -> Canary | None:
    """Choose the canary that engines in these numerics answer after each sync of a run; None: no canary."""
    if not (experiment.sync.canary and experiment.needs_engines):
        return None
    vocabulary = read_model(experiment.model.directory).sizes.vocab_size
    equal = numerics.mode == "exact" and numerics.trainer_spec == numerics.rollout_spec
    return Canary.of(experiment.run.seed, vocabulary, experiment.rollout.context_length, equal)


def trainer_spec(experiment: Experiment, numerics: NumericsConfig) -> TrainerSpec:
    """Return the specification that each rank of the trainer starts from."""
    algorithm = experiment.algorithm
    return TrainerSpec(
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


@contextmanager
def open_pair(
    experiment: Experiment, numerics: NumericsConfig | None = None, say: Callable[[str], object] = print
) -> Iterator[Stack]:
    """Start both sides, with one engine, until the block ends. The engine has passed the handshake, but is not synced.

    There is no canary, since it would replace an engine that differs, and callers measure the difference.

    numerics: None: those of the experiment.

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
        stack = Stack(experiment, numerics or experiment.numerics_config(), folder, closing, say)
        stack.wait_for_engines()
        yield stack
