"""Native mode: the experts against each token's own sum in float64, and SGLang's quantizer with the run's scales."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8rl.models import Model, ModelSizes
from fp8rl.models.families.mlp import moe_tensors
from fp8rl.models.tensors import TensorRow
from fp8rl.numerics.backend.implementation import Implementation, using
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.quantize import fake_quantize, quantize
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rollout.engine.plugin import native, state
from fp8rl.rollout.engine.plugin.weights import ServedWeights
from tests.support.definitions import listed
from tests.support.served_model import SIZES

pytest.importorskip("sglang.srt.layers.activation")

SPEC = QuantSpec.preset("fp8_block_pow2")
TOKENS, HIDDEN, WIDTH, EXPERTS, TOP_K = 9, 256, 128, 5, 2


def test_fp8_experts_follow_sglangs_order_of_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN).bfloat16()
    w13, w2 = (
        quantize(torch.randn(EXPERTS, *shape).bfloat16() / 8, SPEC.weight)
        for shape in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
    )
    weights, experts = torch.rand(TOKENS, EXPERTS).topk(TOP_K)
    layer = nn.Module()
    layer.num_experts = EXPERTS
    for name, quantized in (("w13_weight", w13), ("w2_weight", w2)):
        layer.register_parameter(name, nn.Parameter(quantized.data, requires_grad=False))
        layer.register_parameter(f"{name}_scale_inv", nn.Parameter(quantized.scale_inv, requires_grad=False))
    monkeypatch.setattr(state, "_state", None)
    state.configure(NumericsConfig(mode="native", spec=SPEC))
    state.state().weights = ServedWeights(SPEC.weight, layer, definition(), "0")

    dispatched = SimpleNamespace(hidden_states=x, topk_output=(weights, experts.int(), None))
    found = native.fp8_experts(None, layer, dispatched).hidden_states
    of_experts, rows = list(zip(w13.dequantize(), w2.dequantize())), zip(x, weights, experts)
    sums = [sum(p * expert_output(row, *of_experts[e]) for p, e in zip(each, chosen)) for row, each, chosen in rows]
    expected = torch.stack(sums)
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-6)


def definition() -> Model:
    """Of a layer that is the whole model."""

    def rows(sizes: ModelSizes) -> Iterator[TensorRow]:
        for row in moe_tensors(sizes, 0):
            if row.expert is not None:
                parameter = row.engine.parameter.rpartition(".")[2]
                yield replace(row, engine=replace(row.engine, parameter=parameter))

    sizes = replace(SIZES, hidden_size=HIDDEN, experts=EXPERTS, expert_size=WIDTH)
    return listed("Experts", sizes, rows)


def expert_output(x: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """float64 [H], rounded to BF16 after each product, after SiLU and after its product with the up half."""
    gate, up = product(x, w13).chunk(2)
    return product(F.silu(gate).bfloat16() * up, w2).double()


def product(x: Tensor, weight: Tensor) -> Tensor:
    return (weight.double() @ fake_quantize(x[None], SPEC.activation)[0].double()).bfloat16()


@pytest.fixture
def fp8_kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's module of quantizers as the plugin leaves it on a GPU."""
    module = pytest.importorskip("sglang.kernels.ops.quantization.fp8_kernel")
    monkeypatch.setattr(state, "_state", None)
    state.configure(NumericsConfig(mode="native", spec=SPEC))
    monkeypatch.setattr(module, "_run_per_token_group_quant_8bit_kernel", native.quantize_groups)
    monkeypatch.setattr(module, "sglang_per_token_quant_fp8", native.quantize_only_group)
    return module


def activations(channels: int) -> Tensor:
    """Rows of magnitudes from 2^-18 to 2^17, one of them zero in its first group and one wholly zero."""
    magnitudes = torch.exp2(torch.arange(-18.0, 18.0, 3.0))
    x = torch.randn(len(magnitudes), channels, generator=torch.Generator().manual_seed(0)) * magnitudes[:, None]
    x[3, :128] = 0
    x[5] = 0
    return x.bfloat16()


@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.parametrize("channels", [128, 384])
@pytest.mark.parametrize(
    "layout", [{}, {"column_major_scales": True}, {"column_major_scales": True, "scale_tma_aligned": True}]
)
def test_sglang_quantizes_activations_with_powers_of_two(
    fp8_kernel: Any, layout: dict[str, bool], channels: int, implementation: Implementation
) -> None:
    """In the layouts that the Triton experts and dense products, CUTLASS and DeepGEMM ask for."""
    x = activations(channels)
    with using(implementation):
        codes, scales = fp8_kernel.sglang_per_token_group_quant_fp8(x, 128, **layout)
    expected = quantize(x, SPEC.activation)
    assert (codes.dtype, codes.shape) == (torch.float8_e4m3fn, x.shape)
    assert (scales.dtype, scales.shape) == (torch.float32, (len(x), channels // 128))
    assert torch.equal(codes.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(scales, expected.scale_inv)
    assert channels == 128 or (scales.stride(0) == 1) == bool(layout)
    mantissas, _ = torch.frexp(scales)
    assert (mantissas == 0.5).all()
    assert (scales[5] == 1).all() and scales[3, 0] == 1


@pytest.mark.parametrize("options", [{"fuse_silu_and_mul": True}, {"masked_m": torch.tensor([2])}])
def test_a_product_that_wants_more_than_codes_and_scales_is_refused(fp8_kernel: Any, options: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match="moe-runner-backend triton"):
        fp8_kernel.sglang_per_token_group_quant_fp8(activations(256), 128, **options)


def test_one_scale_for_a_longer_row_is_refused(fp8_kernel: Any) -> None:
    with pytest.raises(NotImplementedError, match="a group of 256 channels, expected 128"):
        fp8_kernel.sglang_per_token_quant_fp8(activations(256))
