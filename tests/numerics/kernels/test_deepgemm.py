"""DeepGEMM in the place of our products: what it is given, what it may take, and that it runs only where its bits are
ours. A stand-in takes what the Python and CUDA sources of sgl-deep-gemm 0.1.7 take."""

import sys
from types import SimpleNamespace

import pytest
import torch

from fp8rl.numerics import probe
from fp8rl.numerics.backend.implementation import deepgemm_lacks, has_deepgemm, using
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.kernels.products import deepgemm
from fp8rl.numerics.kernels.products.deepgemm import NOBODY, Library
from fp8rl.numerics.kernels.products.gemm import gemm
from fp8rl.numerics.kernels.products.tiles import make_tiles
from fp8rl.numerics.kernels.quantize import quantize_blocks, quantize_rows
from fp8rl.numerics.quantize import QuantizedTensor
from fp8rl.numerics.spec import TensorSpec
from tests.support.kernels import DEVICE, random

ROWS, BLOCKS = TensorSpec(), TensorSpec(granularity="block")


@pytest.fixture(autouse=True)
def none_afterwards():
    yield
    deepgemm.allow(None)


class StandIn:
    """Multiplies as our kernels do, or with a wrong bit in each result, and notes what it was called for."""

    def __init__(self, wrong=0):
        self.wrong, self.calls = wrong, []
        self.library = Library(self.dense, self.grouped)

    def dense(self, a, b, out):
        self.calls.append("dense")
        check_rows(*a)
        assert b[0].is_contiguous() and b[1].is_contiguous() and b[0].shape[0] % 64 == b[0].shape[1] % 128 == 0
        self.multiply(a, b, out)

    def grouped(self, a, b, out, experts):
        self.calls.append("grouped")
        check_rows(*a)
        assert experts.dtype == torch.int32 and len(experts) == len(a[0]) == len(out) and len(out) % 128 == 0
        for block, group in enumerate(experts.view(-1, 128)):
            real = group[group != NOBODY]
            assert group[: len(real)].equal(real) and len(real.unique()) <= 1, "a block of 128 rows has one expert"
            if len(real):
                rows, expert = slice(128 * block, 128 * block + len(real)), int(real[0])
                self.multiply((a[0][rows], a[1][rows]), (b[0][expert], b[1][expert]), out[rows])

    def multiply(self, a, b, out):
        deepgemm.allow(None)
        out.copy_(gemm(QuantizedTensor(*a, ROWS), QuantizedTensor(*b, BLOCKS), torch.bfloat16))
        out.view(torch.int16).bitwise_xor_(self.wrong)
        deepgemm.allow(self.library)


def check_rows(codes, scales):
    """Codes row by row; scales by columns, each at a multiple of 16 bytes, for the tensor memory accelerator."""
    rows, k = codes.shape
    assert codes.is_contiguous() and codes.dtype == torch.float8_e4m3fn
    assert scales.shape == (rows, k // 128) and scales.dtype == torch.float32
    assert scales.stride(0) == 1 and (scales.stride(1) % 4 == 0 or scales.shape[1] == 1)


def operands(m, n, k):
    return quantize_rows(random(m, k), ROWS), quantize_blocks(random(n, k, seed=1), BLOCKS)


@pytest.mark.parametrize("rows", (1, 64, 130))
def test_a_product_goes_to_the_library_that_was_allowed(rows):
    a, b = operands(rows, 192, 256)
    ours, stand_in = gemm(a, b, torch.bfloat16), StandIn()
    assert deepgemm.product(a, b, torch.bfloat16, 1, None) is None
    deepgemm.allow(stand_in.library)
    assert gemm(a, b, torch.bfloat16).equal(ours) and stand_in.calls == ["dense"]


@pytest.mark.slow
def test_what_it_does_not_know_stays_with_our_kernels():
    stand_in = StandIn(wrong=1)
    deepgemm.allow(stand_in.library)
    a, b = operands(8, 192, 256)
    gemm(a, b, torch.float32), gemm(a, b, torch.bfloat16, 2)
    gemm(a, operands(192, 64, 256)[0], torch.bfloat16)  # as weight gradients are
    gemm(*operands(8, 72, 256), torch.bfloat16), gemm(*operands(8, 64, 192), torch.bfloat16)
    e5m2 = quantize_rows(random(8, 256), TensorSpec(format="e5m2"))
    gemm(e5m2, b, torch.bfloat16), gemm(random(8, 256), random(64, 256), torch.bfloat16)
    few, b = quantize_rows(random(200, 256), ROWS), quantize_blocks(random(3, 64, 256, seed=1), BLOCKS)
    gemm(few, b, torch.bfloat16, tiles=make_tiles(torch.tensor([100, 40, 60], device=DEVICE), 200))
    assert stand_in.calls == []


@pytest.mark.slow
@pytest.mark.parametrize("counts", ([300, 0, 129], [128, 128, 200], [0, 0, 400]))
def test_experts_rows_are_copied_to_whole_tiles_and_back(counts):
    """Behind the last expert there may be rows of nobody, which are not written."""
    a = quantize_rows(random(sum(counts) + 5, 256), ROWS)
    b = quantize_blocks(random(3, 64, 256, seed=1), BLOCKS)
    tiles = make_tiles(torch.tensor(counts, device=DEVICE), len(a.data))
    ours, stand_in = gemm(a, b, torch.bfloat16, tiles=tiles), StandIn()
    deepgemm.allow(stand_in.library)
    found = gemm(a, b, torch.bfloat16, tiles=tiles)
    assert stand_in.calls == ["grouped"] and found[: sum(counts)].equal(ours[: sum(counts)])


@pytest.fixture
def hopper(monkeypatch):
    """The probe's products at sizes for an interpreter; the machine is a Hopper GPU's, as far as it is asked."""
    monkeypatch.setattr(probe, "_DENSE", ((1, 192, 256), (65, 64, 384)))
    monkeypatch.setattr(probe, "_GROUPED", ((300, 0, 129), 64, 256))
    monkeypatch.setattr(probe, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "deep_gemm")

    def has(stand_in):
        module = SimpleNamespace(fp8_gemm_nt=stand_in.dense, m_grouped_fp8_gemm_nt_contiguous=stand_in.grouped)
        monkeypatch.setitem(sys.modules, "deep_gemm", module)
        return stand_in

    return has


def compile_failed(*_):
    raise RuntimeError("nvcc: not found\nin /opt")


@pytest.mark.slow
@pytest.mark.parametrize("wrong, said", [(0, None), (1, "other bits than those of the Triton kernel, in 1 x 192 x")])
def test_the_probe_allows_it_where_its_bits_are_ours(hopper, wrong, said):
    stand_in = hopper(StandIn(wrong))
    with using("triton"):
        assert probe.choose_deepgemm(DEVICE, False) is None and stand_in.calls == []
        found = probe.choose_deepgemm(DEVICE, True)
    assert found.startswith(said) if wrong else found is None
    assert set(stand_in.calls) == {"dense", "grouped"}
    assert (deepgemm.product(*operands(8, 64, 256), torch.bfloat16, 1, None) is None) == bool(wrong)


def test_what_is_missing_is_named(monkeypatch, hopper):
    assert deepgemm_lacks(None, True) == deepgemm_lacks((10, 0), True) == "Hopper GPU (compute capability 9.0)"
    assert deepgemm_lacks((9, 0), has_deepgemm()) is None
    with using("torch"):
        assert "no kernels for the spec" in str(probe.allow_deepgemm(DEVICE))
    stand_in = StandIn()
    stand_in.dense = compile_failed
    hopper(stand_in)
    with using("triton"):
        assert probe.allow_deepgemm(DEVICE) == "DeepGEMM fails with RuntimeError: nvcc: not found"
    assert deepgemm.product(*operands(8, 64, 256), torch.bfloat16, 1, None) is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert probe.choose_deepgemm(DEVICE, None) is None
    assert probe.allow_deepgemm(DEVICE) == "no DeepGEMM (the package sgl-deep-gemm)"


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU may have it")
def test_a_trainer_that_cannot_have_it_says_so():
    from fp8rl.trainer.trainer import check_row_invariance

    with pytest.raises(UserError, match="numerics.deepgemm: found 'true, and no Hopper GPU"):
        check_row_invariance(deepgemm=True)
