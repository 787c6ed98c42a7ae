"""The FP8 experts of native mode against each token's own sum over its experts in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from numerics.config import NumericsConfig
from numerics.quantize import fake_quantize, quantize
from numerics.spec import QuantSpec
from rollout.plugin import engine
from rollout.plugin.native import fp8_moe

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
    monkeypatch.setattr(engine, "_state", None)
    engine.configure(NumericsConfig(mode="native", spec=SPEC))
    engine.state().weights.attach(layer, "0")

    dispatched = SimpleNamespace(hidden_states=x, topk_output=(weights, experts.int(), None))
    found = fp8_moe(None, layer, dispatched).hidden_states
    expected = torch.stack(
        [
            sum(
                p * expert_output(x[t], w13.dequantize()[e], w2.dequantize()[e]) for p, e in zip(weights[t], experts[t])
            )
            for t in range(TOKENS)
        ]
    )
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-6)


def expert_output(x: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """float64 [H], rounded to BF16 after each product, after SiLU and after its product with the up half."""
    gate, up = product(x, w13).chunk(2)
    return product(F.silu(gate).bfloat16() * up, w2).double()


def product(x: Tensor, weight: Tensor) -> Tensor:
    return (weight.double() @ fake_quantize(x[None], SPEC.activation)[0].double()).bfloat16()
