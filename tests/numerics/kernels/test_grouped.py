"""The grouped product kernels: each expert's rows and gradients bit for bit as `gemm` gives them alone."""

from itertools import pairwise

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F

from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.kernels.products.gemm import gemm
from fp8rl.numerics.kernels.products.grouped import grouped_wgrad, grouped_wgrad_matmul
from fp8rl.numerics.kernels.products.tiles import make_tiles
from fp8rl.numerics.quantize import QuantizedTensor
from fp8rl.numerics.spec import TensorSpec
from tests.support.kernels import DEVICE, quantized, same

ROWS, BLOCK = TensorSpec(), TensorSpec(granularity="block")
COUNTS = [0, 130, 3, 0, 67]


def numbers(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * torch.linspace(0.1, 3, shape[-1])).bfloat16()


def tiles_of(counts):
    return make_tiles(torch.tensor(counts, device=DEVICE), sum(counts))


def spans(counts):
    stops = torch.tensor(counts).cumsum(0).tolist()
    return [slice(stop - count, stop) for stop, count in zip(stops, counts, strict=True)]


def columns_of(x, spec, counts):
    """x [T, K] transposed and quantized along the tokens, tile by tile, by the torch quantizer."""
    pieces = [piece for span in spans(counts) for piece in x[span].split(128) if len(piece)]
    pieces += [x[:0]] * (len(tiles_of(counts).rows) - len(pieces))
    quantizeds = [quantized(F.pad(piece, (0, 0, 0, 128 - len(piece))).t().contiguous(), spec) for piece in pieces]
    data = torch.cat([q.data.view(torch.uint8) for q in quantizeds], 1).view(spec.dtype)
    return QuantizedTensor(data, torch.cat([q.scale_inv for q in quantizeds], 1), spec)


def test_tiles_by_hand():
    tiles = make_tiles(torch.tensor([0, 130, 3, 0, 256], device=DEVICE), 389)
    assert tiles.expert.tolist() == [1, 1, 2, 4, 4, 0, 0, 0]  # 389 rows of 5 experts fill at most 8
    assert tiles.first.tolist() == [0, 128, 130, 133, 261, 0, 0, 0]
    assert tiles.rows.tolist() == [128, 2, 3, 128, 128, 0, 0, 0] and tiles.starts.tolist() == [0, 0, 2, 3, 3, 5]
    assert {x.dtype for x in (tiles.expert, tiles.first, tiles.rows, tiles.starts)} == {torch.int32}


@pytest.mark.slow
@hypothesis.given(counts=st.lists(st.sampled_from([0, 1, 2, 127, 128, 129, 300]), min_size=1, max_size=70))
@hypothesis.settings(max_examples=30)
def test_every_row_is_in_one_tile_of_its_expert(counts):
    tiles = tiles_of(counts)
    used = int(tiles.starts[-1])
    assert used <= len(tiles.rows) and not tiles.rows[used:].any()
    spans_of_tiles = torch.stack([tiles.expert, tiles.first, tiles.rows], 1)[:used].tolist()
    found = [(expert, row) for expert, first, rows in spans_of_tiles for row in range(first, first + rows)]
    assert found == [(e, row) for e, span in enumerate(spans(counts)) for row in range(span.start, span.stop)]
    assert tiles.starts.diff().tolist() == [-(-count // 128) for count in counts]


def test_the_fullest_case_has_no_tile_to_spare():
    tiles = tiles_of([1, 1, 129, 257])
    assert len(tiles.rows) == int(tiles.starts[-1]) == 7 and len(tiles_of([1] + [0] * 200).rows) == 1
    assert make_tiles(torch.zeros(4, dtype=torch.int64, device=DEVICE), 0).starts.tolist() == [0] * 5


@pytest.mark.slow
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("n, k", [(256, 384), (130, 200)])
def test_rows_are_those_of_gemm(n, k, format):
    x = quantized(numbers(200, k), TensorSpec(format=format))
    weights = quantized(numbers(len(COUNTS), n, k, seed=1), BLOCK)
    found = gemm(x, weights, torch.bfloat16, tiles=tiles_of(COUNTS))
    for expert, span in enumerate(spans(COUNTS)):
        one = QuantizedTensor(weights.data[expert], weights.scale_inv[expert], BLOCK)
        rows = QuantizedTensor(x.data[span], x.scale_inv[span], x.spec)
        same(found[span], gemm(rows, one, torch.bfloat16))
    x, weights = numbers(200, k).to(DEVICE), numbers(len(COUNTS), n, k, seed=1).to(DEVICE)
    found = gemm(x, weights, torch.bfloat16, tiles=tiles_of(COUNTS))
    for expert, span in enumerate(spans(COUNTS)):
        same(found[span], gemm(x[span], weights[expert], torch.bfloat16))


@pytest.mark.slow
def test_experts_do_not_see_each_other():
    """NaN in one expert's rows and matrix, and beyond the edges of all, stays there."""
    spoiled = spans(COUNTS)[2]
    x, weights = numbers(200, 200), numbers(len(COUNTS), 130, 200, seed=1)
    expected = gemm(x.to(DEVICE), weights.to(DEVICE), torch.float32, tiles=tiles_of(COUNTS))
    dy = numbers(200, 130, seed=2)
    gradient = grouped_wgrad_matmul(dy.to(DEVICE), x.to(DEVICE), tiles_of(COUNTS), torch.float32)
    for tensor, where in ((x, spoiled), (weights, 2), (dy, spoiled)):
        tensor[where] = float("nan")
    found = gemm(x.to(DEVICE), weights.to(DEVICE), torch.float32, tiles=tiles_of(COUNTS))
    kept = torch.ones(200, dtype=torch.bool)
    kept[spoiled] = False
    assert torch.equal(found[kept], expected[kept]) and found[spoiled].isnan().all()
    found = grouped_wgrad_matmul(dy.to(DEVICE), x.to(DEVICE), tiles_of(COUNTS), torch.float32)
    assert torch.equal(found[[0, 1, 3, 4]], gradient[[0, 1, 3, 4]]) and found[2].isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("scale", ["pow2", "fp32"])
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_weight_gradients_are_those_of_gemm(format, scale):
    tiles = tiles_of(COUNTS)
    dy_t = columns_of(numbers(200, 136), TensorSpec(format=format, scale=scale), COUNTS)
    x_t = columns_of(numbers(200, 200, seed=1), TensorSpec(scale=scale), COUNTS)
    found = grouped_wgrad(dy_t, x_t, tiles, torch.float32)
    for expert, (start, stop) in enumerate(pairwise(tiles.starts.tolist())):
        a, b = (
            QuantizedTensor(q.data[:, start * 128 : stop * 128], q.scale_inv[:, start:stop], q.spec)
            for q in (dy_t, x_t)
        )
        same(found[expert], gemm(a, b, torch.float32))
    assert not found[[0, 3]].any() and found[[1, 2, 4]].any((1, 2)).all()
    same(grouped_wgrad(dy_t, x_t, tiles, torch.bfloat16), found.bfloat16())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weight_gradients_are_rounded_and_added_to_a_total(dtype):
    """What experts without tokens have stays as it is, whatever it is."""
    tiles, total = tiles_of(COUNTS), numbers(len(COUNTS), 136, 200, seed=2).float().to(DEVICE)
    total[0] = float("nan")
    dy, x = numbers(200, 136), numbers(200, 200, seed=1)
    columns = columns_of(dy, ROWS, COUNTS), columns_of(x, ROWS, COUNTS)
    for product, operands in ((grouped_wgrad, columns), (grouped_wgrad_matmul, (dy.to(DEVICE), x.to(DEVICE)))):
        added = total.clone()
        assert product(*operands, tiles, dtype, added) is added
        same(added[1:], (total + product(*operands, tiles, dtype).float())[1:])
        assert added[0].isnan().all()


def test_what_does_not_fit_is_refused():
    tiles, x = tiles_of(COUNTS), numbers(200, 256).to(DEVICE)
    columns = columns_of(numbers(256, 128), ROWS, [256])
    with pytest.raises(UserError, match="2 and 3 dimensions"):
        gemm(x, x, torch.bfloat16, tiles=tiles)
    with pytest.raises(UserError, match="as many rows"):
        grouped_wgrad_matmul(x, x[1:], tiles, torch.bfloat16)
    with pytest.raises(UserError, match="with the same tiles"):
        grouped_wgrad(columns, columns, tiles, torch.bfloat16)
    with pytest.raises(UserError, match="counts"):
        make_tiles(torch.ones(3), 3)
