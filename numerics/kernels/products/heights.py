"""How many rows a tile holds: 128, or 64 where there are few and this GPU gives them the bits that they have among 128.

A tile of 64 rows has one warp group, which runs the instruction that each of the two of a taller tile runs, in the same
order. That this gives a row the same bits is promised nowhere. So all tiles are tall until
`numerics.backend.probe.allow_short_tiles` has compared the two on the machine at hand.
"""

from __future__ import annotations

TALL, SHORT = 128, 64
_ROWS_OF_A_WARP = 16
_short_allowed = False


def tile_height(rows: int) -> int:
    """The height of the tiles for so many rows that may share one."""
    return SHORT if _short_allowed and rows <= SHORT else TALL


def warps(height: int) -> int:
    """How many warps run a tile: each holds 16 whole rows, whatever the height."""
    return height // _ROWS_OF_A_WARP


def allow_short(allowed: bool) -> None:
    """Choose for the rest of this process whether tiles may be short."""
    global _short_allowed
    _short_allowed = allowed
