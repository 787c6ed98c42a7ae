"""The tokens of a forward pass, and what they attend to: SGLang's cache, or for a recording whole sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fp8rl.numerics import ops
from fp8rl.numerics.kv import KVFormat
from fp8rl.numerics.ops import NewSlots

Slots = tuple[Tensor, Tensor, Tensor | None, Tensor]
"""The table of slots, and by sequence: its row in the table, its new tokens (None: 1 each), and all its tokens."""
Rotation = Callable[[NewSlots | None], tuple[Tensor, Tensor]]
"""Returns rotated queries and keys. Also writes keys and values to a cache if it gets one."""


@dataclass(frozen=True)
class Paged:
    """The tokens of SGLang's ForwardBatch. Each request has its keys, values and states in slots of SGLang's pools.

    SGLang only clears and copies the slots of states, so they may have our layout. The delta rule goes from token to
    token, so whole prefill, chunked prefill and decode leave the same bits in a slot.
    """

    batch: Any
    backend: Any
    """SGLang's attention backend, which knows the pools."""
    positions: Tensor

    @classmethod
    def of(cls, batch: Any) -> Paged:
        from sglang.srt.model_executor.forward_context import get_attn_backend

        return cls(batch, get_attn_backend(), batch.positions)

    @cached_property
    def _attention(self) -> Any:
        """SGLang's backend for attention layers. A backend for attention and linear attention contains it."""
        return getattr(self.backend, "full_attn_backend", self.backend)

    @cached_property
    def _decodes(self) -> bool:
        return bool(self.batch.forward_mode.is_decode_or_idle())

    @cached_property
    def _slots(self) -> Slots:
        new = None if self._decodes else self.batch.extend_seq_lens
        table = self._attention.req_to_token_pool.req_to_token
        return table, self.batch.req_pool_indices, new, self.batch.seq_lens

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, kv: KVFormat, rotated: Rotation | None
    ) -> Tensor:
        """Return the attention's output [T, heads, D]. rotated: rotates q and k. None: they are rotated already."""
        pool = self._attention.token_to_kv_pool
        keys, values = pool.get_key_buffer(layer), pool.get_value_buffer(layer)
        one_launch = rotated is not None and not kv.quantized  # rotates, and writes numbers as they are
        if rotated is not None:
            q, k = rotated(NewSlots(keys, values, self.batch.out_cache_loc, v) if one_launch else None)
        if not one_launch:
            self._write(layer, kv.keys(k), kv.values(v))
        return ops.paged_attention(q.contiguous(), keys, values, *self._slots, scale)

    def attend_rows(self, layer: int, q: Tensor, rows: Tensor, rank: int, scale: float, kv: KVFormat) -> Tensor:
        self._write(layer, kv.keys(rows)[:, None], None)
        cache = self._attention.token_to_kv_pool.get_key_buffer(layer)[:, 0]
        return ops.paged_latent_attention(q, cache, *self._slots, rank, scale)

    def _write(self, layer: int, keys: Tensor, values: Tensor | None) -> None:
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        where, of_layer = KVWriteLoc(self.batch.out_cache_loc, None), SimpleNamespace(layer_id=layer)
        self._attention.token_to_kv_pool.set_kv_buffer(of_layer, where, keys, values)

    @cached_property
    def states(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return for each sequence the slot of its states, int64 [B], its number of new tokens, int64 [B], and whether
        it has earlier tokens, bool [B].

        Rows that pad the batch of a CUDA graph have no slot (-1). They get slot 0, which SGLang reserves.
        """
        slots = self.backend.linear_attn_backend.forward_metadata.mamba_cache_indices.long().clamp(min=0)
        if self._decodes:
            return slots, torch.ones_like(slots), torch.ones_like(slots, dtype=torch.bool)
        return slots, self.batch.extend_seq_lens.long(), self.batch.extend_prefix_lens > 0

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        slots = self._states_of(layer).conv[0]
        rows = slots.view(len(slots), weight.shape[1] - 1, len(weight))  # whatever order SGLang has
        return ops.paged_causal_conv(x, weight, rows, *self.states)

    def recur(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        slots = self._states_of(layer).temporal
        count, heads, values, keys = slots.shape
        return ops.paged_gated_delta_rule(q, k, v, g, beta, slots.view(count, heads, keys, values), *self.states)

    def _states_of(self, layer: int) -> Any:
        return self.backend.linear_attn_backend.req_to_token_pool.mamba2_layer_cache(layer)

    def note_experts(self, layer: int, chosen: Tensor) -> None:
        from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

        if (capturer := get_global_experts_capturer()) is not None:
            capturer.capture(layer_id=layer, topk_indices=chosen)

    def logprobs(self, logits: Tensor) -> Tensor:
        raise NotImplementedError("SGLang's sampler asks for log-probabilities after the model's forward pass")


@dataclass(frozen=True)
class Recorded:
    """Whole sequences of a recording. Their keys are in a separate cache, in which token t has slot t."""

    lengths: Tensor
    """int64 [sequences]"""
    targets: Tensor
    """int64 [T], the tokens whose log-probabilities are computed."""
    temperature: float

    @cached_property
    def positions(self) -> Tensor:
        return torch.cat([torch.arange(n, device=self.lengths.device) for n in self.lengths.tolist()])

    @cached_property
    def _slots(self) -> Slots:
        starts = self.lengths.cumsum(0) - self.lengths
        table = starts[:, None] + torch.arange(int(self.lengths.max()), device=starts.device)
        requests = torch.arange(len(starts), device=starts.device)
        return table.clamp(max=len(self.targets) - 1).int(), requests, self.lengths, self.lengths

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, kv: KVFormat, rotated: Rotation | None
    ) -> Tensor:
        q, k = (q, k) if rotated is None else rotated(None)
        keys, values = kv.keys(k).to(kv.dtype), kv.values(v).to(kv.dtype)
        return ops.paged_attention(q.contiguous(), keys.contiguous(), values.contiguous(), *self._slots, scale)

    def attend_rows(self, layer: int, q: Tensor, rows: Tensor, rank: int, scale: float, kv: KVFormat) -> Tensor:
        return ops.paged_latent_attention(q, kv.keys(rows).to(kv.dtype), *self._slots, rank, scale)

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        return ops.causal_conv(x, weight, self.lengths)

    def recur(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return ops.gated_delta_rule(q, k, v, g, beta, self.lengths)

    def note_experts(self, layer: int, chosen: Tensor) -> None:
        """Do nothing, because the engine must not record the experts of a probe."""

    def logprobs(self, logits: Tensor) -> Tensor:
        return ops.token_logprobs(logits.float(), self.targets, self.temperature)[0]


Tokens = Paged | Recorded
