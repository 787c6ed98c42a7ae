"""Native mode on the real engine and the real trainer: how far the two libraries are apart, in which precisions."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from operator import methodcaller
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8rl.diagnose.doctor.formats import differences_of
from fp8rl.diagnose.doctor.watch import engine_holdings
from fp8rl.models import read_model
from fp8rl.numerics.config import NumericsConfig
from fp8rl.rl.run.batching import batch_from_trajectories
from fp8rl.rl.run.engines.canary import Canary
from fp8rl.rl.run.feed.feed import to_groups
from fp8rl.rollout.engine.engine import Engine
from fp8rl.rollout.types import Problem, Prompt, SamplingParams
from fp8rl.trainer.actor import TrainerGroup
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.step.batch import TokenBatch
from fp8rl.weight_sync.served import convert_checkpoint
from tests.support.rig import Pipeline, Rig, Setup, differences, make_engine
from tests.support.tiny_model import TinyModel, write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MODEL = TinyModel(layers=4, hidden=256, heads=4, kv_heads=2, experts=8, top_k=2, vocab=512)
SPREAD = 2.5
"""Factor on the random matrices: a standard deviation of 0.05."""
SEQUENCES, PROMPT_TOKENS, NEW_TOKENS = 32, 32, 48
FP8 = Setup("native", mode="native", router_replay="record")


@dataclasses.dataclass(frozen=True)
class Sides:
    """Two engines of the same weights, in BF16 and in FP8, a trainer, and what each engine sampled."""

    engines: dict[str, Engine]
    trainer: TrainerGroup
    batches: dict[str, TokenBatch]

    def mean_difference(self, trainer: str, rollout: str, replay: bool) -> float:
        """Mean |d| over the tokens of one engine, scored in one precision of the trainer, on its routes or replayed."""
        set_precision(self.trainer, trainer)
        batch = dataclasses.replace(self.batches[rollout], replay=replay)
        return float(differences(self.trainer.score(batch), batch).abs().mean())


@pytest.fixture(scope="module")
def sides(rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    folder = tmp_path_factory.mktemp("native")
    model = rig.models[FP8.model] = write_model(folder / "model")
    setups = {rollout: dataclasses.replace(FP8, rollout=rollout) for rollout in ("bf16", "fp8")}
    engines = {name: make_engine(folder / f"{name}.log", setup.numerics) for name, setup in setups.items()}
    for name, setup in setups.items():
        convert_checkpoint(model, folder / name, setup.numerics.rollout_spec)
    config = TrainerSection(lr=1e-3, warmup_steps=0)
    rig.stop_engine()
    trainer = rig.start_trainer(model, config, FP8.numerics)

    async def start() -> None:
        await asyncio.gather(*(engine.start(folder / name) for name, engine in engines.items()))

    async def stop() -> None:
        await asyncio.gather(*(engine.stop() for engine in engines.values()))

    try:
        rig.run(start())
        yield Sides(engines, trainer, {name: sample(rig, engine, 0) for name, engine in engines.items()})
    finally:
        rig.run(stop())


@pytest.mark.parametrize("rollout", ["bf16", "fp8"])
def test_an_engine_holds_what_the_precision_map_plans(rollout: str, rig: Rig, sides: Sides) -> None:
    (held,) = rig.run(sides.engines[rollout].inventory())
    numerics = dataclasses.replace(FP8, rollout=rollout).numerics
    model = read_model(rig.models[FP8.model])
    sightings = engine_holdings(held, model, numerics)
    assert differences_of(sightings) == []
    other = engine_holdings(held, model, dataclasses.replace(numerics, mode="exact", kv="fp8"))
    (cache,) = [each for each in differences_of(other) if each.key == "engine.kv_cache"]
    assert (cache.found, cache.expected) == ("bf16", "e4m3")
    assert [*cache.names] == [f"{kind} of layer {layer}" for kind in "kv" for layer in range(MODEL.layers)]
    found = {each.found for each in sightings if each.key == "engine.weight"}
    assert found == ({"e4m3"} if rollout == "fp8" else set())


@pytest.mark.parametrize(("replay", "bar"), [(False, 0.55), (True, 0.5)])
def test_fp8_on_both_sides_is_closer_than_beside_a_bf16_trainer(sides: Sides, replay: bool, bar: float) -> None:
    floor = sides.mean_difference("bf16", "bf16", replay)
    both = sides.mean_difference("fp8", "fp8", replay)
    one = sides.mean_difference("bf16", "fp8", replay)
    assert 0 < floor < both < one
    assert floor < 0.25 * one
    assert both <= bar * one


def test_updates_arrive_and_the_sides_stay_as_close(rig: Rig, sides: Sides) -> None:
    set_precision(sides.trainer, "fp8")
    pipeline = Pipeline(rig, FP8, sides.engines["fp8"], sides.trainer)
    batch = sides.batches["fp8"]
    before = differences(pipeline.train_step(batch).logprobs, batch).abs().mean()
    report = pipeline.sync()
    assert (report.version, report.mismatched_tensors) == (1, 0)
    assert report.verified_tensors > 200
    stale = differences(sides.trainer.score(batch), batch).abs().mean()
    fresh = sample(rig, sides.engines["fp8"], 1)
    after = differences(sides.trainer.score(fresh), fresh).abs().mean()
    assert after < 1.5 * before < stale


def test_a_canary_has_known_tokens_here_too_and_is_as_close_as_other_answers(rig: Rig, sides: Sides) -> None:
    canary = Canary.of(0, MODEL.vocab, 512, exact=False)
    (answer,) = rig.run(sides.engines["fp8"].generate([canary.group], canary.sampling))
    difference = canary.difference(answer, sides.trainer.score(canary.batch))
    largest = differences(sides.trainer.score(sides.batches["fp8"]), sides.batches["fp8"]).abs().max()
    assert answer.token_ids == canary.answer_ids and 0 < difference < largest


@pytest.mark.parametrize("only_the_best", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_the_engine_restricts_its_draws_as_the_spec_says(
    rig: Rig, sides: Sides, only_the_best: dict[str, float]
) -> None:
    def first_logprobs(temperature: float, **spec: float) -> torch.Tensor:
        sampling = SamplingParams(max_new_tokens=1, temperature=temperature, **spec)  # type: ignore[arg-type]
        prompts = [Prompt(Problem("", ""), [number, *range(20, 40)]) for number in range(6, 38)]
        groups = to_groups(prompts, 1, run_seed=0, step=1)
        answers = rig.run(sides.engines["bf16"].generate(groups, sampling))
        return torch.tensor([answer.logprobs[0] for answer in answers])

    # Tokens of equal logits, which BF16 makes, are equally good.
    best, restricted = first_logprobs(0.0), first_logprobs(1.0, **only_the_best)
    torch.testing.assert_close(restricted, best, rtol=0, atol=0.05)
    assert (best - first_logprobs(1.0) > 0.5).sum() > 8


def write_model(path: Path) -> Path:
    write_tiny_model(path, MODEL)
    tensors = load_file(path / "model.safetensors")
    for tensor in tensors.values():
        if tensor.dim() > 1:
            tensor *= SPREAD
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def sample(rig: Rig, engine: Engine, version: int) -> TokenBatch:
    """One answer to each of the same random prompts."""
    draw = torch.Generator().manual_seed(0)
    prompts = [
        Prompt(Problem("", ""), torch.randint(6, MODEL.vocab, (PROMPT_TOKENS,), generator=draw).tolist())
        for _ in range(SEQUENCES)
    ]
    groups = to_groups(prompts, 1, run_seed=0, step=1)
    trajectories = rig.run(engine.generate(groups, SamplingParams(max_new_tokens=NEW_TOKENS)))
    return batch_from_trajectories(trajectories, 1.0)


def set_precision(trainer: TrainerGroup, precision: str) -> None:
    numerics: NumericsConfig = dataclasses.replace(FP8.numerics, trainer=precision)
    trainer.apply(methodcaller("set_numerics", numerics))
