"""Computes FP8 products by DeepGEMM, a library of kernels for Hopper, in place of ours.

DeepGEMM's kernel sums 128 products along K from zero on the tensor core, scales the sum, and adds it in FP32, K
ascending and never cut (`sm90_fp8_gemm_1d2d.cuh` of sgl-deep-gemm 0.1.7). That is the formula of `gemm`. No document
promises equal bits, so nothing uses DeepGEMM before `numerics.probe.allow_deepgemm` has compared both on the machine at
hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8rl.numerics.kernels.products.tiles import TALL, Tiles
from fp8rl.numerics.quantize import QuantizedTensor

Scaled = tuple[Tensor, Tensor]
"""Codes E4M3 and their scales FP32. Rows [T, K] have scales [T, K / 128] in column-major order, each column at a
multiple of 16 bytes. Matrices [..., N, K] have scales [..., N / 128, K / 128]."""
NOBODY = -1
"""The expert number of a row that only fills up a tile."""


@dataclass(frozen=True)
class Library:
    """The two products that the library has."""

    dense: Callable[[Scaled, Scaled, Tensor], Any]
    """dense(a, b, out): a [T, K] @ b [N, K]^T into BF16 [T, N]."""
    grouped: Callable[[Scaled, Scaled, Tensor, Tensor], Any]
    """grouped(a, b, out, experts): the same with matrices b [E, N, K], by each row's expert, int32 [T]. Each 128 rows
    belong to one expert, perhaps with rows of NOBODY at their end."""


_library: Library | None = None


def allow(library: Library | None) -> None:
    """Let this library compute the FP8 products that it supports, in this process. None: our kernels compute all."""
    global _library
    _library = library


def installed() -> Library:
    """Return the library of this environment, which must have it. It compiles a kernel for each shape at its first
    call."""
    import deep_gemm

    return Library(deep_gemm.fp8_gemm_nt, deep_gemm.m_grouped_fp8_gemm_nt_contiguous)


def product(a: Any, b: Any, dtype: torch.dtype, k_splits: int, tiles: Tiles | None) -> Tensor | None:
    """Compute `gemm.gemm` by the allowed library. Return None without one, or if it cannot compute this product."""
    if _library is None or not _takes(a, b, dtype, k_splits):
        return None
    if tiles is None:
        out = a.data.new_empty(len(a.data), b.data.shape[0], dtype=dtype)
        _library.dense((a.data, _aligned(a.scale_inv)), (b.data, b.scale_inv), out)
        return out
    # Rows are copied to fill tiles: with fewer of them in the mean this takes longer than it saves.
    if tiles.height != TALL or len(a.data) < TALL * len(b.data):
        return None
    return _grouped(_library, a, b, dtype, tiles)


def _takes(a: Any, b: Any, dtype: torch.dtype, k_splits: int) -> bool:
    if not isinstance(a, QuantizedTensor) or not isinstance(b, QuantizedTensor):
        return False
    n, k = b.data.shape[-2:]
    formats = {a.data.dtype, b.data.dtype} == {torch.float8_e4m3fn} and b.spec.granularity == "block"
    shapes = len(a.data) > 0 and n % 64 == 0 and k % 128 == 0 and k_splits == 1
    whole = all(x.is_contiguous() for x in (a.data, b.data, b.scale_inv))
    return formats and shapes and whole and dtype == torch.bfloat16


def _aligned(scale_inv: Tensor) -> Tensor:
    """Return scales [T, groups] in the layout that the tensor memory accelerator reads: a copy if theirs is another."""
    rows, groups = scale_inv.shape
    if scale_inv.stride(0) == 1 and (scale_inv.stride(1) % 4 == 0 or groups == 1):
        return scale_inv
    room = scale_inv.new_empty(groups, -(-rows // 4) * 4)[:, :rows]
    return room.copy_(scale_inv.t()).t()


def _grouped(library: Library, a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype, tiles: Tiles) -> Tensor:
    """Return the grouped product. Rows are copied so that tile i begins at row 128 i; results are copied back."""
    rows, device = len(a.data), a.data.device
    lane = torch.arange(TALL, device=device)
    real = lane < tiles.rows[:, None]
    experts = torch.where(real, tiles.expert[:, None], NOBODY).flatten().int()
    source = torch.where(real, tiles.first[:, None] + lane, 0).flatten()
    codes = a.data.view(torch.uint8)[source].view(a.data.dtype)
    scales = a.scale_inv.t()[:, source].t()
    filled = codes.new_empty(len(source), b.data.shape[1], dtype=dtype)
    library.grouped((codes, scales), (b.data, b.scale_inv), filled, experts)
    place = torch.zeros(rows + 1, dtype=torch.int64, device=device)  # of a row; the last one stands for no row
    place[torch.where(real.flatten(), source, rows)] = torch.arange(len(source), device=device)
    return filled[place[:rows]]
