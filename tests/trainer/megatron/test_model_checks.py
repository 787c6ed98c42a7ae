"""Layouts, quantizations and modes that a model does not fit are refused by the setting to change."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from fp8rl.models import ModelSizes
from fp8rl.numerics.errors import UserError
from fp8rl.numerics.spec import QuantSpec
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.megatron.model_checks import check_engine_layout, check_layout
from tests.support.definitions import SIZES

SPEC = QuantSpec.preset("fp8_block_pow2")
MOE = dataclasses.replace(
    SIZES, layers=6, hidden_size=512, heads=8, kv_heads=4, ffn_size=0, experts=8, expert_size=256, vocab_size=4096
)
DENSE = dataclasses.replace(MOE, experts=0, top_k=0, expert_size=0, ffn_size=768)


@pytest.mark.parametrize(
    ("sizes", "layout"),
    [
        (DENSE, {}),
        (DENSE, {"tp": 2, "pp": 3}),
        (MOE, {"tp": 4, "ep": 4, "pp": 2}),
        (MOE, {"dp": 8, "ep": 8}),
    ],
)
def test_what_divides_is_accepted(sizes: ModelSizes, layout: dict[str, int]) -> None:
    check_layout(sizes, TrainerSection(**layout), SPEC)


@pytest.mark.parametrize(
    ("sizes", "layout", "said"),
    [
        (MOE, {"tp": 8}, r"trainer\.tp: found 8, expected a divisor of the model's num_key_value_heads = 4"),
        (DENSE, {"pp": 4}, r"trainer\.pp: found 4, expected a divisor of the model's num_hidden_layers = 6"),
        (DENSE, {"ep": 2, "dp": 2}, r"trainer\.ep: found 2, expected 1 for a dense model"),
        (MOE, {"ep": 16, "dp": 16}, r"trainer\.ep: found 16, expected a divisor of the model's num_experts = 8"),
        (MOE, {"ep": 4, "tp": 2}, r"trainer\.ep: found 4, expected a divisor of tp \* dp \* cp = 2 \* 1 \* 1"),
        # 768 / 4 = 192 columns on a rank, which is one block and a half; an expert's 256 are not split.
        (DENSE, {"tp": 4}, r"intermediate_size / trainer\.tp = 768 / 4: found 192, expected a multiple of 128"),
        (
            dataclasses.replace(MOE, expert_size=192),
            {},
            r"moe_intermediate_size: found 192, expected a multiple of 128",
        ),
        (dataclasses.replace(DENSE, head_dim=64), {}, r"head_dim: found 64, expected a multiple of 128"),
    ],
)
def test_what_does_not_divide_is_refused(sizes: ModelSizes, layout: dict[str, int], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_layout(sizes, TrainerSection(**layout), SPEC)


def test_norms_over_all_heads_are_shared_by_a_trainers_ranks_and_not_by_an_engines() -> None:
    olmoe = dataclasses.replace(MOE, head_norms="together")
    check_layout(olmoe, TrainerSection(tp=2), SPEC)
    check_engine_layout(olmoe, 1, SPEC)
    with pytest.raises(UserError, match=r"rollout\.tp: found 2, expected 1 for a model whose norms"):
        check_engine_layout(olmoe, 2, SPEC)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weight": {"granularity": "tensor"}}, r"numerics\.weight\.granularity: found 'tensor'"),
        ({"first_layers_bf16": 4, "last_layers_bf16": 2}, r"last_layers_bf16: found 6, expected less than .* = 6"),
    ],
)
def test_what_cannot_be_quantized_so_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_layout(MOE, TrainerSection(), SPEC.override(changes))


@pytest.mark.slow
def test_the_checks_of_the_driver_do_not_import_megatron() -> None:
    source = (
        "import sys, fp8rl.rl.experiment.preconditions; sys.exit(any(x.startswith('megatron') for x in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", source], timeout=120).returncode == 0


def test_dense_first_layers_and_shared_experts() -> None:
    """GLM-4.5-Air: its first layer is 85.5 blocks wide."""
    air = dataclasses.replace(MOE, dense_layers=1, ffn_size=10944, expert_size=1408, shared_size=1408)
    first_in_bf16 = dataclasses.replace(SPEC, first_layers_bf16=1)
    with pytest.raises(UserError, match="intermediate_size: found 10944, expected a multiple of 128"):
        check_layout(air, TrainerSection(), SPEC)
    check_layout(air, TrainerSection(), first_in_bf16)
    with pytest.raises(UserError, match=r"n_shared_experts / trainer.tp = 1408 / 2: found 704, expected a multiple"):
        check_layout(air, TrainerSection(tp=2), first_in_bf16)
    wide = dataclasses.replace(air, ffn_size=1024, shared_size=1024, expert_size=1024)
    check_engine_layout(wide, 2, SPEC)
