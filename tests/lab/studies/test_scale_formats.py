"""Errors of planted outliers, against float64 and by hand."""

from collections.abc import Iterator

import pytest
import torch

from lab.studies.harness.products import Operands
from lab.studies.scale_formats import CHANNELS, ROWS, _Probe, error_name


def test_a_probe_quantizes_one_operand_and_measures_in_float64(operands: Operands) -> None:
    probe = _Probe(0)
    probe(operands)
    x, w = operands.a.double(), operands.b.double()
    amax = x.abs().unflatten(1, (-1, 128)).amax(-1, keepdim=True)
    scale = 2.0 ** torch.floor(torch.log2(448.0 / amax))
    scaled = x.unflatten(1, (-1, 128)) * scale
    step = 2.0 ** (torch.floor(torch.log2(scaled.abs().clamp(min=2.0**-6))) - 3)
    rounded = (torch.round(scaled / step) * step / scale).flatten(1)
    expected = float((rounded @ w.t() - x @ w.t()).norm() / (x @ w.t()).norm())
    assert probe.found["pow2 1x128"][error_name("activation", 1)] == [pytest.approx(expected, rel=1e-6)]


def test_outliers_change_no_product_and_spoil_a_scale_that_others_share(operands: Operands) -> None:
    probe = _Probe(0)
    probe(operands)

    def error(arm: str, factor: float) -> float:
        return probe.found[arm][error_name("activation", factor)][0]

    assert error("FP32 tensor", 1e4) > 1.3 * error("FP32 tensor", 1)
    assert error("FP32 1x32", 1e4) < 1.2 * error("FP32 1x32", 1)
    assert error("E5M2 1x128", 1) == pytest.approx(2 * error("pow2 1x128", 1), rel=0.1)
    # 1% of the channels carry 1% of the product's squares; without them, as all saturate, the error is near a tenth.
    assert error("static 224", 1e4) == pytest.approx(CHANNELS**0.5, rel=0.4)


def test_gradients_are_measured_without_outliers_and_sums_over_tokens_not_at_all(operands: Operands) -> None:
    probe = _Probe(0)
    for role in ("dgrad", "wgrad"):
        probe(Operands(role, *(getattr(operands, name) for name in ("weight", "a", "b", "quantized_a", "quantized_b"))))
    assert set(probe.found) == set(ROWS)
    assert all(list(metrics) == [error_name("gradient", 1)] for metrics in probe.found.values())


@pytest.fixture
def operands() -> Iterator[Operands]:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(64, 512, generator=generator).bfloat16(), torch.randn(96, 512, generator=generator).bfloat16()
    yield Operands("fprop", b, a, b, a, b)
