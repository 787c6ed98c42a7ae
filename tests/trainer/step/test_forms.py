"""Micro-batches of rows that are padded, end to end, or prefix trees: the same bits for every token."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8rl.diagnose.doctor.formats import differences_of
from fp8rl.diagnose.doctor.watch import watch_step
from fp8rl.models.adapters import AdapterSection
from fp8rl.numerics.sampling import Truncation
from fp8rl.trainer.step.batch import LIKELY_IDS, LIKELY_LOGPROBS, OWN_LIKELY, UNKNOWN, ObjectiveOutput, TokenBatch
from fp8rl.trainer.step.kept_tokens import KeptTokenPool
from fp8rl.trainer.step.microbatches import MicroBatch, PackedMicroBatch, plan, plan_packed
from fp8rl.trainer.step.trees import TreeMicroBatch, plan_trees, token_keys
from tests.support.batches import cross_entropy, random_batch, random_routes
from tests.support.models import VOCAB
from tests.support.trainers import MakeTrainer, Models, critic_on, in_order, passed, scored, spread
from tests.support.trees import batch_of_rows, branching_rows, conversations, groups

ALONE = 1 << 16
"""Tokens of a micro-batch that holds every row."""
LESS_MEMORY: dict[str, Any] = {"recompute": "layer", "head_chunk_tokens": 37}
FORMS: list[dict[str, Any]] = [
    {"packing": True}, {"prefix_sharing": True}, {"head_chunk_tokens": 37}, {"packing": True, **LESS_MEMORY},
    {"prefix_sharing": True, "micro_batch_tokens": 90, **LESS_MEMORY},
]  # fmt: skip


class PolicyGradient:
    """Each row's log-probabilities times its advantage, and some entropy, which it keeps of a single micro-batch."""

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: TokenBatch) -> ObjectiveOutput:
        self.entropy, self.likely = entropy.detach().clone(), batch.fields.get(OWN_LIKELY, entropy[..., None]).detach()
        gain = logprobs * batch.fields["advantages"] + 0.01 * entropy
        return ObjectiveOutput(-(gain * batch.loss_mask).sum() / 100)


def drawn(batch: TokenBatch) -> TokenBatch:
    return replace(batch, seeds=torch.arange(batch.rows).where(torch.arange(batch.rows) % 3 > 0, -1) * 7919)


def with_supports(batch: TokenBatch) -> TokenBatch:
    """Every other row carries the tokens that its engine kept; of the others the trainer finds them."""
    carried = batch.loss_mask & (torch.arange(batch.rows) % 2 == 0)[:, None]
    own = [sorted({token, (token + 5) % VOCAB, (token + 11) % VOCAB}) for token in batch.tokens[carried].tolist()]
    counts, ids = torch.tensor([len(each) for each in own]), torch.tensor([token for each in own for token in each])
    return replace(batch, truncation=Truncation(0.7, 6, 0.02), supports=KeptTokenPool.of(carried, counts, ids))


def with_likeliest(batch: TokenBatch) -> TokenBatch:
    """Two ids for each token; those of even and odd rows differ where their tokens do not."""
    ids = torch.stack([batch.tokens, batch.tokens + 5 + torch.arange(batch.rows)[:, None] % 2], -1) % VOCAB
    return batch.with_fields(**{LIKELY_IDS: ids.float(), LIKELY_LOGPROBS: -torch.ones(ids.shape)})


def of_two_versions(batch: TokenBatch) -> TokenBatch:
    """Routes to be replayed: those of even rows and of odd rows differ where their tokens do not."""
    routes = random_routes(batch)
    both = routes[torch.arange(batch.rows) % 2]
    known = torch.arange(batch.width) < batch.lengths[:, None] - 1
    return replace(batch, routes=both.where(known[:, :, None, None], UNKNOWN), replay=True)


BATCHES = {
    "answers": drawn(groups(40, 24)), "branches": drawn(conversations()),
    "top-p": drawn(replace(conversations(), truncation=Truncation(top_p=0.7))),
    "supports carried": drawn(with_supports(conversations())),
    "own routes": replace(conversations(), routes=torch.full_like(random_routes(conversations()), UNKNOWN)),
    "replayed routes": of_two_versions(conversations()), "likeliest": drawn(with_likeliest(conversations())),
}  # fmt: skip


def said(trainer: Any, batch: TokenBatch) -> dict[str, Tensor]:
    """What a pass says of each real token."""
    done = trainer.forward_backward(batch, objective := PolicyGradient())
    found = {name: getattr(done.result, name) for name in ("logprobs", "routes", "draws")}
    if len(objective.entropy) == batch.rows:
        found |= {"entropy": objective.entropy, "likely": objective.likely}
    real = batch.real_tokens()
    return {name: in_order(done.rows, x)[:, : batch.width][real] for name, x in found.items() if x is not None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "batches", "forms"),
    [("moe", 7, FORMS), ("dense", 2, FORMS[:2]), ("latent", 2, FORMS[:2]), ("linear", 2, FORMS[:2])],
)
def test_what_a_pass_says_of_tokens_has_the_bits_of_padded_rows(kind, batches, forms, make_trainer, models) -> None:
    padded = make_trainer(models[kind], "fp8", micro_batch_tokens=ALONE)
    expected = {name: said(padded, BATCHES[name]) for name in list(BATCHES)[:batches]}
    for keys in forms:
        trainer = make_trainer(models[kind], "fp8", **{"micro_batch_tokens": ALONE, **keys})
        for name, wanted in expected.items():
            found = said(trainer, BATCHES[name])
            assert found.keys() == wanted.keys() - ({"entropy", "likely"} if "micro_batch_tokens" in keys else set())
            assert all(torch.equal(found[key], wanted[key]) for key in found), (name, keys)
    assert len(TreeMicroBatch.plan(BATCHES["branches"], 1, 90, 1)[0]) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype", "precision", "bound"),
    [*((kind, torch.float32, "bf16", 1e-6) for kind in ("moe", "latent", "linear")),
     ("moe", torch.bfloat16, "fp8", 1e-3)],
)  # fmt: skip
def test_gradients_differ_by_the_order_of_sums(kind, dtype, precision, bound, make_trainer, models) -> None:
    """In FP8 the embedding's, behind all layers, do not differ at all where rows are end to end. In FP32 they may: some
    processors' products of FP32 add up a row in an order that depends on the number of rows. Rows of a tree add
    gradients of hidden states, too, which BF16 rounds."""
    batch, forms = with_supports(conversations()), FORMS[:2] if precision == "bf16" else FORMS[:1]
    alone = partial(make_trainer, models[kind], precision, dtype, micro_batch_tokens=ALONE)
    wanted, *others = (passed(alone(**keys), batch, PolicyGradient())[1] for keys in ({}, *forms))
    for found, each in zip(others, (bound, 1e-5)):
        assert all((found[name] - gradient).norm() <= each * gradient.norm() for name, gradient in wanted.items())
        off = sum((found[name] - gradient).square().sum() for name, gradient in wanted.items())
        assert precision == "fp8" or off.sqrt() <= 2e-6 * sum(x.square().sum() for x in wanted.values()).sqrt()
    embedding = "embedding.word_embeddings.weight"
    assert precision == "bf16" or torch.equal(others[0][embedding], wanted[embedding])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["separate", "merged"])
def test_adapters_change_no_bit(mode: str, moe_path, make_trainer: MakeTrainer) -> None:
    """After a step, for their second factor is zero before it."""
    found = []
    for keys in FORMS[:2]:
        adapter = AdapterSection(mode=mode, rank=8, alpha=16)
        trainer = make_trainer(moe_path, "fp8", adapter=adapter, **{"micro_batch_tokens": ALONE, **keys})
        spread(trainer, 0.1)
        found.append(said(trainer, BATCHES["branches"]))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "keys"),
    [("moe", {"packing": True}), ("moe", {"prefix_sharing": True}), ("moe", LESS_MEMORY), ("linear", LESS_MEMORY)],
)
def test_every_op_is_as_planned(kind: str, keys: dict[str, Any], make_trainer: MakeTrainer, models: Models) -> None:
    """What is computed once more is seen as what was computed before."""
    path, seen = models[kind], []
    batch = random_batch(rows=2, longest=12) if kind == "linear" else groups(20, 12, count=1)
    for each in (keys, {}):
        trainer = make_trainer(path, "fp8", **each)
        sightings = watch_step(trainer, batch, cross_entropy(batch), trainer.numerics, trainer.config)
        assert differences_of(sightings) == [] and "softmax.reduction" in {each.key for each in sightings}
        seen.append({(each.key, each.name, each.found) for each in sightings})
    assert keys is not LESS_MEMORY or seen[0] == seen[1]


def test_a_critic_reads_the_same_values(moe_path, make_trainer: MakeTrainer, layout: Any) -> None:
    policy = make_trainer(moe_path, "fp8")
    wanted, *others = (
        scored(critic_on(layout, policy, moe_path, **keys), conversations()) for keys in ({}, *FORMS[:2])
    )
    assert wanted.abs().max() > 0.1 and all(torch.equal(found, wanted) for found in others)


def test_values_come_back_where_they_were_and_the_padding_repeats_the_last_token() -> None:
    batch = random_batch(rows=5, longest=9)
    micro = PackedMicroBatch.of(batch, [4, 0, 2], multiple=16)
    tokens, real = micro.to_model(micro.batch.tokens), int(batch.lengths[[4, 0, 2]].sum())
    assert tokens.shape == (1, -(-real // 16) * 16)
    rows = [batch.tokens[row, : batch.lengths[row]] for row in (4, 0, 2)]
    assert torch.equal(tokens[0, :real], torch.cat(rows)) and (tokens[0, real:] == rows[-1][-1]).all()
    assert micro.packed_rows is not None
    lengths = [*map(len, rows), tokens.shape[1] - real]
    assert micro.packed_rows.lengths.tolist() == lengths and micro.packed_rows.max_seqlen_q == max(lengths)
    assert micro.packed_rows.positions.tolist() == [at for length in lengths for at in range(length)]
    assert micro.packed_rows.cu_seqlens_q.tolist() == [0, *torch.tensor(lengths).cumsum(0).tolist()]
    back = micro.from_model(tokens[..., None].expand(-1, -1, 2), padding=-1)
    assert torch.equal(back[..., 0], torch.where(micro.batch.real_tokens(), micro.batch.tokens, -1))


def test_tokens_come_back_to_all_rows_that_share_them() -> None:
    micro = TreeMicroBatch.of(groups(5, 6), [3, 0, 1, 2], multiple=16)
    chosen, layout, real = micro.batch, micro.packed_rows, micro.batch.real_tokens()
    tokens = micro.to_model(chosen.tokens)
    assert layout is not None and tokens.shape[1] % 16 == 0 and micro.real < int(real.sum())
    back = micro.from_model(tokens[..., None].expand(-1, -1, 2), padding=-1)
    assert torch.equal(back[..., 0], torch.where(real, chosen.tokens, -1))
    positions = micro.from_model(layout.positions[None], padding=0)
    assert torch.equal(positions, torch.where(real, torch.arange(chosen.width), 0))
    hidden = torch.arange(tokens.shape[1]).view(-1, 1, 1).float()  # each token's place in the layout
    predicted = micro.from_targets(micro.predictors(hidden).flatten())
    places = micro.from_model(torch.arange(tokens.shape[1])[None])
    assert torch.equal(predicted, torch.where(real[:, 1:], places[:, :-1], 0).float())
    assert torch.equal(micro.from_targets(micro.targets_of(chosen.tokens)), torch.where(real, chosen.tokens, 0)[:, 1:])
    # Rows of one token ask for nothing.
    batch = TokenBatch(torch.tensor([[3], [3]]), torch.tensor([1, 1]), torch.zeros(2, 1, dtype=torch.bool))
    micro = TreeMicroBatch.of(batch, [0, 1], multiple=2)
    assert micro.real == 1 and micro.predictors(torch.zeros(2, 1, 4)).shape == (2, 1, 4)
    assert micro.from_targets(torch.zeros(2)).shape == (2, 0)


def tokens_of(form: str, rows: list[list[int]], multiple: int) -> int:
    if form == "padded":
        return max((-(-len(row) // multiple) * multiple for row in rows), default=0) * len(rows)
    starts = {
        (*row[: at + 1], *([index] if form == "packed" else []))
        for index, row in enumerate(rows)
        for at in range(len(row))
    }
    return -(-len(starts) // multiple) * multiple


@pytest.mark.parametrize("form", ["padded", "packed", "trees"])
@pytest.mark.parametrize("dp_size", [1, 2, 3])
@pytest.mark.parametrize("multiple", [1, 16])
def test_every_row_once_within_the_budget_and_shared_evenly(form: str, dp_size: int, multiple: int) -> None:
    for seed in range(30):
        rows = branching_rows(random.Random(seed), [(1, 60), (1, 30), (1, 20)])
        batch = batch_of_rows(rows, [[False] * len(row) for row in rows])
        lengths = batch.lengths.tolist()
        if form == "trees":
            ranks = plan_trees(token_keys(batch), lengths, dp_size, 256, multiple)
        else:
            ranks = {"padded": plan, "packed": plan_packed}[form](lengths, dp_size, 256, multiple)
        micro = [rows for rank in ranks for rows in rank]
        assert sorted(row for rows in micro for row in rows) == list(range(batch.rows))
        assert len({len(rank) for rank in ranks}) == 1
        tokens = [tokens_of(form, [rows[row] for row in each], multiple) for each in micro]
        assert max(tokens) <= 256
        if form == "packed":
            assert max(tokens) - min(tokens) < max(lengths) + multiple
        if form == "trees":
            assert len(micro) <= -(-2 * tokens_of(form, rows, 1) // 256) + 1 + dp_size


def test_as_few_micro_batches_as_the_tokens_need_and_padding_adds_no_targets() -> None:
    for each in (plan, plan_packed):
        assert each([300, 4, 4], 1, 100) == [[[0], [1, 2]]], "a row beyond the budget is alone"
        assert each([5], 2, 100) == [[[0]], [[]]], "a rank without rows"
    assert [len(rank) for rank in plan_packed([60] * 8, 2, 100)] == [4, 4]
    padded = MicroBatch.of(batch := random_batch(rows=3, longest=7), [0, 1, 2], 4).batch
    assert padded.width == 8 and padded.loss_mask.sum() == batch.loss_mask.sum()
