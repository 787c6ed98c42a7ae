"""SGLang's copies of kv_b_proj, made by its own code: as held at each commit, and named where they are not."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8rl.models.families.latent import Latent, latent_attention_tensors
from fp8rl.numerics import delta
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.quantize import quantize
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rollout.engine.plugin import native, state
from fp8rl.rollout.engine.plugin.weights import ServedWeights
from fp8rl.rollout.engine.protocol import DELTA
from tests.support.definitions import listed
from tests.support.served_model import SIZES

loader = pytest.importorskip("sglang.srt.models.deepseek_common.deepseek_weight_loader")

HEADS, PLAIN, VALUE, RANK = 2, 128, 128, 256
NAME = "model.layers.0.self_attn.kv_b_proj.weight"
PRESETS = ("bf16", "fp8_block_fp32")


class Engine(loader.DeepseekV2WeightLoaderMixin, nn.Module):
    """What SGLang's loader reads of a model with one layer, whose kv_b_proj is served by `spec`."""

    def __init__(self, spec: QuantSpec) -> None:
        super().__init__()
        product, attention = nn.Module(), nn.Module()
        for part, tensor in tensors(spec, 0).items():
            product.register_parameter(part, nn.Parameter(tensor, requires_grad=False))
        attention.kv_b_proj = product
        attention.w_kc = attention.w_vc = attention.w_scale = None
        attention.qk_nope_head_dim, attention.v_head_dim, attention.use_deep_gemm_bmm = PLAIN, VALUE, False
        layer = nn.Module()
        layer.self_attn = attention
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([layer])
        self.model.start_layer, self.model.end_layer = 0, 1
        self.config = SimpleNamespace(num_hidden_layers=1, architectures=["DeepseekV3ForCausalLM"])
        self.quant_config = SimpleNamespace(weight_block_size=[128, 128]) if spec.quantized else None
        self.post_load_weights()

    @property
    def attention(self) -> Any:
        return self.model.layers[0].self_attn


def tensors(spec: QuantSpec, seed: int) -> dict[str, Tensor]:
    """kv_b_proj's parameters. Its blocks have different scales, so that one scale for all could not hold them."""
    weight = torch.randn(HEADS * (PLAIN + VALUE), RANK, generator=torch.Generator().manual_seed(seed))
    weight = (weight * torch.exp2(torch.arange(-4, 4)).repeat_interleave(64)[:, None]).bfloat16()
    if not spec.quantized:
        return {"weight": weight}
    quantized = quantize(weight, spec.weight)
    return {"weight": quantized.data, "weight_scale_inv": quantized.scale_inv}


@pytest.fixture(params=PRESETS)
def spec(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> QuantSpec:
    found = QuantSpec.preset(request.param)
    monkeypatch.setattr(state, "_state", None)
    state.configure(NumericsConfig(mode="native", spec=found))
    monkeypatch.setattr(loader, "block_quant_to_tensor_quant", native.dequantized)
    return found


def served_by(engine: Engine, spec: QuantSpec) -> ServedWeights:
    sizes = dataclasses.replace(SIZES, own=(Latent(q_rank=128, kv_rank=RANK, rope_dim=64, value_dim=VALUE),))
    rows = [row for row in latent_attention_tensors(sizes, 0) if row.name == NAME]
    return ServedWeights(spec.weight, engine, listed("Latent", sizes, lambda _: iter(rows)), "0")


def value_of(held: dict[str, Tensor]) -> Tensor:
    """What it multiplies as, in FP64: each code times its block's scale."""
    weight = held["weight"].double()
    if (scales := held.get("weight_scale_inv")) is None:
        return weight
    return weight * scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)


def test_copies_are_what_the_codes_say_rounded_once_and_named_where_somebody_changed_them(spec: QuantSpec) -> None:
    engine = Engine(spec)
    served, whole = served_by(engine, spec), value_of(tensors(spec, 0)).bfloat16().unflatten(0, (HEADS, -1))
    assert engine.attention.w_kc.equal(whole[:, :PLAIN])
    assert engine.attention.w_vc.equal(whole[:, PLAIN:].transpose(1, 2))
    sound = served.manifest()
    engine.attention.w_vc[0, 0, 0] += 1
    assert {name for name, entry in served.manifest().items() if entry != sound[name]} == {NAME}
    assert served.commit("0") == sound


def test_a_delta_reaches_the_copies_with_its_commit(spec: QuantSpec) -> None:
    """It is written into the parameter, and SGLang's loader, which makes the copies, never hears of it."""
    engine = Engine(spec)
    served = served_by(engine, spec)
    new = {part: tensor.clone() for part, tensor in tensors(spec, 0).items()}
    new["weight"].view(torch.uint8)[3, 5] ^= 1
    served.invalidate()
    served.load(lambda _: None, [(DELTA + NAME, delta.encode(new["weight"], tensors(spec, 0)["weight"]))])
    assert {name for name, entry in served.manifest().items() if entry.endswith("@copies of another")} == {NAME}
    assert not any("copies" in entry for entry in served.commit("1").values())
    whole = value_of(new).bfloat16().unflatten(0, (HEADS, -1))
    assert engine.attention.w_kc.equal(whole[:, :PLAIN])
