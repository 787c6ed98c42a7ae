"""Where the tensors of a model lie in a base."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from fp8rl.models.shared_base import SharedBase, base_bytes, parameter_spans
from fp8rl.numerics.quantize import QuantizedTensor
from fp8rl.numerics.spec import QuantSpec
from tests.support.served_model import DEFINITION, EXPERTS, HIDDEN, SPEC, WIDTH, build, hf_tensors_served

TENSORS = hf_tensors_served(0)


def filled() -> SharedBase:
    base = SharedBase(torch.zeros(base_bytes(DEFINITION, SPEC), dtype=torch.uint8), DEFINITION, SPEC)
    for name, tensor in TENSORS.items():
        base.tensors[name].copy_(tensor)
    return base


@pytest.mark.slow
def test_a_base_holds_every_parameter_of_the_engine_and_no_more() -> None:
    """The padding of the vocabulary, which no tensor fills, is the only difference."""
    base, engine = filled(), dict(build(TENSORS).named_parameters())
    assert base.parameters.keys() == engine.keys()
    for name, parameter in engine.items():
        view = base.parameters[name]
        assert (view.shape, view.dtype) == (parameter.shape, parameter.dtype), name
        if name not in ("model.embed_tokens.weight", "lm_head.weight"):
            assert torch.equal(view.view(torch.uint8), parameter.view(torch.uint8)), name
    spans = sorted((span.start, span.stop) for span in parameter_spans(DEFINITION, SPEC).values())
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    assert base.flat.numel() <= 1.01 * sum(tensor.nbytes for tensor in engine.values())


def test_fused_tensors_are_views_and_experts_a_stack() -> None:
    base, rows = filled(), DEFINITION.tensors.rows
    prefix = "model.layers.0.mlp.experts."
    up = base.fused([rows[f"{prefix}1.up_proj.weight"]])
    both = base.fused([rows[f"{prefix}1.{kind}_proj.weight"] for kind in ("gate", "up")], stacked=EXPERTS - 1)
    assert isinstance(up, QuantizedTensor) and isinstance(both, QuantizedTensor)
    assert both.data.shape == (EXPERTS - 1, 2 * WIDTH, HIDDEN)
    assert torch.equal(both.dequantize()[0, WIDTH:], up.dequantize())
    assert up.data.untyped_storage().data_ptr() == base.flat.untyped_storage().data_ptr()
    with pytest.raises(ValueError, match="one after the other"):
        base.fused([rows[f"{prefix}1.{kind}_proj.weight"] for kind in ("up", "gate")])


def test_another_spec_is_refused_by_its_size() -> None:
    with pytest.raises(ValueError, match="expected [0-9]+: another model, or another spec"):
        SharedBase(filled().flat, DEFINITION, QuantSpec.preset("bf16"))
