"""Layouts, quantizations and modes that a model does not fit are refused by the setting to change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from fp8rl.models import ModelSizes
from fp8rl.models.families import gated_delta, latent, mlp
from fp8rl.models.families.gated_delta import GatedDelta
from fp8rl.models.shape import Shape
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.spec import QuantSpec
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.megatron import model_checks
from fp8rl.trainer.megatron.model_checks import check_engine_layout, check_layout, check_rows, check_training
from tests.support.definitions import SIZES, shape_of
from tests.support.remedies import broken, rules_of

Check = Callable[[], None]
SPEC = QuantSpec.preset("fp8_block_pow2")
MOE = dataclasses.replace(
    SIZES, layers=6, hidden_size=512, heads=8, kv_heads=4, ffn_size=0, experts=8, expert_size=256, vocab_size=4096
)
DENSE = dataclasses.replace(MOE, experts=0, top_k=0, expert_size=0, ffn_size=768)
LATENT = dataclasses.replace(
    MOE, own=(latent.Latent(q_rank=256, kv_rank=256, rope_dim=64, value_dim=128),), head_dim=192, rotary_dim=64
)
LINEAR = dataclasses.replace(
    MOE, own=(GatedDelta(layers=(0,), key_heads=2, value_heads=8, key_dim=128, value_dim=64, taps=4, joined=True),)
)
OLMOE = dataclasses.replace(MOE, head_norms="together")


def split(sizes: ModelSizes = MOE, tp: int = 1, spec: QuantSpec = SPEC) -> Check:
    return partial(check_layout, shape_of(sizes), TrainerSection(tp=tp), spec)


def engine(sizes: ModelSizes = MOE, tp: int = 1, mode: Any = "exact") -> Check:
    shape = Shape(sizes, (latent.FAMILY, mlp.MOE)) if sizes is LATENT else shape_of(sizes)
    return partial(check_engine_layout, shape, tp, SPEC, mode)


def trained(sizes: ModelSizes = MOE, spec: QuantSpec = SPEC, **config: Any) -> Check:
    shape = Shape(sizes, (latent.FAMILY, mlp.MOE)) if sizes is LATENT else shape_of(sizes)

    def check() -> None:
        check_layout(shape, TrainerSection(**config), spec)
        check_training(shape, TrainerSection(**config), spec)

    return check


def rows(mode="exact", **config: Any) -> Check:
    return partial(check_rows, TrainerSection(**config), mode, False)


def linear(**config: int) -> Check:
    return partial(check_layout, Shape(LINEAR, (gated_delta.JOINED, mlp.MOE)), TrainerSection(**config), SPEC)


def changed(**sizes: Any) -> ModelSizes:
    return dataclasses.replace(MOE, **sizes)


AIR = dataclasses.replace(MOE, dense_layers=1, ffn_size=10944, expert_size=1408, shared_size=1408)
"""GLM-4.5-Air: its first layer is 85.5 blocks wide."""
FIRST = SPEC.override({"first_layers_bf16": 1})
DIVISOR = "expected a divisor of the model's"
TP, EP, WIRE, GATHER, SHARING = (
    f"trainer.{key}: found" for key in ("tp", "ep", "gradient_wire", "weight_gather", "prefix_sharing")
)
NATIVE, BLOCKS = "with numerics.mode=native", "model config:"
SIX, FIVE = ({"first_layers_bf16": 4, "last_layers_bf16": each} for each in (2, 1))
TENSOR, CHANNEL = ({"weight": {"granularity": each}} for each in ("tensor", "channel"))
FP32 = QuantSpec.preset("fp8_block_fp32")
E4M3 = {"weight_gather": "e4m3", "dp": 2}
# What breaks a rule, what the message begins with, and what its remedy makes of that.
CASES: list[tuple[Check, str, Check | None]] = [
    (split(tp=3), f"{TP} 3, {DIVISOR} num_attention_heads = 8", split()),
    (split(tp=8), f"{TP} 8, {DIVISOR} num_key_value_heads = 4", split(tp=4)),
    (split(changed(joined=2), 4), f"{TP} 4, {DIVISOR} groups of key-value heads that", split(changed(joined=2), 2)),
    (linear(tp=4), f"{TP} 4, {DIVISOR} linear_num_key_heads = 2", linear(tp=2)),
    (linear(cp=2), "trainer.cp: found 2, expected 1 for a model with linear attention, whose state", linear()),
    (split(changed(vocab_size=4097), 2), f"{TP} 2, {DIVISOR} vocab_size = 4097", None),
    (split(dataclasses.replace(DENSE, ffn_size=770), 4), f"{TP} 4, {DIVISOR} intermediate_size", None),
    (split(changed(shared_size=257), 2), f"{TP} 2, {DIVISOR} moe_intermediate_size * n_shared_ex", None),
    (split(spec=SPEC.override(SIX)), "numerics.first_layers_bf16 + numerics.last_l", split(spec=SPEC.override(FIVE))),
    (split(spec=SPEC.override(TENSOR)), "numerics.weight.granularity: found 't", split(spec=SPEC.override(CHANNEL))),
    # 768 / 4 = 192 columns on a rank, which is one block and a half; an expert's 256 are not split.
    (split(DENSE, 4), f"{BLOCKS} intermediate_size / trainer.tp = 768 / 4: found 192, expected a mul", split(DENSE, 2)),
    (split(changed(expert_size=192)), f"{BLOCKS} moe_intermediate_size: found 192, expected a multiple of 128", None),
    (split(AIR), f"{BLOCKS} intermediate_size: found 10944, expected a multiple of 128", split(AIR, spec=FIRST)),
    (split(AIR, 2, FIRST), f"{BLOCKS} moe_intermediate_size * n_shared_experts / trainer.tp = 1408 / 2: f", None),
    (split(changed(head_dim=64)), f"{BLOCKS} head_dim: found 64, expected a multiple of 128", None),
    (engine(tp=3), f"rollout.tp: found 3, {DIVISOR} num_attention_heads = 8", engine(tp=8)),
    (engine(MOE, 8, "native"), f"rollout.tp: found 8, {DIVISOR} num_key_value_heads = 4", engine(MOE, 4, "native")),
    (engine(LATENT, 8), f"rollout.tp: found 8, {DIVISOR} num_key_value_heads = 4", engine(MOE, 8)),
    (engine(changed(joined=2), 8), f"rollout.tp: found 8, {DIVISOR} num_key_val", engine(changed(joined=2), 2)),
    (engine(OLMOE, 2), "rollout.tp: found 2, expected 1 for a model that norms", split(OLMOE, 2)),
    (engine(changed(experts=6), 4), f"rollout.tp: found 4, {DIVISOR} num_experts = 6", engine(changed(experts=6), 2)),
    (trained(DENSE, ep=2, dp=2), f"{EP} 2, expected 1 for a dense model", trained(DENSE, dp=2)),
    (trained(ep=16, dp=16), f"{EP} 16, {DIVISOR} num_experts = 8", trained(ep=8, dp=16)),
    (trained(ep=4, tp=2), f"{EP} 4, expected a divisor of tp * dp * cp = 2 * 1 * 1", trained(ep=4, tp=2, dp=4)),
    (trained(pp=4), f"trainer.pp: found 4, {DIVISOR} num_hidden_layers = 6", trained(pp=3)),
    (trained(LATENT, cp=2), "trainer.cp: found 2, expected 1 for a model with latent attention", trained(LATENT)),
    (trained(gradient_wire="bf16", tp=2, ep=2), f"{WIRE} 'bf16 with trainer.dp=1', expected fp32", trained(tp=2, ep=2)),
    (trained(weight_gather="e4m3"), f"{GATHER} 'e4m3 with trainer.dp=1', expected bf16 where no", trained(**E4M3)),
    (trained(spec=FP32, **E4M3), f"{GATHER} 'e4m3 with weights in e4m3, block, fp32, nearest', exp", trained(**E4M3)),
    (trained(spec=QuantSpec.preset("bf16"), **E4M3), f"{GATHER} 'e4m3 with a BF16 trainer'", trained(**E4M3)),
    (trained(router_bias_rate=0.001), "trainer.router_bias_rate: found 0.001, expected 0 for a model", trained()),
    (rows("native", packing=True), f"trainer.packing: found 'true {NATIVE} and without", rows("exact", packing=True)),
    (rows("native", prefix_sharing=True), f"{SHARING} 'true {NATIVE}', expected", rows("exact", prefix_sharing=True)),
    (rows(cp=2, prefix_sharing=True), f"{SHARING} 'true with trainer.cp=2', expected false", rows(prefix_sharing=True)),
    (rows("native", cp=2), f"trainer.cp: found '2 {NATIVE}', expected 1", rows("exact", cp=2)),
    (rows(cp=2, packing=True), "trainer.cp: found '2 with trainer.packing=true', expected 1", rows(cp=2)),
]


@pytest.mark.parametrize(
    "accepted",
    [
        *(trained(DENSE), trained(DENSE, tp=2, pp=3), trained(dp=8, ep=8), trained(tp=4, ep=4, pp=2)),
        trained(gradient_wire="e5m2", dp=2, spec=QuantSpec.preset("bf16")),
        trained(gradient_wire="e5m2", tp=2),  # the experts are not split: two ranks train each
        trained(weight_gather="e4m3", dp=2, spec=QuantSpec.preset("ironwood")),
    ],
)
def test_what_divides_and_what_is_sent_narrow_is_accepted(accepted: Check) -> None:
    accepted()


@pytest.mark.parametrize(("breaks", "said", "mended"), CASES)
def test_a_rule_refuses_and_its_remedy_mends(breaks: Check, said: str, mended: Check | None) -> None:
    with pytest.raises(UserError) as refused:
        breaks()
    assert str(refused.value).startswith(said)
    if mended is not None:
        mended()


def test_every_rule_is_broken_by_a_row() -> None:
    assert set().union(*(broken(breaks, model_checks) for breaks, _, _ in CASES)) == rules_of(model_checks)
