"""What a rank holds, against sums by hand, and what it sends."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fp8rl.trainer.inventory import _parameters, inventory, transfers
from tests.support.batches import cross_entropy, random_batch
from tests.support.blockwise import BlockwiseWeight
from tests.support.holdings import bytes_held
from tests.support.models import EXPERTS, LAYERS, VOCAB
from tests.support.trainers import MakeTrainer

HIDDEN, HEADS, KV, HEAD, FFN = 256, 4, 2, 128, 128
ATTENTION = HIDDEN * HEAD * (HEADS + 2 * KV) + HEADS * HEAD * HIDDEN
EXPERT = 3 * HIDDEN * FFN
QUANTIZED = LAYERS * (ATTENTION + EXPERTS * EXPERT)
NORMS = LAYERS * (2 * HIDDEN + 2 * HEAD) + HIDDEN
PARAMETERS = QUANTIZED + NORMS + LAYERS * EXPERTS * HIDDEN + 2 * VOCAB * HIDDEN


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exact", "native"])
def test_a_rank_holds_two_bytes_of_a_weight_and_sixteen_for_its_update(
    mode: str, moe_path: Path, make_trainer: MakeTrainer
) -> None:
    trainer, batch = make_trainer(moe_path, "fp8", mode=mode), random_batch(rows=2, longest=9)
    state = {"parameters": 2, "gradients": 4, "masters": 4, "moments": 8}
    before = bytes_held(trainer)
    assert {kind: before[kind] for kind in state} == {kind: size * PARAMETERS for kind, size in state.items()}
    assert before["operands"] == 0
    trainer.score(batch)
    assert bytes_held(trainer)["operands"] == 2 * QUANTIZED  # what the codes stand for, in BF16
    trainer.train_step(batch, cross_entropy(batch))
    after = bytes_held(trainer)
    assert after == before
    trainer.set_numerics(replace(trainer.numerics, trainer="bf16"))
    trainer.score(batch)
    assert bytes_held(trainer)["operands"] == 0


def test_every_holding_is_named_formatted_and_as_large_as_its_shape(moe_path: Path, make_trainer: MakeTrainer) -> None:
    from fp8rl.trainer.modules.weights import named_weights

    trainer = make_trainer(moe_path, "fp8")
    trainer.score(random_batch(rows=2, longest=9))
    held = inventory(trainer)
    names = {name for name, _ in named_weights(trainer.model)}
    formats = {"parameters": "bf16", "operands": "bf16", "gradients": "fp32", "masters": "fp32", "moments": "fp32"}
    for each in held:
        if each.kind != "rest":
            assert each.name.partition(":")[0] in names, each
            assert each.format == formats[each.kind], each
            assert each.bytes == prod(each.shape) * {"bf16": 2, "fp32": 4}[each.format], each
    assert len({(each.name, each.kind) for each in held}) == len(held)
    assert {each.name for each in held if each.kind == "masters"} == names


def test_tied_weights_are_held_once(dense_path: Path, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(dense_path)
    names = [each.name for each in inventory(trainer) if each.kind == "parameters"]
    assert names.count("embedding.word_embeddings.weight") == 1 and "output_layer.weight" not in names


def test_an_fp32_parameter_is_its_own_master(moe_path: Path, make_trainer: MakeTrainer) -> None:
    import torch

    held = bytes_held(make_trainer(moe_path, dtype=torch.float32))
    assert held["parameters"] == 4 * PARAMETERS and held["masters"] == 0 and held["moments"] == 8 * PARAMETERS


def test_a_step_hands_its_gradients_to_a_collective_in_fp32_and_gathers_weights_in_bf16(
    moe_path: Path, make_trainer: MakeTrainer
) -> None:
    trainer, batch = make_trainer(moe_path, "fp8"), random_batch(rows=2, longest=9)
    with transfers(trainer) as sent:
        trainer.train_step(batch, cross_entropy(batch))
    gradients = [each for each in sent if each.kind == "gradients"]
    assert {each.format for each in gradients} == {"fp32"} and {each.ranks for each in sent} == {1}
    assert sum(each.bytes for each in gradients) >= bytes_held(trainer)["gradients"]  # with padding
    gathered = [each for each in sent if each.kind == "parameters"]
    assert {each.format for each in gathered} == {"bf16"}
    (norm,) = [each for each in sent if each.kind == "rest"]
    assert norm.collective == "allreduce_" and norm.format == "fp32" and norm.bytes == 4


def test_a_weight_of_transformer_engine_is_its_codes_and_scales_without_what_megatron_hangs_on_it() -> None:
    model = torch.nn.Linear(512, 256, bias=False, dtype=torch.bfloat16)
    model.weight = weight = BlockwiseWeight(torch.randn(256, 512).bfloat16())
    weight.main_grad = weight.main_param = torch.zeros(256, 512)
    weight._columnwise_data = None
    (found,) = _parameters(SimpleNamespace(model=model))  # type: ignore[arg-type]
    assert (found.name, found.kind, found.shape) == ("weight", "parameters", (256, 512))
    assert found.format == "e4m3" and found.bytes == 256 * 512 + 4 * 2 * 4  # FP32, 2 x 4 blocks
