"""Checks the parameters of an engine's model, adds adapters to them, and refreshes SGLang's copies of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8rl.models import Model
from fp8rl.models.tensors import SCALE_SUFFIX, EngineRank
from fp8rl.numerics.ops import Fused, LowRank
from fp8rl.numerics.quantize import QuantizedTensor
from fp8rl.numerics.spec import TensorSpec

CACHE_SCALES = {"k_scale", "v_scale"}
"""Parameters that SGLang adds to attention in some quantized models, for an FP8 cache. The plugin does not use them."""


def check_table(model: nn.Module, definition: Model) -> None:
    """Check that the engine's model has exactly the parameters in its tensor table. Raises RuntimeError, which names
    missing and additional parameters."""
    expected = definition.tensors.in_engine.keys()
    names = {name.removesuffix(SCALE_SUFFIX) for name, _ in model.named_parameters()}
    # An engine that starts without weights has made up whatever is saved with a model, its buffers too.
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    names |= model.state_dict().keys() - tied
    spare = sorted(name for name in names - expected if name.rpartition(".")[2] not in CACHE_SCALES)
    missing = sorted(expected - names)
    if spare or missing:
        raise RuntimeError(
            f"fp8rl plugin: found an engine with the additional parameters {spare[:5]} and without {missing[:5]}, "
            f"expected the parameters of {definition.architecture.name}. Install the locked version of sglang"
        )


# Adapters. SGLang does not know them, so their parameters stand beside its fused parameters, and our loader fills them.


@dataclass(frozen=True)
class ServedAdapter:
    """The adapter of one of the engine's weights, or of a rank's part of the weight."""

    b: nn.Parameter
    """The parameter into which the adapter's B is loaded."""
    fused: Fused | None
    """Which rows of the weight the rows of `b` belong to. None: row i of `b` belongs to row i of the weight."""
    low_rank: LowRank
    """The adapter in the form that products take. Its `b` keeps its address, from which CUDA graphs read."""

    def refresh(self) -> None:
        """Update `low_rank` from the loaded parameters."""
        if self.fused is not None:
            self.low_rank.b.copy_(self.fused.wide(self.b.detach()))


class AdaptedRows:
    """Marks the rows of a forward pass that use the adapters, in an engine that also serves the model without them.

    A request for the model without adapters has a `lora_id`. SGLang also caches prefixes separately for each id.
    """

    def __init__(self, most: int, device: torch.device) -> None:
        """most: the largest number of rows of a forward pass."""
        self.mask = torch.ones(most, dtype=torch.bool, device=device)
        """bool [most]. The rows of the pass come first. The tensor keeps its address, from which CUDA graphs read."""

    def take(self, batch: Any) -> None:
        """Mark the rows of a ForwardBatch. A request has one row in a decode step, otherwise one for each new token."""
        rows = torch.tensor([name is None for name in batch.lora_ids], dtype=torch.bool).to(self.mask.device)
        if not batch.forward_mode.is_decode_or_idle():
            rows = rows.repeat_interleave(batch.extend_seq_lens, output_size=len(batch.input_ids))
        self.mask[: len(rows)] = rows


@torch.no_grad()
def attach_adapters(model: nn.Module, definition: Model, rank: EngineRank) -> dict[Tensor, ServedAdapter]:
    """Register the parameters of all adapters in SGLang's model, as zeros. Return the adapter of each weight."""
    config = definition.adapter
    assert config is not None
    found: dict[Tensor, ServedAdapter] = {}
    for by_index in definition.tensors.in_engine.values():
        rows = next(iter(by_index.values()))  # for a stack of experts, the tensors of the first
        counts, own = [rank.rows(row) for row in rows], [config.adapts(row) for row in rows]
        if not any(own):
            continue
        name, weight = rows[0].engine.parameter, model.get_parameter(rows[0].engine.parameter)
        stack = (len(weight),) if rows[0].expert is not None and config.experts == "per_expert" else ()
        adapted_rows = sum(count for count, adapted in zip(counts, own, strict=True) if adapted)
        a = _register(model, name, "a", *stack, sum(own) * config.rank, weight.shape[-1])
        b = _register(model, name, "b", *stack, adapted_rows, config.rank)
        fused = _fused(counts, own, config.rank).to(weight.device) if len(rows) > 1 else None
        wide = b.detach() if fused is None else fused.wide(b.detach())
        found[weight] = ServedAdapter(b, fused, LowRank(a.detach(), wide, config.scale, sum(own)))
    return found


def _fused(counts: Sequence[int], own: Sequence[bool], rank: int) -> Fused:
    """Map B's rows to a parameter's rows. counts: rows of each tensor in it. own: whether each has an adapter."""
    number = torch.tensor([sum(own[:i]) if adapted else -1 for i, adapted in enumerate(own)])
    part = number.repeat_interleave(torch.tensor(counts))
    rows = (part >= 0).nonzero().flatten()
    return Fused.of(rows, part[rows], len(part), sum(own), rank)


def _register(model: nn.Module, weight: str, letter: str, *shape: int) -> nn.Parameter:
    """Register the parameter `letter` (a or b) of an adapter in the module of its weight, and return the parameter."""
    device = model.get_parameter(weight).device
    parameter = nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16, device=device), requires_grad=False)
    path, _, name = weight.rpartition(".")
    model.get_submodule(path).register_parameter(name.replace("weight", f"lora_{letter}"), parameter)
    return parameter


# Copies of parameters with which SGLang's attention computes in native mode.


@dataclass(frozen=True)
class CopiesOfKvB:
    """Copies w_kc [heads, N, R] and w_vc [heads, R, V] of kv_b_proj [heads * (N + V), R], a head's keys first.

    SGLang multiplies by the copies, and makes them at the end of a load that names a kv_b_proj. This is not enough,
    because a delta writes the parameter without a load, and a parameter and its scales may come in two loads. So each
    commit lets SGLang make the copies again. A manifest marks copies that differ from the engine's kv_b_proj.
    """

    model: Any
    """SGLang's model, which makes the copies."""
    attention: Any
    """The layer's module, which has the copies."""
    name: str
    """The name of the layer's kv_b_proj."""

    def refresh(self) -> None:
        """Make the copies again."""
        self.model.post_load_weights(weight_names=[self.name])

    def agree(self, spec: TensorSpec) -> bool:
        """Return whether the copies equal kv_b_proj bit for bit (dequantized, if it is quantized by `spec`)."""
        product = self.attention.kv_b_proj
        whole = product.weight.detach()
        if (scales := getattr(product, "weight_scale_inv", None)) is not None:
            whole = QuantizedTensor(whole, scales.detach().to(spec.scale_dtype), spec).dequantize(torch.bfloat16)
        copies = torch.cat((self.attention.w_kc, self.attention.w_vc.transpose(1, 2)), 1).flatten(0, 1)
        return copies.dtype == whole.dtype and copies.view(torch.int16).equal(whole.view(torch.int16))


def copies_in(model: nn.Module) -> Mapping[Tensor, CopiesOfKvB]:
    """Return the copies of each kv_b_proj that has copies."""
    return {
        module.kv_b_proj.weight: CopiesOfKvB(model, module, f"{name}.kv_b_proj.weight")
        for name, module in model.named_modules()
        if getattr(module, "w_kc", None) is not None
    }
