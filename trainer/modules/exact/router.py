"""The top-k router."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from fp8rl.models.sizes import SigmoidRouter
from fp8rl.numerics import ops


class Router(TopKRouter):
    """Logits by `ops.linear`, top-k by `ops.route`, handed to the stock dispatcher as dense tensors."""

    def __init__(
        self,
        *,
        renormalize: bool,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.renormalize = renormalize

    def gating(self, input: Tensor) -> Tensor:
        """[S, B, H] -> logits [S, B, E]"""
        return ops.linear(input, self.weight)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits [S, B, E] -> probabilities fp32 [S * B, E], zero off the chosen experts, and their bool map."""
        flat = logits.reshape(-1, logits.shape[-1])
        probs, chosen = self._route(flat)
        dense = torch.zeros(flat.shape, dtype=probs.dtype, device=probs.device).scatter(1, chosen, probs)
        routing_map = torch.zeros(flat.shape, dtype=torch.bool, device=probs.device).scatter(1, chosen, True)
        return dense, routing_map

    def _route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """[T, E] -> probabilities and experts [T, k]"""
        return ops.route(logits, self.topk, self.renormalize, self._choose)

    def _choose(self, probs: Tensor, top_k: int) -> Tensor:
        return self.router_replay.get_replay_topk(probs, top_k, default_compute_topk=_top)[1]

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[S, B, H] -> what :meth:`routing` returns."""
        return self.routing(self.gating(input), padding_mask)


class BiasedRouter(Router):
    """Logits in FP32, not rounded, and top-k by `ops.route_sigmoid`, with a bias for each expert."""

    def __init__(self, *, chooses: SigmoidRouter, **settings: Any) -> None:
        super().__init__(**settings)
        self.chooses = chooses

    def gating(self, input: Tensor) -> Tensor:
        """[S, B, H] -> logits FP32 [S, B, E]"""
        return ops.linear_partial(input, self.weight)

    def _route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        how = self.chooses
        return ops.route_sigmoid(
            logits, self.expert_bias, self.topk, how.groups, how.kept_groups, self.renormalize, how.factor, self._choose
        )


def _top(probs: Tensor, top_k: int, *groups: None) -> tuple[Tensor, Tensor]:
    experts = ops.top_experts(probs, top_k)
    return probs.gather(1, experts), experts
