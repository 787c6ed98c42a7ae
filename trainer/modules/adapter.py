"""The adapter of one weight parameter, as a module's forward asks for it."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fp8rl.models.adapters import AdapterConfig
from fp8rl.numerics import ops
from fp8rl.numerics.ops.low_rank import Fused, LowRank


@dataclass(frozen=True)
class Adapter:
    """What stands beside a weight [N, K], or stacked ones [experts, N, K].

    Attributes:
        a: [parts * rank, K], of each matrix that the weight fuses and that has an adapter, one after the other.
        b: [M, rank], in the order of the weight's rows, of those of them that have an adapter. Both with the experts
            before where each has its own.
        parts: how many matrices these are.
        fused: where the rows of b stand; None: there is one matrix.
        halves: b has the rows of two matrices, gate and up, one after the other.
    """

    a: nn.Parameter
    b: nn.Parameter
    config: AdapterConfig
    parts: int = 1
    fused: Fused | None = None
    halves: bool = False

    @property
    def merges(self) -> bool:
        """Whether products take the weight with the adapter in it."""
        return self.config.mode == "merged"

    @property
    def low_rank(self) -> LowRank:
        """The adapter as products take it."""
        wide = self.b if self.fused is None else self.fused.wide(self.b)
        return LowRank(self.a, wide, self.config.scale, self.parts)

    def term(self, x: Tensor, k_splits: int = 1) -> Tensor | None:
        """What a product of x adds before it is rounded; None where the weight has it in it."""
        return None if self.merges else ops.low_rank_of(x, self.low_rank, k_splits)

    def reached(self, product: Tensor, x: Tensor, counts: Tensor | None = None) -> Tensor:
        """The product of x, whose gradient reaches the adapter."""
        return ops.reaching(product, x, self.low_rank, counts) if self.merges else product

    def merged(self, weight: Tensor) -> Tensor:
        """What is served in place of the weight."""
        return ops.merged(weight, self.low_rank)


def initial_a(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """The A of a matrix before the first update, FP32 [rank, K]: uniform, as `peft` begins it, and a function of its
    name and the run's seed alone. B is zero."""
    generator = torch.Generator().manual_seed(_number(f"{seed}/{name}"))
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
