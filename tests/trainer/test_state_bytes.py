"""State of a rank: calculated by formulas of the field and by hand, held by live trainers, sent, and counted for the
specs of real models in examples/, parameter by parameter, without a weight.

`test_parallel.py` holds it against several ranks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fp8rl.models import read_model, read_shape
from fp8rl.models.adapters import AdapterSection
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rl.experiment import load_experiment
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.inventory import inventory, of_model, transfers
from fp8rl.trainer.state_bytes import StateBytes, Storage, buffers, state_bytes
from tests.support.batches import cross_entropy, random_batch
from tests.support.blockwise import BlockwiseWeight
from tests.support.holdings import bytes_held
from tests.support.meta_model import parameters_of
from tests.support.models import EXPERTS, LAYERS, VOCAB
from tests.support.paths import CONFIGS, EXAMPLES, REAL_SPECS
from tests.support.ranks import in_a_fork

EXACT = NumericsConfig(spec=QuantSpec.preset("fp8_block_pow2"))
BF16 = replace(EXACT, trainer="bf16")
GIB = 2**30


def shape_of(name: str):
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


def test_qwen3_30b_takes_what_the_review_found() -> None:
    for dp, found in ((2, 70.0e9), (4, 47.0e9)):
        assert total("qwen3_30b_a3b", tp=4, ep=8, dp=dp).total == pytest.approx(found, rel=0.01)
    state = total("qwen3_30b_a3b", EXACT, ep=8, dp=8)
    taken = [state.parameters, state.gradients, state.masters + state.moments, state.operands, state.total]
    assert [each / GIB for each in taken] == pytest.approx([9.6, 19.2, 42.7, 8.4, 80.0], abs=0.06)


def test_operands_on_a_cpu_are_as_wide_as_they_are_exact() -> None:
    """BF16 for power-of-two scales, FP32 for others, in the layers that are quantized."""
    quantized = 128 * 512 + 256 * 128 + 8 * 3 * 128 * 128
    first = EXACT.spec.override({"first_layers_bf16": 1})
    for spec, size in ((EXACT.spec, 2 * 2), (QuantSpec.preset("fp8_block_fp32"), 2 * 4), (first, 2)):
        assert total("tiny_qwen3_moe", replace(EXACT, spec=spec), "torch").operands == quantized * size


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


ADAPTER = AdapterSection(rank=8, targets=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"))
LIVE: list[tuple[str, str, AdapterSection | None]] = [
    *((model, precision, None) for model in ("moe", "dense") for precision in ("bf16", "fp8")),
    ("moe", "fp8", ADAPTER), ("moe", "fp8", ADAPTER.model_copy(update={"experts": "shared"})),
    ("latent", "fp8", AdapterSection(rank=8)),
]  # fmt: skip


@pytest.mark.parametrize(("model", "precision", "adapter"), LIVE)
def test_a_live_trainer_holds_them(model, precision, adapter, make_trainer, models) -> None:
    path, numerics = models[model], replace(EXACT, trainer=precision)
    trainer = make_trainer(path, precision, adapter=adapter)
    trainer.score(random_batch(rows=2, longest=8))
    states = state_bytes(read_shape(path, adapter=adapter), trainer.config, numerics, "torch").values()
    held = bytes_held(trainer)
    for name in ("parameters", "operands", "gradients", "masters", "moments"):
        assert held[name] == sum(getattr(state, name) for state in states), name
    if adapter is not None:
        full = sum(state_bytes(read_shape(path), trainer.config, numerics, "torch").values(), StateBytes())
        assert sum(states, StateBytes()).total < 0.35 * full.total


HIDDEN, HEADS, KV, HEAD, FFN = 256, 4, 2, 128, 128
ATTENTION = HIDDEN * HEAD * (HEADS + 2 * KV) + HEADS * HEAD * HIDDEN
EXPERT = 3 * HIDDEN * FFN
QUANTIZED = LAYERS * (ATTENTION + EXPERTS * EXPERT)
NORMS = LAYERS * (2 * HIDDEN + 2 * HEAD) + HIDDEN
PARAMETERS = QUANTIZED + NORMS + LAYERS * EXPERTS * HIDDEN + 2 * VOCAB * HIDDEN


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exact", "native"])
def test_a_rank_holds_eighteen_bytes_of_a_parameter(mode: str, moe_path: Path, make_trainer) -> None:
    """By hand. What is quantized is what the codes stand for, in BF16."""
    trainer, batch = make_trainer(moe_path, "fp8", mode=mode), random_batch(rows=2, longest=9)
    state = {kind: size * PARAMETERS for kind, size in (("parameters", 2), ("gradients", 4), ("masters", 4))}
    before = bytes_held(trainer)
    assert before == before | state | {"moments": 8 * PARAMETERS, "operands": 0}
    trainer.score(batch)
    assert bytes_held(trainer)["operands"] == 2 * QUANTIZED
    formats = {"parameters": "bf16", "operands": "bf16", "gradients": "fp32", "masters": "fp32", "moments": "fp32"}
    held = [each for each in inventory(trainer.optimizer, trainer.cache) if each.kind != "rest"]
    assert all(each.format == formats[each.kind] for each in held)
    assert all(each.bytes == prod(each.shape) * {"bf16": 2, "fp32": 4}[each.format] for each in held)
    names = {each.name for each in held if each.kind == "masters"}
    assert {each.name.partition(":")[0] for each in held} == names and len(set(held)) == len(held)
    trainer.train_step(batch, cross_entropy(batch))
    assert bytes_held(trainer) == before
    trainer.set_numerics(replace(trainer.numerics, trainer="bf16"))
    trainer.score(batch)
    assert bytes_held(trainer)["operands"] == 0
    held = bytes_held(make_trainer(moe_path, dtype=torch.float32))  # an FP32 parameter is its own master
    assert held["parameters"] == 4 * PARAMETERS and held["masters"] == 0 and held["moments"] == 8 * PARAMETERS


def test_a_step_sends_gradients_in_fp32_and_gathers_weights_in_bf16(moe_path: Path, make_trainer) -> None:
    trainer, batch = make_trainer(moe_path, "fp8"), random_batch(rows=2, longest=9)
    with transfers() as sent:
        trainer.train_step(batch, cross_entropy(batch))
    gradients = [each for each in sent if each.collective == "reduce_scatter_tensor_coalesced_"]
    assert {each.format for each in gradients} == {"fp32"} and {each.ranks for each in sent} == {1}
    assert sum(each.bytes for each in gradients) >= bytes_held(trainer)["gradients"]  # with padding
    gathered = [each for each in sent if each.collective == "allgather_into_tensor_coalesced_"]
    assert {each.format for each in gathered} == {"bf16"}
    (norm,) = [each for each in sent if each not in (*gradients, *gathered)]
    assert norm.collective == "allreduce_" and norm.format == "fp32" and norm.bytes == 4


def test_a_weight_of_transformer_engine_is_its_codes_and_scales_without_what_megatron_hangs_on_it() -> None:
    model = torch.nn.Linear(512, 256, bias=False, dtype=torch.bfloat16)
    model.weight = weight = BlockwiseWeight(torch.randn(256, 512).bfloat16())
    weight.main_grad = weight.main_param = torch.zeros(256, 512)
    weight._columnwise_data = None
    (found,) = of_model(model, SimpleNamespace(operands=list))  # type: ignore[arg-type]
    assert (found.name, found.kind, found.shape) == ("weight", "parameters", (256, 512))
    assert found.format == "e4m3" and found.bytes == 256 * 512 + 4 * 2 * 4  # FP32, 2 x 4 blocks


BLOCK, PLACE = 128, 64
"""Elements of a quantization block, and those at whose multiples a parameter begins in Megatron's buffers."""


@pytest.mark.slow
@pytest.mark.parametrize("example", REAL_SPECS)
def test_every_rank_holds_its_part_of_every_tensor_in_whole_blocks(example: str, tmp_path: Path) -> None:
    """The last rank of each stage, whose experts are the last ones."""
    directory = CONFIGS / example.removesuffix("_one_gpu").removesuffix("_lora")
    experiment, model = load_experiment(EXAMPLES / f"planned/{example}.yaml"), read_model(directory)
    config, numerics, table = experiment.trainer, experiment.numerics_config(), model.tensors
    seen: set[str] = set()
    for stage in range(config.pp):
        rank = (stage + 1) * config.tp * config.dp - 1
        held = in_a_fork(tmp_path, partial(parameters_of, directory, experiment, rank))
        for each in held:
            rows = [table[name] for name in each.tensors]
            ranks = config.tp if each.split is not None else 1
            rest = rows[0].shape[1:]  # Megatron holds matrices
            whole = [sum(row.shape[0] for row in rows), *([prod(rest)] if rest else [])]
            if each.split is not None:
                whole[each.split] //= config.tp
            assert each.shape == tuple(whole), each
            if any(model.quantizes(row, numerics.trainer_spec) for row in rows):
                assert each.split != 0 or all(row.shape[0] // ranks % BLOCK == 0 for row in rows), each
                # The last block of kv_a_proj's rows is half a one; nothing lies behind it.
                sizes = [size for row in rows for size in row.shape if row.kind != "kv_a_proj"]
                assert all(size % BLOCK == 0 for size in (*sizes, each.shape[1])), each
        # As the planner counts them, to the element.
        counted = buffers(model.shape, config, numerics.trainer_spec, "torch", stage)
        places = (-(-prod(each.shape) // PLACE) * PLACE for each in held)
        assert sum(places) == sum(buffer.elements for buffer in counted)
        seen |= {name for each in held for name in each.tensors}
    others = {name for name, row in table.rows.items() if not row.megatron.buffer} - seen
    at = Layout.of(config.world_size - 1, config)
    mine = range(model.sizes.experts // config.ep * at.ep_rank, model.sizes.experts // config.ep * (at.ep_rank + 1))
    assert {row.expert for row in map(table.__getitem__, others)} == {*range(model.sizes.experts)} - {*mine}
