"""Launches what an engine launches on a GPU: its forwards run on the meta device, where nothing is computed.

`numerics.kernels.precompile` notes which kernels these are. SGLang is not there: every op of the model's forward is
called as its hook calls it, by the side of its form (`EngineSide.launch`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor

from fp8rl.models import Model
from fp8rl.models.adapters import AdapterSection
from fp8rl.models.sizes import ModelSizes
from fp8rl.models.tensors import EngineRank, TensorRow
from fp8rl.models.trace import TOKENS, OpSite
from fp8rl.numerics import ops
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.kernels.precompile import META
from fp8rl.numerics.ops import ExpertWeights, LowRank
from fp8rl.numerics.quantize import QuantizedTensor, scale_shape
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rollout.config import RolloutSection
from fp8rl.rollout.engine.plugin.families import Read, families, sides
from fp8rl.rollout.engine.plugin.normed import whole_product
from fp8rl.rollout.engine.plugin.state import configure, state

_BEYOND = 4
"""Slots that SGLang adds to the context in its table of a request's slots, beside those of drafts."""
_PREFILLED = (17, 128, 1000, 8192)
"""New tokens of prefills, in short and in tall tiles, that fill them or not."""


def launch_forwards(
    definition: Model, numerics: NumericsConfig, config: RolloutSection, adapter: AdapterSection | None = None
) -> list[str]:
    """Decode and prefill batches of one rank of an engine; return the names of forms that have no launch.

    In native mode these are the ops of hooks alone: what else SGLang launches is its own. The process is good for no
    other engine afterwards. adapter: what stands beside the weights.
    """
    configure(numerics)
    definition = definition.adapted(adapter)
    known, missing = sides(), set()
    decoded = [(each, each) for each in sorted({*config.graphs, *_powers(max(config.graphs))})]
    together = list(_powers(max(config.graphs)))  # a prefill may begin as many answers as the largest batch has
    prefilled = [(tokens, sequences) for tokens in _PREFILLED for sequences in together]
    length = config.context_length + _BEYOND + (config.speculation.width if config.speculation else 0)
    for is_decode, batches in ((True, decoded), (False, prefilled)):
        for tokens, sequences in batches:
            engine = MetaEngine(definition, numerics, config.tp, tokens, sequences, length, is_decode)
            state().weights = cast(Any, engine)
            if numerics.mode == "native":
                for family in families():
                    family.launch_native(engine)
                continue
            values: dict[str, Tensor | None] = {TOKENS: engine.whole(tokens)}
            for site in engine.sites:
                if (launch := known[site.op.form].launch) is None:
                    missing.add(site.op.form.name)
                    break
                read: Read = [values.get(name) for name in site.op.reads]
                values |= zip(site.op.writes, launch(engine, site, *read), strict=True)
    return sorted(missing)


def _powers(most: int) -> Iterator[int]:
    each = 1
    while each < most:
        yield each
        each *= 2
    yield most


@dataclasses.dataclass(frozen=True)
class MetaEngine:
    """One rank of an engine, and a batch, of which only shapes exist. It answers for the plugin's weights, too."""

    definition: Model
    numerics: NumericsConfig
    ranks: int
    tokens: int
    """New tokens of the batch."""
    sequences: int
    length: int
    """Slots of a request in the table."""
    decodes: bool
    """Each sequence has one new token."""

    @property
    def sizes(self) -> ModelSizes:
        return self.definition.sizes

    @property
    def spec(self) -> QuantSpec:
        return self.numerics.rollout_spec

    @cached_property
    def sites(self) -> list[OpSite]:
        """The ops of the model, of layers that launch the same those of one."""
        kinds: dict[object, int] = {}
        for layer in range(self.sizes.layers):
            of_layer = [(row.op, row.shape, self.definition.quantizes(row, self.spec)) for row in self._by_layer[layer]]
            kinds.setdefault((self.definition.forward.layers[layer], tuple(of_layer)), layer)
        return [site for site in self.definition.forward.sites() if site.layer in {None, *kinds.values()}]

    @cached_property
    def _by_layer(self) -> dict[int | None, list[TensorRow]]:
        found: dict[int | None, list[TensorRow]] = {}
        for row in self.definition.tensors.rows.values():
            if not row.expert and row.adapts is None:  # experts are alike
                found.setdefault(row.layer, []).append(row)
        return found

    @cached_property
    def quantized_widths(self) -> list[int]:
        """The lengths K over which one rank's FP8 products sum."""
        rows = [row for row in self.definition.tensors.rows.values() if self.definition.quantizes(row, self.spec)]
        return sorted({row.shape[1] // (self.ranks if row.engine.split == 1 else 1) for row in rows})

    def empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=META)

    def whole(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Integers, which could be anything."""
        return torch.empty(*shape, dtype=dtype, device=META)

    @property
    def positions(self) -> Tensor:
        return self.whole(self.tokens)

    @property
    def new(self) -> Tensor | None:
        """The new tokens of each sequence; None in decode, where each has one."""
        return None if self.decodes else self.whole(self.sequences, dtype=torch.int32)

    @property
    def table(self) -> Tensor:
        return self.whole(self.sequences + 1, self.length, dtype=torch.int32)

    def norm(self, size: int) -> Tensor:
        """The weight of a norm, as its op gets it."""
        return self.empty(size, dtype=torch.float32 if self.sizes.zero_centered_norms else torch.bfloat16)

    def heads(self, number: int) -> int:
        """Return how many of `number` heads a rank has."""
        return max(number // self.ranks, 1)

    def rows(self, site: OpSite) -> list[TensorRow]:
        """The weights of a site's product, which one parameter fuses."""
        return [row for row in self._by_layer[site.layer] if row.op == site.op.name and row.product]

    def product(self, site: OpSite, x: Tensor) -> Tensor:
        """The product of x [T, K] as SGLang's linear modules are hooked."""
        rows = self.rows(site)
        weight, shared = self.weight(rows), rows[0].engine.split == 1
        low_rank, operand = self._low_rank(rows), self.operand(weight)
        if shared and self.ranks > 1:
            if operand is None:
                own = ops.linear_partial(x, weight)
            else:
                own = ops.fp8_linear_partial(x, weight, operand, self.spec, "bf16")
            plus, width = None, own.shape[-1]
            if low_rank is not None:
                own = torch.cat((own, ops.linear_partial(x, low_rank.a)), -1)
            parts = own.new_empty(self.ranks, *own.shape)
            if low_rank is not None:
                h = ops.merge_partials(list(parts[..., width:]), x.dtype)
                plus = ops.low_rank_term(h, low_rank.b, low_rank.scale, low_rank.parts)
            return ops.merge_partials(list(parts[..., :width]), x.dtype, plus)
        splits = self.numerics.k_splits if shared else 1
        plus = None if low_rank is None else ops.low_rank_of(x, low_rank, splits)
        if operand is None:
            return ops.linear(x, weight, splits, plus)
        plain = partial(ops.fp8_linear, x, weight, operand, self.spec, "bf16")
        return whole_product(x, state().rows_of(x), operand, plain)(splits, plus)

    def weight(self, rows: Sequence[TensorRow], experts: int | None = None) -> Tensor:
        """Make this rank's parameter of some tensors, one below the other: FP8 codes if they are quantized.

        experts: how many of them are stacked.
        """
        rank, (_, columns) = EngineRank(0, self.ranks), rows[0].shape
        shape = (sum(rank.rows(row) for row in rows), columns // (self.ranks if rows[0].engine.split == 1 else 1))
        quantized = self.definition.quantizes(rows[0], self.spec)
        dtype = self.spec.weight.dtype if quantized else rows[0].served
        return self.empty(*((experts,) if experts else ()), *shape, dtype=dtype)

    def operand(self, weight: Tensor) -> Any:
        """Make the GEMM operand of an FP8 parameter; None of another."""
        if weight.dtype != self.spec.weight.dtype or not self.spec.quantized:
            return None
        scales = self.empty(*scale_shape(tuple(weight.shape), self.spec.weight), dtype=torch.float32)
        return ops.weight_operand(QuantizedTensor(weight, scales, self.spec.weight))

    def low_rank(self, weight: Tensor) -> LowRank | None:
        """Adapters of what is asked for by its parameter are left out."""
        return None

    def experts(self, rows: Sequence[TensorRow], held: int) -> ExpertWeights:
        """One stack of this rank's `held` experts, with the adapter beside it. rows: of one expert."""
        stack = self.weight(rows, held)
        return ExpertWeights(stack, self.operand(stack), self._low_rank(rows, held))

    def _low_rank(self, rows: Sequence[TensorRow], experts: int | None = None) -> LowRank | None:
        config = self.definition.adapter
        adapted = [row for row in rows if config is not None and config.adapts(row)]
        if config is None or not adapted:
            return None
        (n, k), parts = self.weight(rows).shape, len(adapted)
        of_each = (experts,) if experts and config.experts != "shared" else ()
        a, b = self.empty(*of_each, parts * config.rank, k), self.empty(*of_each, n, parts * config.rank)
        return LowRank(a, b, config.scale, parts)
