"""Maps the programs of a grouped product to rows sorted by expert, on the device and without a sync.

An expert's rows are cut into tiles of 128 or 64 rows, from its first row on. So a row's tile depends only on its
expert.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8rl.numerics.core.errors import user_error

# How many rows a tile holds: 128, or 64 where there are few; and how many columns of BF16: 128, or 256 where there are
# many.
#
# A tile of 64 rows has one warp group, which runs the instruction that each of the two of a taller tile runs, in the
# same order. A wide tile runs an instruction of 256 columns. That either gives a number the same bits is promised
# nowhere. So all tiles are tall and narrow until `numerics.probe.choose_tiles` has compared them on the machine
# at hand.

TALL, SHORT = 128, 64
NARROW, WIDE = 128, 256
_WIDE_FROM = 2048  # columns of a product; a tensor-parallel rank holds a part of them
ALLOWED = {SHORT: False, WIDE: False}
"""Whether this process uses these sizes."""


def tile_height(rows: int) -> int:
    """Return the height of the tiles for this number of rows, which may share a tile."""
    return SHORT if ALLOWED[SHORT] and rows <= SHORT else TALL


def tile_width(columns: int) -> int:
    """Return the width of the tiles of a BF16 product with this number of columns."""
    return WIDE if ALLOWED[WIDE] and columns >= _WIDE_FROM else NARROW


def warps(height: int) -> int:
    """Return the number of warps that run a tile: each holds 16 whole rows, whatever the height."""
    return height // 16


_TILES = 64  # that one program describes


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The tiles of all experts, in the order of their rows. Tiles past starts[experts] are unused, with 0 rows."""

    expert: Tensor
    """int32 [tiles], each tile's expert."""
    first: Tensor
    """int32 [tiles], each tile's first row."""
    rows: Tensor
    """int32 [tiles], each tile's number of rows, 1 to `height`."""
    starts: Tensor
    """int32 [experts + 1], the first tile of each expert, and the number of tiles in use."""
    height: int = TALL
    """The most rows of a tile. It is 128 if a product sums over tokens, because its scale groups are the tiles."""


def spans(counts: Tensor, x: Tensor) -> Tiles:
    """`numerics.ops.grouped.spans`, without a wait for the host."""
    return make_tiles(counts.to(x.device), len(x))


def make_tiles(counts: Tensor, rows: int, height: int = TALL) -> Tiles:
    """Return the tiles of `rows` rows. counts: an int tensor [experts], the number of rows of each expert, 0 or more.

    The number of tiles is the most that `rows` rows may fill. It follows from the shapes alone, so that a CUDA graph
    can hold them. The counts must sum to `rows` or less.
    """
    if counts.dim() != 1 or counts.is_floating_point():
        remedy = "Pass the number of rows of each expert."
        raise user_error("counts", f"{counts.dtype} {list(counts.shape)}", "an integer tensor [experts]", remedy)
    experts = counts.numel()
    tiles = room_for_tiles(experts, rows, height, counts.device)
    most = tiles.expert.numel()
    _tiles_kernel[max(1, -(-most // _TILES)),](
        *(counts, tiles.expert, tiles.first, tiles.rows, tiles.starts, experts, most),
        EXPERTS=triton.next_power_of_2(max(experts, 1)),
        SIZE=height,
        TILES=_TILES,
        num_warps=4,
    )
    return tiles


def room_for_tiles(experts: int, rows: int, height: int, device: torch.device) -> Tiles:
    """Allocate as many tiles as `rows` rows may fill at most."""
    nonempty = min(experts, rows)
    most = (rows - nonempty) // height + nonempty
    expert, first, filled = torch.empty(3, most, dtype=torch.int32, device=device)
    return Tiles(expert, first, filled, torch.empty(experts + 1, dtype=torch.int32, device=device), height)


@triton.jit(do_not_specialize=["most", "first_ptr", "rows_ptr"])
def _tiles_kernel(
    counts_ptr, expert_ptr, first_ptr, rows_ptr, starts_ptr, experts, most,
    EXPERTS: tl.constexpr, SIZE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    each = tl.arange(0, EXPERTS)
    counts = tl.load(counts_ptr + each, mask=each < experts, other=0).to(tl.int32)
    describe_tiles(counts, expert_ptr, first_ptr, rows_ptr, starts_ptr, experts, most, EXPERTS, SIZE, TILES)


@triton.jit
def describe_tiles(
    counts, expert_ptr, first_ptr, rows_ptr, starts_ptr, experts, most,
    EXPERTS: tl.constexpr, SIZE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Store this program's TILES tiles of experts that have `counts` rows, int32 [EXPERTS]."""
    each = tl.arange(0, EXPERTS)
    tiles = (counts + SIZE - 1) // SIZE
    last_tile, last_row = tl.cumsum(tiles, 0), tl.cumsum(counts, 0)  # one past the last
    if tl.program_id(0) == 0:
        tl.store(starts_ptr + 1 + each, last_tile, mask=each < experts)
        tl.store(starts_ptr + each, last_tile - tiles, mask=each == 0)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    mine = ((last_tile - tiles)[None, :] <= tile[:, None]) & (tile[:, None] < last_tile[None, :])
    expert = tl.sum(tl.where(mine, each[None, :], 0), 1)
    into = (tile[:, None] - (last_tile - tiles)[None, :]) * SIZE
    first = tl.sum(tl.where(mine, (last_row - counts)[None, :] + into, 0), 1)
    rows = tl.sum(tl.where(mine, tl.minimum(counts[None, :] - into, SIZE), 0), 1)
    tl.store(expert_ptr + tile, expert, mask=tile < most)
    tl.store(first_ptr + tile, first, mask=tile < most)
    tl.store(rows_ptr + tile, rows, mask=tile < most)
