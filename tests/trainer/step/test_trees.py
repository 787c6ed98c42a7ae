"""Micro-batches as prefix trees against rows end to end: the same bits for every token, gradients but for rounding."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8rl.diagnose.audit import differences_of
from fp8rl.diagnose.audit.watch import watch_step
from fp8rl.models.adapters import AdapterSection
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.sampling import Truncation
from fp8rl.numerics.spec import QuantSpec
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.step.batch import UNKNOWN, KeptTokenPool, TokenBatch
from fp8rl.trainer.step.objective import ObjectiveOutput
from fp8rl.trainer.step.trees import TreeMicroBatch, plan_trees, token_keys
from tests.support.batches import cross_entropy, random_routes
from tests.support.models import VOCAB
from tests.support.ranks import run_on_ranks
from tests.support.trainers import MakeTrainer, critic_values
from tests.support.trees import batch_of_rows, branching_rows, conversations, groups

ALONE = 1 << 16
"""Tokens of a micro-batch that holds every row."""


@dataclass
class PolicyGradient:
    """Each row's log-probabilities times its advantage, and some entropy. It keeps the entropy of each pass."""

    targets: int
    entropy: Tensor | None = None

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: TokenBatch) -> ObjectiveOutput:
        self.entropy = entropy.detach().clone()
        gain = logprobs * batch.fields["advantages"] + 0.01 * entropy
        return ObjectiveOutput(-(gain * batch.loss_mask).sum() / self.targets)


def passed(trainer: Any, batch: TokenBatch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What a pass says of each token, in the order of the batch, and its gradients."""
    objective = PolicyGradient(int(batch.loss_mask.sum()))
    done = trainer.forward_backward(batch, objective)
    order = torch.tensor(done.rows).argsort()
    found = {
        name: value[order]
        for name in ("logprobs", "routes", "draws")
        if (value := getattr(done.result, name)) is not None
    }
    if objective.entropy is not None and len(objective.entropy) == batch.rows:  # of the one micro-batch
        found["entropy"] = objective.entropy[order]
    trained = ((name, p) for name, p in trainer.model.named_parameters() if p.requires_grad)
    return found, {name: p.main_grad.clone() for name, p in trained}


def drawn(batch: TokenBatch) -> TokenBatch:
    """Some of the rows are drawn again."""
    return replace(batch, seeds=torch.arange(batch.rows).where(torch.arange(batch.rows) % 3 > 0, -1) * 7919)


def with_supports(batch: TokenBatch) -> TokenBatch:
    """Every other row carries the tokens that top-p kept; of the others the trainer finds them."""
    carried = batch.loss_mask & (torch.arange(batch.rows) % 2 == 0)[:, None]
    own = [sorted({token, (token + 5) % VOCAB, (token + 11) % VOCAB}) for token in batch.tokens[carried].tolist()]
    counts, ids = torch.tensor([len(each) for each in own]), torch.tensor([token for each in own for token in each])
    return replace(batch, truncation=Truncation(top_p=0.7), supports=KeptTokenPool.of(carried, counts, ids))


def routed(batch: TokenBatch) -> TokenBatch:
    """The routers' own choice is reported; none is given."""
    return replace(batch, routes=torch.full_like(random_routes(batch), UNKNOWN))


def of_two_versions(batch: TokenBatch) -> TokenBatch:
    """Routes to be replayed: those of even rows and of odd rows differ where their tokens do not."""
    routes = random_routes(batch)
    both = routes[torch.arange(batch.rows) % 2]
    known = torch.arange(batch.width) < batch.lengths[:, None] - 1
    return replace(batch, routes=both.where(known[:, :, None, None], UNKNOWN), replay=True)


BATCHES = {
    "answers": drawn(groups(40, 24)),
    "branches": drawn(conversations()),
    "top-p": drawn(replace(conversations(), truncation=Truncation(top_p=0.7))),
    "supports carried": with_supports(conversations()),
}


def of_real_tokens(found: dict[str, Tensor], batch: TokenBatch) -> dict[str, Tensor]:
    """The same with zeros in the padding."""
    real = batch.real_tokens()
    return {
        name: torch.where(real.view(*real.shape, *[1] * (x.dim() - 2)), x[:, : batch.width], 0)
        for name, x in found.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("path", ["moe_path", "dense_path", "latent_path", "linear_path"])
def test_what_a_pass_says_of_tokens_has_the_bits_of_rows_end_to_end(
    path: str, make_trainer: MakeTrainer, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(path)
    flat = make_trainer(folder, "fp8", packing=True, micro_batch_tokens=ALONE)
    tree = make_trainer(folder, "fp8", prefix_sharing=True, micro_batch_tokens=ALONE)
    batches = BATCHES if path == "moe_path" else dict(list(BATCHES.items())[:2])
    if path == "moe_path":
        batches |= {"routes": routed(conversations()), "two versions' routes": of_two_versions(conversations())}
    for name, batch in batches.items():
        wanted = of_real_tokens(passed(flat, batch)[0], batch)
        found = of_real_tokens(passed(tree, batch)[0], batch)
        assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted), name


@pytest.mark.slow
def test_recomputation_chunks_and_several_micro_batches_change_no_bit(
    moe_path: Path, make_trainer: MakeTrainer
) -> None:
    batch = routed(drawn(conversations()))
    flat, tree = (
        make_trainer(moe_path, "fp8", **keys)
        for keys in (
            {"packing": True, "micro_batch_tokens": ALONE},
            {"prefix_sharing": True, "micro_batch_tokens": 90, "recompute": "layer", "head_chunk_tokens": 37},
        )
    )
    wanted = of_real_tokens(passed(flat, batch)[0], batch)
    found = of_real_tokens(passed(tree, batch)[0], batch)
    assert len(TreeMicroBatch.plan(batch, 1, 90, 1)[0]) > 1
    assert all(torch.equal(found[name], wanted[name]) for name in ("logprobs", "routes", "draws"))


@pytest.mark.slow
@pytest.mark.parametrize("path", ["moe_path", "latent_path", "linear_path"])
def test_gradients_in_fp32_are_those_of_rows_end_to_end(
    path: str, make_trainer: MakeTrainer, request: pytest.FixtureRequest
) -> None:
    batch, folder = conversations(), request.getfixturevalue(path)
    flat, tree = (
        passed(make_trainer(folder, dtype=torch.float32, micro_batch_tokens=ALONE, **keys), batch)[1]
        for keys in ({"packing": True}, {"prefix_sharing": True})
    )
    off = sum((tree[name] - wanted).square().sum() for name, wanted in flat.items())
    assert off.sqrt() <= 2e-6 * sum(wanted.square().sum() for wanted in flat.values()).sqrt()
    for name, wanted in flat.items():
        assert (tree[name] - wanted).norm() <= 1e-5 * wanted.norm(), name


def test_a_critic_reads_the_same_values(moe_path: Path, make_trainer: MakeTrainer, layout: Any) -> None:
    policy, batch = make_trainer(moe_path, "fp8"), conversations()
    found = [
        critic_values(policy, moe_path, batch, layout, **keys) for keys in ({"packing": True}, {"prefix_sharing": True})
    ]
    assert found[0].abs().max() > 0.1 and torch.equal(*found)


@pytest.mark.parametrize("keys", [{"mode": "native"}, {"cp": 2}])
def test_it_is_refused_where_a_token_s_bits_depend_on_its_row(
    keys: dict[str, Any], moe_path: Path, make_trainer: MakeTrainer
) -> None:
    with pytest.raises(UserError, match=r"trainer\.prefix_sharing: found 'true with"):
        make_trainer(moe_path, "fp8", prefix_sharing=True, **keys)


def test_tokens_come_back_to_all_rows_that_share_them() -> None:
    batch = groups(5, 6)
    rows = [3, 0, 1, 2]
    micro = TreeMicroBatch.of(batch, rows, multiple=16)
    chosen, layout = micro.batch, micro.packed_rows
    tokens = micro.to_model(chosen.tokens)
    assert layout is not None and tokens.shape[1] % 16 == 0 and micro.real < int(chosen.real_tokens().sum())
    back = micro.from_model(tokens[..., None].expand(-1, -1, 2), padding=-1)
    assert torch.equal(back[..., 0], torch.where(chosen.real_tokens(), chosen.tokens, -1))
    positions = micro.from_model(layout.positions[None], padding=0)
    assert torch.equal(positions, torch.where(chosen.real_tokens(), torch.arange(chosen.width), 0))
    hidden = torch.arange(tokens.shape[1]).view(-1, 1, 1).float()  # each token's place in the layout
    predicted = micro.from_targets(micro.predictors(hidden).flatten())
    places = micro.from_model(torch.arange(tokens.shape[1])[None])
    before = torch.where(chosen.real_tokens()[:, 1:], places[:, :-1], 0)
    assert torch.equal(predicted, before.float())
    found = micro.from_targets(micro.targets_of(chosen.tokens))
    assert torch.equal(found, torch.where(chosen.real_tokens(), chosen.tokens, 0)[:, 1:])


def test_rows_of_one_token_ask_for_nothing() -> None:
    batch = TokenBatch(torch.tensor([[3], [3]]), torch.tensor([1, 1]), torch.zeros(2, 1, dtype=torch.bool))
    micro = TreeMicroBatch.of(batch, [0, 1], multiple=2)
    assert micro.real == 1 and micro.predictors(torch.zeros(2, 1, 4)).shape == (2, 1, 4)
    assert micro.from_targets(torch.zeros(2)).shape == (2, 0)


@pytest.mark.parametrize("dp_size", [1, 2, 3])
@pytest.mark.parametrize("multiple", [1, 16])
def test_every_row_once_within_the_budget_and_shared_evenly(dp_size: int, multiple: int) -> None:
    for seed in range(30):
        rng = random.Random(seed)
        rows = branching_rows(rng, [(1, 60), (1, 30), (1, 20)])
        batch = batch_of_rows(rows, [[False] * len(row) for row in rows])
        ranks = plan_trees(token_keys(batch), batch.lengths.tolist(), dp_size, 256, multiple)
        micro = [rows for rank in ranks for rows in rank]
        assert sorted(row for rows in micro for row in rows) == list(range(batch.rows))
        assert len({len(rank) for rank in ranks}) == 1
        tokens = [len({tuple(rows[row][: at + 1]) for row in each for at in range(len(rows[row]))}) for each in micro]
        assert all(-(-each // multiple) * multiple <= 256 for each in tokens)
        whole = len({tuple(row[: at + 1]) for row in rows for at in range(len(row))})
        assert len(micro) <= -(-2 * whole // 256) + 1 + dp_size


LAYOUTS = {"tp 2": {"tp": 2}, "ep 2, dp 2": {"ep": 2, "dp": 2}, "pp 2": {"pp": 2}}


def log_probabilities(layout: Any, config: TrainerSection, path: Path) -> dict[int, Tensor]:
    """Those of this rank's rows, of rows that share prefixes."""
    from fp8rl.trainer.trainer import Trainer

    numerics = NumericsConfig(spec=QuantSpec.preset("fp8_block_pow2"), trainer="fp8", k_splits=config.tp)
    trainer = Trainer(path, config, numerics, layout, seed=0, total_steps=9, max_sequence_length=128)
    batch = drawn(conversations())
    done = trainer.forward_backward(batch, PolicyGradient(int(batch.loss_mask.sum())))
    return dict(zip(done.rows, done.result.logprobs, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("split", LAYOUTS.values(), ids=LAYOUTS)
def test_no_layout_changes_a_bit(
    split: dict[str, int], moe_path: Path, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    """Against rows end to end on one rank, which adds partial sums as two would."""
    config = TrainerSection(prefix_sharing=True, micro_batch_tokens=90, **split)
    ranks = run_on_ranks(config, tmp_path, partial(log_probabilities, path=moe_path))
    batch = drawn(conversations())
    wanted = passed(make_trainer(moe_path, "fp8", packing=True, k_splits=split.get("tp", 1)), batch)[0]["logprobs"]
    found = {row: values for rank in ranks for row, values in rank.items()}
    assert sorted(found) == list(range(batch.rows))
    real = batch.real_tokens()
    assert all(torch.equal(values[: batch.width][real[row]], wanted[row][real[row]]) for row, values in found.items())


@pytest.mark.slow
def test_every_op_is_placed_and_in_the_format_that_is_planned(moe_path: Path, make_trainer: MakeTrainer) -> None:
    trainer, batch = make_trainer(moe_path, "fp8", prefix_sharing=True), groups(20, 12, count=1)
    sightings = watch_step(trainer, batch, cross_entropy(batch), trainer.numerics, trainer.config)
    assert differences_of(sightings) == [] and "softmax.reduction" in {each.key for each in sightings}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["separate", "merged"])
def test_adapters_change_no_bit(moe_path: Path, make_trainer: MakeTrainer, mode: str) -> None:
    """After a step, for their second factor is zero before it."""
    batch, found = drawn(conversations()), []
    for keys in ({"packing": True}, {"prefix_sharing": True}):
        adapter = AdapterSection(mode=mode, rank=8, alpha=16)
        trainer = make_trainer(moe_path, "fp8", adapter=adapter, micro_batch_tokens=ALONE, **keys)
        for index, (name, parameter) in enumerate(trainer.model.named_parameters()):
            if "adapter" in name:
                torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(index))
        trainer.weights_changed()
        found.append(of_real_tokens(passed(trainer, batch)[0], batch))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
