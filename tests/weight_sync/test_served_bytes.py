"""What the engine is sent is what the trainer's own forward multiplies with, bit for bit: codes and scales."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from numerics.config import NumericsConfig
from numerics.quantize import dequantize
from numerics.spec import QuantSpec
from tests.support.batches import cross_entropy, random_batch
from tests.support.models import LENGTH, write_model
from tests.support.ranks import run_on_ranks
from trainer.config import TrainerConfig
from trainer.parallel import Layout

pytestmark = pytest.mark.slow
HEADS, KEY_HEADS, HEAD_DIM = 4, 2, 128
PRESETS = ("fp8_block_pow2", "fp8_block_fp32")


@dataclass(frozen=True)
class Case:
    """Run on the one rank: train a step, run a forward, and collect what is served and what the forward cached."""

    paths: dict[str, Path]

    def __call__(self, layout: Layout, config: TrainerConfig) -> dict[str, Any]:
        from trainer.trainer import Trainer
        from weight_sync.quantized import served_tensors

        found = {}
        for preset in PRESETS:
            numerics = NumericsConfig(spec=QuantSpec.preset(preset))
            for kind, path in self.paths.items():
                trainer = Trainer(path, config, numerics, layout, seed=0, total_steps=9, max_sequence_length=LENGTH)
                batch = random_batch(rows=8)
                trainer.train_step(batch, cross_entropy(batch))
                trainer.score(batch)
                names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
                cached = {
                    names[id(weight)]: operand
                    for (weights, _), made in trainer.cache._operands.items()
                    for weight, operand in zip(weights, made if isinstance(made, list) else [made], strict=True)
                }
                tensors = served_tensors(trainer.export_weights(), numerics.spec, trainer.definition)
                served = {name: tensor.clone() for name, tensor in tensors}
                found[f"{kind}/{preset}"] = {"cached": cached, "served": served}
        return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("served_bytes")
    paths = {"moe": write_model(folder / "moe"), "dense": write_model(folder / "dense", moe=False)}
    return run_on_ranks(TrainerConfig(lr=1e-3, warmup_steps=0), folder / "rank", Case(paths))[0]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_the_forward_computes_with_what_is_served(found: dict[str, Any], kind: str, preset: str) -> None:
    cached, served = found[f"{kind}/{preset}"]["cached"], found[f"{kind}/{preset}"]["served"]
    computed = {hf_name: part for name, operand in cached.items() for hf_name, part in hf_parts(name, operand)}
    quantized_names = {name for name in served if name + "_scale_inv" in served}
    assert len(quantized_names) == 2 * (4 + 3 * (8 if kind == "moe" else 1))
    assert computed.keys() == quantized_names
    for name, values in computed.items():
        held = dequantize(served[name], served[name + "_scale_inv"], QuantSpec.preset(preset).weight)
        assert torch.equal(values, held), name


def hf_parts(name: str, operand: Tensor) -> list[tuple[str, Tensor]]:
    """(HF name, values) of the matrices in one parameter of Megatron's, cut at whole blocks."""
    _, _, layer, module, linear, leaf = name.removeprefix("module.").replace("mlp.experts.", "mlp.").split(".")
    prefix = f"model.layers.{layer}." + {"self_attention": "self_attn.", "mlp": "mlp."}[module]
    if leaf != "weight":
        prefix += f"experts.{leaf.removeprefix('weight')}."
    match linear:
        case "linear_qkv":
            # Each key head's group is its query heads, its key head and its value head; a head is one block high.
            kinds = (*["q"] * (HEADS // KEY_HEADS), "k", "v") * KEY_HEADS
            rows = {kind: [i for i, other in enumerate(kinds) if other == kind] for kind in "qkv"}
            heads = operand.unflatten(0, (len(kinds), HEAD_DIM))
            return [(f"{prefix}{k}_proj.weight", heads[rows[k]].flatten(0, 1)) for k in "qkv"]
        case "linear_fc1":
            return [(f"{prefix}{kind}_proj.weight", half) for kind, half in zip(("gate", "up"), operand.chunk(2))]
        case "linear_fc2":
            return [(f"{prefix}down_proj.weight", operand)]
        case "linear_proj":
            return [(f"{prefix}o_proj.weight", operand)]
    raise AssertionError(f"unknown parameter {name}")
