"""Tiles of 64 rows for decode: the bits of tiles of 128, and used only where the start-up probe has found that."""

import pytest
import torch

from fp8rl.numerics import probe
from fp8rl.numerics.backend.implementation import using
from fp8rl.numerics.kernels.attention.forward import paged_attention
from fp8rl.numerics.kernels.products import tiles
from fp8rl.numerics.kernels.products.gemm import gemm
from fp8rl.numerics.kernels.products.tiles import make_tiles
from fp8rl.numerics.quantize import QuantizedTensor
from fp8rl.numerics.spec import TensorSpec
from tests.support.kernels import DEVICE, quantized, random

BLOCK = TensorSpec(granularity="block")


@pytest.fixture(autouse=True)
def tall_again():
    yield
    tiles.ALLOWED[tiles.SHORT] = False
    tiles.ALLOWED[tiles.WIDE] = False


def in_both(run):
    tiles.ALLOWED[tiles.SHORT] = False
    tall = run()
    tiles.ALLOWED[tiles.SHORT] = True
    return tall, run()


@pytest.mark.parametrize("rows", (1, 9, 64))
@pytest.mark.parametrize("splits", (1, 2))
def test_a_product_of_few_rows_has_the_bits_of_one_of_many(rows, splits):
    a, b = quantized(random(130, 256).cpu(), TensorSpec()), quantized(random(130, 256, seed=1).cpu(), BLOCK)
    some = QuantizedTensor(a.data[:rows], a.scale_inv[:rows], a.spec)
    many = gemm(a, b, torch.bfloat16, splits)
    tall, short = in_both(lambda: gemm(some, b, torch.bfloat16, splits))
    assert torch.equal(tall, short) and torch.equal(many[:rows], short)


def test_experts_rows_have_the_bits_of_tall_tiles():
    counts, x = [0, 70, 3, 64], quantized(random(137, 256).cpu(), TensorSpec())
    weights = quantized(random(4, 136, 256, seed=1).cpu(), BLOCK)
    outs = []
    for height in (tiles.TALL, tiles.SHORT):
        made = make_tiles(torch.tensor(counts, device=DEVICE), 137, height)
        outs.append(gemm(x, weights, torch.bfloat16, tiles=made))
    assert made.rows[made.rows > 0].tolist() == [64, 6, 3, 64] and made.first[:4].tolist() == [0, 64, 70, 73]
    assert torch.equal(*outs)


@pytest.mark.slow
@pytest.mark.parametrize("heads, key_heads, dim, new", [(8, 1, 128, 1), (5, 1, 64, 1), (4, 2, 64, 20)])
def test_decode_has_the_bits_of_tall_tiles(heads, key_heads, dim, new):
    lengths = torch.tensor([300, 129, new, 0], device=DEVICE)
    fresh = torch.tensor([new, 1, new, 1], device=DEVICE)
    keys, values = (random(1200, key_heads, dim, seed=seed) for seed in (1, 2))
    table = torch.arange(1200, device=DEVICE, dtype=torch.int32).view(4, 300)
    q, each = random(int(fresh.sum()), heads, dim), torch.arange(4, device=DEVICE)
    tall, short = in_both(lambda: paged_attention(q, keys, values, table, each, fresh, lengths, 0.1))
    assert torch.equal(tall, short) and tall[:-1].any(-1).all() and not tall[-1].any()
    # The same keys under a table with room for more, whose chunks are spread over programs.
    wide = torch.nn.functional.pad(table, (0, 2000))
    spread_tall, spread_short = in_both(lambda: paged_attention(q, keys, values, wide, each, fresh, lengths, 0.1))
    assert torch.equal(spread_tall, tall) and torch.equal(spread_short, tall)


@pytest.mark.slow
def test_the_probe_allows_tiles_whose_bits_are_those_of_128(monkeypatch, caplog):
    assert (tiles.tile_height(1), tiles.tile_width(4096)) == (tiles.TALL, tiles.NARROW)
    with using("torch"):
        assert not any(probe.choose_tiles(DEVICE).values())
    with using("triton"):
        assert all(probe.choose_tiles(DEVICE).values())
        assert tiles.tile_height(64) == tiles.SHORT and tiles.tile_height(65) == tiles.TALL
        assert tiles.tile_width(2048) == tiles.WIDE and tiles.tile_width(2047) == tiles.NARROW and not caplog.records
        # A machine whose other tiles give other bits.
        monkeypatch.setattr(probe, "_of_few_rows", lambda device: [torch.tensor(tiles.tile_height(1))])
        monkeypatch.setattr(probe, "_of_many_columns", lambda device: [torch.tensor(tiles.tile_width(4096))])
        assert not any(probe.choose_tiles(DEVICE).values())
    assert (tiles.tile_height(1), tiles.tile_width(4096)) == (tiles.TALL, tiles.NARROW)
    assert "tiles of 64 rows" in caplog.text and "tiles of 256 columns" in caplog.text
