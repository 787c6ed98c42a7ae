"""Experts share the work without a loss for it: each has a bias that only counts when experts are chosen.

After an optimizer step the bias of an expert that was chosen more often than the mean of its layer falls, and that of
any other which was chosen less often rises, all by the same amount (DeepSeek-V3, arXiv 2412.19437, section 2.1.2;
arXiv 2408.15664). Probabilities are made without the bias, so that nothing else changes.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn


@torch.no_grad()
def move_biases(model: nn.Module, loads: Tensor, rate: float) -> None:
    """Move the bias of each expert by `rate` towards the mean load of its layer, the same on every rank.

    loads: int64 [layers, E] of the model's layers with experts, in their order, over the whole batch.
    """
    routers = [module.router for module in model.modules() if isinstance(module, MoELayer)]
    for router, load in zip(routers, loads, strict=True):
        router.expert_bias += rate * torch.sign(load.sum() - load.numel() * load)
