"""Attaches adapters to the weights of a model, and freezes the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from fp8rl.models.adapters import AdapterSection
from fp8rl.models.checkpoint.peft import digest_of_all
from fp8rl.models.tensors import TensorRow
from fp8rl.numerics import ops
from fp8rl.numerics.core.memory import batches_by_bytes
from fp8rl.numerics.core.process import all_gathered, exhaust
from fp8rl.numerics.digest import tensor_digests
from fp8rl.numerics.ops.low_rank import Fused
from fp8rl.numerics.quantize import quantize
from fp8rl.numerics.spec import TensorSpec
from fp8rl.numerics.weight_cache import WeightCache
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.modules.exact import Held
from fp8rl.trainer.modules.precision import Adapter, initial_a
from fp8rl.trainer.modules.weights import beside, matrices, tag_split
from fp8rl.trainer.weights.hf_weights import HFWeights

_BATCH_BYTES = 16 << 20


@torch.no_grad()
def attach(
    model: GPTModel,
    weights: HFWeights,
    cache: WeightCache,
    config: AdapterSection,
    seed: int,
    stays: Callable[[str], bool] = lambda name: False,
    start: Mapping[str, Tensor] | None = None,
) -> None:
    """Freeze a model, except for parameters that `stays` selects, and attach adapters to its weights.

    A starts with the values of `initial_a`, and B with zeros, so that at first adapters change no result.

    start: initial tensors to use instead, by name.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(stays(name))
    whole = weights.whole(model)
    for path, module in list(model.named_modules()):
        weight = module._parameters.get("weight")
        if weight is None:
            continue
        names = [whole(name) for name, _ in matrices(f"{path}.weight", weight)]
        if not any(config.adapts(row) for row in weights.rows_of(names[0])):
            continue
        adapter = _made(weight, names, weights, config, seed, model.config.sequence_parallel, start)
        module.register_parameter("lora_a", adapter.a)
        module.register_parameter("lora_b", adapter.b)
        module.adapter = adapter  # type: ignore[assignment]
        if isinstance(module, Held) and module.halves and adapter.parts == 2:  # else B has the rows of one half
            module.halves |= {"lora_b"}
        if adapter.merges:
            cache.serve(weight, partial(adapter.merged, weight))


def keep_graph(model: GPTModel) -> None:
    """Let the outputs of a frozen embedding require a gradient.

    If the backward pass recomputes a block (torch's reentrant checkpoints), an input of the block must require a
    gradient. Otherwise no parameter inside the block gets a gradient.
    """

    def require(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return output.requires_grad_() if torch.is_grad_enabled() else output

    if model.pre_process:
        model.embedding.register_forward_hook(require)


def _made(
    held: nn.Parameter,
    names: Sequence[str],
    weights: HFWeights,
    config: AdapterSection,
    seed: int,
    in_parts: bool,
    start: Mapping[str, Tensor] | None,
) -> Adapter:
    """Make the adapter of a parameter.

    names: the names of its matrices in the whole model. in_parts: whether ranks split the tokens of a sequence.
    """
    stacked, shared = held.dim() == 3, config.experts == "shared"
    axis = getattr(held, "partition_dim", -1) if getattr(held, "tensor_model_parallel", False) else -1
    rows = weights.rows_of(names[0])
    adapted = [row for row in rows if config.adapts(row)]
    fused = None
    if len(rows) > 1:

        def number(row: TensorRow) -> Tensor:
            return torch.full((row.shape[0], 1), adapted.index(row) if row in adapted else -1)

        part = weights.part(names[0], number, 0 if axis == 0 else None).flatten()
        places = (part >= 0).nonzero().flatten()
        fused = Fused.of(places, part[places], len(part), len(adapted), config.rank).to(held.device)

    def begin(letter: str, own_axis: int, first: Callable[[TensorRow], Tensor]) -> nn.Parameter:
        split = axis == own_axis
        parameters = [beside(name, letter) for name in names]
        if stacked and shared:
            parameters = [parameters[0].rstrip("0123456789")]
        made = [weights.part(name, first, own_axis if split else None) for name in parameters]
        value = torch.stack(made) if stacked and not shared else made[0]
        parameter = nn.Parameter(value.to(held))
        if split:
            tag_split(parameter, own_axis)
        elif not stacked or shared:
            # Each of the ranks that share rows, columns or tokens of the product has a part of its gradient.
            held_so = bool(getattr(held, "sequence_parallel", False))
            parameter.sequence_parallel = in_parts if axis >= 0 or shared else held_so  # type: ignore[attr-defined]
        return parameter

    return Adapter(
        begin("a", 1, lambda row: start[row.name] if start else initial_a(row.name, row.shape, seed)),
        begin("b", 0, lambda row: start[row.name] if start else torch.zeros(row.shape)),
        config,
        len(adapted),
        fused,
    )


@torch.no_grad()
def update_survival(model: GPTModel, spec_of: Callable[[str], TensorSpec | None], layout: Layout) -> float | None:
    """Measure how much of merged updates D survives quantization. Return the cosine of Q(W + D) - Q(W) and D over all
    quantized weights W, or None while all D are zero. All ranks take part.

    A dot product would say little. A small update moves only a few elements to the next code, but moves each of them
    by a whole step of the grid. In the mean over many elements both effects cancel. The cosine also falls with the
    noise that these steps add.

    spec_of: returns the spec of a weight by its name, or None if the weight is not quantized.
    """
    sums = torch.zeros(3, dtype=torch.float64)
    for path, module in model.named_modules():
        adapter = getattr(module, "adapter", None)
        if adapter is None or not adapter.merges or (spec := spec_of(f"{path}.weight")) is None:
            continue
        held = module.weight
        alike = 1 if getattr(held, "tensor_model_parallel", False) else layout.tp_size
        copies = layout.expert_dp_size if held.dim() == 3 else layout.dp_size * alike
        low_rank, weights = adapter.low_rank, held.view(-1, *held.shape[-2:])
        for index, weight in enumerate(weights):
            matrix = low_rank.of_expert(index)
            update = ops.updates(matrix)
            left = _quantized(ops.merged(weight, matrix), spec) - _quantized(weight, spec)
            sums += torch.stack([(left * update).sum(), left.square().sum(), update.square().sum()]).cpu() / copies
    both, of_left, of_update = torch.stack(all_gathered(sums)).sum(0).tolist()
    if not of_update:
        return None
    return both / math.sqrt(of_left * of_update) if of_left else 0.0


def _quantized(weight: Tensor, spec: TensorSpec) -> Tensor:
    return quantize(weight, spec).dequantize().double()


def base_digest(model: GPTModel, weights: HFWeights) -> str:
    """Return a digest of the frozen weights, 32 hex digits.

    Equal tensors in the checkpoint give equal digests, on any layout. All ranks take part.
    """
    found: dict[str, str] = {}
    share = weights.base(model)
    try:
        for batch in batches_by_bytes(share, _BATCH_BYTES):
            names, tensors = zip(*batch, strict=True)
            found.update(zip(names, tensor_digests(tensors), strict=True))
    finally:
        exhaust(share)
    return digest_of_all({name: digest for part in all_gathered(found) for name, digest in part.items()})
