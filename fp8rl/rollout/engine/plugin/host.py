"""The engine's side of the model's program (`models.program.Host`): gives ops their weights and SGLang's cache.

Ranks exchange FP32 partial sums. Then each rank adds all of them, in the order in which a single rank would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8rl.models import Model
from fp8rl.models.program import OpSite
from fp8rl.models.shared_base import engine_parameters
from fp8rl.models.tensors import WHOLE, EngineRank
from fp8rl.numerics import ops
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.ops import ExpertWeights, HeadNorms, LowRank, NewSlots
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rollout.engine.plugin.state import state
from fp8rl.rollout.engine.plugin.tokens import Tokens


class EngineHost(nn.Module):
    """Has a rank's parameters, and the methods that the ops of the program call."""

    tokens: Tokens
    """The tokens of the running forward pass."""

    def __init__(self, definition: Model, numerics: NumericsConfig, rank: EngineRank = WHOLE) -> None:
        super().__init__()
        self.definition, self.numerics, self.rank = definition, numerics, rank
        self.sizes, self.spec, self.kv = definition.sizes, numerics.rollout_spec, numerics.kv_format
        hold(self, definition, self.spec, rank)
        self.weights = OpWeights.of(self, definition, rank)

    def tensor(self, site: OpSite, name: str = "", of: str = "") -> Tensor:
        return self.weights.tensors[site.layer, of or site.op.name][name]

    def product(self, site: OpSite, x: Tensor, rows: Any = None) -> Tensor:
        product = self.weights.products[site.layer, site.op.name]
        low_rank, operand = state().weights.low_rank(product.weight), self._operand(product.weight)
        splits = self.numerics.k_splits // self.rank.ranks if product.row_parallel else 1
        if product.row_parallel and self.rank.ranks > 1:
            return ops.add_bias(self._merged(x, product.weight, operand, low_rank, splits), product.bias)
        plus = None if low_rank is None else ops.low_rank_of(x, low_rank, splits)
        if operand is None:
            out = ops.linear(x, product.weight, splits, plus)
        elif rows is None or splits > 1:
            out = ops.fp8_linear(x, product.weight, operand, self.spec, "bf16", splits, plus)
        else:
            out = ops.rows_linear(rows, operand, x.dtype, plus)
        return ops.add_bias(out, product.bias)

    def _merged(self, x: Tensor, weight: Tensor, operand: Any, low_rank: LowRank | None, slices: int) -> Tensor:
        """Add the FP32 partial sums of all ranks' slices of K in order, then the adapter's term, and round once."""
        sums, width = ops.partial_sums(slices, x, weight, operand, self.spec, "bf16"), len(weight)
        if low_rank is not None:
            sums = [torch.cat(both, -1) for both in zip(sums, ops.partial_sums(slices, x, low_rank.a), strict=True)]
        parts, plus = self._group.all_gather(ops.stacked(sums).contiguous(), dim=0), None
        if low_rank is not None:
            h = ops.merge_partials(list(parts[..., width:]), x.dtype)
            plus = low_rank.on_rows(ops.low_rank_term(h, low_rank.b, low_rank.scale, low_rank.parts))
        return ops.merge_partials(list(parts[..., :width]), x.dtype, plus)

    def products(self, site: OpSite, x: Tensor, rows: Any = None) -> Sequence[Tensor]:
        return self.product(site, x, rows).split(self.weights.products[site.layer, site.op.name].counts, -1)

    def product_of_heads(self, site: OpSite) -> Callable[..., Tensor]:
        weight = self.weights.products[site.layer, site.op.name].weight
        operand, low_rank = self._operand(weight), state().weights.low_rank(weight)

        def of_heads(x: Tensor, first: int, count: int, transposed: bool) -> Tensor:
            plus = None if low_rank is None else ops.head_term(x, low_rank, first, count, transposed)
            return ops.head_linear(x, weight, operand, first, count, transposed, plus)

        return of_heads

    def embed(self, site: OpSite, tokens: Tensor) -> Tensor:
        weight = self.tensor(site)
        if self.rank.ranks == 1:
            return F.embedding(tokens, weight)
        local = tokens - self.rank.rank * len(weight)
        mine = (local >= 0) & (local < len(weight))
        rows = F.embedding(local.clamp(0, len(weight) - 1), weight)
        return self._group.all_reduce(torch.where(mine[:, None], rows, -0.0))  # type: ignore[no-any-return]

    def logprobs(self, site: OpSite, logits: Tensor) -> Tensor:
        return self.tokens.logprobs(logits)

    def whole(self, x: Tensor) -> Tensor:
        return x

    def over_heads(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return function(x)

    def in_rows(self, x: Tensor) -> Tensor:
        return x

    def by_rows(self, function: Callable[..., Tensor], *values: Tensor) -> Tensor:
        return function(*values)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([part.flatten(-2) for part in parts], -1)

    def apart(self, x: Tensor, widths: Sequence[int]) -> Sequence[Tensor]:
        heads = x.shape[-1] // sum(widths)
        return [part.unflatten(-1, (heads, -1)) for part in x.split([heads * width for width in widths], -1)]

    def rotate(
        self, q: Tensor, k: Tensor, norms: HeadNorms | None = None, cache: NewSlots | None = None
    ) -> tuple[Tensor, Tensor]:
        sizes, positions = self.sizes, self.tokens.positions
        return ops.rope_heads(q, k, positions, sizes.rope_theta, sizes.rotary_dim, sizes.rope_scaling, norms, cache)

    def rotate_pairs(self, x: Tensor) -> Tensor:
        return ops.rope_pairs(x[None], self.tokens.positions[None], self.sizes.rope_theta, self.sizes.rope_scaling)[0]

    def attend(
        self, site: OpSite, q: Tensor, k: Tensor, v: Tensor, rotates: bool = False, norms: HeadNorms | None = None
    ) -> Tensor:
        scale = self.sizes.head_dim**-0.5 * self.kv.key_scale
        rotated = partial(self.rotate, q, k, norms) if rotates else None
        return self.kv.result(self.tokens.attend(_layer(site), q, k, v, scale, self.kv, rotated)).flatten(1)

    def attend_rows(self, site: OpSite, q: Tensor, rows: Tensor, rank: int) -> Tensor:
        scale = self.sizes.attention_scale * self.kv.key_scale
        return self.kv.result_of_keys(self.tokens.attend_rows(_layer(site), q, rows, rank, scale, self.kv))

    def convolve(self, site: OpSite, x: Tensor, weight: Tensor) -> Tensor:
        return self.tokens.convolve(_layer(site), x, weight)

    def recur(self, site: OpSite, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return self.tokens.recur(_layer(site), q, k, v, g, beta)

    def choose(self, site: OpSite, route: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        probs, chosen = route(ids=torch.int32)
        self.tokens.note_experts(_layer(site), chosen)
        return probs, chosen

    def experts(self, site: OpSite, x: Tensor, probs: Tensor, chosen: Tensor, rows: Any = None) -> Tensor:
        """Compute the experts of each token. probs, chosen: [T, k], the probabilities and the ids of these experts."""
        spec = self.spec if self.spec.quantized else None
        stacks, low_rank = self.weights.stacks[site.layer, site.op.name], state().weights.low_rank
        w13, w2 = (ExpertWeights(stack, self._operand(stack), low_rank(stack)) for stack in stacks)
        if self.rank.ranks == 1:
            return ops.routed_experts(x, probs, chosen, w13, w2, spec, "bf16", rows)
        # A CUDA graph may not wait for the device, and only the device knows how many (token, choice) pairs belong to
        # this rank. So all pairs are sorted: other ranks' pairs come last, and no expert computes them.
        here = len(stacks[0])
        local = chosen.long() - self.rank.rank * here
        order, counts = ops.group_by_expert(torch.where((local < 0) | (local >= here), here, local), here + 1)
        token = order // chosen.shape[1]
        outputs = ops.experts(x[token], counts[:here], w13.of_rows(token), w2.of_rows(token), spec, "bf16")
        computed = torch.arange(len(order), device=order.device) < counts[:here].sum()
        choices = torch.empty_like(outputs)
        choices[order] = torch.where(computed[:, None], outputs, -0.0)
        choices = self._group.all_reduce(choices)  # of each only one rank has more than -0
        return ops.combine(choices, probs, torch.arange(chosen.numel(), device=chosen.device), x.dtype)

    def _operand(self, weight: nn.Parameter) -> Any:
        """Return the operand of an FP8 weight. None for a BF16 weight."""
        quantized = self.spec.quantized and weight.dtype == self.spec.weight.dtype
        return state().weights.operand(weight) if quantized else None

    @property
    def _group(self) -> Any:
        from sglang.srt.distributed import get_tp_group

        return get_tp_group()


def _layer(site: OpSite) -> int:
    assert site.layer is not None
    return site.layer


# The parameters of a rank, and each op's parameters.

Key = tuple[int | None, str]
"""The layer and the name of an op."""


@dataclass(frozen=True)
class Product:
    """The matrices of an op, end to end in one parameter."""

    weight: nn.Parameter
    counts: list[int]
    """The number of rows of each matrix on this rank."""
    row_parallel: bool
    """True if ranks split the columns. Each rank then computes a part of every sum."""
    bias: nn.Parameter | None = None


@dataclass(frozen=True)
class OpWeights:
    """The parameters of each op."""

    products: dict[Key, Product]
    stacks: dict[Key, list[nn.Parameter]]
    """The two stacks of an op's routed experts, [experts, N, K]: gate and up in one stack, then down."""
    tensors: dict[Key, dict[str, Tensor]]
    """All other tensors, by the last part of their names, or by `""` for an op's only tensor."""

    @classmethod
    def of(cls, model: nn.Module, definition: Model, rank: EngineRank) -> OpWeights:
        found = cls({}, {}, {})
        for name, by_index in definition.tensors.in_engine.items():
            rows = next(iter(by_index.values()))
            row, key, last = rows[0], (rows[0].layer, rows[0].op), name.rpartition(".")[2]
            if row.adapts is not None:
                continue
            parameter = model.get_parameter(name)
            if None not in by_index:
                found.stacks.setdefault(key, []).append(parameter)
            elif last == "bias" and key in found.products:
                found.products[key] = replace(found.products[key], bias=parameter)
            else:
                if row.product:
                    counts = [rank.rows(matrix) for matrix in rows]
                    found.products[key] = Product(parameter, counts, row.engine.split == 1)
                tensors = found.tensors.setdefault(key, {})
                tensors[last] = parameter
                if not row.product or "" not in tensors:  # an op may have a norm in addition to its product
                    tensors[""] = parameter
            if row.copies:  # the embedding is the head's matrix too
                found.products[None, "lm_head"] = Product(parameter, [len(parameter)], False)
        return found


def hold(model: nn.Module, definition: Model, spec: QuantSpec, rank: EngineRank) -> None:
    """Register a rank's parameters, as zeros, under their names in the tensor table."""
    for name, (shape, dtype) in engine_parameters(definition, spec, rank).items():
        *path, last = name.split(".")
        module = model
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        zeros: Any = torch.zeros(shape, dtype=dtype)  # rows that pad a vocabulary stay zeros
        module.register_parameter(last, nn.Parameter(zeros, requires_grad=False))
