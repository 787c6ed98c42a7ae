"""Replays routes (R3, arXiv 2510.11370): the trainer uses the engine's experts, and also records its own choice.

Each layer with experts has Megatron's `RouterReplay`, which chooses the experts of the tokens. In a pass over a batch
with routes, it records the router's own choice. It returns the batch's routes if `replay` is set, otherwise the own
choice. The probabilities of the experts are always the trainer's, so gradients reach the router. Autograd's graph has
the choice of the forward pass, so the backward pass needs no replay. If the backward pass recomputes a forward pass, it
still finds the routes of its micro-batch, because the next micro-batch begins later.

The same record counts the tokens of each expert. From these counts `move_biases` changes the router's biases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor, nn

from fp8rl.trainer import device
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.megatron.patches import become
from fp8rl.trainer.step.batch import UNKNOWN, TokenBatch
from fp8rl.trainer.step.microbatches import MicroBatch


@contextmanager
def routing_of(model: nn.Module, batch: TokenBatch, layout: Layout, counting: bool) -> Iterator[Routing]:
    """Prepare the model's routers for a pass over `batch`. With neither routes nor counting, do nothing to them.

    counting: whether to count the tokens of each expert.

    Raises ValueError: the routes have the layers or the experts of another model.
    """
    routers: list[Any] = []
    if counting or batch.routes is not None:
        routers = [module for module in model.modules() if hasattr(module, "router_replay")]
    if batch.routes is not None:
        _check_routes(batch, routers)
    layers: list[LayerRouting] = [become(router.router_replay, LayerRouting) for router in routers]
    loads = None
    if counting:
        experts = routers[0].config.num_moe_experts if routers else 0
        loads = torch.zeros(len(routers), experts, dtype=torch.int64, device=device.current())
    action = RouterReplayAction.REPLAY_FORWARD if batch.replay else RouterReplayAction.RECORD
    for layer in layers:
        layer.set_router_replay_action(action)
    try:
        yield Routing(layers, layout, loads)
    finally:
        for layer in layers:
            layer.clear_router_replay_action()
            layer.clear_indices()


class Routing:
    """The routers of one model during a pass.

    loads: int64 [layers of this stage, E], how many tokens of this rank's rows chose each expert, without padding. If
    several ranks have the same rows, only one of them counts them. None: nothing is counted.
    """

    def __init__(self, layers: list[LayerRouting], layout: Layout, loads: Tensor | None) -> None:
        self._layers, self._layout, self.loads = layers, layout, loads

    def begin(self, micro: MicroBatch) -> None:
        """Give the routers the routes of a micro-batch, before its forward pass."""
        if micro.batch.routes is None or not micro.batch.replay:
            return
        # Routers see [S, B] tokens, and under sequence parallelism this rank's part of S.
        whole = micro.to_model(micro.batch.routes).transpose(0, 1)
        part = whole.chunk(self._layout.tp_size)[self._layout.tp_rank].long().flatten(0, 1)
        for layer, experts in zip(self._layers, part.unbind(1), strict=True):
            layer.target_topk_idx = experts

    def own_choice(self, micro: MicroBatch) -> Tensor | None:
        """After the forward pass of a micro-batch, count its experts and return the routers' own choice.

        The choice is int16 [B, S, L, K], in ascending order, with -1 in the padding. None for a batch without routes.
        """
        if not self._layers:
            return None
        # Not int16, which gloo does not carry.
        chosen = torch.stack([layer.recorded_topk_idx for layer in self._layers], dim=1).int()
        if self._layout.tp_size > 1:
            parts = [torch.empty_like(chosen) for _ in range(self._layout.tp_size)]
            dist.all_gather(parts, chosen, group=self._layout.tp_group)
            chosen = torch.cat(parts)
        rows = micro.to_model(micro.batch.tokens).shape[0]
        routes = micro.from_model(chosen.sort(-1).values.unflatten(0, (-1, rows)).transpose(0, 1))
        if self.loads is not None and micro.rows and self._layout.cp_rank == 0:
            for load, experts in zip(self.loads, routes[micro.batch.real_tokens()].unbind(1), strict=True):
                load += experts.flatten().bincount(minlength=len(load))
        if micro.batch.routes is None:
            return None
        return torch.where(micro.batch.real_tokens()[:, :, None, None], routes, UNKNOWN).to(torch.int16)


class LayerRouting(RouterReplay):
    """Megatron's replay for one router. It records the router's choice also while it replays. For a token without a
    route, the router chooses."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the scores [T, k] of the experts to use, and the experts, int64 [T, k], best first. scores: [T, E]."""
        assert default_compute_topk is not None
        values, choice = default_compute_topk(scores, topk, num_groups, group_topk)
        if self.router_replay_action is None or (experts := self.experts(choice)) is choice:
            return values, choice
        # In the order of top-k, so that a softmax over the values adds in the same order as without replay.
        values, best_first = scores.gather(1, experts).sort(dim=-1, descending=True)
        return values, experts.gather(1, best_first)

    def experts(self, choice: Tensor) -> Tensor:
        """Record the router's own choice of experts, int64 [T, k]. Return the experts to use."""
        self.record_indices(choice)
        if self.router_replay_action is RouterReplayAction.RECORD:
            return choice
        return torch.where(self.target_topk_idx == UNKNOWN, choice, self.target_topk_idx)


def _check_routes(batch: TokenBatch, routers: list[Any]) -> None:
    """Check that the routes have the model's layers and k. If they are replayed, every token must have k different
    experts of the model in each layer, or only -1."""
    assert batch.routes is not None
    found, expected = list(batch.routes.shape[2:]), [len(routers), routers[0].config.moe_router_topk if routers else 0]
    if found != expected:
        raise ValueError(
            f"routes: found {found} (layers, experts of a token), expected {expected}, as in the trainer's model. "
            "Replay routes of the same model"
        )
    if not batch.replay:
        return
    routes, experts = batch.routes, routers[0].config.num_moe_experts
    ascending = routes.sort(-1).values
    unknown = (ascending == UNKNOWN).all(-1)
    known = (ascending[..., 0] >= 0) & (ascending[..., -1] < experts) & (ascending.diff(dim=-1) > 0).all(-1)
    bad = (~(unknown | known)).nonzero()
    if len(bad):
        row, token, layer = bad[0].tolist()
        raise ValueError(
            f"routes: found the experts {routes[row, token, layer].tolist()} in row {row}, token {token}, layer {layer}"
            f" (and {len(bad) - 1} like it), expected different ones from 0 to {experts - 1}, or only -1"
        )


@torch.no_grad()
def move_biases(model: nn.Module, loads: Tensor, rate: float) -> None:
    """Change the bias of each expert by `rate`, so that the experts of a layer get more equal loads.

    This balances experts without a loss. After an optimizer step the bias of an expert falls by `rate` if more tokens
    chose it than the mean of its layer, and rises by `rate` if fewer did (DeepSeek-V3, arXiv 2412.19437, section 2.1.2;
    arXiv 2408.15664). A bias affects only the choice of experts. Probabilities are computed without it. The result is
    the same on every rank.

    loads: int64 [layers with experts, E], how many tokens of the whole batch chose each expert.
    """
    biases = [bias for name, bias in model.named_buffers() if name.endswith(".expert_bias")]
    for bias, load in zip(biases, loads, strict=True):
        bias += rate * torch.sign(load.sum() - load.numel() * load)
