"""Megatron's router where it would choose or weigh experts otherwise than the model."""

from __future__ import annotations

from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from fp8rl.numerics.ops.router import kept_scores


class OneExpertRouter(TopKRouter):
    """The router of one expert per token, renormalised: its probability is 1, whatever its logit, as in the engine.

    Megatron insists on a softmax over all experts there (`moe_router_pre_softmax`), and leaves the probability so.
    """

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits [S, B, E] -> probabilities [S * B, E], 1 for the chosen expert, and their bool map."""
        probs, routing_map = super().routing(logits, padding_mask)
        return probs * 0 + routing_map.to(probs.dtype), routing_map  # its weight keeps a gradient, of zeros


def best_of_groups(
    scores: Tensor, topk: int, num_tokens: int, num_experts: int, num_groups: int, group_topk: int
) -> tuple[Tensor, Tensor]:
    """`group_limited_topk`: scores [T, E] -> those of the experts chosen, and the experts, [T, k] each."""
    return kept_scores(scores, num_groups, group_topk).topk(topk, dim=-1)
