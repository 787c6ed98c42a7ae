"""Calculates the bytes that a trainer rank will keep between steps, before there is a trainer.

`trainer.inventory` lists the bytes of a trainer that runs. Weights, FP32 gradients, FP32 masters and Adam's moments are
counted as in Megatron's buffers (0.16.1, `distributed/param_and_grad_buffer.py`). There is a flat buffer for dense
weights and one for experts. Each is sharded over the ranks that have the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

from fp8rl.models.shape import BF16_BYTES, FP32_BYTES, Shape, WeightGroup, overlap
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.quantize import scale_shape
from fp8rl.numerics.spec import QuantSpec, TensorSpec
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.megatron.lowering import by_mx

Storage = Literal["torch", "kernels", "transformer_engine"]
"""How quantized weights are stored, which depends on the library of the FP8 products. `torch`: the BF16 weight and its
dequantized values. `kernels`: the BF16 weight, its codes and their transpose. `transformer_engine`: only the codes and
their transpose."""

_BUCKET, _PARAMETER = 128, 64
"""Numbers of elements. A buffer's size is a multiple of the first, a parameter's start in it of the second."""


@dataclass(frozen=True)
class StateBytes:
    """The bytes of a rank by kind (see `trainer.inventory.Kind`)."""

    parameters: int = 0
    """Bytes of weights that the forward pass reads."""
    operands: int = 0
    """Bytes of quantized forms that are kept in addition to the weights."""
    gradients: int = 0
    """Bytes of gradients, summed in FP32."""
    masters: int = 0
    """Bytes of this rank's share of the FP32 masters. 0 if `trainer.optimizer.offload` keeps them on the host."""
    moments: int = 0
    """Bytes of this rank's share of Adam's two moments. 0 if `trainer.optimizer.offload` keeps them on the host."""
    padding: int = 0
    """Bytes of padding in Megatron's buffers of parameters and gradients."""

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def storage_on_gpus(numerics: NumericsConfig, transformer_engine: bool) -> Storage:
    """Return how quantized weights are stored on a machine with GPUs, and with TransformerEngine or without it."""
    if numerics.mode == "exact" or (transformer_engine and by_mx(numerics.trainer_spec)):
        return "kernels"  # BF16, and beside it codes both ways
    return "transformer_engine" if transformer_engine else "torch"


def state_bytes(
    shape: Shape, config: TrainerSection, numerics: NumericsConfig, storage: Storage, rank: int = 0, base: bool = False
) -> dict[str, StateBytes]:
    """Count the bytes that one rank keeps for `experts`, and for all other weights, `dense`.

    If the shape has adapters, they are trained in place of the weights. The weights then have only parameters and
    operands. base: the rank reads the weights in the engines' memory (`sync.shared_base`), except weights that engines
    store in another form. The count is exact if each parameter's size is a multiple of 64 elements.
    """
    at, memory = Layout.of(rank, config), config.optimizer
    gpu = storage != "torch"  # where there is none, the host's memory is all there is
    moment_bytes = None if gpu and memory.offload else BF16_BYTES if gpu and memory.moments == "bf16" else FP32_BYTES
    found = {"dense": StateBytes(), "experts": StateBytes()}
    trained = list(buffers(shape, config, numerics.trainer_spec, storage, at.pp_rank))
    if shape.adapters:
        if base:
            frozen_ones = _of_stage(shape, config, numerics.trainer_spec, at.pp_rank)
            kept = sum(
                group.elements * group.count * (FP32_BYTES if group.weight.fp32 else BF16_BYTES)
                for group in frozen_ones
                if group.stands_otherwise(config.tp)
            )
            found["dense"] += StateBytes(parameters=kept)
        for buffer in () if base else trained:
            width = FP32_BYTES if buffer.fp32 else BF16_BYTES
            frozen = StateBytes(parameters=buffer.elements * width + buffer.scales, operands=buffer.operands)
            found["experts" if buffer.experts else "dense"] += frozen
        trained = list(_of_adapters(shape, config, at.pp_rank))
    for buffer in trained:
        ranks, replica = (at.expert_dp_size, at.expert_dp_rank) if buffer.experts else (at.dp_size, at.dp_rank)
        found["experts" if buffer.experts else "dense"] += _held(buffer, ranks, replica, moment_bytes)
    return found


@dataclass(frozen=True)
class Buffer:
    """A flat buffer of Megatron."""

    experts: bool
    """Whether the buffer holds experts."""
    elements: int
    """Number of elements of its parameters."""
    fp8: bool = False
    """Whether the parameters are FP8, with codes row-wise and column-wise."""
    fp32: bool = False
    """Whether the parameters are FP32. Such a parameter is also its own master."""
    operands: int = 0
    """Bytes of operands that are kept in addition to the parameters."""
    scales: int = 0
    """Bytes of the scales of FP8 parameters."""


def buffers(shape: Shape, config: TrainerSection, spec: QuantSpec, storage: Storage, stage: int) -> Iterator[Buffer]:
    """Yield the buffers of one rank of a pipeline stage.

    FP8 parameters have a separate buffer. With several stages, a tied embedding (which is also the output projection)
    has a separate buffer too.
    """
    groups = list(_of_stage(shape, config, spec, stage))
    for experts in (False, True):
        mine = [group for group in groups if (group.weight.share == "experts") is experts and not group.apart]
        for fp8, fp32 in ((False, False), (True, False), (False, True)):
            as_fp8 = [group for group in mine if (group.quantized and storage == "transformer_engine") is fp8]
            members = [group for group in as_fp8 if group.weight.fp32 is fp32]
            if members:
                yield Buffer(
                    experts,
                    sum(-(-group.elements // _PARAMETER) * _PARAMETER * group.count for group in members),
                    fp8,
                    fp32,
                    operands=0 if fp8 else sum(group.operand_bytes(spec.weight, storage) for group in members),
                    scales=sum(2 * group.scale_bytes(spec.weight) for group in members) if fp8 else 0,
                )
    for group in groups:
        if group.apart:
            yield Buffer(False, group.elements)


def _of_adapters(shape: Shape, config: TrainerSection, stage: int) -> Iterator[Buffer]:
    """Yield the buffers of adapters on one rank of a stage. Adapters of single experts have a separate buffer."""
    layers = layers_of_stage(shape.sizes.layers, config.pp, stage)
    sizes: dict[tuple[bool, str], int] = {}
    for row in shape.adapters:
        if row.layer in layers:
            parameter = row.megatron.parameter.rstrip("0123456789")  # experts are stacked
            parts = config.ep if row.expert is not None else config.tp if row.engine.split is not None else 1
            key = row.expert is not None, parameter
            sizes[key] = sizes.get(key, 0) + math.prod(row.shape) // parts
    for experts in (False, True):
        own = [-(-size // _PARAMETER) * _PARAMETER for (of_experts, _), size in sizes.items() if of_experts is experts]
        if own:
            yield Buffer(experts, sum(own))


def layers_of_stage(layers: int, stages: int, stage: int) -> range:
    """Return the layers of a stage. The stages' numbers of layers differ by at most 1."""
    return range(round(stage * layers / stages), round((stage + 1) * layers / stages))


@dataclass(frozen=True)
class _Held:
    """Weights of one rank that have the same size."""

    weight: WeightGroup
    elements: int
    """Number of elements in this rank's part of one weight."""
    count: int
    quantized: bool = False
    apart: bool = False
    """Whether the weights are in a separate buffer."""

    def stands_otherwise(self, ranks: int) -> bool:
        """Return True if the rank cannot read the weights from a base (`trainer.weights.hf_weights.HFWeights.adopt`).

        A base has a fused q|k|v in BF16 in another order, and does not split BF16 weights of a layer over ranks.
        """
        is_part = ranks > 1 and self.weight.share == "split" and self.weight.in_layers
        return not self.quantized and (self.weight.by_heads or is_part)

    def operand_bytes(self, spec: TensorSpec, storage: Storage) -> int:
        if not self.quantized:
            return 0
        if storage == "torch":
            return self.elements * self.count * spec.dequantized_dtype.itemsize
        return 2 * (self.elements * self.count + self.scale_bytes(spec))

    def scale_bytes(self, spec: TensorSpec) -> int:
        rows = self.elements // self.weight.columns
        return spec.scale_dtype.itemsize * math.prod(scale_shape((rows, self.weight.columns), spec)) * self.count


def _of_stage(shape: Shape, config: TrainerSection, spec: QuantSpec, stage: int) -> Iterator[_Held]:
    """Yield the weights that each rank of a stage holds."""
    layers = layers_of_stage(shape.sizes.layers, config.pp, stage)
    first, last = stage == 0, stage == config.pp - 1
    for weight in shape.weights:
        if not weight.trained:
            continue
        elements = weight.size // (config.tp if weight.share == "split" else 1)
        copies = weight.copies // (config.ep if weight.share == "experts" else 1)
        if weight.in_layers:
            fp8 = len(overlap(shape.quantized_layers(weight, spec), layers))
            for count, quantized in ((len(overlap(weight.layers, layers)) - fp8, False), (fp8, True)):
                if count:
                    yield _Held(weight, elements, copies * count, quantized)
        elif (weight.place == "first" and first) or (weight.place == "last" and last and not (weight.tied and first)):
            apart = config.pp > 1 and shape.sizes.tied and weight.share == "split"
            yield _Held(weight, elements, copies, apart=apart)


def _held(buffer: Buffer, ranks: int, replica: int, moment_bytes: int | None) -> StateBytes:
    """Return the bytes of a buffer. moment_bytes: bytes per element of a moment. None: the optimizer is offloaded."""
    whole = math.lcm(ranks, _BUCKET)
    padded = -(-buffer.elements // whole) * whole
    mine = max(0, min(buffer.elements - replica * (padded // ranks), padded // ranks))
    width = FP32_BYTES if buffer.fp32 else 2 if buffer.fp8 else BF16_BYTES  # codes and their transpose, or BF16
    return StateBytes(
        parameters=buffer.elements * width + buffer.scales,
        operands=buffer.operands,
        gradients=buffer.elements * FP32_BYTES,
        masters=0 if moment_bytes is None or buffer.fp32 else mine * FP32_BYTES,
        moments=mine * 2 * (moment_bytes or 0),
        padding=(padded - buffer.elements) * (width + FP32_BYTES),
    )
