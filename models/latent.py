"""The sizes of multi-head latent attention (MLA)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Queries, and keys with values, come from narrow rows.

    Attributes:
        q_rank, kv_rank: width of these rows; the second is cached.
        rope_dim: width of the one rotated key that all heads share, cached beside it.
        value_dim: width of a head's value.
    """

    q_rank: int
    kv_rank: int
    rope_dim: int
    value_dim: int
