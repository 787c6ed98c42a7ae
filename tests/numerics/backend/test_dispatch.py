from __future__ import annotations

import inspect

import pytest
import torch

from fp8rl.numerics import ops
from fp8rl.numerics.backend import dispatch
from fp8rl.numerics.backend.implementation import choose, expandable_segments, implementation_for, using
from fp8rl.numerics.spec import QuantSpec

POW2 = QuantSpec.preset("fp8_block_pow2")


@pytest.mark.parametrize(
    ("capability", "changes", "expected"),
    [(None, {}, "torch"), ((8, 0), {}, "torch"), ((8, 9), {}, "triton"), ((9, 0), {}, "triton"),
     ((10, 0), {}, "triton"), ((12, 0), {}, "torch"), ((9, 0), {"gradient": {"format": "e5m2"}}, "triton"),
     ((9, 0), {"activation": {"fixed": 224}}, "triton"), ((9, 0), {"activation": {"scale": "e8m0"}}, "torch"),
     ((9, 0), {"activation": {"rounding": "stochastic"}}, "torch"),
     ((9, 0), {"activation": {"group": 64}}, "torch"), ((9, 0), {"weight": {"granularity": "token_group"}}, "torch"),
     ((9, 0), {"gradient": {"granularity": "block"}}, "torch")],
)  # fmt: skip
def test_kernels_run_where_they_know_the_device_and_the_spec(capability, changes, expected):
    assert implementation_for(capability, POW2.override(changes)) == expected


def test_every_op_has_its_kernel_and_every_kernel_its_op():
    from fp8rl.numerics.kernels.kernels import KERNELS

    assert KERNELS.keys() == dispatch.OPS.keys() - dispatch._registered.keys()
    for name, kernel in KERNELS.items():
        definition = dispatch.OPS[name]
        assert list(inspect.signature(kernel).parameters) == list(inspect.signature(definition).parameters), name


def test_a_users_op_runs_on_its_kernel_where_kernels_run(monkeypatch):
    monkeypatch.setattr(dispatch, "_registered", {})
    monkeypatch.setattr(dispatch, "OPS", dict(dispatch.OPS))

    def doubled(x):
        return 2 * x

    def kernel(x):
        return 2 * x + 0 * x.new_tensor(seen.append(x) or 0)

    seen, op = [], dispatch.op(doubled)
    kernel.__name__ = "doubled"
    dispatch.register_kernel(kernel)
    assert op(torch.ones(1)) == 2 and not seen
    with using("triton"):
        assert op(torch.ones(1)) == 2 and len(seen) == 1


def test_where_kernels_run_an_op_without_one_is_an_error():
    x, weight = torch.randn(3, 128).bfloat16(), torch.ones(128).bfloat16()
    with using("triton"):
        kernels = dict(dispatch.installed())
        del kernels["rms_norm_forward"]
        dispatch.install(kernels)
        with pytest.raises(NotImplementedError, match="no kernel for the op rms_norm_forward"):
            ops.rms_norm(x, weight, 1e-6)


def test_a_choice_lasts_as_long_as_its_block():
    x, weight = torch.randn(3, 128).bfloat16(), torch.ones(128).bfloat16()
    plain = ops.rms_norm(x, weight, 1e-6)
    with using("triton"):
        from fp8rl.numerics.kernels import norm

        assert torch.equal(ops.rms_norm(x, weight, 1e-6), norm.rms_norm_forward(x, weight, 1e-6))
        with using("torch"):
            assert torch.equal(ops.rms_norm(x, weight, 1e-6), plain)
    assert torch.equal(ops.rms_norm(x, weight, 1e-6), plain)


def test_expandable_segments_are_found_in_the_allocators_settings():
    for text, asked in (
        ("max_split_size_mb:128, expandable_segments: true", True), ("expandable_segments:False", False),
    ):  # fmt: skip
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            assert (expandable_segments({name: text}) is not None) is asked


def test_a_cpu_runs_the_definitions_and_products_of_bf16_add_in_fp32() -> None:
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    assert choose("cpu", POW2) == "torch" and not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
