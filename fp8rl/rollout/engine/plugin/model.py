"""Our model in SGLang's place: the program of `models`, run over SGLang's cache, for every architecture.

SGLang's scheduler, its pools of slots, its CUDA graphs and its sampler stay. Of its model classes and layers nothing is
here but the processor of logits, which chooses the rows whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8rl.models import Model, read_model
from fp8rl.models.families import attention
from fp8rl.models.families.gated_attention import GATED_QKV
from fp8rl.models.families.gated_delta import IN_PROJ
from fp8rl.models.families.latent import LATENT_DOWN
from fp8rl.models.families.mlp import EXPERTS, EXPERTS_AND_SHARED
from fp8rl.models.program import LINEAR, TOKENS, OpSite, run, with_rows
from fp8rl.models.tensors import WHOLE, EngineRank, TensorRow
from fp8rl.numerics import ops
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.kv import KVFormat
from fp8rl.numerics.ops import ExpertWeights, HeadNorms, NewSlots
from fp8rl.numerics.quantize import scale_shape
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rollout.engine.plugin.parameters import hf_tensors
from fp8rl.rollout.engine.plugin.state import state

TAKES_ROWS = {LINEAR, attention.QKV, GATED_QKV, LATENT_DOWN, IN_PROJ, EXPERTS, EXPERTS_AND_SHARED}
"""Forms whose products may take a norm's quantized rows."""


# What the tokens of a forward attend to.


@dataclass(frozen=True)
class Paged:
    """The tokens of SGLang's ForwardBatch, over its cache."""

    batch: Any
    backend: Any
    positions: Tensor

    @classmethod
    def of(cls, batch: Any, positions: Tensor) -> Paged:
        from sglang.srt.model_executor.forward_context import get_attn_backend

        return cls(batch, get_attn_backend(), positions)

    @cached_property
    def where(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Table of slots, requests, new tokens (None: one each) and all tokens of each sequence."""
        new = None if self.batch.forward_mode.is_decode_or_idle() else self.batch.extend_seq_lens
        table = self._attending.req_to_token_pool.req_to_token
        return table, self.batch.req_pool_indices, new, self.batch.seq_lens

    @property
    def _attending(self) -> Any:
        """Beside layers of another kind, SGLang has a backend for those that attend within its backend."""
        return getattr(self.backend, "full_attn_backend", self.backend)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, kv: KVFormat, rotated: Any) -> Tensor:
        pool = self._attending.token_to_kv_pool
        keys, values = pool.get_key_buffer(layer), pool.get_value_buffer(layer)
        if rotated is not None:  # in one launch with what writes the cache, where that takes numbers as they are
            q, k = rotated(NewSlots(keys, values, self.batch.out_cache_loc, v) if not kv.quantized else None)
        if rotated is None or kv.quantized:
            pool.set_kv_buffer(SimpleNamespace(layer_id=layer), self._slots, kv.keys(k), kv.values(v))
        return ops.paged_attention(q.contiguous(), keys, values, *self.where, scale)

    def attend_rows(self, layer: int, q: Tensor, rows: Tensor, rank: int, scale: float) -> Tensor:
        pool = self._attending.token_to_kv_pool
        pool.set_kv_buffer(SimpleNamespace(layer_id=layer), self._slots, rows[:, None], None)
        return ops.paged_latent_attention(q, pool.get_key_buffer(layer)[:, 0], *self.where, rank, scale)

    @property
    def _slots(self) -> Any:
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        return KVWriteLoc(self.batch.out_cache_loc, None)

    @cached_property
    def states(self) -> tuple[Tensor, Tensor, Tensor]:
        """Slots of states, new tokens of each sequence, and whether it had tokens before."""
        slots = self.backend.linear_attn_backend.forward_metadata.mamba_cache_indices.long().clamp(min=0)
        if self.batch.forward_mode.is_decode_or_idle():
            return slots, torch.ones_like(slots), torch.ones_like(slots, dtype=torch.bool)
        return slots, self.batch.extend_seq_lens.long(), self.batch.extend_prefix_lens > 0

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        held = self.backend.linear_attn_backend.req_to_token_pool.mamba2_layer_cache(layer).conv[0]
        count, channels, rows = held.shape
        return ops.paged_causal_conv(x, weight, held.view(count, rows, channels), *self.states)

    def recur(self, layer: int, *inputs: Tensor) -> Tensor:
        held = self.backend.linear_attn_backend.req_to_token_pool.mamba2_layer_cache(layer).temporal
        count, heads, values, keys = held.shape
        return ops.paged_gated_delta_rule(*inputs, held.view(count, heads, keys, values), *self.states)


@dataclass(frozen=True)
class Whole:
    """The tokens of whole sequences, end to end, each over its own keys: of a recording."""

    lengths: Tensor

    @cached_property
    def positions(self) -> Tensor:
        return torch.cat([torch.arange(n, device=self.lengths.device) for n in self.lengths.tolist()])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, kv: KVFormat, rotated: Any) -> Tensor:
        q, k = (q, k) if rotated is None else rotated(None)
        return ops.packed_attention(q, kv.keys(k), kv.values(v), self.lengths, scale)

    def attend_rows(self, layer: int, q: Tensor, rows: Tensor, rank: int, scale: float) -> Tensor:
        return ops.packed_latent_attention(q, rows, self.lengths, rank, scale)

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        return ops.causal_conv(x, weight, self.lengths)[0]

    def recur(self, layer: int, *inputs: Tensor) -> Tensor:
        return ops.gated_delta_rule(*inputs, self.lengths)[0]


# The host.


class ProgramHost(nn.Module):
    """The weights of a rank of an engine, and the host of its program over whatever tokens attend to."""

    def __init__(self, definition: Model, numerics: NumericsConfig, rank: EngineRank = WHOLE) -> None:
        super().__init__()
        self.definition, self.numerics, self.rank = definition, numerics, rank
        self.sizes, self.spec, self.kv = definition.sizes, numerics.rollout_spec, numerics.kv_format
        hold(self, definition, self.spec, rank)
        self.weights = OpWeights.of(self, definition, rank)
        self.tokens: Any = None

    # The host of the program (`models.program.Host`).

    def tensor(self, site: OpSite, name: str = "", of: str = "") -> Tensor:
        return self.weights.tensors[site.layer, of or site.op.name][name]

    def product(self, site: OpSite, x: Tensor, rows: Any = None) -> Tensor:
        weight, bias, shared, _ = self.weights.products[site.layer, site.op.name]
        low_rank = state().weights.low_rank(weight)
        operand = self._operand(weight)
        if shared and self.rank.ranks > 1:
            if operand is None:
                own = ops.linear_partial(x, weight)
            else:
                own = ops.fp8_linear_partial(x, weight, operand, self.spec, "bf16")
            return ops.add_bias(self._merged(own, x, low_rank), bias)
        splits = self.numerics.k_splits if shared else 1
        plus = None if low_rank is None else ops.low_rank_of(x, low_rank, splits)
        if operand is None:
            out = ops.linear(x, weight, splits, plus)
        elif rows is None or splits > 1:
            out = ops.fp8_linear(x, weight, operand, self.spec, "bf16", splits, plus)
        else:
            out = ops.rows_linear(rows, operand, x.dtype, plus)
        return ops.add_bias(out, bias)

    def products(self, site: OpSite, x: Tensor, rows: Any = None) -> Sequence[Tensor]:
        counts = self.weights.products[site.layer, site.op.name].counts
        return self.product(site, x, rows).split(counts, -1)

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
        own = F.embedding(local.clamp(0, len(weight) - 1), weight)
        return self._group.all_reduce(torch.where(mine[:, None], own, -0.0))  # type: ignore[no-any-return]

    def logprobs(self, site: OpSite, logits: Tensor) -> Tensor:
        raise NotImplementedError("the sampler computes them")

    def whole(self, x: Tensor) -> Tensor:
        return x

    def over_heads(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return function(x)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([part.flatten(-2) for part in parts], -1)

    def apart(self, x: Tensor, widths: Sequence[int]) -> Sequence[Tensor]:
        heads = x.shape[-1] // sum(widths)
        parts = x.split([heads * width for width in widths], -1)
        return [part.unflatten(-1, (heads, -1)) for part in parts]

    def rotate(self, q: Tensor, k: Tensor, norms: HeadNorms | None = None, cache: Any = None) -> tuple[Tensor, Tensor]:
        sizes, positions = self.sizes, self.tokens.positions.flatten()
        return ops.rope_heads(q, k, positions, sizes.rope_theta, sizes.rotary_dim, sizes.rope_scaling, norms, cache)

    def rotate_pairs(self, x: Tensor) -> Tensor:
        return ops.rope_pairs(x[None], self.tokens.positions[None], self.sizes.rope_theta, self.sizes.rope_scaling)[0]

    def attend(
        self, site: OpSite, q: Tensor, k: Tensor, v: Tensor, rotates: bool = False, norms: HeadNorms | None = None
    ) -> Tensor:
        scale = self.sizes.head_dim**-0.5 * self.kv.key_scale
        rotated = partial(self.rotate, q, k, norms) if rotates else None
        return self.kv.result(self.tokens.attend(site.layer, q, k, v, scale, self.kv, rotated)).flatten(1)

    def attend_rows(self, site: OpSite, q: Tensor, rows: Tensor, rank: int) -> Tensor:
        scale = self.sizes.attention_scale * self.kv.key_scale
        return self.kv.result_of_keys(self.tokens.attend_rows(site.layer, q, self.kv.keys(rows), rank, scale))

    def in_rows(self, x: Tensor) -> Tensor:
        return x

    def by_rows(self, function: Callable[..., Tensor], *values: Tensor) -> Tensor:
        return function(*values)

    def convolve(self, site: OpSite, x: Tensor, weight: Tensor) -> Tensor:
        return self.tokens.convolve(site.layer, x, weight)

    def recur(self, site: OpSite, *inputs: Tensor) -> Tensor:
        return self.tokens.recur(site.layer, *inputs)

    def choose(self, site: OpSite, route: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

        probs, chosen = route(ids=torch.int32)
        if isinstance(self.tokens, Paged) and (capturer := get_global_experts_capturer()) is not None:
            capturer.capture(layer_id=site.layer, topk_indices=chosen)
        return probs, chosen

    def experts(self, site: OpSite, x: Tensor, probs: Tensor, chosen: Tensor, rows: Any = None) -> Tensor:
        spec = self.spec if self.spec.quantized else None
        stacks, low_rank = self.weights.stacks[site.layer, site.op.name], state().weights.low_rank
        w13, w2 = (ExpertWeights(stack, self._operand(stack), low_rank(stack)) for stack in stacks)
        if self.rank.ranks == 1:
            return ops.routed_experts(x, probs, chosen, w13, w2, spec, "bf16", rows)
        held = len(stacks[0])
        local = chosen.long() - self.rank.rank * held
        order, counts = ops.group_by_expert(torch.where((local < 0) | (local >= held), held, local), held + 1)
        token = order // chosen.shape[1]
        outputs = ops.experts(x[token], counts[:held], w13.of_rows(token), w2.of_rows(token), spec, "bf16")
        own = torch.arange(len(order), device=order.device) < counts[:held].sum()
        choices = torch.empty_like(outputs)
        choices[order] = torch.where(own[:, None], outputs, -0.0)
        choices = self._group.all_reduce(choices)  # of each only one rank has more than -0
        return ops.combine(choices, probs, torch.arange(chosen.numel(), device=chosen.device), x.dtype)

    def _operand(self, weight: nn.Parameter) -> Any:
        quantized = self.spec.quantized and weight.dtype == self.spec.weight.dtype
        return state().weights.operand(weight) if quantized else None

    @property
    def _group(self) -> Any:
        from sglang.srt.distributed import get_tp_group

        return get_tp_group()

    def _merged(self, own: Tensor, x: Tensor, low_rank: Any) -> Tensor:
        """The sum of all ranks' FP32 partials, in rank order, and the term of the adapter, rounded once."""
        width = own.shape[-1]
        if low_rank is not None:
            own = torch.cat((own, ops.linear_partial(x, low_rank.a)), -1)
        parts, plus = self._group.all_gather(own.contiguous()[None], dim=0), None
        if low_rank is not None:
            h = ops.merge_partials(list(parts[..., width:]), x.dtype)
            plus = low_rank.on_rows(ops.low_rank_term(h, low_rank.b, low_rank.scale, low_rank.parts))
        return ops.merge_partials(list(parts[..., :width]), x.dtype, plus)


class ProgramModel(ProgramHost):
    """SGLang's model of any architecture of ours. A rank has its heads and experts."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        from sglang.srt.runtime_context import get_parallel, get_server_args

        current, parallel = state(), get_parallel()
        found = read_model(Path(get_server_args().model_path), served=True)
        definition = replace(found, own=True).adapted(current.adapter)
        super().__init__(definition, current.numerics, EngineRank(parallel.tp_rank, parallel.tp_size))
        self.config = config
        lower = torch.cuda.is_available() or current.lowers
        *body, self._head, _ = lowered(definition, self.spec) if lower else definition.forward.sites()
        self._body = tuple(body)
        self.logits_processor = _logits_processor(config)

    def forward(
        self, input_ids: Tensor, positions: Tensor, forward_batch: Any, input_embeds: None = None, **unused: Any
    ) -> Any:
        self.tokens, x = Paged.of(forward_batch, positions), input_ids.new_empty(0, self.sizes.hidden_size)
        if len(input_ids):
            x = run(self._body, self, {TOKENS: input_ids})["x"]
        return self.logits_processor(input_ids, x, self, forward_batch)

    def logits(self, x: Tensor) -> Tensor:
        """The head, of rows that SGLang's processor chose."""
        return run((self._head,), self, {"x": x})["logits"]  # type: ignore[no-any-return]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Before `ServedWeights` takes charge: a start from a directory with weights."""
        held = hf_tensors(self, self.definition.tensors, self.spec.weight.block_rows, self.rank)
        views, table = {label: view for label, _, view in held}, self.definition.tensors
        for name, tensor in weights:
            if (row := table.get(name)) is not None and (view := views.get(self.rank.label(name, row))) is not None:
                view.copy_(self.rank.part(row, tensor))


def lowered(definition: Model, spec: QuantSpec) -> list[OpSite]:
    """The program with a norm's rows quantized with it, and head norms, rotation and the cache's write in one."""
    forward, found = definition.forward, []
    for index, layer in enumerate(forward.layers):
        rows = [row for row in definition.tensors.rows.values() if row.layer == index and row.product]
        quantized = {row.op: definition.quantizes(row, spec) for row in rows}
        for fusion in attention.FUSIONS:
            layer = fusion.within(layer)
        if spec.quantized:
            layer = with_rows(layer, {op.name for op in layer if op.form in TAKES_ROWS and quantized.get(op.name)})
        found.append(layer)
    return replace(forward, layers=tuple(found)).sites()


# Its weights.


@dataclass(frozen=True)
class Product:
    """A product's weight, its bias, whether ranks share its K, and the rows of each matrix in it."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    shared: bool
    counts: list[int]

    def __iter__(self) -> Any:
        return iter((self.weight, self.bias, self.shared, self.counts))


@dataclass(frozen=True)
class OpWeights:
    """The weights of a model by layer and op."""

    products: dict[tuple[int | None, str], Product]
    stacks: dict[tuple[int | None, str], list[nn.Parameter]]
    tensors: dict[tuple[int | None, str], dict[str, nn.Parameter]]

    @classmethod
    def of(cls, model: nn.Module, definition: Model, rank: EngineRank) -> OpWeights:
        found, tied = cls({}, {}, {}), None
        for name, by_index in definition.tensors.in_engine.items():
            rows = next(iter(by_index.values()))
            row, key, held = rows[0], (rows[0].layer, rows[0].op), None
            if row.adapts is not None:
                continue
            held = model.get_parameter(name)
            if row.copies:
                tied = held
            if None not in by_index:
                found.stacks.setdefault(key, []).append(held)
            elif row.product:
                counts = [rank.rows(each) for each in rows]
                found.products[key] = Product(held, None, row.engine.split == 1, counts)
            if None in by_index and name.endswith(".bias") and key in found.products:
                found.products[key] = replace(found.products[key], bias=held)
            elif None in by_index:
                last, own = name.rpartition(".")[2], found.tensors.setdefault(key, {})
                own[last] = held
                if not row.product or "" not in own:  # an op may have a norm beside its product
                    own[""] = held
        if tied is not None:
            found.products[None, "lm_head"] = Product(tied, None, False, [len(tied)])
        return found


def hold(model: nn.Module, definition: Model, spec: QuantSpec, rank: EngineRank) -> None:
    """Register a rank's parameters: codes and scales of what is quantized."""
    for name, by_index in definition.tensors.in_engine.items():
        rows, stacked = next(iter(by_index.values())), None not in by_index
        if rows[0].adapts is None:
            quantized, shape = definition.quantizes(rows[0], spec), _shape(rows, rank)
            if stacked:
                shape = (len(by_index) // rank.ranks, *shape)
            _register(model, name, torch.empty(shape, dtype=spec.weight.dtype if quantized else rows[0].served))
            if quantized:
                _register(model, f"{name}_scale_inv", torch.empty(scale_shape(shape, spec.weight), dtype=torch.float32))


def _shape(rows: Sequence[TensorRow], rank: EngineRank) -> tuple[int, ...]:
    first = rows[0]
    count = sum(rank.rows(row) for row in rows)
    if first.engine.padded and rank.ranks > 1:
        count = -(-first.shape[0] // 64) * 64 // rank.ranks
    rest = list(first.shape[1:])
    if first.engine.split == 1:
        rest[0] //= rank.ranks
    return (count, *rest)


def _register(model: nn.Module, name: str, tensor: Tensor) -> None:
    *path, last = name.split(".")
    for part in path:
        if part not in model._modules:
            model.add_module(part, nn.Module())
        model = model._modules[part]
    model.register_parameter(last, nn.Parameter(tensor, requires_grad=False))


def _logits_processor(config: Any) -> Any:
    from sglang.srt.layers.logits_processor import LogitsProcessor

    class Logits(LogitsProcessor):  # type: ignore[misc]
        def _compute_lm_head(self, hidden_states: Tensor, lm_head: Any, embedding_bias: Any = None) -> Tensor:
            return lm_head.logits(hidden_states)

    return Logits(config)


def register(definitions: Iterable[str]) -> None:
    """Put it in the place of SGLang's models of these names."""
    from sglang.srt.models.registry import ModelRegistry

    for name in definitions:
        ModelRegistry.models[name] = ProgramModel
