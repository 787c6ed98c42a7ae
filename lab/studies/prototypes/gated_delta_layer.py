"""A layer of Qwen3-Next's linear attention, as an engine and a trainer's module both compute it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8rl.numerics import ops
from fp8rl.numerics.ops.experts import sigmoid
from lab.studies.prototypes.gated_delta import Rows, State, causal_conv, gated_delta, silu


class Weights(NamedTuple):
    """One layer's parameters, as checkpoints name them. conv1d: [channels, taps]; A_log and dt_bias: [value heads]."""

    in_proj_qkvz: Tensor
    in_proj_ba: Tensor
    conv1d: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    out_proj: Tensor


@dataclass(frozen=True)
class Sizes:
    """Heads of keys (and queries) and of values, their widths, and the norm's epsilon."""

    keys: int
    values: int
    key_dim: int
    value_dim: int
    eps: float


class Held(NamedTuple):
    """All that a sequence leaves behind in a layer: the last rows before the convolution, and the rule's state."""

    conv: Tensor
    state: State

    @classmethod
    def empty(cls, weights: Weights, sizes: Sizes) -> Held:
        channels, taps = weights.conv1d.shape
        return cls(torch.zeros(taps - 1, channels), State.empty(sizes.values, sizes.key_dim, sizes.value_dim))


def of_transformers(module: Any) -> tuple[Weights, Sizes]:
    """Weights and sizes of a `Qwen3NextGatedDeltaNet` of transformers."""
    named = {name.removesuffix(".weight"): each.detach() for name, each in module.named_parameters()}
    heads = module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim
    return Weights(**named | {"conv1d": named["conv1d"].flatten(1)}), Sizes(*heads, module.layer_norm_epsilon)


def linear_attention(x: Tensor, weights: Weights, sizes: Sizes, held: Held) -> tuple[Tensor, Held]:
    """The layer over the next tokens of one sequence: x [T, hidden] in BF16 -> the same, and what it leaves behind.

    Products are `ops.linear`. Convolution, norms of queries and keys, gates and rule are FP32; the convolution's and
    the rule's results are rounded to BF16 once, and so is the gated norm's.
    """
    shares = sizes.values // sizes.keys
    widths = [sizes.key_dim, sizes.key_dim, shares * sizes.value_dim, shares * sizes.value_dim]
    q, k, v, z = ops.linear(x, weights.in_proj_qkvz).unflatten(-1, (sizes.keys, -1)).split(widths, -1)
    b, a = (y.flatten(1) for y in ops.linear(x, weights.in_proj_ba).unflatten(-1, (sizes.keys, -1)).split(shares, -1))
    mixed = torch.cat([y.flatten(1) for y in (q, k, v)], -1).float()
    mixed, conv = causal_conv(mixed, weights.conv1d.float(), held.conv)
    of_keys, of_values = sizes.keys * sizes.key_dim, sizes.values * sizes.value_dim
    q, k, v = mixed.to(x.dtype).float().split([of_keys, of_keys, of_values], -1)
    q, k = (_normed(y.unflatten(-1, (sizes.keys, -1))).repeat_interleave(shares, 1) for y in (q, k))
    q, v = q * sizes.key_dim**-0.5, v.unflatten(-1, (sizes.values, -1))
    decay = -weights.A_log.float().exp() * _softplus(a.float() + weights.dt_bias.float())
    rows = Rows(*(y.transpose(0, 1).contiguous() for y in (q, k, v, decay, sigmoid(b.float()))))
    out, state = gated_delta(rows, held.state)
    normed = ops.rms_norm(out.transpose(0, 1).to(x.dtype).reshape(-1, sizes.value_dim), weights.norm, sizes.eps)
    gated = normed.float() * silu(z.reshape(-1, sizes.value_dim).float())
    return ops.linear(gated.to(x.dtype).reshape(len(x), -1), weights.out_proj), Held(conv, state)


def _normed(x: Tensor) -> Tensor:
    return x / ((x * x).sum(-1, keepdim=True) + 1e-6).sqrt()


def _softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), in float64 because small results would be lost. torch's takes another function for the last few
    elements of a tensor than for the others."""
    return torch.log(1 + torch.exp(x.double())).float()


class GatedDeltaNet(torch.nn.Module):
    """The trainer's side: the layer over whole sequences, with its parameters."""

    def __init__(self, weights: Weights, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.held = torch.nn.ParameterDict({name: value.clone() for name, value in weights._asdict().items()})

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden], a sequence from its first token on."""
        weights = Weights(**self.held)
        return linear_attention(x, weights, self.sizes, Held.empty(weights, self.sizes))[0]
