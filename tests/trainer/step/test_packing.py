"""Rows end to end: the bits of padded ones, as far as sums are taken in the same order."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8rl.diagnose.audit import differences_of
from fp8rl.diagnose.audit.watch import watch_step
from fp8rl.numerics.core.errors import UserError
from fp8rl.trainer.step.batch import TokenBatch
from fp8rl.trainer.step.microbatches import PackedMicroBatch, plan_packed
from tests.support.batches import cross_entropy, random_batch, random_routes
from tests.support.models import write_model
from tests.support.trainers import MakeTrainer, critic_values

ALONE = 1 << 16
"""Tokens of a micro-batch that holds every row."""


@pytest.fixture(scope="module")
def batch() -> TokenBatch:
    """Rows whose tokens go to experts that are given, and of which some are drawn again."""
    batch = random_batch(temperature=0.9)
    seeds = torch.arange(batch.rows).where(torch.arange(batch.rows) % 3 > 0, -1) * 7919
    return replace(batch, routes=random_routes(batch), seeds=seeds)


def passed(trainer: Any, batch: TokenBatch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What a pass says of each token, in the order of the batch, and its gradients."""
    done = trainer.forward_backward(batch, cross_entropy(batch))
    order = torch.tensor(done.rows).argsort()
    found = {name: getattr(done.result, name)[order] for name in ("logprobs", "routes", "draws")}
    return found, {name: p.main_grad.clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.slow
def test_what_a_pass_says_of_tokens_has_the_bits_of_padded_rows(
    moe_path: Path, make_trainer: MakeTrainer, batch: TokenBatch
) -> None:
    batches = batch, replace(batch, replay=True)
    expected = [passed(make_trainer(moe_path, "fp8"), each)[0] for each in batches]
    for keys in ({}, {"recompute": "layer", "head_chunk_tokens": 37}):
        packed = make_trainer(moe_path, "fp8", packing=True, **keys)
        for each, wanted in zip(batches, expected, strict=True):
            found = passed(packed, each)[0]
            assert all(torch.equal(found[name], wanted[name]) for name in wanted), keys


@pytest.mark.slow
def test_gradients_differ_by_the_order_of_sums_over_tokens(
    tmp_path: Path, make_trainer: MakeTrainer, batch: TokenBatch
) -> None:
    """Those of hidden states, and so those of the embedding behind all layers, do not differ at all."""
    for dtype, precision, bound in ((torch.float32, "bf16", 1e-6), (torch.bfloat16, "fp8", 3e-4)):
        path = write_model(tmp_path / precision, dtype=dtype)
        padded, packed = (
            passed(make_trainer(path, precision, dtype=dtype, micro_batch_tokens=ALONE, packing=packing), batch)[1]
            for packing in (False, True)
        )
        assert torch.equal(packed["embedding.word_embeddings.weight"], padded["embedding.word_embeddings.weight"])
        for name, wanted in padded.items():
            assert (packed[name] - wanted).norm() <= bound * wanted.norm(), (precision, name)


def test_a_critic_reads_the_same_values(moe_path: Path, make_trainer: MakeTrainer, layout: Any) -> None:
    policy, batch = make_trainer(moe_path, "fp8"), random_batch()
    found = [critic_values(policy, moe_path, batch, layout, **keys) for keys in ({"packing": False}, {"packing": True})]
    assert found[0].abs().max() > 0.1 and torch.equal(*found)


@pytest.mark.slow
def test_every_op_is_placed_and_in_the_format_that_is_planned(moe_path: Path, make_trainer: MakeTrainer) -> None:
    trainer, batch = make_trainer(moe_path, "fp8", packing=True), random_batch(rows=4, longest=40)
    sightings = watch_step(trainer, batch, cross_entropy(batch), trainer.numerics, trainer.config)
    assert differences_of(sightings) == [] and "softmax.reduction" in {each.key for each in sightings}


def test_megatron_s_own_attention_takes_padded_rows_alone(moe_path: Path, make_trainer: MakeTrainer) -> None:
    with pytest.raises(UserError, match=r"trainer\.packing: found 'true with numerics\.mode=native and without"):
        make_trainer(moe_path, "fp8", mode="native", packing=True)


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


@pytest.mark.parametrize("dp_size", [1, 2, 3])
@pytest.mark.parametrize("multiple", [1, 16])
def test_every_row_once_within_the_budget_and_shared_evenly(dp_size: int, multiple: int) -> None:
    rng = random.Random(dp_size)
    for _ in range(50):
        lengths = [rng.randint(1, 90) for _ in range(rng.randint(1, 40))]
        ranks = plan_packed(lengths, dp_size, 256, multiple)
        assert ranks == plan_packed(lengths, dp_size, 256, multiple)
        micro = [rows for rank in ranks for rows in rank]
        assert sorted(row for rows in micro for row in rows) == list(range(len(lengths)))
        assert len({len(rank) for rank in ranks}) == 1
        tokens = [sum(lengths[row] for row in rows) for rows in micro]
        assert all(-(-each // multiple) * multiple <= 256 for each in tokens)
        assert max(tokens) - min(tokens) <= max(lengths)


def test_as_few_micro_batches_as_the_tokens_need() -> None:
    assert plan_packed([300, 4, 4], 1, 100) == [[[0], [1, 2]]]
    assert plan_packed([5], 2, 100) == [[[0]], [[]]]
    assert [len(rank) for rank in plan_packed([60] * 8, 2, 100)] == [4, 4]
