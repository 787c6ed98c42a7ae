"""The format of keys and values against torch's own cast, and attention over codes against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl.numerics import ops
from fp8rl.numerics.kv import BF16_CACHE, KVFormat

SCALES = st.integers(-4, 4).map(lambda exponent: 2.0**exponent)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40), SCALES)
def test_numbers_are_those_of_torchs_cast_of_what_is_clamped(numbers: list[float], scale: float) -> None:
    x = torch.tensor(numbers).bfloat16()[:, None, None]
    expected = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    kv = KVFormat(True, key_scale=scale)
    found = kv.keys(x)
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected.to(torch.bfloat16))
    assert torch.equal(found.to(kv.dtype).to(torch.bfloat16), found)  # SGLang's cast is exact


def test_nan_stays_and_bf16_is_left_alone() -> None:
    x = torch.tensor([torch.nan, torch.inf, 449.0]).bfloat16()
    found = KVFormat(True).values(x)
    assert found[0].isnan() and found[1:].tolist() == [448.0, 448.0]
    assert BF16_CACHE.keys(x) is x and BF16_CACHE.values(x) is x and BF16_CACHE.result(x) is x
    assert BF16_CACHE.dtype == torch.bfloat16


def test_a_result_over_rows_that_are_keys_and_values_in_one_has_the_scale_of_keys() -> None:
    kv = KVFormat(True, key_scale=4.0, value_scale=0.5)
    rows, weights = torch.randn(12, 8).bfloat16(), torch.randn(3, 12, dtype=torch.float64).softmax(-1)
    found = kv.result_of_keys(weights @ kv.keys(rows).double())
    rounding = 2**-4 * (weights @ rows.double().abs()) + 4.0 * 2**-10  # half a step of E4M3, normal or not
    assert ((found - weights @ rows.double()).abs() <= rounding).all()


@pytest.mark.parametrize("scale", (1.0, 4.0))
def test_gradients_go_straight_through_the_rounding(scale: float) -> None:
    """Of the numbers that a key and a value stand for, scale * code."""
    kv = KVFormat(True, scale, scale)
    x = torch.randn(5, 2, 8).bfloat16().requires_grad_()
    upstream = torch.randn(5, 2, 8).bfloat16()
    (kv.keys(x) * scale * upstream).sum().backward()
    assert torch.equal(x.grad, upstream)


@pytest.mark.parametrize(("key_scale", "value_scale"), ((1.0, 1.0), (2.0, 0.0625)))
def test_attention_over_codes_is_that_over_the_numbers_which_they_stand_for(key_scale, value_scale) -> None:
    """Scales in the scores and in the result, where they round nothing."""
    torch.manual_seed(0)
    kv = KVFormat(True, key_scale, value_scale)
    q, k, v = torch.randn(3, 4, 32).bfloat16(), torch.randn(40, 2, 32).bfloat16(), torch.randn(40, 2, 32).bfloat16()
    keys, values = kv.keys(k), kv.values(v)
    table, lengths = torch.randperm(40)[:36].view(3, 12).int(), torch.tensor([12, 7, 3])
    cache = keys.to(kv.dtype), values.to(kv.dtype)
    found = kv.result(ops.paged_attention(q, *cache, table, torch.arange(3), None, lengths, 0.2 * key_scale))
    for row, length in enumerate(lengths.tolist()):
        slots = table[row, :length].long()
        own_keys, own_values = (keys * key_scale)[slots], (values * value_scale)[slots]
        last = torch.tensor([[length - 1]])
        said = ops.attention(q[row][None, None], own_keys[None], own_values[None], last, 0.2)
        assert torch.equal(found[row], said[0, 0])
        wide_keys, wide_values = (each.double().repeat_interleave(2, 1) for each in (own_keys, own_values))
        weights = (torch.einsum("hd,thd->ht", q[row].double(), wide_keys) * 0.2).softmax(-1)
        exact = torch.einsum("ht,thd->hd", weights, wide_values)
        assert (found[row].double() - exact).abs().max() <= 2**-8 * exact.abs().max()
