"""SGLang's own copies of kv_b_proj, which its latent attention multiplies by in native mode.

SGLang makes them at the end of a load that names a kv_b_proj. A delta writes the parameter and loads nothing, and a
parameter and its scales may come in two loads; so `commit` has them made anew, and a manifest says where one is not of
the kv_b_proj that is held.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8rl.numerics.quantize import QuantizedTensor
from fp8rl.numerics.spec import TensorSpec


@dataclass(frozen=True)
class Copies:
    """w_kc [heads, N, R] and w_vc [heads, R, V] of one layer: its kv_b_proj [heads * (N + V), R], a head's keys first.

    model: SGLang's, which makes them. attention: the layer's module, which has them. name: its kv_b_proj's.
    """

    model: Any
    attention: Any
    name: str

    def refresh(self) -> None:
        self.model.post_load_weights(weight_names=[self.name])

    def agree(self, spec: TensorSpec) -> bool:
        """Whether they are, bit for bit, what kv_b_proj is or, quantized by `spec`, dequantizes to."""
        product = self.attention.kv_b_proj
        whole = product.weight.detach()
        if (scales := getattr(product, "weight_scale_inv", None)) is not None:
            whole = QuantizedTensor(whole, scales.detach().to(spec.scale_dtype), spec).dequantize(torch.bfloat16)
        held = torch.cat((self.attention.w_kc, self.attention.w_vc.transpose(1, 2)), 1).flatten(0, 1)
        return held.dtype == whole.dtype and held.view(torch.int16).equal(whole.view(torch.int16))


def copies_in(model: nn.Module) -> dict[Tensor, Copies]:
    """The copies of each kv_b_proj that has some. Exact mode has none."""
    return {
        module.kv_b_proj.weight: Copies(model, module, f"{name}.kv_b_proj.weight")
        for name, module in model.named_modules()
        if getattr(module, "w_kc", None) is not None
    }
