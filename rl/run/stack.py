"""The two sides and the bridge between them: what computes in a run, in a preflight, in an attribution."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from numerics.config import NumericsConfig
from rl.experiment import Experiment
from rl.run.cluster.cluster import end_at_once, ray_cluster
from rl.run.cluster.seats import Seats
from rl.run.engines.pool import EnginePool
from rl.run.engines.serving import Serving, engine_maker
from rl.run.engines.teacher import Teacher
from rl.run.feed.conversations import Conversations
from rl.run.feed.failures import Failures
from rl.run.feed.judging import Judge
from rl.run.lifecycle.interrupts import Closing
from rollout.environments.config import SINGLE_TURN
from rollout.errors import StaleWeightsError
from rollout.server.client import EngineClient
from rollout.types import Endpoint, Group, SamplingParams, Trajectory
from trainer.actor import TrainerGroup
from weight_sync.bridge import Bridge, SyncReport
from weight_sync.hf_checkpoint import convert_checkpoint
from weight_sync.manifest import SyncError

Result = TypeVar("Result")
Tell = Callable[[str, int, str], None]
"""Takes note of what was mended: the metric that counts it, how many there were, and in words."""

ENGINES_REPLACED = "rollout/engines_replaced"
STALE_RESYNCS = "gates/stale_resyncs"
SYNCS_REPEATED = "sync/repeated"

_LOOK_SECONDS = 0.1
"""Between two looks at whether a new engine waits for weights."""


@dataclass
class Asked:
    """A group that engines have been asked to answer, and the answers, in time.

    began, ended: monotonic seconds, of asking and of the last answer. sampling: if not as the experiment trains.
    """

    group: Group
    temperature: float
    answers: Future[list[Trajectory]]
    began: float = field(default_factory=time.monotonic)
    ended: float | None = None
    sampling: SamplingParams | None = None

    def __post_init__(self) -> None:
        self.expect(self.answers)

    def expect(self, answers: Future[list[Trajectory]]) -> None:
        """Wait for these, in place of others that are no good."""
        self.answers, self.ended = answers, None
        answers.add_done_callback(self._end)

    def _end(self, _: object) -> None:
        self.ended = time.monotonic()

    @property
    def answered(self) -> bool:
        """Whether all answers are there, and are what they should be."""
        return self.answers.done() and self.answers.exception() is None


def done(answers: list[Trajectory]) -> Future[list[Trajectory]]:
    """Answers that are there already."""
    future: Future[list[Trajectory]] = Future()
    future.set_result(answers)
    return future


@dataclass
class Stack:
    """Trainer and engines of one experiment, which run the same numerics and change them together.

    Attributes:
        numerics: what both sides run now.
        folder: for engines' logs and for checkpoints that they start from.
        closing: what ends both sides.
        judge: gives answers their rewards.
        conversations: of an experiment with an environment, where an answer is more than one turn of the model.
        seats: where they are.
        engines: none in a run that samples nothing.
        checkpoint: what the engines were last started from.
        tell: takes note of what was mended.
        progress: told, while groups are waited for, how many of how many are answered.
        teacher: what the policy learns from, if that is a model.
    """

    experiment: Experiment
    numerics: NumericsConfig
    folder: Path
    closing: Closing
    tokenizer: PreTrainedTokenizerBase
    judge: Judge
    conversations: Conversations | None
    seats: Seats
    trainer: TrainerGroup
    engines: EnginePool
    checkpoint: Path
    tell: Tell = field(default=lambda metric, count, text: None)
    progress: Callable[[int, int], object] = field(default=lambda done, wanted: None)
    teacher: Teacher | None = None

    @classmethod
    def open(
        cls,
        experiment: Experiment,
        numerics: NumericsConfig,
        folder: Path,
        closing: Closing,
        say: Callable[[str], object],
        lost: Callable[[str], object] = end_at_once,
    ) -> Stack:
        """Start Ray and both sides, to be ended by `closing`. The engines may still be coming up: `wait_for_engines()`.

        say: told what is going on. lost: see `ray_cluster`.

        Raises:
            UserError: the model, the layout and the sizes do not fit together, or not onto the nodes of the cluster.
        """
        closing.enter_context(ray_cluster(folder / "ray_logs", lost))
        say(f"starting {'the engine and ' if experiment.needs_engines else ''}the trainer")
        seats = Seats(experiment, folder)
        closing.callback(seats.close)
        checkpoint = folder / "served" / "start"
        closing.callback(shutil.rmtree, checkpoint.parent, ignore_errors=True)
        engines = EnginePool.none()
        if experiment.needs_engines:  # they come up while the trainer does
            convert_checkpoint(Path(experiment.model.path), checkpoint, numerics.rollout_spec)
            engines = EnginePool.start(experiment, seats, folder, numerics, checkpoint)
        closing.callback(engines.stop)
        teacher = Teacher.start(experiment, seats, folder)
        if teacher is not None:
            closing.callback(teacher.engines.stop)
        trainer = _start_trainer(experiment, numerics, seats)
        closing.callback(trainer.shutdown)
        tokenizer = AutoTokenizer.from_pretrained(experiment.model.path)
        judge = Judge(experiment.rewards, tokenizer, teacher=teacher)
        closing.callback(judge.close)
        conversations = None
        if experiment.environment.function != SINGLE_TURN:  # one turn is asked for by groups, which is faster
            conversations = Conversations(experiment.environment, tokenizer, engines.admit)
            closing.callback(conversations.close)
        return cls(
            experiment=experiment,
            numerics=numerics,
            folder=folder,
            closing=closing,
            tokenizer=tokenizer,
            judge=judge,
            conversations=conversations,
            seats=seats,
            trainer=trainer,
            engines=engines,
            checkpoint=checkpoint,
            teacher=teacher,
        )

    def wait_for_engines(self) -> None:
        """Until every engine answers and has passed the handshake. Raises what went wrong at the first start."""
        self.engines.wait()
        if self.teacher is not None:
            self.teacher.engines.wait()

    def restart_trainer(self, numerics: NumericsConfig) -> None:
        """A new trainer in place of one that is lost, at the weights that the experiment starts from; then `numerics`
        on both sides. The engines stay up, and have to be synced before anything is sampled."""
        self.trainer.shutdown()
        self.trainer = _start_trainer(self.experiment, self.numerics, self.seats)
        self.closing.callback(self.trainer.shutdown)
        if numerics != self.numerics:
            self.switch(numerics)

    @property
    def bridge(self) -> Bridge:
        """From the trainer to the engines, in the numerics of now."""
        model = Path(self.experiment.model.path)
        return Bridge(self.trainer, self.numerics.rollout_spec, self.experiment.sync, model, self.folder / "served")

    @property
    def replays(self) -> bool:
        """Whether the experiment has the trainer take the engine's experts."""
        return self.numerics.router_replay == "replay"

    def sync(self, manifest: Path | None = None) -> SyncReport:
        """The trainer's weights into every engine that is up, verified; their digests are saved to `manifest`.

        An engine that is lost on the way is left to be replaced. Raises SyncError, EngineError.
        """
        self.engines.expect(self.trainer.weight_version)
        while True:
            report = self._sent(self.engines.up(), manifest)
            self._hear()
            if report is not None:
                return report

    def admit(self, groups: Sequence[Group], temperature: float, sampling: SamplingParams | None = None) -> list[Asked]:
        """Have groups answered at the trainer's weights or those of later syncs.

        temperature: 0 is greedy. sampling: if not as the experiment says for this temperature.
        """
        oldest = self.trainer.weight_version
        chosen = sampling or self.experiment.rollout.sampling(temperature, (self.tokenizer.eos_token_id,))
        ask = self.engines.admit if self.conversations is None else self.conversations.begin
        return [Asked(group, temperature, ask(group, chosen, oldest), sampling=sampling) for group in groups]

    def collect(self, asked: Sequence[Asked]) -> list[list[Trajectory]]:
        """The answers of each group, once all are there. Meanwhile new engines get the trainer's weights.

        Groups that were sampled at other weights than they may be are asked for again, once, after a sync.

        Raises StaleWeightsError at the second time, EngineError.
        """
        self._wait(asked)
        stale = [item for item in asked if isinstance(item.answers.exception(), StaleWeightsError)]
        if stale:
            error = stale[0].answers.exception()
            self.tell(STALE_RESYNCS, 1, f"stale weights: syncing and sampling again ({error})")
            self.sync()
            for item in stale:
                (again,) = self.admit([item.group], item.temperature, item.sampling)
                item.expect(again.answers)
            self._wait(asked)
        return [item.answers.result() for item in asked]

    def sample(self, groups: Sequence[Group], temperature: float) -> list[Trajectory]:
        """The answers of all groups at the trainer's weights; `group` is the index of their group."""
        answers = self.collect(self.admit(groups, temperature))
        return [replace(answer, group=index) for index, group in enumerate(answers) for answer in group]

    def wait_for_some(self, asked: Sequence[Asked], count: int) -> None:
        """Until `count` of the groups, or all of them, have their answers; see `collect`."""
        while (answered := sum(item.answered for item in asked)) < min(count, len(asked)):
            self.progress(answered, min(count, len(asked)))
            self._look_after([item.answers for item in asked if not item.answers.done()], FIRST_COMPLETED)
        self._hear()

    def wait_for_fresh(self, asked: Sequence[Asked]) -> None:
        """Until a group has an answer with a token of the trainer's weights, or all are there; see `collect`."""
        while not any(self._fresh(item) for item in asked) and (open_ := [a for a in asked if not a.answers.done()]):
            self._look_after([item.answers for item in open_], FIRST_COMPLETED)
        self._hear()

    def _fresh(self, item: Asked) -> bool:
        version = self.trainer.weight_version
        return item.answered and any(version in answer.weight_versions for answer in item.answers.result())

    def _wait(self, asked: Sequence[Asked]) -> None:
        while not all(item.answers.done() for item in asked):
            self.progress(sum(item.answered for item in asked), len(asked))
            self._look_after([item.answers for item in asked], FIRST_EXCEPTION)
        self.progress(len(asked), len(asked))
        self._hear()

    def _look_after(self, answers: list[Future[list[Trajectory]]], until: str) -> None:
        """Wait for a moment, give engines that came up the trainer's weights, and raise what no sync can mend."""
        wait(answers, timeout=_LOOK_SECONDS, return_when=until)
        self._hear()
        if self.conversations is not None:
            self.conversations.check()
        if new := self.engines.waiting():
            self._sent(new)
        for future in answers:
            if future.done() and not isinstance(future.exception(), StaleWeightsError | None):
                future.result()

    def _sent(self, endpoints: list[Endpoint], manifest: Path | None = None) -> SyncReport | None:
        """A verified sync of these engines; None if one of them proves to be lost, and has to be left out.

        One that fails although all of them live is done again, once: whatever broke it may have been of that moment.
        """
        for again in (False, True):
            try:
                report = self.bridge.sync(endpoints, manifest)
            except SyncError as error:
                if self.engines.any_lost(endpoints):
                    return None
                if again:
                    raise
                self.tell(SYNCS_REPEATED, 1, f"a sync failed and is done again: {str(error).splitlines()[0]}")
            else:
                self.engines.verified(endpoints)
                return report
        raise AssertionError("unreachable")

    def _hear(self) -> None:
        for news in (*self.engines.news(), *(self.teacher.engines.news() if self.teacher else ())):
            self.tell(ENGINES_REPLACED, news.replaced, news.text)

    @property
    def failures(self) -> list[Failures]:
        """Those of the user's functions that every answer meets."""
        return [self.judge.failures] + ([] if self.conversations is None else [self.conversations.failures])

    def tell_failures(self, *failures: Failures) -> None:
        """Take note of what has failed since this was last asked."""
        for each in failures:
            if news := each.news():
                self.tell(
                    each.metric, len(news), "\n".join(filter(None, news)) or f"{len(news)} more {each.what}s failed"
                )

    def switch(self, numerics: NumericsConfig) -> None:
        """Run other numerics of the same mode on both sides: the trainer as it stands, the engines as new ones.

        Their handshake says what they run. They start from the trainer's weights, and a sync has to verify that.
        """
        self.trainer.set_numerics(numerics)
        self.numerics = numerics
        self.checkpoint = self.bridge.write_checkpoint()
        make = engine_maker(self.experiment, self.seats, self.folder, numerics)
        self.engines.switch(Serving(make, self.checkpoint, self.trainer.weight_version))

    def ask(self, use: Callable[[EngineClient], Awaitable[Result]]) -> Result:
        """What `use` gets from the first engine."""

        async def asked() -> Result:
            async with EngineClient(self.engines.up()[0]) as client:
                return await use(client)

        return asyncio.run(asked())


def _start_trainer(experiment: Experiment, numerics: NumericsConfig, seats: Seats) -> TrainerGroup:
    algorithm = experiment.algorithm
    return TrainerGroup.start(
        Path(experiment.model.path),
        experiment.trainer,
        numerics,
        seed=experiment.run.seed,
        total_steps=experiment.run.steps * algorithm.updates,
        max_sequence_length=experiment.rollout.context_length,
        seats=seats.trainer(),
        reference=algorithm.needs.reference,
        critic=algorithm.critic_config(experiment.trainer),
    )


@contextmanager
def open_pair(
    experiment: Experiment, numerics: NumericsConfig | None = None, say: Callable[[str], object] = print
) -> Iterator[Stack]:
    """Both sides with one engine, up and with the handshake passed but unsynced; all of it ends with the block.

    numerics: if they are not those that the experiment gives its layout.

    Raises HandshakeError, and what the start of either side raises.
    """
    alone = {"engines": 1, "port": None}
    experiment = experiment.model_copy(update={"rollout": experiment.rollout.model_copy(update=alone), "teacher": None})
    with Closing() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="fp8rl-pair-")))
        stack = Stack.open(experiment, numerics or experiment.numerics_config(), folder, closing, say)
        stack.wait_for_engines()
        yield stack
