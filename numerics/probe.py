"""The start-up probe: is this machine's arithmetic row-invariant?

The ops are row-invariant if what they run on is: if a row of a product does not depend on how many rows there are, nor
on its place among them, and if leading keys of a sum do not depend on the zeros behind them. Neither matrix libraries
nor tensor cores promise it, so each process checks it on the machine at hand before the first rollout.
"""

from __future__ import annotations

import torch

from numerics import ops
from numerics.ops.attention import KEY_SPLIT
from numerics.ops.grouped import grouped_linear
from numerics.quantize import quantize
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
    operand = ops.weight_operand(quantize(w, spec.weight))
    stacked = torch.stack((w, -w, w * 2))
    group = ops.weight_operand(quantize(stacked, spec.weight))
    tokens = torch.arange(_MANY, device=device)
    positions = tokens[:, None]

    def of_experts(n: int) -> torch.Tensor:
        """The last rows of the second expert, behind n rows of the first."""
        counts = torch.tensor([n, _MANY, 0], device=device)
        return grouped_linear(torch.cat((x[:n], x)), counts, stacked, group, spec)[n:]

    rowwise = {
        "bf16 product": lambda n: ops.linear(x[:n], w),
        "fp32 product": lambda n: ops.linear(x[:n].float(), wide),
        "fp8_linear": lambda n: ops.fp8_linear(x[:n], w, operand, spec),
        "rms_norm": lambda n: ops.rms_norm(x[:n], norm, 1e-6),
        "swiglu": lambda n: ops.swiglu(gate_up[:n]),
        "rope": lambda n: ops.rope(x[:n].view(n, 1, 4, 128), positions[:n], 1e6),
        "route": lambda n: ops.route(logits[:n], 4, True)[0],
        "token_logprobs": lambda n: ops.token_logprobs(logits[:n], tokens[:n], 0.7)[0],
    }
    with torch.no_grad():
        variant = [name for name, op in rowwise.items() if any(not torch.equal(op(n), op(_MANY)[:n]) for n in _FEW)]
        if any(not torch.equal(of_experts(n), of_experts(0)) for n in _FEW):
            variant.append("grouped_linear")
        large = x.repeat(-(-_MICRO_BATCH // _MANY), 1)
        if not torch.equal(ops.linear(large, w)[-_MANY:], ops.linear(x, w)):
            variant.append("bf16 product of a micro-batch")
        if not torch.equal(ops.fp8_linear(large, w, operand, spec)[-_MANY:], ops.fp8_linear(x, w, operand, spec)):
            variant.append("fp8_linear of a micro-batch")
        if not _attention_is_invariant(random(2, 2 * _MANY, 4, 128), random(2, 2 * _MANY, 2, 128)):
            variant.append("attention")
    return variant


def _attention_is_invariant(q: torch.Tensor, kv: torch.Tensor) -> bool:
    """A whole sequence against single queries over just the keys that they see, and against the paged op."""
    length = q.shape[1]
    positions = torch.arange(length, device=q.device).expand(q.shape[0], -1)
    whole = ops.attention(q, kv, kv, positions, 0.1)
    # Slot 0 of the cache is nobody's; sequence b's keys lie backwards in the rest.
    slots = 1 + torch.arange(2 * length, device=q.device).flip(0).view(2, length)
    cache = kv.new_full((1 + 2 * length, *kv.shape[2:]), torch.nan)
    cache[slots] = kv
    both = torch.arange(2, device=q.device)

    def paged(first: int, stop: int) -> torch.Tensor:
        """Queries first to stop of both sequences, when they are the newest."""
        new, lengths = (torch.full((2,), count, device=q.device) for count in (stop - first, stop))
        fresh = q[:, first:stop].flatten(0, 1)
        return ops.paged_attention(fresh, cache, cache, slots, both, new, lengths, 0.1).unflatten(0, (2, -1))

    ends = (0, 5, 31, 32, 96, KEY_SPLIT - 1, KEY_SPLIT, KEY_SPLIT + 33, 2 * KEY_SPLIT + 1, length - 1)
    return torch.equal(paged(0, length), whole) and all(
        torch.equal(
            ops.attention(q[:1, t : t + 1], kv[:1, : t + 1], kv[:1, : t + 1], positions[:1, t : t + 1], 0.1),
            whole[:1, t : t + 1],
        )
        and torch.equal(paged(t, t + 1), whole[:, t : t + 1])
        for t in ends
    )
