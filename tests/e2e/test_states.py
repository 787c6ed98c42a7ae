"""Linear attention in the engine: every value of its layers is the trainer's, however the tokens came, and no state
outlives its weights."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8rl.diagnose.attribution import attribute
from fp8rl.models import read_shape
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rl.run.engines.serving import expected_report
from fp8rl.rollout.config import RolloutSection
from fp8rl.rollout.engine.actor import Engine
from fp8rl.rollout.engine.server.client import EngineClient
from fp8rl.rollout.types import Completion, Endpoint, SamplingParams
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.weight_sync.served import convert_checkpoint
from fp8rl.weight_sync.transports.tensor import TensorTransport
from tests.support.batches import batch_of_answers, cross_entropy
from tests.support.plants import PLANT, states_of_another_request
from tests.support.rig import ALONE, CHUNK, Rig, Setup, write_random
from tests.support.syncs import push
from tests.support.tiny_model import TinyModel

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SHAPE = TinyModel(
    layers=4, hidden=256, heads=2, kv_heads=2, intermediate=128, experts=4, top_k=2, max_positions=1024,
    family="qwen3_next",
)  # fmt: skip
LINEAR = (0, 1, 2)
NUMERICS = NumericsConfig(spec=QuantSpec.preset("fp8_block_pow2"))
PROMPTS, NEW, RUNNING = (420, 150, 70, 5), 40, 8
STATES = 3 * RUNNING
Rows = dict[tuple[str, int], list[tuple[int, Tensor, Tensor]]]
"""By request and layer: position, input and output of each token, in the order in which they were computed."""


@pytest.fixture
def trainer(layout: Layout, tmp_path: Path) -> Any:
    from fp8rl.trainer.trainer import Trainer

    model = write_random(tmp_path / "model", SHAPE)
    config = TrainerSection(lr=1e-3, warmup_steps=0)
    return Trainer(model, config, NUMERICS, layout, seed=0, total_steps=9, max_sequence_length=1024)


class Served:
    """The engine, its client, and what its layers wrote down."""

    def __init__(self, runner: asyncio.Runner, endpoint: Endpoint, folder: Path) -> None:
        self.run, self.endpoint, self._folder = runner.run, endpoint, folder
        self.draw = torch.Generator().manual_seed(1)

    def ask(self, call: str, *arguments: Any) -> Any:
        async def ask() -> Any:
            async with EngineClient(self.endpoint) as client:
                return await getattr(client, call)(*arguments)

        return self.run(ask())

    def prompts(self, *lengths: int) -> list[list[int]]:
        return [torch.randint(6, SHAPE.vocab, (length,), generator=self.draw).tolist() for length in lengths]

    def answer(self, prompts: list[list[int]]) -> list[Completion]:
        return self.run(self._answer(prompts))

    def answer_with_a_retraction(self, prompts: list[list[int]]) -> list[Completion]:
        """All requests go back to the queue while they decode, and find no prefix of theirs then."""

        async def both() -> list[Completion]:
            async with EngineClient(self.endpoint) as client:
                answers = asyncio.create_task(self._answer(prompts))
                while not any(set(record["counts"]) == {1} for record in self.records()):
                    await asyncio.sleep(0.05)
                await client.pause("retract")
                await client.flush()
                await client.resume()
                return await answers

        return self.run(both())

    async def _answer(self, prompts: list[list[int]]) -> list[Completion]:
        async with EngineClient(self.endpoint) as client:
            return await client.complete(prompts, SamplingParams(NEW, temperature=1.0), range(len(prompts)))

    def records(self) -> Iterator[dict[str, Any]]:
        for path in sorted(self._folder.glob("*.pt")):
            yield torch.load(path, weights_only=True)

    def rows(self) -> Rows:
        """Everything that was written down since the last time."""
        found: Rows = defaultdict(list)
        for record in self.records():
            parts = [record[name].split(record["counts"]) for name in ("positions", "x", "y")]
            for request, *own in zip(record["requests"], *parts, strict=True):
                found[request, record["layer"]] += zip(own[0].tolist(), *own[1:], strict=True)
        for path in self._folder.glob("*.pt"):
            path.unlink()
        return found


@pytest.fixture
def served(trainer: Any, tmp_path: Path, warm_engines: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    folder = tmp_path / "recorded"
    folder.mkdir()
    monkeypatch.setenv("FP8RL_RECORDED_LAYERS", str(folder))
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "tests.support.recorded")
    convert_checkpoint(tmp_path / "model", tmp_path / "served", NUMERICS.rollout_spec)
    config = RolloutSection(
        context_length=1024, max_total_tokens=16384, chunked_prefill_size=CHUNK, max_running_requests=RUNNING
    )
    plugin, expected = {"numerics": NUMERICS.to_dict()}, expected_report(NUMERICS, None)
    engine = Engine(config, tmp_path / "engine.log", plugin=plugin, expected=expected)
    with asyncio.Runner() as runner:
        endpoint = runner.run(engine.start(tmp_path / "served", 0))
        try:
            yield Served(runner, endpoint, folder)
        finally:
            runner.run(engine.stop())


def test_states_that_are_not_a_sequences_own_are_named_first(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine computes each op right, and does not give its own answers again."""
    rig.only_ray()  # before the fault, or Ray would hand it on to engines of its own actors
    monkeypatch.setenv(PLANT, states_of_another_request.__name__)
    pipeline = rig.open(Setup("qwen3_next"))
    batch = pipeline.sample(1.0, count=len(ALONE), answers=1)
    setup = pipeline.setup.numerics, pipeline.definition
    first, *others = attribute(pipeline.trainer, pipeline.endpoint, batch, *setup).findings
    rig.stop_engine()
    assert first.cause == "state" and "does not reproduce the recorded log-probabilities" in first.text and not others


def test_states_are_the_trainers_and_no_older_than_the_weights(trainer: Any, served: Served, tmp_path: Path) -> None:
    prompts = served.prompts(*PROMPTS)
    answers = served.answer_with_a_retraction(prompts)
    rows = served.rows()
    assert sum(computed_again(own) for own in rows.values()) > 400 * len(LINEAR), "the retraction came too late"
    longest = max(rows, key=lambda key: len(once(rows[key])))[0]
    assert values_equal(trainer, rows) > 500_000
    assert_equal(trainer, prompts, answers)

    # A second turn begins where the state of the first one ended.
    turn = [prompts[0] + answers[0].token_ids + served.prompts(3)[0]]
    again = served.answer(turn)
    more = served.rows()
    begins = {min(position for position, *_ in own) for own in more.values()}
    assert begins == {len(turn[0]) - 4}, "all but the last token of the answer, which was not computed yet"
    whole = {key: once(rows[longest, key[1]])[: begins.copy().pop()] + own for key, own in more.items()}
    assert values_equal(trainer, whole) > 300_000
    assert_equal(trainer, turn, again)

    # Nothing is read of the states of older weights, nor of a memory that was given up.
    batch = batch_of_answers(prompts[1:], answers[1:])
    trainer.train_step(batch, cross_entropy(batch))
    sync(trainer, served)
    fresh = served.answer(turn)
    assert {min(position for position, *_ in own) for own in served.rows().values()} == {0}
    assert_equal(trainer, turn, fresh)
    shape = read_shape(tmp_path / "model")
    (before,) = served.ask("memory")
    assert before.kv_cache == shape.kv_bytes() * (16384 + 1) + shape.request_bytes() * (STATES + 1)
    served.ask("pause", "retract")
    served.ask("release")
    (asleep,) = served.ask("memory")
    assert (asleep.weights, asleep.kv_cache) == (0, 0) and before.in_use - asleep.in_use > before.kv_cache / 2
    served.ask("occupy")
    sync(trainer, served)
    awake = served.answer(turn)
    assert awake[0].token_ids == fresh[0].token_ids
    assert values_equal(trainer, served.rows()) > 300_000
    assert_equal(trainer, turn, awake)


def sync(trainer: Any, served: Served) -> None:
    version = trainer.weight_version
    _, report, problems = push(trainer, TensorTransport(1 << 20), NUMERICS.rollout_spec, [served.endpoint], version)
    assert problems == [] and report.mismatched_tensors == 0


def once(rows: list[tuple[int, Tensor, Tensor]]) -> list[tuple[int, Tensor, Tensor]]:
    """Each position once, in order."""
    return [row for _, row in sorted({row[0]: row for row in rows}.items())]


def computed_again(rows: list[tuple[int, Tensor, Tensor]]) -> int:
    """Return how many tokens were computed more than once; their values are the same each time."""
    first: dict[int, tuple[Tensor, Tensor]] = {}
    for position, x, y in rows:
        same = first.setdefault(position, (x, y))
        assert same[0].equal(x) and same[1].equal(y)
    return len(rows) - len(first)


def values_equal(trainer: Any, rows: Rows) -> int:
    """Return how many values of the layers are, bit for bit, what the trainer's module gives for whole sequences."""
    count = 0
    assert {layer for _, layer in rows} == set(LINEAR)
    for (_, layer), own in rows.items():
        ordered = once(own)
        assert [position for position, *_ in ordered] == list(range(len(ordered)))
        x, y = (torch.stack([row[each] for row in ordered]) for each in (1, 2))
        with torch.no_grad():
            expected, _ = trainer.model.decoder.layers[layer].self_attention(x[:, None])
        differ = (expected[:, 0] != y).any(1).nonzero().flatten().tolist()
        assert not differ, f"layer {layer}, tokens {differ[:9]} of {len(y)}"
        count += y.numel()
    return count


def assert_equal(trainer: Any, prompts: list[list[int]], answers: list[Completion]) -> None:
    batch = batch_of_answers(prompts, answers)
    rows, scored = trainer.score(batch)
    d = (scored - batch.fields["rollout_logprobs"][rows])[batch.loss_mask[rows]]
    assert len(d) >= len(prompts) and not d.any()
