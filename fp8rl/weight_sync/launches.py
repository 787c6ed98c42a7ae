"""Launches what a sync launches on a GPU, on the meta device: quantizers into a bucket, and digests."""

from __future__ import annotations

import torch

from fp8rl.models import Model
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.digest import CHUNK, chunk_sums
from fp8rl.numerics.kernels.precompile import META
from fp8rl.numerics.quantize import QuantizedTensor, quantize_many, scale_shape

_ODD = 3  # words of a tensor whose rows do not begin at multiples of 16 bytes


def launch_sync(definition: Model, numerics: NumericsConfig) -> None:
    """Quantize a model's weights as they are sent, and digest them as both sides do."""
    launch_digests()
    spec = numerics.rollout_spec
    rows = definition.tensors.rows.values()
    for shape in sorted({row.shape for row in rows if definition.quantizes(row, spec)}):
        weight = torch.empty(*shape, dtype=torch.bfloat16, device=META)
        codes = torch.empty(*shape, dtype=spec.weight.dtype, device=META)
        scales = torch.empty(*scale_shape(shape, spec.weight), device=META)
        quantize_many([weight, weight], spec.weight, [QuantizedTensor(codes, scales, spec.weight)] * 2)


def launch_digests() -> None:
    """Digest tensors as an engine does."""
    for words in (CHUNK, _ODD):
        chunk_sums([torch.empty(words, dtype=torch.int32, device=META)])
