"""The start-up probe: is this machine's arithmetic row-invariant?

The ops are row-invariant if the matrix library is: if a row of a product does not depend on how many rows there are,
and if leading keys of a sum do not depend on the zeros behind them. Libraries do not promise it, so each process
checks it on the machine at hand before the first rollout.
"""

from __future__ import annotations

import torch

from numerics import ops
from numerics.ops.attention import KEY_SPLIT
from numerics.ops.linear import product
from numerics.spec import QuantSpec

_MANY = 192
_FEW = (1, 2, 7, 8, 9, 31, 64, 65, 129)
_MICRO_BATCH = 4096


def row_variant_ops(device: torch.device | str = "cpu") -> list[str]:
    """The ops that gave a row other bits in a small batch than in a large one. Empty where exact mode can work."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)

    x, w, wide = random(_MANY, 512), random(384, 512) / 16, random(384, 512, dtype=torch.float32) / 16
    norm, gate_up, logits = random(512), random(_MANY, 768), random(_MANY, 640) * 4
    spec = QuantSpec.preset("fp8_block_pow2")
    tokens = torch.arange(_MANY, device=device)
    positions = tokens[:, None]
    rowwise = {
        "bf16 product": lambda n: product(x[:n], w, torch.bfloat16),
        "fp32 product": lambda n: product(x[:n], wide, torch.float32),
        "fp8_linear": lambda n: ops.fp8_linear(x[:n], w, w, spec),
        "rms_norm": lambda n: ops.rms_norm(x[:n], norm, 1e-6),
        "swiglu": lambda n: ops.swiglu(gate_up[:n]),
        "rope": lambda n: ops.rope(x[:n].view(n, 1, 4, 128), positions[:n], 1e6),
        "route": lambda n: ops.route(logits[:n], 4, True)[0],
        "token_logprobs": lambda n: ops.token_logprobs(logits[:n], tokens[:n], 0.7)[0],
    }
    with torch.no_grad():
        variant = [name for name, op in rowwise.items() if any(not torch.equal(op(n), op(_MANY)[:n]) for n in _FEW)]
        large = x.repeat(-(-_MICRO_BATCH // _MANY), 1)
        if not torch.equal(product(large, w, torch.bfloat16)[:_MANY], product(x, w, torch.bfloat16)):
            variant.append("bf16 product of a micro-batch")
        if not _attention_is_invariant(random(2, 2 * _MANY, 4, 128), random(2, 2 * _MANY, 2, 128)):
            variant.append("attention")
    return variant


def _attention_is_invariant(q: torch.Tensor, kv: torch.Tensor) -> bool:
    """A whole sequence against single queries over just the keys that they see."""
    positions = torch.arange(q.shape[1], device=q.device).expand(q.shape[0], -1)
    whole = ops.attention(q, kv, kv, positions, 0.1)
    ends = (0, 5, 31, 32, 96, KEY_SPLIT - 1, KEY_SPLIT, KEY_SPLIT + 33, 2 * KEY_SPLIT + 1, q.shape[1] - 1)
    return all(
        torch.equal(
            ops.attention(q[:1, t : t + 1], kv[:1, : t + 1], kv[:1, : t + 1], positions[:1, t : t + 1], 0.1),
            whole[:1, t : t + 1],
        )
        for t in ends
    )
