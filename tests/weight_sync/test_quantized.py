"""What is served: exact names, shapes, and the bytes of the project's one quantizer."""

from __future__ import annotations

import pytest
import torch

from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.quantize import quantize
from fp8rl.numerics.spec import QuantSpec
from fp8rl.weight_sync.served import served_tensors
from tests.support.definitions import every_tensor

POW2 = QuantSpec.preset("fp8_block_pow2")
LAYER = "model.layers.3."
MODEL = every_tensor(layers=5)
# name -> shape, and the blocks of 128 x 128 that it has if it is quantized
WEIGHTS = {
    "model.embed_tokens.weight": ((64, 256), None),
    LAYER + "input_layernorm.weight": ((256,), None),
    LAYER + "self_attn.q_proj.weight": ((512, 256), (4, 2)),
    LAYER + "self_attn.k_proj.weight": ((200, 256), (2, 2)),
    LAYER + "self_attn.v_proj.weight": ((128, 300), (1, 3)),
    LAYER + "self_attn.o_proj.weight": ((256, 512), (2, 4)),
    LAYER + "self_attn.q_norm.weight": ((128,), None),
    LAYER + "mlp.gate.weight": ((128, 256), None),  # the router: "gate" is not "gate_proj"
    LAYER + "mlp.experts.11.gate_proj.weight": ((128, 256), (1, 2)),
    LAYER + "mlp.experts.11.up_proj.weight": ((128, 256), (1, 2)),
    LAYER + "mlp.experts.11.down_proj.weight": ((256, 128), (2, 1)),
    "model.layers.4.mlp.gate_proj.weight": ((384, 256), (3, 2)),
    "model.layers.4.mlp.up_proj.weight": ((384, 256), (3, 2)),
    "model.layers.4.mlp.down_proj.weight": ((256, 384), (2, 3)),
    "model.norm.weight": ((256,), None),
    "lm_head.weight": ((64, 256), None),
}


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, (shape, _) in WEIGHTS.items()}


def test_names_shapes_and_formats(weights: dict[str, torch.Tensor]) -> None:
    served = list(served_tensors(weights.items(), POW2, MODEL))
    expected = []
    for name, (shape, blocks) in WEIGHTS.items():
        expected.append((name, shape, torch.float8_e4m3fn if blocks else torch.bfloat16))
        if blocks:
            expected.append((name + "_scale_inv", blocks, torch.float32))
    assert [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in served] == expected


@pytest.mark.parametrize("preset", ["fp8_block_pow2", "fp8_block_fp32"])
def test_bytes_are_the_quantizers(weights: dict[str, torch.Tensor], preset: str) -> None:
    spec = QuantSpec.preset(preset)
    served = dict(served_tensors(weights.items(), spec, MODEL))
    for name, (_, blocks) in WEIGHTS.items():
        if blocks is None:
            assert served[name] is weights[name]
            continue
        expected = quantize(weights[name], spec.weight)
        assert torch.equal(served[name].view(torch.uint8), expected.data.view(torch.uint8))
        assert torch.equal(served[name + "_scale_inv"], expected.scale_inv)
        largest = weights[name][:128, :128].float().abs().max()
        held = (served[name][:128, :128].float() * served[name + "_scale_inv"][0, 0]).abs().max()
        assert held == pytest.approx(largest, rel=2**-4)  # E4M3 keeps three bits behind the leading one


def test_a_static_range_is_served_as_a_scale_of_one_half_in_every_block(weights: dict[str, torch.Tensor]) -> None:
    served = dict(served_tensors(weights.items(), QuantSpec.preset("ironwood"), MODEL))
    for name, (_, blocks) in WEIGHTS.items():
        if blocks is not None:
            assert served[name + "_scale_inv"].shape == blocks and (served[name + "_scale_inv"] == 0.5).all()
            assert torch.equal(served[name].float(), (weights[name].float() * 2).to(torch.float8_e4m3fn).float())


def test_a_kind_outside_the_scope_is_served_as_it_is(weights: dict[str, torch.Tensor]) -> None:
    spec = POW2.override({"scope": ["experts.gate_proj", "experts.up_proj", "experts.down_proj"]})
    scales = {name for name, _ in served_tensors(weights.items(), spec, MODEL) if name.endswith("_scale_inv")}
    assert scales == {f"{LAYER}mlp.experts.11.{kind}_proj.weight_scale_inv" for kind in ("gate", "up", "down")}


@pytest.mark.parametrize(("first", "last", "in_fp8"), [(3, 0, "34"), (4, 0, "4"), (0, 1, "3"), (0, 0, "34")])
def test_a_layer_that_is_an_exception_is_served_as_it_is(
    weights: dict[str, torch.Tensor], first: int, last: int, in_fp8: str
) -> None:
    """Layers 3 and 4 of a model of five."""
    spec = POW2.override({"first_layers_bf16": first, "last_layers_bf16": last})
    served = dict(served_tensors(weights.items(), spec, MODEL))
    quantized = {name for name in served if name + "_scale_inv" in served}
    assert {name.split(".")[2] for name in quantized} == set(in_fp8)
    assert all(served[name] is weights[name] for name in weights.keys() - quantized)


@pytest.mark.parametrize("preset", ["fp8_block_pow2", "fp8_block_fp32"])
def test_what_the_trainer_quantized_is_served_as_it_is(preset: str) -> None:
    spec = QuantSpec.preset(preset)
    name = LAYER + "self_attn.o_proj.weight"
    mine = quantize(torch.randn(256, 256), spec.weight)
    served = dict(served_tensors([(name, mine)], spec, MODEL))
    assert served[name] is mine.data and served[name + "_scale_inv"] is mine.scale_inv
    (unquantized,) = dict(served_tensors([(name, mine)], QuantSpec.preset("bf16"), MODEL)).values()
    scales = mine.scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(unquantized, (mine.data.float() * scales).bfloat16())
    other = QuantSpec.preset({"fp8_block_pow2": "fp8_block_fp32", "fp8_block_fp32": "fp8_block_pow2"}[preset])
    with pytest.raises(UserError, match=f"{name}: found it quantized as"):
        list(served_tensors([(name, mine)], other, MODEL))


def test_bf16_passes_everything_through(weights: dict[str, torch.Tensor]) -> None:
    served = list(served_tensors(weights.items(), QuantSpec.preset("bf16"), MODEL))
    assert [name for name, _ in served] == list(weights)
    assert all(tensor is weights[name] for name, tensor in served)
