"""Attention over latent rows on the tensor core: `numerics.ops.latent`, contiguous, packed and paged.

It is the kernel of `forward` with tiles of 64 rows: a key is a row of D + TAIL channels, of which the first D are its
value too, so that a program reads each row once for both. Query heads share all rows, and so do tiles: up to 64 heads
of a decoded token read its sequence's rows once.
"""

from __future__ import annotations

from typing import Any

import torch

from fp8rl.numerics.errors import user_error
from fp8rl.numerics.kernels.attention.forward import attend, attend_packed, attend_paged, check_dtypes
from fp8rl.numerics.kernels.attention.latent_backward import gradients_of_latent
from fp8rl.numerics.kernels.memory import dense_rows


def latent_attention(
    q: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, rank: int, scale: float
) -> torch.Tensor:
    """`numerics.ops.latent_attention`.

    Raises:
        UserError: another dtype than BF16, or a rank or a rotated part that is no power of two.
    """
    _check(q, rows, rank)
    return _Latent.apply(dense_rows(q), dense_rows(rows), positions, rank, scale)


def packed_latent_attention(
    q: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, rank: int, scale: float
) -> torch.Tensor:
    """`numerics.ops.packed_latent_attention`."""
    _check(q, rows, rank)
    return _PackedLatent.apply(dense_rows(q), dense_rows(rows), lengths.contiguous(), rank, scale)


def paged_latent_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    requests: torch.Tensor,
    new: torch.Tensor,
    lengths: torch.Tensor,
    rank: int,
    scale: float,
) -> torch.Tensor:
    """`numerics.ops.paged_latent_attention`, without a wait for the device (`forward.paged_attention`)."""
    _check(q, cache, rank)
    keys = cache.unsqueeze(1)
    return attend_paged(q, keys, keys[..., :rank], table, requests, new, lengths, scale, cache.shape[-1] - rank)


class _Latent(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, rank: int, scale: float
    ) -> torch.Tensor:
        keys = rows.unsqueeze(2)
        out, _, logsumexp = attend(q, keys, keys[..., :rank], positions, scale, rows.shape[-1] - rank)
        ctx.save_for_backward(q, rows, positions, out, logsumexp)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        q, rows, positions, out, logsumexp = ctx.saved_tensors
        return *gradients_of_latent(grads[0], q, rows, positions, out, logsumexp, ctx.scale), None, None, None


class _PackedLatent(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, rank: int, scale: float
    ) -> torch.Tensor:
        keys = rows.unsqueeze(1)
        out, logsumexp, positions = attend_packed(q, keys, keys[..., :rank], lengths, scale, rows.shape[-1] - rank)
        ctx.save_for_backward(q, rows, positions, out, logsumexp, lengths)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        *saved, lengths = ctx.saved_tensors
        q, rows, positions, out, logsumexp = (x[None] for x in saved)
        dq, drows = gradients_of_latent(grads[0][None], q, rows, positions, out, logsumexp, ctx.scale, lengths)
        return dq[0], drows[0], None, None, None


def _check(q: torch.Tensor, rows: torch.Tensor, rank: int) -> None:
    """Raises UserError unless the kernels know these dtypes and sizes."""
    check_dtypes(q, rows)
    tail = rows.shape[-1] - rank
    known = 16 <= rank <= 512 and 16 <= tail <= 128 and not rank & (rank - 1) and not tail & (tail - 1)
    if not known or q.shape[-1] != rows.shape[-1]:
        raise user_error(
            "latent attention",
            found=f"queries of {q.shape[-1]} channels, rows of {rows.shape[-1]}, {rank} of them the value",
            expected="queries as wide as rows; powers of two: a value of 16 to 512 channels, 16 to 128 behind it",
            remedy="Run the ops on torch.",
        )
