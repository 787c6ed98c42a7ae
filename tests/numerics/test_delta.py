"""Deltas of bytes: what they restore, how long they are, and what they are refused for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fp8rl.numerics.delta import apply, as_bytes, encode

DTYPES = (torch.float8_e4m3fn, torch.bfloat16, torch.float32)


@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 400),
    changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), max_size=60),
    seed=st.integers(0, 99),
)
def test_applied_to_the_old_tensor_it_gives_the_new_one(dtype, rows, changes, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    old = torch.randint(0, 256, (rows * 512 * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    old = old.view(dtype).view(rows, 512)
    new = old.clone()
    for place, flip in changes:
        as_bytes(new)[place % old.nbytes] ^= flip
    differing = int((as_bytes(new) != as_bytes(old)).sum())
    delta = encode(new, old)
    if delta is None:
        assert 3 * (differing + 1) >= new.nbytes
        return
    assert 3 * differing <= len(delta) <= 3 * (differing + 1 + old.nbytes // 0xFFFF)
    apply(delta, old)
    assert torch.equal(as_bytes(old), as_bytes(new))


def test_a_far_change_is_reached() -> None:
    old = torch.zeros(1 << 20, dtype=torch.uint8)
    new = old.clone()
    new[[0, 65_534, 65_536, 900_001, (1 << 20) - 1]] = 7
    delta = encode(new, old)
    assert delta is not None and len(delta) < 100
    apply(delta, old)
    assert torch.equal(old, new)


def test_what_has_changed_throughout_has_no_delta() -> None:
    assert encode(torch.ones(64), torch.zeros(64)) is None
    assert encode(torch.ones(2, dtype=torch.uint8), torch.ones(2, dtype=torch.uint8)) is None


def test_a_delta_of_a_longer_tensor_is_refused() -> None:
    old = torch.zeros(4096, dtype=torch.uint8)
    new = old.clone()
    new[4000] = 1
    delta = encode(new, old)
    assert delta is not None
    with pytest.raises(ValueError, match="a delta that changes byte 4000, expected bytes 0 to 99"):
        apply(delta, torch.zeros(100, dtype=torch.uint8))


def test_a_delta_comes_to_where_the_tensor_is() -> None:
    """CUDA writes to places of a tensor only where places and values are on its device."""
    old, new = torch.zeros(4, 512), torch.zeros(4, 512)
    new[2, 7] = 1.0
    delta = encode(new, old)
    assert delta is not None
    devices: list[str] = []

    class Writes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket is torch.ops.aten.index_put_:
                devices.extend(each.device.type for each in (args[0], args[1][0], args[2]))
            return func(*args, **(kwargs or {}))

    with Writes():
        apply(delta, old.to("meta"))
    assert devices == ["meta"] * 3
