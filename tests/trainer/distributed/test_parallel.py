"""Two ranks against one: tensor, expert, data and context parallelism, bit for bit where the ops promise it."""

from __future__ import annotations

import functools
import itertools
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from fp8rl.diagnose.doctor.formats import differences_of
from fp8rl.models import read_model, read_shape
from fp8rl.models.checkpoint.reading import stored_tensors
from fp8rl.numerics.config import NumericsConfig
from fp8rl.trainer.config import TrainerSection, TrainerSpec
from fp8rl.trainer.distributed import parallel
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.state_bytes import state_bytes
from fp8rl.weight_sync.served import served_bytes, served_tensors
from tests.support import trainers
from tests.support.batches import Poisoned, cross_entropy, random_batch, random_routes
from tests.support.models import LENGTH, write_family
from tests.support.ranks import run_on_ranks
from tests.support.tiny_model import TinyModel
from tests.support.trainers import POW2, MakeTrainer, Models, critic_on, in_order, save_checkpoint, trainer_on, whole
from tests.support.trees import conversations

pytestmark = pytest.mark.slow

SETTINGS = {"lr": 1e-3, "warmup_steps": 0, "micro_batch_tokens": 220}
LAYOUTS = {
    "ep2": {"ep": 2, "dp": 2}, "dp2": {"dp": 2}, "pp2": {"pp": 2}, "tp2ep2": {"tp": 2, "ep": 2}, "cp2": {"cp": 2},
}  # fmt: skip
RECOMPUTED = {
    "ep2": ("none", "experts"), "dp2": ("none", "attention"), "pp2": ("none", "layer"),
    "tp2ep2": ("experts", "attention"), "cp2": ("layer", "none"),
}  # fmt: skip
"""What the gradients of padded rows and of rows end to end compute once more: layouts differ in a layer's collectives,
a stage's layers, a row's chunks."""
BATCH: dict[str, Any] = {"rows": 7, "longest": 60, "temperature": 0.9}
two_steps = functools.partial(trainers.train, first=5, last=7, **BATCH)
FAMILIES = {
    "ep2": ("sigmoid",), "dp2": ("sigmoid",), "pp2": ("latent", "linear", "sigmoid"),
    "tp2ep2": ("latent", "linear", "sigmoid"), "cp2": ("sigmoid",),
}  # fmt: skip
"""Models of which a layout shares parts in ways of its own: experts, layers, heads, rows. Context-parallel ranks cannot
share a row of latent or linear attention yet."""
BIASED = {"router_bias_rate": 2.0**-10}
TREES: dict[str, Any] = {"prefix_sharing": True, "micro_batch_tokens": 90}
SATURATED = {"kv": "fp8", "key_scale": 2.0**-16, "value_scale": 2.0**-16}
SLICES = {"bf16": 2, "fp8": 1}  # of K on a rank
HEADS_SHARED = "tp2ep2"
"""The layout in which gradients of linear attention are sums of several ranks'."""
CHUNK = 60
"""Tokens that meet the head together, fewer than a micro-batch has."""

T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """What the ranks of one layout do; a method runs on each rank."""

    paths: Models
    checkpoint: Path
    saved: Path
    name: str

    def __call__(self, layout: Layout, config: TrainerSection) -> dict[str, Any]:
        from fp8rl.diagnose.doctor.watch import watch_step
        from fp8rl.trainer.inventory import inventory, transfers

        out: dict[str, Any] = {}
        trainer_of = functools.partial(trainer_on, layout)
        kinds = [("moe", "bf16"), ("moe", "fp8"), *((each, "fp8") for each in FAMILIES[self.name])]
        for kind, precision in kinds + [("dense", "fp8")] * (config.ep == 1):
            biased, slices = BIASED if kind == "sigmoid" else {}, {"k_splits": config.tp * SLICES[precision]}
            trainer = trainer_of(config.model_copy(update=biased), self.paths[kind], precision, slices)
            out[f"{kind}/{precision}"] = reported(layout, trainer.score(random_batch(**BATCH)))
            out[f"{kind} export"], out[f"{kind} stacks"] = exported(trainer), exported(trainer, stacked=True)
            if kind == "sigmoid":
                out["biases"] = biases(trainer)
        trainer = trainer_of(config, self.paths["moe"])
        trainer.export_hf(self.saved.with_name("hf"))
        out["one rank fails"] = self._failing(layout)
        out["turns"] = turns(layout)
        out["routed"] = self._routed(layout, trainer)
        if config.cp == 1:
            out["packed"] = self._packed(layout, config)
            trees = trainer_of(config.model_copy(update=TREES), self.paths["moe"])
            out["trees"] = reported(layout, trees.score(conversations()))
        if "linear" in FAMILIES[self.name]:
            out["saturated"] = saturated(trainer_of(config, self.paths["linear"], numerics=SATURATED))
        if self.name == HEADS_SHARED:
            linear = trainer_of(config, self.paths["linear"], "bf16", {"k_splits": 4}, dtype=torch.float32)
            out["linear gradients"] = gradients(linear)
        out["extra"] = trainer.load(self.checkpoint)
        with transfers() as sent:
            out["resumed"] = two_steps(trainer)
        out["inventory"] = inventory(trainer.optimizer, trainer.cache), sent
        save_checkpoint(trainer, self.saved, {"layout": config.model_dump()})
        batch = random_batch(rows=4, longest=16)
        out["formats"] = watch_step(trainer, batch, cross_entropy(batch), trainer.numerics, config)
        out["non-finite"] = self._non_finite(trainer)
        out["reference"] = self._frozen(layout, trainer)
        out["critic"] = valued(layout, trainer, self.paths["moe"])
        config = config.model_copy(update={"recompute": RECOMPUTED[self.name][0]})
        out["gradients"] = gradients(trainer_of(config, self.paths["moe"], "bf16", dtype=torch.float32))
        return out

    def _failing(self, layout: Layout) -> str:
        from fp8rl.models.checkpoint.writing import write_directory

        def tensors():
            yield str(layout.rank), torch.ones(1)
            if layout.rank == 1:
                raise OSError("no space left")

        with pytest.raises(OSError) as error:
            write_directory(self.saved.with_name("failed"), tensors(), lambda partial: None)
        return str(error.value)

    def _frozen(self, layout: Layout, policy: Any) -> Any:
        """What a model without an optimizer makes of the batch."""
        from fp8rl.trainer.scorer import Scorer

        frozen = Scorer(TrainerSpec(self.paths["moe"], policy.config, policy.numerics, 0, 1, LENGTH), layout)
        return reported(layout, frozen.score(random_batch(**BATCH)))

    def _routed(self, layout: Layout, trainer: Any) -> Any:
        return reported(layout, trainer.score_routed(routed_batch())) if trainer.config.pp == 1 else None

    def _packed(self, layout: Layout, config: TrainerSection) -> tuple[Any, Any, dict[str, Tensor]]:
        """Log-probabilities with less memory, what is said of routes, and gradients, of rows that lie end to end."""
        less = {"packing": True, "micro_batch_tokens": 160, "head_chunk_tokens": CHUNK}
        config = config.model_copy(update=less | {"recompute": RECOMPUTED[self.name][1]})
        trainer = trainer_on(layout, config, self.paths["moe"])
        scored = reported(layout, trainer.score(random_batch(**BATCH)))
        routed = self._routed(layout, trainer)
        return scored, routed, gradients(trainer_on(layout, config, self.paths["moe"], "bf16", dtype=torch.float32))

    def _non_finite(self, trainer: Any) -> str:
        from fp8rl.trainer.step.batch import NonFiniteLossError

        with pytest.raises(NonFiniteLossError) as error:
            trainer.train_step(random_batch(**BATCH), Poisoned(BATCH["longest"]))
        return str(error.value)


def valued(layout: Layout, policy: Any, path: Path) -> Any:
    """What a critic says of a batch, and loss and norm of two steps of it."""
    critic = critic_on(layout, policy, path)
    return reported(layout, critic.score(random_batch(**BATCH))), two_steps(critic)


def biases(trainer: Any) -> dict[str, Tensor]:
    batch = random_batch(**BATCH)
    trainer.train_step(batch, cross_entropy(batch))
    return {name: held.clone() for name, held in trainer.model.named_buffers() if name.endswith("expert_bias")}


def saturated(trainer: Any) -> float:
    batch = random_batch(**BATCH)
    done = trainer.forward_backward(batch, cross_entropy(batch))
    return done.result.metrics["train/kv_saturated"]  # type: ignore[no-any-return]


def exported(trainer: Any, stacked: bool = False) -> dict[str, Tensor]:
    shared = (trainer.definition.tensors.stack(*pair) for pair in trainer.weights.share(trainer.model, stacked))
    return {name: tensor.clone() for names, stack in shared for name, tensor in zip(names, stack, strict=True)}


def turns(layout: Layout) -> dict[str, Any]:
    """When this rank had its turns, and what those hear that wait behind rank 0 for longer than they may."""
    times, said = [], ""
    for _ in range(3):
        with parallel.in_turn("some"):
            began = time.monotonic()
            time.sleep(0.02)
            times.append((began, time.monotonic()))
    if layout.rank == 0:
        with parallel.in_turn("stuck"):
            dist.barrier()
            dist.barrier()  # the others have given up
    else:
        dist.barrier()
        with pytest.raises(TimeoutError) as error, parallel.in_turn("stuck", timedelta(seconds=0.1)):
            raise AssertionError("two at once")
        said = str(error.value)
        dist.barrier()
    return {"times": times, "said": said}


def reported(layout: Layout, scored: T) -> T | None:
    return scored if layout.is_reporting_rank else None


def routed_batch():
    batch = random_batch(**BATCH)
    return replace(batch, routes=random_routes(batch), replay=True)


def gradients(trainer: Any) -> dict[str, Tensor]:
    """The summed gradients by HF name, those of this rank's share."""
    batch, wrapped = random_batch(**BATCH), trainer.optimizer.model
    trainer._pass(batch, cross_entropy(batch))
    for buffer in (*wrapped.buffers, *wrapped.expert_parallel_buffers):
        # The distributed optimizer leaves each rank the sums of its own part of the buffer.
        group = buffer.data_parallel_group
        parts = list(buffer.grad_data.chunk(group.size()))
        dist.all_gather(parts, parts[group.rank()].clone(), group=group)
    for parameter in trainer.model.parameters():
        parameter.data.copy_(parameter.main_grad)
    return exported(trainer)


@dataclass(frozen=True)
class Outcome:
    name: str
    ranks: list[dict[str, Any]]
    config: TrainerSection
    saved: Path

    def union(self, key: str) -> dict[str, Tensor]:
        return {name: tensor for rank in self.ranks for name, tensor in rank[key].items()}

    def scores(self, key: str) -> Tensor:
        return whole([rank[key] for rank in self.ranks])


@pytest.fixture(scope="module")
def paths(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Some have parts that ranks share in ways of their own: latents; a router of sigmoids with biases; heads of linear
    attention, and a gated shared expert. The layers of the sigmoid one and of the latent one are not alike."""
    shape = TinyModel(hidden=256, heads=4, kv_heads=2, intermediate=256, experts=8, family="glm4_moe")
    return models | {"sigmoid": write_family(tmp_path_factory.mktemp("sigmoid") / "model", shape)}


class OneRank:
    """What one rank makes of the same, computed once for each number of slices that K is summed in."""

    def __init__(self, make: MakeTrainer, paths: Models, layout: Layout, folder: Path) -> None:
        self.make, self.paths, self.layout, self.checkpoint = make, paths, layout, folder / "one"
        trainer = self.trainer("moe", "fp8", 1)
        two_steps(trainer)
        save_checkpoint(trainer, self.checkpoint, {"from": "one rank"})

    def trainer(self, kind: str, precision: str, k_splits: int, **more: Any) -> Any:
        return self.make(self.paths[kind], precision, k_splits=k_splits, **SETTINGS | more)

    @functools.cache  # noqa: B019
    def scores(self, kind: str, precision: str, k_splits: int) -> Tensor:
        return in_order(*self.trainer(kind, precision, k_splits).score(random_batch(**BATCH)))

    @functools.cache  # noqa: B019
    def routed(self, k_splits: int) -> Any:
        rows, found = self.trainer("moe", "fp8", k_splits).score_routed(routed_batch())
        return in_order(rows, found.logprobs), in_order(rows, found.routes)

    @functools.cache  # noqa: B019
    def trees(self, k_splits: int) -> Tensor:
        return in_order(*self.trainer("moe", "fp8", k_splits, packing=True).score(conversations()))

    @functools.cache  # noqa: B019
    def biases(self, k_splits: int) -> dict[str, Tensor]:
        return biases(self.trainer("sigmoid", "fp8", k_splits, **BIASED))

    @functools.cache  # noqa: B019
    def critic(self, k_splits: int) -> Any:
        return valued(self.layout, self.trainer("moe", "fp8", k_splits), self.paths["moe"])

    @functools.cache  # noqa: B019
    def gradients(self, kind: str, k_splits: int) -> dict[str, Tensor]:
        return gradients(self.trainer(kind, "bf16", k_splits, dtype=torch.float32))

    @functools.cache  # noqa: B019
    def resumed(self, k_splits: int) -> tuple[Any, list[tuple[float, ...]]]:
        """A trainer that has gone on from the checkpoint, and its two steps."""
        trainer = self.trainer("moe", "fp8", k_splits)
        trainer.load(self.checkpoint)
        return trainer, two_steps(trainer)


@pytest.fixture(scope="module")
def one_rank(make_trainer, paths, layout, tmp_path_factory) -> OneRank:
    return OneRank(make_trainer, paths, layout, tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module", params=list(LAYOUTS))
def outcome(request, paths, one_rank, tmp_path_factory) -> Outcome:
    config = TrainerSection(**SETTINGS, **LAYOUTS[request.param])
    folder = tmp_path_factory.mktemp(request.param)
    case = Case(paths, one_rank.checkpoint, folder / "saved", request.param)
    return Outcome(request.param, run_on_ranks(config, folder / "ranks", case), config, case.saved)


def test_logprobs_are_bit_equal(outcome: Outcome, one_rank: OneRank) -> None:
    for key in [key for key in outcome.ranks[0] if key.endswith(("/bf16", "/fp8"))]:
        kind, precision = key.split("/")
        expected = one_rank.scores(kind, precision, outcome.config.tp * SLICES[precision])
        assert torch.equal(outcome.scores(key), expected), key
    assert torch.equal(outcome.scores("reference"), outcome.scores("moe/fp8"))


def test_a_critic_s_values_are_bit_equal_and_its_steps_those_of_one_rank(outcome: Outcome, one_rank: OneRank) -> None:
    expected, steps = one_rank.critic(outcome.config.tp)
    assert expected[1].abs().max() > 0.1
    assert torch.equal(whole([rank["critic"][0] for rank in outcome.ranks]), in_order(*expected))
    assert_close_steps([rank["critic"][1] for rank in outcome.ranks], steps)


def assert_close_steps(of_ranks: list[list[tuple[float, ...]]], expected: list[tuple[float, ...]]) -> None:
    """Loss, norm and rate of steps: the same on each rank, and nearly those of one."""
    for steps in of_ranks:
        assert steps == of_ranks[0]
        assert all(found == pytest.approx(wanted, rel=2e-2) for found, wanted in zip(steps, expected, strict=True))


def test_replayed_routes_are_bit_equal(outcome: Outcome, one_rank: OneRank) -> None:
    if outcome.config.pp > 1:
        pytest.skip("refused before a trainer starts")
    logprobs, routes = one_rank.routed(outcome.config.tp)
    packed = [rank["packed"][1] for rank in outcome.ranks if "packed" in rank]
    for said in filter(None, ([rank["routed"] for rank in outcome.ranks], packed)):
        for name, expected in (("logprobs", logprobs), ("routes", routes)):
            assert torch.equal(whole([(rows, getattr(found, name)) for rows, found in filter(None, said)]), expected)


def test_rows_end_to_end_have_the_bits_of_padded_ones_and_their_gradients(outcome: Outcome, one_rank: OneRank) -> None:
    if outcome.config.cp > 1:
        pytest.skip("rows that ranks share are not laid end to end")
    assert torch.equal(whole([rank["packed"][0] for rank in outcome.ranks]), outcome.scores("moe/fp8"))
    assert torch.equal(outcome.scores("trees"), one_rank.trees(outcome.config.tp))
    padded = outcome.union("gradients")
    found = {name: value for rank in outcome.ranks for name, value in rank["packed"][2].items()}
    assert found.keys() == padded.keys()
    for name, value in padded.items():
        assert (found[name] - value).norm() <= 1e-6 * value.norm(), name


def test_routers_biases_move_as_on_one_rank(outcome: Outcome, one_rank: OneRank) -> None:
    alone = one_rank.biases(outcome.config.tp)
    assert len(alone) == 1 and all(bias.any() for bias in alone.values())
    held = [rank["biases"] for rank in outcome.ranks if rank["biases"]]
    assert len(held) == (1 if outcome.config.pp > 1 else 2)
    assert all(torch.equal(*rank.values(), *alone.values()) for rank in held)


def test_ranks_without_keys_count_the_saturated_ones_along(outcome: Outcome, one_rank: OneRank) -> None:
    if "linear" not in FAMILIES[outcome.name]:
        pytest.skip("every rank has keys")
    expected = saturated(one_rank.trainer("linear", "fp8", outcome.config.tp, kv=SATURATED))
    assert 0.5 < expected < 1
    assert [rank["saturated"] for rank in outcome.ranks] == [pytest.approx(expected, rel=1e-12)] * 2


def test_gradients_are_the_sums_of_one_rank(outcome: Outcome, one_rank: OneRank) -> None:
    keys = {"moe": "gradients"} | ({"linear": "linear gradients"} if outcome.name == HEADS_SHARED else {})
    for kind, key in keys.items():
        expected, found = one_rank.gradients(kind, 4 if kind == "linear" else outcome.config.tp), outcome.union(key)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
            if outcome.config.cp > 1:
                assert (found[name] - value).norm() <= 1e-6 * value.norm(), name


def test_weights_leave_as_they_came(outcome: Outcome, paths: Models) -> None:
    written = dict(stored_tensors(outcome.saved.with_name("hf"), read_model(paths["moe"])))
    kinds = ("moe", *FAMILIES[outcome.name])
    for kind, found in [("moe", written), *((kind, outcome.union(f"{kind} export")) for kind in kinds)]:
        stored = load_file(paths[kind] / "model.safetensors")
        assert found.keys() == stored.keys() and all(torch.equal(found[name], stored[name]) for name in stored)


def test_what_one_rank_cannot_do_all_know_of(outcome: Outcome) -> None:
    assert [rank["one rank fails"] for rank in outcome.ranks] == ["no space left"] * len(outcome.ranks)
    assert not outcome.saved.with_name("failed").exists() and len({rank["non-finite"] for rank in outcome.ranks}) == 1
    assert "rows [0" in outcome.ranks[0]["non-finite"]


def test_every_rank_hands_out_about_as_much_and_nothing_twice(outcome: Outcome) -> None:
    names = [name for rank in outcome.ranks for name in rank["moe export"]]
    assert len(names) == len(set(names))
    sizes = [[tensor.nbytes for tensor in rank["moe export"].values()] for rank in outcome.ranks]
    assert max(map(sum, sizes)) - min(map(sum, sizes)) <= 2 * max(map(max, sizes))
    stacks = outcome.union("moe stacks")
    assert stacks.keys() == set(names) and sum(len(rank["moe stacks"]) for rank in outcome.ranks) == len(names)
    assert all(torch.equal(stacks[name], tensor) for name, tensor in outcome.union("moe export").items())


def test_ranks_take_turns_and_say_for_whom_they_wait(outcome: Outcome) -> None:
    times = sorted(turn for rank in outcome.ranks for turn in rank["turns"]["times"])
    assert len(times) == 3 * len(outcome.ranks)
    assert all(ended <= began for (_, ended), (began, _) in itertools.pairwise(times))
    said = [rank["turns"]["said"] for rank in outcome.ranks[1:]]
    assert "stuck: found trainer rank 0 still busy after 0.1 s, expected it to finish" in said
    assert all("found trainer rank" in text for text in said)


def test_a_checkpoint_moves_between_layouts(outcome: Outcome, one_rank: OneRank) -> None:
    trainer, expected = one_rank.resumed(outcome.config.tp)
    assert outcome.ranks[0]["extra"] == {"from": "one rank"}
    assert_close_steps([rank["resumed"] for rank in outcome.ranks], expected)
    assert trainer.load(outcome.saved)["layout"]["tp"] == outcome.config.tp and trainer.weight_version == 4


def test_ranks_hold_and_send_the_bytes_that_are_calculated(outcome: Outcome, paths: Models) -> None:
    """To the byte; what is quantized has been forgotten after an update. Gradients go in FP32, weights in BF16."""
    config, shape, path = outcome.config, read_shape(paths["moe"]), paths["moe"]
    for rank, found in enumerate(outcome.ranks):
        numerics = NumericsConfig(spec=POW2)
        states = state_bytes(shape, config, numerics, "torch", rank)
        for kind in ("parameters", "gradients", "masters", "moments"):
            held = sum(each.bytes for each in found["inventory"][0] if each.kind == kind)
            assert held == sum(getattr(state, kind) for state in states.values()), (rank, kind)
        for name, form in (("reduce_scatter_tensor_coalesced_", "fp32"), ("allgather_into_tensor_coalesced_", "bf16")):
            sent = [each for each in found["inventory"][1] if each.collective == name]
            assert {each.format for each in sent} == {form}
            assert {each.ranks for each in sent} == {config.copies, config.stage_size // config.ep}
    served = served_tensors(outcome.union("moe export").items(), POW2, read_model(path))
    assert sum(tensor.nbytes for _, tensor in served) == served_bytes(shape, POW2)


def test_every_rank_computes_as_the_precision_map_plans(outcome: Outcome) -> None:
    assert [differences_of(rank["formats"]) for rank in outcome.ranks] == [[], []]
    seen = {each.key for rank in outcome.ranks for each in rank["formats"]}
    config = outcome.config
    assert ("wire.layer" in seen) == (max(config.tp, config.ep, config.pp, config.cp) > 1)
    assert {"gradient.wire", "wire.weights", "product.gradient", "softmax.reduction", "loss.reduction"} <= seen
