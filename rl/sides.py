"""The two sides, started once: the trainer of the spec's layout and one engine, in a folder that does not stay."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import TypeVar

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from numerics.config import NumericsConfig
from rl.batching import batch_from_trajectories
from rl.cluster import ray_cluster
from rl.engines import EnginePool
from rl.interrupts import Closing
from rl.run_dir import RunDir
from rl.spec import ExperimentSpec
from rollout.client import EngineClient
from rollout.types import Prompt, SamplingParams
from trainer.actor import TrainerGroup
from trainer.batch import TokenBatch
from weight_sync.bridge import Bridge, SyncReport
from weight_sync.hf_checkpoint import convert_checkpoint

Result = TypeVar("Result")


@dataclass
class Sides:
    """A trainer and an engine, unsynced.

    Attributes:
        spec: with one engine. numerics: what both sides run now. folder: for everything that has to be written.
        checkpoint: what the engine was started from.
    """

    spec: ExperimentSpec
    numerics: NumericsConfig
    tokenizer: PreTrainedTokenizerBase
    trainer: TrainerGroup
    pool: EnginePool
    folder: Path
    checkpoint: Path

    def sync(self) -> SyncReport:
        """The trainer's weights into the engine, verified. Raises SyncError."""
        bridge = Bridge(
            self.trainer, self.numerics.rollout_spec, self.spec.sync, Path(self.spec.model.path), self.folder
        )
        return bridge.sync(self.pool.endpoints())

    def ask(self, use: Callable[[EngineClient], Awaitable[Result]]) -> Result:
        """What `use` gets from the engine."""
        (endpoint,) = self.pool.endpoints()

        async def asked() -> Result:
            async with EngineClient(endpoint) as client:
                return await use(client)

        return asyncio.run(asked())

    def sample(self, prompts: list[Prompt], group_size: int, temperature: float) -> TokenBatch:
        """`group_size` answers to each prompt, as a step would batch them."""
        sampling = sampling_params(self.spec, self.tokenizer, temperature)
        answers = self.pool.sample(prompts, group_size, sampling, self.trainer.weight_version)
        replay = self.numerics.router_replay == "replay"
        return batch_from_trajectories(answers, torch.zeros(len(answers)), temperature, replay=replay)

    def switch(self, numerics: NumericsConfig) -> None:
        """Run other numerics of the same mode: the trainer as it stands, the engine as a new one, synced."""
        self.pool.stop()
        self.trainer.apply(methodcaller("set_numerics", numerics))
        self.numerics = numerics
        self.checkpoint, self.pool = _start_engine(self.spec, numerics, self.folder)
        self.pool.wait()
        self.sync()


@contextmanager
def open_sides(spec: ExperimentSpec, numerics: NumericsConfig | None = None) -> Iterator[Sides]:
    """Both sides, up and with the handshake passed; all of it ends with the block.

    numerics: if they are not those that the spec gives its layout.

    Raises HandshakeError, and what the start of either side raises.
    """
    spec = spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"engines": 1, "port": None})})
    numerics = numerics or spec.numerics_config()
    with Closing() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="fp8rl-sides-")))
        closing.enter_context(ray_cluster(folder / "ray_logs"))
        checkpoint, pool = _start_engine(spec, numerics, folder)  # it comes up while the trainer does
        closing.callback(pool.stop)
        trainer = start_trainer(spec, numerics)
        closing.callback(trainer.shutdown)
        pool.wait()
        tokenizer = AutoTokenizer.from_pretrained(spec.model.path)
        sides = Sides(spec, numerics, tokenizer, trainer, pool, folder, checkpoint)
        closing.callback(lambda: sides.pool.stop())
        yield sides


def start_trainer(spec: ExperimentSpec, numerics: NumericsConfig) -> TrainerGroup:
    """The trainer of the spec's layout, on the spec's model."""
    return TrainerGroup.start(
        Path(spec.model.path),
        spec.trainer,
        numerics,
        seed=spec.run.seed,
        total_steps=spec.run.steps,
        max_sequence_length=spec.rollout.context_length,
    )


def sampling_params(spec: ExperimentSpec, tokenizer: PreTrainedTokenizerBase, temperature: float) -> SamplingParams:
    """Sampling as the spec has it, at another temperature (0 is greedy)."""
    return SamplingParams(
        max_new_tokens=spec.rollout.max_new_tokens, temperature=temperature, stop_token_ids=(tokenizer.eos_token_id,)
    )


def _start_engine(spec: ExperimentSpec, numerics: NumericsConfig, folder: Path) -> tuple[Path, EnginePool]:
    checkpoint = folder / f"served_{numerics.rollout}"
    convert_checkpoint(Path(spec.model.path), checkpoint, numerics.rollout_spec)
    return checkpoint, EnginePool.start(spec, RunDir(folder), numerics, checkpoint)
