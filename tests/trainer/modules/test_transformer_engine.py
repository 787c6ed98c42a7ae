"""What native mode takes from TransformerEngine: its modules, as Megatron names them, linear attention run on a CPU;
its process: environment, the check of its recipe, and a live change.

Stand-ins of its classes take no keyword more than Megatron's wrappers of them do (0.16.1), and compute in BF16.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.extensions import transformer_engine, transformer_engine_spec_provider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.dot_product_attention import DotProductAttention

from fp8rl.models import read_model
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.spec import QuantSpec
from fp8rl.numerics.weight_cache import WeightCache
from fp8rl.trainer.megatron import te_runtime
from fp8rl.trainer.megatron.lowering import BACKWARD, FP32_SCALES, Lowering, lower
from fp8rl.trainer.modules.exact import Held
from fp8rl.trainer.modules.native import (
    ColumnLinear,
    Layer,
    NormColumnLinear,
    RMSNorm,
    RowLinear,
    fields_of_layer,
    transformer_engine_modules,
)
from fp8rl.trainer.modules.precision import LayerPrecision, Precision
from tests.support.batches import cross_entropy, random_batch
from tests.support.lowering import DEFAULT, native
from tests.support.models import write_family
from tests.support.paths import ROOT
from tests.support.tiny_model import TinyModel

EVERY = {"TEDotProductAttention", "TELayerNormColumnParallelLinear", "TERowParallelLinear"}
GROUPED = {"TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"}


def modules(of: Any):
    """All modules that specs of modules name, however deep."""
    if isinstance(of, ModuleSpec):
        yield from (*modules(of.module), *modules(of.submodules))
    elif dataclasses.is_dataclass(of) and not isinstance(of, type):
        for field in dataclasses.fields(of):
            yield from modules(getattr(of, field.name))
    elif isinstance(of, dict):
        for each in of.values():
            yield from modules(each)
    else:
        yield of


@pytest.mark.parametrize(
    ("model", "layer", "beside"),
    [("tiny_qwen2", 0, set()), ("tiny_qwen3_moe", 0, GROUPED | {"TENorm"}),
     ("tiny_deepseek", 1, GROUPED | {"TENorm", "TELinear", "TEColumnParallelLinear"}),
     ("tiny_glm", 1, GROUPED | {"TENorm", "TEColumnParallelLinear"}),
     ("tiny_qwen3_next", 1, GROUPED | {"TENorm", "TEColumnParallelLinear"})],
)  # fmt: skip
def test_its_modules_are_taken(model: str, layer: int, beside: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in GROUPED:  # None without it
        monkeypatch.setattr(transformer_engine_spec_provider, name, name)
    known = {name: module for name, module in vars(transformer_engine).items() if name.startswith("TE") and module}
    names = {id(module): name for name, module in (known | {name: name for name in GROUPED}).items()}
    assert {names[id(each)] for each in modules(fields(model, layer)) if id(each) in names} == EVERY | beside


def fields(model: str, layer: int) -> dict[str, Any]:
    definition = read_model(ROOT / "examples/models" / model)
    numerics = NumericsConfig(mode="native", spec=QuantSpec.preset("fp8_block_pow2"))
    precision = LayerPrecision(Precision(numerics, WeightCache(), definition.sizes.layers), layer)
    return fields_of_layer(Layer(definition, transformer_engine_modules(precision), precision))


pytestmark = pytest.mark.slow

PLAIN: dict[str, Any] = {"precision": SimpleNamespace(quantizes=lambda kind: False), "kind": ""}


def stand_in(name: str, made_of: type, takes: str, **only: Any) -> type:
    """A class that takes these keywords of Megatron's wrapper, of which some have one value."""

    def start(self: Any, inputs: int, outputs: int, **given: Any) -> None:
        assert given.keys() <= {*takes.split()} and {key: given[key] for key in only} == only
        own = {key: value for key, value in given.items() if key not in ("tp_comm_buffer_name", "stride")}
        own.pop("skip_weight_param_allocation", None)
        made_of.__init__(self, inputs, outputs, **own, **PLAIN)

    return type(name, (made_of,), {"__init__": start})


EACH = "config init_method bias skip_bias_add is_expert tp_comm_buffer_name tp_group"
COLUMN = f"{EACH} gather_output skip_weight_param_allocation stride"
TEColumn = stand_in("TEColumn", ColumnLinear, COLUMN, gather_output=False)
TENormColumn = stand_in("TENormColumn", NormColumnLinear, COLUMN, gather_output=False)
TERow = stand_in("TERow", RowLinear, f"{EACH} input_is_parallel", input_is_parallel=True)


ASKED: dict[str, Any] = {
    "column_parallel_linear": lambda self: TEColumn, "column_parallel_layer_norm_linear": lambda self: TENormColumn,
    "row_parallel_linear": lambda self: TERow, "layer_norm": lambda self, rms_norm: {True: RMSNorm}[rms_norm],
    "core_attention": lambda self: DotProductAttention,
}  # fmt: skip
"""What dense models ask of `TESpecProvider`."""


@pytest.fixture
def on_te(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers of native mode have TransformerEngine's layers."""
    module: Any = ModuleType("transformer_engine_spec_provider")
    module.TESpecProvider = type("Provider", (), ASKED)
    monkeypatch.setitem(sys.modules, f"megatron.core.extensions.{module.__name__}", module)
    monkeypatch.setattr("fp8rl.trainer.scorer.lower", lambda *_: Lowering(transformer_engine=True))


def test_linear_attention_has_tes_products(tmp_path, on_te: None, make_trainer) -> None:
    shape = TinyModel(layers=4, hidden=256, heads=4, kv_heads=2, intermediate=256, family="qwen3_5_text", tied=True)
    path, batch = write_family(tmp_path / "model", shape), random_batch(2, 60)
    trainer, exact = make_trainer(path, mode="native"), make_trainer(path)
    net = trainer.model.decoder.layers[0].self_attention
    found = {name: type(module) for name, module in net.named_children()}
    assert found == {
        "in_proj": TEColumn,  # in FP8 by the layer's context, which does not ask what a product is for
        "gate_proj": ColumnParallelLinear,  # so that the gates stay in BF16
        "conv1d": Held,
        "out_norm": Held,
        "out_proj": TERow,
    }
    assert net.A_log.dtype == net.dt_bias.dtype == net.out_norm.weight.dtype == torch.float32
    apart = (trainer.score(batch)[1] - exact.score(batch)[1]).abs()
    assert 0 < apart.max() and apart.mean() < 0.05
    one, other = (each.train_step(batch, cross_entropy(batch)).result.grad_norm for each in (trainer, exact))
    assert one == pytest.approx(other, rel=0.05)


class Float8BlockScaling:
    """The fields of TransformerEngine's recipe of this name, as TransformerEngine 2.20.2 has them by default."""

    def __init__(self, pow2: bool = True, form: str = "E4M3", backward_override: str | None = None) -> None:
        self.fp8_format = SimpleNamespace(name=form)
        scales = SimpleNamespace(power_2_scale=pow2, amax_epsilon=0.0)
        self.fp8_quant_fwd_inp = self.fp8_quant_fwd_weight = self.fp8_quant_bwd_grad = scales
        self.x_block_scaling_dim, self.w_block_scaling_dim, self.grad_block_scaling_dim = 1, 2, 1
        split = SimpleNamespace(use_split_accumulator=True)
        self.fp8_gemm_fprop = self.fp8_gemm_dgrad = self.fp8_gemm_wgrad = split
        self.fp8_dpa = self.fp8_mha = False
        self.backward_override = backward_override


def test_the_environment_is_set_and_cleared_until_it_has_been_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FP32_SCALES, "1")
    monkeypatch.setenv(BACKWARD, "high_precision")
    te_runtime.prepare(Lowering())
    assert (os.environ[FP32_SCALES], os.environ[BACKWARD]) == ("1", "high_precision")
    te_runtime.prepare(DEFAULT)
    assert FP32_SCALES not in os.environ and BACKWARD not in os.environ
    te_runtime.prepare(lower(native("fp8_forward", preset="fp8_block_fp32"), True))
    assert (os.environ[FP32_SCALES], os.environ[BACKWARD]) == ("1", "dequantized")
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    te_runtime.prepare(DEFAULT)
    assert os.environ[FP32_SCALES] == "1"


def test_the_recipe_that_was_lowered_passes() -> None:
    te_runtime.check(DEFAULT, Float8BlockScaling())
    hybrid = lower(native("fp8", preset="fp8_block_fp32", gradient={"format": "e5m2"}), True)
    te_runtime.check(hybrid, Float8BlockScaling(pow2=False, form="HYBRID"))


@pytest.mark.parametrize(
    ("recipe", "found"),
    [(Float8BlockScaling(pow2=False), "'fp8_quant_fwd_weight.power_2_scale': False"),
     (Float8BlockScaling(form="HYBRID"), "{'fp8_format.name': 'HYBRID'}"),
     (Float8BlockScaling(backward_override="high_precision"), "{'backward_override': 'high_precision'}"),
     (SimpleNamespace(), "'SimpleNamespace'"), (None, "'NoneType'")],
)  # fmt: skip
def test_another_recipe_is_refused_with_its_settings(recipe: Any, found: str) -> None:
    with pytest.raises(UserError) as error:
        te_runtime.check(replace(DEFAULT, environment={FP32_SCALES: "1", BACKWARD: None}), recipe)
    assert found in str(error.value) and f"Start the process with {FP32_SCALES}=1 {BACKWARD} unset" in str(error.value)


def test_a_live_model_falls_back_to_bf16_and_returns_and_takes_no_other_fp8() -> None:
    config: Any = SimpleNamespace(fp8="e4m3")
    for numerics, fp8 in ((native("bf16"), None), (native(), "e4m3")):
        te_runtime.switch(DEFAULT, lower(numerics, True), config)
        assert config.fp8 == fp8
    in_bf16 = replace(DEFAULT, config={}, recipe=None)
    for before, changes in (
        (DEFAULT, {"preset": "fp8_block_fp32"}), (DEFAULT, {"first_layers_bf16": 1}), (in_bf16, {}),
    ):  # fmt: skip
        with pytest.raises(UserError, match="Start a new trainer"):
            te_runtime.switch(before, lower(native(**changes), True), config)
        te_runtime.switch(Lowering(), lower(native(**changes), False), config)
    assert config.fp8 == "e4m3"
