"""The study of BF16, against bits worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lab.studies.bf16 import (
    LENGTHS,
    PRODUCTS,
    added_in_bf16,
    as_the_machine_rounds,
    cut_off,
    facts,
    nearest,
    relative_error,
)


@pytest.mark.parametrize(
    ("fp32", "bf16"),
    [
        (0x3F800000, 0x3F80),  # 1
        (0x3F808000, 0x3F80),  # half-way from 1 to the next: the even one is 1
        (0x3F818000, 0x3F82),  # half-way from an odd one
        (0x3F808001, 0x3F81),
        (0xBF818000, 0xBF82),
        (0x00008000, 0x0000),  # half the smallest subnormal
        (0x00018000, 0x0002),
        (0x7F7F7FFF, 0x7F7F),  # the last that does not overflow
        (0x7F7F8000, 0x7F80),
        (0xFF7F8000, 0xFF80),
    ],
)
def test_the_oracle_rounds_as_by_hand(fp32: int, bf16: int) -> None:
    assert nearest(torch.tensor([fp32])).tolist() == [bf16]


def test_a_conversion_that_rounds_halves_up_is_found() -> None:
    def halves_up(x: Tensor) -> Tensor:
        return cut_off((x.view(torch.int32) + 0x8000).view(torch.float32))

    found = facts(halves_up, seed=0)
    assert found["halves to even"] == 0.5
    assert found["overflows to inf"] == 1
    assert found["NaN kept"] < 1  # 0x7fff.... becomes -0


def test_torch_converts_as_the_standard_says() -> None:
    found = facts(as_the_machine_rounds, seed=0)
    kept = ("widened by zeros", "rounded to nearest even", "halves to even", "overflows to inf", "NaN kept", "inf kept")
    assert [found[name] for name in kept] == [1] * len(kept)
    assert (found["stored bits"], found["spacing at 1"], found["spacing below 1"]) == (7, 2**-7, 2**-8)


def test_adding_in_bf16_rounds_after_every_product() -> None:
    """256 + 1 is half-way between 256 and 258 and goes to the even one, however often."""
    x, w = torch.ones(1, 40).bfloat16(), torch.ones(1, 40).bfloat16()
    w[0, 0] = 256
    assert added_in_bf16(x, w).item() == 256
    assert PRODUCTS["product"](x, w).item() == 296  # 295 in full, whose neighbours are 294 and 296


def test_the_error_of_adding_in_bf16_grows_with_the_length() -> None:
    short, long = (relative_error(added_in_bf16, k, seed=0) for k in (LENGTHS[0], 2048))
    assert long > 2 * short
    assert relative_error(PRODUCTS["product"], 2048, seed=0) < 0.002 < short
