"""Rows that are laid end to end, in one row of the model's input."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from fp8rl.trainer import device


@dataclass(kw_only=True)
class PackedRows(PackedSeqParams):
    """What attention is told of rows end to end: Megatron's words for it, and ours.

    Attributes:
        lengths: int64 [B], of each row.
        positions: int64 [T], of each token in its row.
    """

    lengths: Tensor
    positions: Tensor

    @classmethod
    def of(cls, lengths: Tensor) -> PackedRows:
        """lengths: int64 [B] on the CPU, 1 or more each."""
        stops = lengths.cumsum(0)
        positions = torch.arange(int(stops[-1])) - (stops - lengths).repeat_interleave(lengths)
        cumulated = torch.cat([stops.new_zeros(1), stops]).int().to(device.current())
        longest = int(lengths.max())
        return cls(
            qkv_format="thd",
            cu_seqlens_q=cumulated,
            cu_seqlens_kv=cumulated,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            lengths=lengths.to(device.current()),
            positions=positions.to(device.current()),
        )
