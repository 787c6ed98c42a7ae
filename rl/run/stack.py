"""The two sides and the bridge between them: what computes in a run, in a preflight, in an attribution."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import TypeVar

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from numerics.config import NumericsConfig
from rl.experiment import Experiment
from rl.run.cluster import ray_cluster
from rl.run.engines import EnginePool
from rl.run.interrupts import Closing
from rollout.client import EngineClient
from rollout.types import Group, Trajectory
from trainer.actor import TrainerGroup
from weight_sync.bridge import Bridge, SyncReport
from weight_sync.hf_checkpoint import convert_checkpoint

Result = TypeVar("Result")


@dataclass
class Stack:
    """Trainer and engines of one experiment, which run the same numerics and change them together.

    Attributes:
        numerics: what both sides run now.
        folder: for engines' logs and for checkpoints that they start from.
        engines: none in a run that samples nothing.
        checkpoint: what the engines were last started from.
    """

    experiment: Experiment
    numerics: NumericsConfig
    folder: Path
    tokenizer: PreTrainedTokenizerBase
    trainer: TrainerGroup
    engines: EnginePool
    checkpoint: Path

    @classmethod
    def open(
        cls,
        experiment: Experiment,
        numerics: NumericsConfig,
        folder: Path,
        closing: Closing,
        say: Callable[[str], object],
    ) -> Stack:
        """Start Ray and both sides, to be ended by `closing`. The engines may still be coming up: `engines.wait()`.

        say: told what is going on.

        Raises:
            UserError: the model, the layout and the sizes do not fit together.
        """
        closing.enter_context(ray_cluster(folder / "ray_logs"))
        say(f"starting {'the engine and ' if experiment.needs_engines else ''}the trainer")
        checkpoint = folder / "served" / "start"
        closing.callback(shutil.rmtree, checkpoint.parent, ignore_errors=True)
        engines = EnginePool.none()
        if experiment.needs_engines:  # they come up while the trainer does
            convert_checkpoint(Path(experiment.model.path), checkpoint, numerics.rollout_spec)
            engines = EnginePool.start(experiment, folder, numerics, checkpoint)
        closing.callback(engines.stop)
        trainer = TrainerGroup.start(
            Path(experiment.model.path),
            experiment.trainer,
            numerics,
            seed=experiment.run.seed,
            total_steps=experiment.run.steps,
            max_sequence_length=experiment.rollout.context_length,
        )
        closing.callback(trainer.shutdown)
        tokenizer = AutoTokenizer.from_pretrained(experiment.model.path)
        stack = cls(experiment, numerics, folder, tokenizer, trainer, engines, checkpoint)
        closing.callback(lambda: stack.engines.stop())  # those of a later switch
        return stack

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
        """The trainer's weights into the engines, verified; their digests are saved to `manifest`. Raises SyncError."""
        return self.bridge.sync(self.engines.endpoints(), manifest)

    def sample(self, groups: Sequence[Group], temperature: float) -> list[Trajectory]:
        """The answers of all groups at the trainer's weights, sampled as the experiment says.

        temperature: 0 is greedy. Raises StaleWeightsError for a token of other weights, EngineDiedError.
        """
        sampling = self.experiment.rollout.sampling(temperature, (self.tokenizer.eos_token_id,))
        return self.engines.sample(groups, sampling, self.trainer.weight_version)

    def switch(self, numerics: NumericsConfig) -> None:
        """Run other numerics of the same mode on both sides: the trainer as it stands, the engines as new ones.

        Their handshake says what they run. They start from the trainer's weights, and a sync has to verify that.
        """
        self.engines.stop()
        self.trainer.apply(methodcaller("set_numerics", numerics))
        self.numerics = numerics
        self.checkpoint = self.bridge.write_checkpoint()
        self.engines = EnginePool.start(
            self.experiment, self.folder, numerics, self.checkpoint, self.trainer.weight_version
        )
        self.engines.wait()

    def ask(self, use: Callable[[EngineClient], Awaitable[Result]]) -> Result:
        """What `use` gets from the first engine."""

        async def asked() -> Result:
            async with EngineClient(self.engines.endpoints()[0]) as client:
                return await use(client)

        return asyncio.run(asked())


@contextmanager
def open_pair(
    experiment: Experiment, numerics: NumericsConfig | None = None, say: Callable[[str], object] = print
) -> Iterator[Stack]:
    """Both sides with one engine, up and with the handshake passed but unsynced; all of it ends with the block.

    numerics: if they are not those that the experiment gives its layout.

    Raises HandshakeError, and what the start of either side raises.
    """
    alone = {"engines": 1, "port": None}
    experiment = experiment.model_copy(update={"rollout": experiment.rollout.model_copy(update=alone)})
    with Closing() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="fp8rl-pair-")))
        stack = Stack.open(experiment, numerics or experiment.numerics_config(), folder, closing, say)
        stack.engines.wait()
        yield stack
