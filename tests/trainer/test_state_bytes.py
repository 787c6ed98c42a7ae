"""State of a rank, calculated: against formulas of the field, sums worked by hand, and a review of real sizes.

`test_parallel.py` holds it against live ranks.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8rl.models import read_shape
from fp8rl.models.adapters import AdapterSection
from fp8rl.models.shape import Shape
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.spec import QuantSpec
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.state_bytes import StateBytes, Storage, state_bytes
from tests.support.batches import random_batch
from tests.support.holdings import bytes_held
from tests.support.paths import CONFIGS, EXAMPLES
from tests.support.trainers import MakeTrainer

EXACT = NumericsConfig(spec=QuantSpec.preset("fp8_block_pow2"))
BF16 = replace(EXACT, trainer="bf16")
GIB = 2**30
SOME = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")


def shape_of(name: str) -> Shape:
    return read_shape(CONFIGS / name if (CONFIGS / name).exists() else EXAMPLES / "models" / name)


def total(
    name: str, numerics: NumericsConfig = BF16, storage: Storage = "kernels", rank: int = 0, **layout: int
) -> StateBytes:
    states = state_bytes(shape_of(name), TrainerSection(**layout), numerics, storage, rank)
    return sum(states.values(), StateBytes())


@pytest.mark.parametrize("dp", [1, 2, 8, 64])
def test_a_dense_model_takes_megatrons_bytes(dp: int) -> None:
    """6 + 12 / d bytes a parameter: BF16 weights, FP32 gradients, 12 of state over d ranks."""
    n = shape_of("qwen3_8b").parameters
    assert total("qwen3_8b", dp=dp).total == n * 6 + n * 12 // dp


def test_fp8_parameters_take_what_bf16_takes() -> None:
    """A code and its transpose are BF16's two bytes; the scales come on top."""
    bf16 = total("qwen3_30b_a3b", ep=8, dp=8)
    fp8 = total("qwen3_30b_a3b", EXACT, "transformer_engine", ep=8, dp=8)
    assert (fp8.gradients, fp8.masters, fp8.moments, fp8.operands) == (bf16.gradients, bf16.masters, bf16.moments, 0)
    quantized = 48 * (16 * 3 * 2048 * 768 + 2048 * (32 + 8) * 128 + 4096 * 2048)
    assert fp8.parameters - bf16.parameters == 2 * quantized * 4 // 128**2


@pytest.mark.parametrize(("dp", "found"), [(2, 70.0e9), (4, 47.0e9)])
def test_qwen3_30b_with_tp4_ep8_takes(dp: int, found: float) -> None:
    assert total("qwen3_30b_a3b", tp=4, ep=8, dp=dp).total == pytest.approx(found, rel=0.01)


def test_qwen3_30b_on_eight_gpus_in_exact_mode_takes_what_the_review_found() -> None:
    state = total("qwen3_30b_a3b", EXACT, ep=8, dp=8)
    found = [state.parameters, state.gradients, state.masters + state.moments, state.operands, state.total]
    assert [each / GIB for each in found] == pytest.approx([9.6, 19.2, 42.7, 8.4, 80.0], abs=0.06)


def test_operands_on_a_cpu_are_as_wide_as_they_are_exact() -> None:
    """BF16 for power-of-two scales, FP32 for others, in the layers that are quantized."""
    quantized = 128 * 512 + 256 * 128 + 8 * 3 * 128 * 128
    assert total("tiny_qwen3_moe", EXACT, "torch").operands == 2 * quantized * 2
    wide = replace(EXACT, spec=QuantSpec.preset("fp8_block_fp32"))
    assert total("tiny_qwen3_moe", wide, "torch").operands == 2 * quantized * 4
    first = replace(EXACT, spec=EXACT.spec.override({"first_layers_bf16": 1}))
    assert total("tiny_qwen3_moe", first, "torch").operands == quantized * 2


def test_ranks_share_all_there_is() -> None:
    """Over a layout of every kind of parallelism, masters and moments are there once, dense and experts."""
    n = shape_of("qwen3_30b_a3b")
    layout = {"tp": 2, "pp": 3, "ep": 4, "dp": 6}
    states = [total("qwen3_30b_a3b", rank=rank, **layout) for rank in range(36)]
    replicated = sum(w.size * w.count for w in n.weights if w.share == "replicated")
    assert sum(state.masters for state in states) == 4 * (n.parameters + replicated)  # on both tensor-parallel ranks
    assert sum(state.moments for state in states) == 8 * (n.parameters + replicated)


def test_a_buffer_is_padded_to_a_whole_number_for_each_rank() -> None:
    """Three ranks share 465,152 / 2 dense elements: up to a multiple of 3 * 128, and the last has less of them."""
    dense = [
        state_bytes(shape_of("tiny_qwen3_moe"), TrainerSection(dp=3), BF16, "torch", rank)["dense"] for rank in range(3)
    ]
    elements = 232_576
    padded = -(-elements // 384) * 384
    assert [state.masters // 4 for state in dense] == [padded // 3, padded // 3, elements - 2 * padded // 3]
    assert {state.padding for state in dense} == {6 * (padded - elements)}


def test_a_tied_embedding_is_held_by_the_first_and_by_the_last_stage() -> None:
    n = shape_of("qwen3_4b")
    states = [total("qwen3_4b", rank=stage, pp=2) for stage in range(2)]
    assert sum(state.gradients for state in states) == 4 * (n.parameters + 151_936 * 2560)
    assert total("qwen3_4b").gradients == 4 * n.parameters


LIVE: dict[str, tuple[str, str, AdapterSection | None]] = {
    "moe in bf16": ("moe_path", "bf16", None),
    "moe": ("moe_path", "fp8", None),
    "dense in bf16": ("dense_path", "bf16", None),
    "dense": ("dense_path", "fp8", None),
    "adapters": ("moe_path", "fp8", AdapterSection(rank=8, targets=SOME)),
    "shared adapters": ("moe_path", "fp8", AdapterSection(rank=8, targets=SOME, experts="shared")),
    "adapters of latents": ("latent_path", "fp8", AdapterSection(rank=8)),
}


@pytest.mark.parametrize(("model", "precision", "adapter"), LIVE.values(), ids=LIVE)
def test_a_live_trainer_holds_them(
    model: str,
    precision: str,
    adapter: AdapterSection | None,
    make_trainer: MakeTrainer,
    request: pytest.FixtureRequest,
) -> None:
    path, numerics = request.getfixturevalue(model), replace(EXACT, trainer=precision)
    trainer = make_trainer(path, precision, adapter=adapter)
    trainer.score(random_batch(rows=2, longest=8))
    states = state_bytes(read_shape(path, adapter=adapter), trainer.config, numerics, "torch").values()
    held = bytes_held(trainer)
    for name in ("parameters", "operands", "gradients", "masters", "moments"):
        assert held[name] == sum(getattr(state, name) for state in states), name
    if adapter is not None:
        full = sum(state_bytes(read_shape(path), trainer.config, numerics, "torch").values(), StateBytes())
        assert sum(states, StateBytes()).total < 0.35 * full.total
