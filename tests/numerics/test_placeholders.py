"""Parameters that share memory until their own comes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp8rl.numerics.holdings import NAN, ZEROS, own_memory, placeholders


class Layer(nn.Module):
    """Parameters of several sizes and formats, of which one is wrapped anew, as loaders do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.weight = nn.Parameter(torch.ones(4, 8, dtype=torch.bfloat16))
        self.weight.tag = "split"  # type: ignore[attr-defined]
        self.codes = nn.Parameter(torch.ones(5, 7).to(torch.float8_e4m3fn), requires_grad=False)
        self.codes = nn.Parameter(self.codes.data, requires_grad=False)


@pytest.mark.parametrize(("fill", "value"), [(ZEROS, 0.0), (NAN, float("nan"))])
def test_all_parameters_share_the_memory_of_the_largest(fill: int, value: float) -> None:
    with placeholders(fill):
        model = nn.ModuleList(Layer() for _ in range(3))
    held = list(model.parameters())
    assert {p.untyped_storage().data_ptr() for p in held} == {held[0].untyped_storage().data_ptr()}
    assert held[0].untyped_storage().nbytes() == 2 * 4 * 8
    assert [(p.shape, p.dtype) for p in held] == [(p.shape, p.dtype) for _ in range(3) for p in Layer().parameters()]
    assert all(p.is_contiguous() and p.float().allclose(torch.tensor(value), equal_nan=True) for p in held)
    assert all(layer.weight.tag == "split" for layer in model)
    own_memory(held[0])
    held[0].data.fill_(1.0)
    assert (held[1] != 1.0).all()


def test_modules_of_later_have_memory_of_their_own() -> None:
    with pytest.raises(KeyError), placeholders(ZEROS):
        raise KeyError
    assert all((p == 1.0).all() for p in (Layer().scale, Layer().weight))
