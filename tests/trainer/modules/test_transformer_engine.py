"""The modules that native mode takes from TransformerEngine, as Megatron names them; without it they are stand-ins of
Megatron's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from megatron.core.extensions import transformer_engine, transformer_engine_spec_provider
from megatron.core.transformer import ModuleSpec

from fp8rl.models import read_model
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.spec import QuantSpec
from fp8rl.numerics.weight_cache import WeightCache
from fp8rl.trainer.modules.families import Layer, attention, fields_of_layer
from fp8rl.trainer.modules.native import transformer_engine_modules
from fp8rl.trainer.modules.precision import Precision
from tests.support.paths import ROOT

EVERY = {"TEDotProductAttention", "TELayerNormColumnParallelLinear", "TERowParallelLinear"}
GROUPED = {"TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"}


def modules(of: Any) -> Iterator[Any]:
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
    [
        ("tiny_qwen2", 0, set()),
        ("tiny_qwen3_moe", 0, GROUPED | {"TENorm"}),
        ("tiny_deepseek", 1, GROUPED | {"TENorm", "TELinear", "TEColumnParallelLinear"}),
        ("tiny_glm", 1, GROUPED | {"TENorm", "TEColumnParallelLinear"}),
        ("tiny_qwen3_next", 1, GROUPED | {"TENorm", "TEColumnParallelLinear"}),
    ],
)
def test_its_modules_are_taken(model: str, layer: int, beside: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in GROUPED:  # None without it
        monkeypatch.setattr(transformer_engine_spec_provider, name, name)
    known = {name: module for name, module in vars(transformer_engine).items() if name.startswith("TE") and module}
    names = {id(module): name for name, module in (known | {name: name for name in GROUPED}).items()}
    assert {names[id(each)] for each in modules(fields(model, layer)) if id(each) in names} == EVERY | beside


def test_layers_that_it_has_no_modules_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    without = {name: build for name, build in attention.FAMILY.layer.items() if name != "transformer_engine"}
    monkeypatch.setitem(vars(attention.FAMILY), "layer", without)
    with pytest.raises(UserError, match="native, on transformer_engine"):
        fields("tiny_qwen2", 0)


def fields(model: str, layer: int) -> dict[str, Any]:
    """The fields of a layer of a model."""
    definition = read_model(ROOT / "examples/models" / model)
    numerics = NumericsConfig(mode="native", spec=QuantSpec.preset("fp8_block_pow2"))
    precision = Precision(numerics, WeightCache(), definition.sizes.layers).of_layer(layer)
    own = Layer(definition.sizes, transformer_engine_modules(precision), precision)
    return fields_of_layer(definition.architecture.families, own, "transformer_engine")
