from __future__ import annotations

import pytest
import torch

from numerics import ops
from numerics.dispatch import choose, definition_of, implementation_for, using
from numerics.spec import QuantSpec

POW2 = QuantSpec.preset("fp8_block_pow2")


@pytest.mark.parametrize(
    ("capability", "changes", "expected"),
    [
        (None, {}, "torch"),
        ((8, 0), {}, "torch"),
        ((8, 9), {}, "triton"),
        ((9, 0), {}, "triton"),
        ((10, 0), {}, "triton"),
        ((12, 0), {}, "torch"),
        ((9, 0), {"gradient": {"format": "e5m2"}}, "triton"),
        ((9, 0), {"gradient": {"format": "bf16"}}, "triton"),
        ((9, 0), {"activation": {"group": 64}}, "torch"),
        ((9, 0), {"activation": {"granularity": "channel"}}, "torch"),
        ((9, 0), {"weight": {"granularity": "token_group"}}, "torch"),
        ((9, 0), {"gradient": {"granularity": "block"}}, "torch"),
    ],
)
def test_kernels_run_where_they_know_the_device_and_the_spec(capability, changes, expected):
    assert implementation_for(capability, POW2.override(changes)) == expected


def test_a_cpu_runs_the_definitions():
    assert choose("cpu", POW2) == "torch"


def test_every_kernel_stands_in_for_an_op_and_has_its_parameters():
    import inspect

    from numerics import digest, quantize
    from numerics.kernels.kernels import KERNELS
    from numerics.ops import grouped

    definitions = {**vars(quantize), **vars(digest), **vars(grouped), **vars(ops)}
    for name, kernel in KERNELS.items():
        definition = definition_of(definitions[name])
        assert list(inspect.signature(kernel).parameters) == list(inspect.signature(definition).parameters), name


def test_a_choice_lasts_as_long_as_its_block():
    x, weight = torch.randn(3, 128).bfloat16(), torch.ones(128).bfloat16()
    plain = ops.rms_norm(x, weight, 1e-6)
    with using("triton"):
        from numerics.kernels import norm

        assert torch.equal(ops.rms_norm(x, weight, 1e-6), norm.rms_norm(x, weight, 1e-6))
        with using("torch"):
            assert torch.equal(ops.rms_norm(x, weight, 1e-6), plain)
    assert torch.equal(ops.rms_norm(x, weight, 1e-6), plain)
