"""Keeps SGLang's copies of kv_b_proj up to date. SGLang's attention computes with them in native mode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8rl.numerics.quantize import QuantizedTensor
from fp8rl.numerics.spec import TensorSpec


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
        """Make the copies anew."""
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
