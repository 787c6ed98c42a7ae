"""Pseudo-random bits as a function of what they are for, without a state: the same wherever they are needed again."""

from __future__ import annotations

from torch import Tensor

GOLDEN = -0x61C8864680B583EB
"""2^64 / golden ratio, as int64: multiples of it lie far apart."""
MIX = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
"""The factors of splitmix64 (Steele, Lea and Flood 2014)."""


def mix(x: Tensor) -> Tensor:
    """splitmix64's finalizer: a bijection of int64 in which each bit depends on every bit. Products wrap around."""
    x = (x ^ shifted(x, 30)) * MIX[0]
    x = (x ^ shifted(x, 27)) * MIX[1]
    return x ^ shifted(x, 31)


def shifted(x: Tensor, bits: int) -> Tensor:
    """int64 x >> bits with zeros shifted in."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
