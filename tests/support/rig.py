"""One trainer and one engine with everything real between them, kept alive for as long as tests ask for the same."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import random
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from fp8rl.models import Model, read_model
from fp8rl.models.adapters import AdapterSection
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.sampling import EVERY_TOKEN, Truncation
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rl.algorithms.sft import SftObjective
from fp8rl.rl.run.batching import batch_from_trajectories
from fp8rl.rl.run.cluster.cluster import ray_cluster
from fp8rl.rl.run.engines.serving import expected_report
from fp8rl.rl.run.feed.feed import to_groups
from fp8rl.rollout.config import RolloutSection
from fp8rl.rollout.engine.engine import Engine
from fp8rl.rollout.engine.server.answers import check_versions
from fp8rl.rollout.tasks.environments.conversation import Conversation
from fp8rl.rollout.types import NO_WEIGHTS, Endpoint, Group, Problem, Prompt, SamplingParams, Trajectory
from fp8rl.trainer.actor import TrainerActor, TrainerGroup
from fp8rl.trainer.config import ActorPlacement, TrainerSection, TrainerSpec
from fp8rl.trainer.step.batch import PassResult, TokenBatch
from fp8rl.weight_sync.bridge import Bridge, SyncReport
from fp8rl.weight_sync.config import SyncSection
from fp8rl.weight_sync.frozen import FrozenBase
from fp8rl.weight_sync.served import convert_checkpoint, write_served_checkpoint
from tests.support.tiny_model import TinyModel, write_tiny_model
from tests.support.towers import with_tower
from tests.support.warm_engine import forked_engines

FAMILY = TinyModel(layers=3, hidden=256, heads=2, kv_heads=2, intermediate=256, experts=4, top_k=2, groups=1)
"""Sizes that every family can have."""
MODELS = {family: dataclasses.replace(FAMILY, family=family) for family in TinyModel.families()} | {
    # A head's keys and values are 448 wide: those of two are whole blocks, and two ranks of an engine share four.
    "glm_moe_dsa": dataclasses.replace(FAMILY, family="glm_moe_dsa", heads=4),
    # Heads of 64, of which two share a quantization block; their biases lie as they do.
    "qwen2": dataclasses.replace(FAMILY, family="qwen2", heads=8, kv_heads=4, head_dim=64),
    "moe": TinyModel(
        layers=3, hidden=256, heads=4, kv_heads=2, intermediate=128, experts=8, top_k=4, renormalize=False
    ),
    "dense": TinyModel(layers=2, hidden=256, heads=4, kv_heads=2, intermediate=512, experts=0, vocab=250, tied=True),
    "latent": TinyModel(
        layers=3, hidden=256, heads=4, intermediate=256, experts=8, top_k=4, family="deepseek_v3", yarn=True
    ),
}
BLOCK = 128
CHUNK = 96
"""Tokens of a prefill chunk, shorter than most prompts."""
ALONE = (1, 2, 17, 40, 97, 128, 300)
"""Lengths of the first prompts, those of which none begins as another."""
SHARED_PREFIX = 150
LONGEST_PROMPT = 330
NEW_TOKENS = 24


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a test runs: which model, in which numerics, on which trainer layout."""

    model: str
    preset: str = "fp8_block_pow2"
    trainer: str = "fp8"
    rollout: str = "fp8"
    k_splits: int = 1
    layout: tuple[tuple[str, int | float | str], ...] = ()
    bf16_ends: int = 0
    """Layers that stay in BF16, at the start and at the end."""
    mode: str = "exact"
    router_replay: str = "off"
    engine_tp: int = 1
    adapter: AdapterSection | None = None
    shared_base: bool = False
    kv: str = "bf16"

    @property
    def numerics(self) -> NumericsConfig:
        ends = {"first_layers_bf16": self.bf16_ends, "last_layers_bf16": self.bf16_ends}
        own = {name: getattr(self, name) for name in ("mode", "trainer", "rollout", "k_splits", "router_replay", "kv")}
        return NumericsConfig(spec=QuantSpec.preset(self.preset).override(ends), **own)

    @property
    def served(self) -> tuple[Any, ...]:
        """What the engine depends on."""
        numerics = self.numerics.rollout_spec, self.kv, self.k_splits, self.mode, self.router_replay, self.engine_tp
        return self.model, *numerics, self.beside, self.shared_base

    @property
    def beside(self) -> AdapterSection | None:
        """The adapters that the engine holds beside its weights."""
        return self.adapter if self.adapter is not None and self.adapter.mode == "separate" else None


class Rig:
    """At most one engine and one trainer at a time; each is replaced when a test asks for another. It opens when it is
    first used, and may open again after it was closed."""

    def __init__(self, folder: Path, models: Models) -> None:
        self.folder, self.models = folder, models
        self._opened: ExitStack | None = None
        self._runner = asyncio.Runner()
        self._engine: tuple[Any, Engine] | None = None
        self._trainer: tuple[Setup, TrainerGroup] | None = None
        self._ranks: list[str] = []

    def open(self, setup: Setup) -> Pipeline:
        """The pipeline of a setup, synced: the engine holds the trainer's weights."""
        pipeline = Pipeline(self, setup, self._engine_for(setup), self._trainer_for(setup))
        pipeline.sync()
        return pipeline

    def run(self, call: Any) -> Any:
        """Wait for a coroutine of the engine's event loop."""
        return self._runner.run(call)

    def start_trainer(
        self, model: Path, config: TrainerSection, numerics: NumericsConfig, adapter: AdapterSection | None = None,
        shared_base: bool = False,
    ) -> TrainerGroup:  # fmt: skip
        """A trainer of a model, on ranks that others were on before; it takes the place of the one before."""
        self.up()
        self._trainer = None
        actors = [ray.get_actor(name) for name in self._ranks]
        ray.get([actor.__ray_call__.remote(begin_again, rank, config) for rank, actor in enumerate(actors)])
        self._ranks += [f"rank-{rank}-of-the-rig" for rank in range(len(actors), config.world_size)]
        named = [
            ActorPlacement(options={"name": name, "get_if_exists": True, "lifetime": "detached"})
            for name in self._ranks[: config.world_size]
        ]
        spec = TrainerSpec(model, config, numerics, 0, 100, 512, adapter=adapter, shared_base=shared_base)
        return TrainerGroup.start(spec, named)

    def only_ray(self) -> None:
        """Ray, and room for a test's own engines."""
        self.up()
        self.stop_engine()

    def stop_engine(self) -> None:
        if self._engine is not None:
            self.run(self._engine[1].stop())
            self._engine = None

    def close(self) -> None:
        """End every process."""
        if self._opened is not None:
            self.stop_engine()
            self._trainer, self._ranks = None, []
            gc.collect()  # no handle outlives its Ray
            self._opened.close()
            self._opened = None

    def up(self) -> None:
        """Start Ray, which stacks of this process join, and have their engines forked from the template, too."""
        if self._opened is None:
            with ExitStack() as opening:
                opening.enter_context(forked_engines())  # which Ray's processes hear of
                opening.enter_context(ray_cluster(self.folder / "ray_logs"))
                self._opened = opening.pop_all()

    def _engine_for(self, setup: Setup) -> Engine:
        self.up()
        if self._engine is None or self._engine[0] != setup.served:
            self.stop_engine()
            checkpoint, model, spec = self.folder / "served", self.models[setup.model], setup.numerics.rollout_spec
            if setup.shared_base:
                write_served_checkpoint((), model, checkpoint, spec)
            else:
                convert_checkpoint(model, checkpoint, spec)
            served = setup.numerics, setup.engine_tp, setup.beside, setup.shared_base
            engine = make_engine(self.folder / "engine.log", *served)
            self._runner.run(engine.start(checkpoint, NO_WEIGHTS if setup.shared_base else 0))
            self._engine = setup.served, engine
        return self._engine[1]

    def _trainer_for(self, setup: Setup) -> TrainerGroup:
        if self._trainer is None or self._trainer[0] != setup:
            # Three layers of up to 360 tokens in several micro-batches, and steps large enough to move every expert.
            config = TrainerSection(lr=1e-3, warmup_steps=0, micro_batch_tokens=1024, **dict(setup.layout))
            own = setup.numerics, setup.adapter, setup.shared_base
            self._trainer = setup, self.start_trainer(self.models[setup.model], config, *own)
        return self._trainer[1]


def begin_again(actor: TrainerActor, rank: int, config: TrainerSection) -> None:
    """Forget all models, and the other ranks."""
    actor.stop()
    gc.collect()
    TrainerActor.__init__(actor, rank, config)


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A trainer, an engine and the bridge between them."""

    rig: Rig
    setup: Setup
    engine: Engine
    trainer: TrainerGroup
    held: FrozenBase = dataclasses.field(default_factory=FrozenBase)

    @property
    def endpoint(self) -> Endpoint:
        return self.engine.endpoint

    @property
    def definition(self) -> Model:
        return read_model(self.rig.models[self.setup.model])

    @property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.rig.models[self.setup.model])

    def sync(
        self, transport: str = "tensor", manifest: Path | None = None, delta: bool = False, wakes: bool = False
    ) -> SyncReport:
        """A sync through real buckets: of one MiB, so that a model needs several."""
        return self.bridge(transport, delta=delta, wakes=wakes).sync([self.endpoint], manifest)

    def bridge(
        self, transport: str = "tensor", pause: str = "retract", delta: bool = False, wakes: bool = False
    ) -> Bridge:
        own = {"bucket_mib": 1, "shared_base": self.setup.shared_base}
        config = SyncSection(transport=transport, pause=pause, delta=delta, **own)
        model, spec = self.rig.models[self.setup.model], self.setup.numerics.rollout_spec
        return Bridge(self.trainer, spec, config, model, self.rig.folder, wakes, self.setup.beside, self.held)

    def resume(self) -> None:
        """Have the engine go on after a sync that failed, with whatever weights it has."""
        self.rig.run(self.engine.resume())

    def generate(self, groups: list[Group], sampling: SamplingParams) -> list[Trajectory]:
        answers: list[Trajectory] = self.rig.run(self.engine.generate(groups, sampling))
        check_versions(answers, self.trainer.weight_version, self.trainer.weight_version)
        return answers

    def sample(
        self, temperature: float, seed: int = 0, count: int | None = None, cut: Truncation = EVERY_TOKEN,
        supports: bool = False, answers: int = 2, likeliest: int = 0,
    ) -> TokenBatch:  # fmt: skip
        """So many answers to each of the first `count` prompts, as the loop would batch them."""
        asked = {"supports": supports, "likeliest": likeliest}
        sampling = SamplingParams(NEW_TOKENS, temperature, **dataclasses.asdict(cut), **asked)
        groups = to_groups(prompts(seed)[:count], answers, run_seed=seed, step=1)
        trajectories = self.generate(groups, sampling)
        return batch_from_trajectories(trajectories, temperature, redraws=len(trajectories), truncation=cut)

    def converse(
        self, environment: Callable[[Conversation], Awaitable[object]], count: int, new_tokens: int = 64
    ) -> list[Trajectory]:
        """One conversation about each of the first `count` prompts, all at the same time."""
        tokenizer = self.tokenizer

        async def sample(group: Group, sampling: SamplingParams) -> Trajectory:
            (answer,) = await self.engine.generate([group], sampling)
            return answer

        async def run(seed: int, prompt: Prompt) -> Trajectory:
            conversation = Conversation(prompt, seed, SamplingParams(new_tokens), sample, tokenizer, 60.0)
            await conversation.run(environment)
            return conversation.trajectories({})[0]

        async def all_of_them() -> list[Trajectory]:
            return list(await asyncio.gather(*itertools.starmap(run, enumerate(prompts(3)[-count:]))))

        return self.rig.run(all_of_them())  # type: ignore[no-any-return]

    def train_step(self, batch: TokenBatch) -> PassResult:
        return self.trainer.train_step(batch, SftObjective.of(batch))


def make_engine(
    log: Path, numerics: NumericsConfig, tp: int = 1, adapter: AdapterSection | None = None, shared_base: bool = False,
    **changes: Any,
) -> Engine:  # fmt: skip
    """An engine as a run starts it: prefix cache on, short prefill chunks, handshake expected."""
    config = RolloutSection(context_length=512, max_total_tokens=16384, chunked_prefill_size=CHUNK, tp=tp)
    beside = {"adapter": adapter and adapter.model_dump(mode="json"), "shared_base": shared_base}
    options = {"plugin": {"numerics": numerics.to_dict(), **beside}, "expected": expected_report(numerics, adapter)}
    return Engine(config, log, **{**options, **changes})


class Models(dict[str, Path]):
    """The directories of MODELS, each written when it is first asked for, one in the form that is published."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __missing__(self, name: str) -> Path:
        path = self[name] = write_random(self._folder / name, MODELS[name])
        return with_tower(path) if name == "qwen3_5_moe_text" else path


def write_random(path: Path, shape: TinyModel) -> Path:
    """A model with weights so large that rounding shows in every logprob, and blocks with different scales."""
    write_tiny_model(path, shape)
    noise = torch.Generator().manual_seed(1)
    tensors = load_file(path / "model.safetensors")
    for tensor in tensors.values():
        if tensor.dim() == 1:
            tensor += 0.2 * torch.randn(tensor.shape, generator=noise)
        else:
            tensor *= 4
            tensor[BLOCK:] *= 2
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def prompts(seed: int) -> list[Prompt]:
    """Prompts of 1 to LONGEST_PROMPT random tokens; every second one begins with the same SHARED_PREFIX tokens."""
    draw = random.Random(seed)
    vocabulary = MODELS["moe"].vocab

    def tokens(count: int) -> list[int]:
        return [draw.randrange(6, vocabulary) for _ in range(count)]  # no special tokens, which would end answers

    prefix = tokens(SHARED_PREFIX)
    alone = [tokens(length) for length in ALONE]
    shared = [prefix + tokens(length) for length in (1, 10, 33, 106, LONGEST_PROMPT - SHARED_PREFIX)]
    return [Prompt(Problem("", ""), ids) for ids in alone + shared]


def differences(logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """d = trainer - rollout for every sampled token, [tokens]."""
    return (logprobs - batch.fields["rollout_logprobs"])[batch.loss_mask]
