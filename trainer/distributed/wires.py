"""The traffic of data-parallel ranks and its formats: gradients to be summed, weights that were updated.

Megatron keeps all gradients of a rank in a few flat buffers and gives each rank a part of every buffer to sum and to
update. Its reduce-scatter adds on the way, in FP32. In a narrower format nothing can be added on the way: there every
rank sends every other rank its part (an all-to-all), and the receiver adds up in FP32, in rank order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup, shard_buffer
from torch import Tensor, nn

from fp8rl.numerics.quantize import dequantize, quantize
from fp8rl.numerics.spec import TensorSpec
from fp8rl.trainer.config import GradientWire
from fp8rl.trainer.distributed.weight_gather import gather_weights
from fp8rl.trainer.megatron.patches import become

Narrow = Literal["bf16", "e4m3", "e5m2"]
"""Wires in which nothing is added on the way."""
SPECS: dict[str, TensorSpec] = {wire: TensorSpec(format=wire, scale="fp32") for wire in ("e4m3", "e5m2")}
"""The quantization of gradients for a wire: 1 x 128, along the buffer, whatever parameters lie there."""
InFp8 = Callable[[], Mapping[nn.Parameter, TensorSpec]]
"""The parameters that travel as FP8 codes now, and how they are quantized."""


@dataclass
class Traffic:
    """Bytes that this rank has sent to its data-parallel peers since it was made, as a ring sends them."""

    gradients: int = 0
    """Of a sum, (ranks - 1) parts."""
    weights: int = 0
    """Of all ranks' parts, (ranks - 1) parts."""


def install(model: DistributedDataParallel, wire: GradientWire, in_fp8: InFp8) -> Traffic:
    """Send the gradients of a wrapped model as `wire`, and some weights in FP8. Return the counter of their bytes."""
    traffic = Traffic()
    for group in (*model.bucket_groups, *model.expert_parallel_bucket_groups):
        become(group, BucketGroup)
        group.wire, group.in_fp8, group.traffic = wire, in_fp8, traffic
    return traffic


class BucketGroup(_ParamAndGradBucketGroup):
    """Some of the buffers of a model, and the ranks that share them."""

    wire: GradientWire
    in_fp8: InFp8
    traffic: Traffic

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        ranks = self.intra_distributed_optimizer_instance_group
        if self.wire == "fp32" or ranks.size() == 1:
            self.traffic.gradients += sum(_sent(bucket.grad_data.nbytes, ranks) for bucket in self.buckets)
            super().start_grad_sync(force_all_reduce)
            return
        for bucket in self.buckets:
            assert bucket.gradient_scaling_factor == 1.0, "the objective has its own denominators"
            total, sent = reduce_scatter(bucket.grad_data, self.wire, ranks)
            shard_buffer(bucket.grad_data, ranks.size())[ranks.rank()].copy_(total)
            self.traffic.gradients += sent

    def start_param_sync(self, force_sync: bool = False) -> None:
        ranks = self.intra_distributed_optimizer_instance_group
        in_fp8 = self.in_fp8() if ranks.size() > 1 else {}
        if not any(parameter in in_fp8 for parameter in self.params):
            self.traffic.weights += sum(_sent(bucket.param_data.nbytes, ranks) for bucket in self.buckets)
            super().start_param_sync(force_sync)
            return
        for bucket in self.buckets:
            chosen = [(parameter, in_fp8[parameter]) for parameter in bucket.params_list if parameter in in_fp8]
            self.traffic.weights += gather_weights(bucket.param_data, chosen, ranks)


def reduce_scatter(gradients: Tensor, wire: Narrow, ranks: dist.ProcessGroup) -> tuple[Tensor, int]:
    """Return this rank's part of the sum over all ranks, FP32 [n], and the bytes that it has sent.

    gradients: FP32 [ranks * n]. Each rank's contribution is rounded, its own to its own part as well, so that the sum
    does not depend on whose part it is. A number that is not finite becomes NaN in FP8: it must not saturate unseen.
    """
    parts = gradients.view(ranks.size(), -1)
    if wire == "bf16":
        payloads = [parts.bfloat16()]
        values = _exchanged(payloads[0], ranks).float()
    else:
        quantized = quantize(torch.where(parts.isfinite(), parts, math.nan), SPECS[wire])
        payloads = [quantized.data, quantized.scale_inv.contiguous()]
        codes, scale_inv = (_exchanged(payload, ranks) for payload in payloads)
        values = dequantize(codes, scale_inv, quantized.spec)
    total = values[0]
    for other in values[1:]:
        total = total + other
    return total, sum(_sent(payload.nbytes, ranks) for payload in payloads)


def _exchanged(payload: Tensor, ranks: dist.ProcessGroup) -> Tensor:
    """Send row r of payload to rank r; row r of the result [ranks, ...] came from it."""
    received = torch.empty_like(payload)
    dist.all_to_all_single(received.view(torch.uint8), payload.view(torch.uint8), group=ranks)
    return received


def _sent(nbytes: int, ranks: dist.ProcessGroup) -> int:
    """Count the bytes that a rank sends of a buffer of this size: it keeps its own part."""
    return nbytes * (ranks.size() - 1) // ranks.size()
