"""Routing replay (R3, arXiv 2510.11370): the engine's choice of experts in the trainer, and its own beside it.

Megatron's `moe_enable_routing_replay` gives each router a `RouterReplay`, which chooses the experts of its tokens.
During a pass over a batch with routes, those of this model remember the router's own choice, and answer with the
batch's routes if they are to be replayed. Probabilities are always the trainer's, at whatever experts are taken, so
gradients reach the router; the forward's choice is in its graph, so the backward needs no replay of its own. A forward
that is recomputed in the backward still finds the routes of its micro-batch, for the next one comes later.

The same record counts the tokens of each expert, by which a router's bias is moved (`move_biases`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor, nn

from fp8rl.numerics.core.errors import user_error
from fp8rl.trainer import device
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.megatron.patches import become
from fp8rl.trainer.step.batch import UNKNOWN, TokenBatch
from fp8rl.trainer.step.microbatches import MicroBatch


@contextmanager
def routing_of(model: nn.Module, batch: TokenBatch, layout: Layout, counting: bool = False) -> Iterator[Routing]:
    """Prepare the model's routers for a pass over `batch`; without routes in the batch or counting they are left alone.

    counting: count the tokens of each expert.

    Raises:
        UserError: the batch has routes, and the model is split over pipeline stages.
        ValueError: the routes are not those of such a model.
    """
    routers: list[TopKRouter] = []
    if counting or batch.routes is not None:
        routers = [module.router for module in model.modules() if isinstance(module, MoELayer)]
    if batch.routes is not None:
        if layout.pp_size > 1:
            remedy = "Set trainer.pp=1, or numerics.router_replay=off."
            raise user_error("trainer.pp", layout.pp_size, "1 with numerics.router_replay", remedy)
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

    loads: int64 [layers of this stage, E], the tokens of this rank's rows that chose each expert. Padding does not
    count, nor does a rank that shares its rows with the one that does. None: not counted.
    """

    def __init__(self, layers: list[LayerRouting], layout: Layout, loads: Tensor | None = None) -> None:
        self._layers, self._layout, self.loads = layers, layout, loads

    def begin(self, micro: MicroBatch) -> None:
        """Set the routes of a micro-batch, before its forward."""
        if micro.batch.routes is None or not micro.batch.replay:
            return
        # Routers see [S, B] tokens, and under sequence parallelism this rank's part of S.
        part = (
            micro.to_model(micro.batch.routes)
            .transpose(0, 1)
            .chunk(self._layout.tp_size)[self._layout.tp_rank]
            .long()
            .flatten(0, 1)
        )
        for layer, experts in zip(self._layers, part.unbind(1), strict=True):
            layer.target_topk_idx = experts

    def own_choice(self, micro: MicroBatch) -> Tensor | None:
        """Return the routers' own choice for a micro-batch, after its forward, and count it.

        int16 [B, S, L, K], experts ascending and -1 in the padding. None for a batch without routes.
        """
        if not self._layers:
            return None
        routes = self._chosen(micro)
        if self.loads is not None and micro.rows and self._layout.cp_rank == 0:
            for load, experts in zip(self.loads, routes[micro.batch.real_tokens()].unbind(1), strict=True):
                load += experts.flatten().bincount(minlength=len(load))
        if micro.batch.routes is None:
            return None
        return torch.where(micro.batch.real_tokens()[:, :, None, None], routes, UNKNOWN).to(torch.int16)

    def _chosen(self, micro: MicroBatch) -> Tensor:
        """Return int32 [B, S, L, K], with anything in the padding."""
        # Not int16, which gloo does not carry.
        chosen = torch.stack([layer.recorded_topk_idx for layer in self._layers], dim=1).int()
        if self._layout.tp_size > 1:
            parts = [torch.empty_like(chosen) for _ in range(self._layout.tp_size)]
            dist.all_gather(parts, chosen, group=self._layout.tp_group)
            chosen = torch.cat(parts)
        rows = micro.to_model(micro.batch.tokens).shape[0]
        return micro.from_model(chosen.sort(-1).values.unflatten(0, (-1, rows)).transpose(0, 1))


class LayerRouting(RouterReplay):
    """Megatron's replay for one router. It also records while it replays; the router chooses where no route is
    known."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return scores [T, k] of the experts taken, and the experts int64 [T, k], best first, of scores [T, E]."""
        assert default_compute_topk is not None
        values, own = default_compute_topk(scores, topk, num_groups, group_topk)
        if self.router_replay_action is None:
            return values, own
        self.record_indices(own)
        if self.router_replay_action is RouterReplayAction.RECORD:
            return values, own
        experts = torch.where(self.target_topk_idx == UNKNOWN, own, self.target_topk_idx)
        # In the order of top-k, so that a softmax over the values adds in the same order as without replay.
        values, best_first = scores.gather(1, experts).sort(dim=-1, descending=True)
        return values, experts.gather(1, best_first)


def _check_routes(batch: TokenBatch, routers: list[TopKRouter]) -> None:
    assert batch.routes is not None
    found, expected = list(batch.routes.shape[2:]), [len(routers), routers[0].topk if routers else 0]
    if found != expected:
        raise ValueError(
            f"routes: found {found} (layers, experts of a token), expected {expected}, as the model has; they come "
            "from another model"
        )
    if batch.replay:
        _check_experts(batch.routes, routers[0].config.num_moe_experts)


def _check_experts(routes: Tensor, experts: int) -> None:
    """Check that every token has k different experts of the model in a layer, or none."""
    ascending = routes.sort(-1).values
    unknown = (ascending == UNKNOWN).all(-1)
    known = (ascending[..., 0] >= 0) & (ascending[..., -1] < experts) & (ascending.diff(dim=-1) > 0).all(-1)
    bad = (~(unknown | known)).nonzero()
    if len(bad):
        row, token, layer = bad[0].tolist()
        raise ValueError(
            f"routes: found the experts {routes[row, token, layer].tolist()} in row {row}, token {token}, layer {layer}"
            f" (and {len(bad) - 1} like it), expected different ones of 0 to {experts - 1}, or -1 for all"
        )


@torch.no_grad()
def move_biases(model: nn.Module, loads: Tensor, rate: float) -> None:
    """Move the bias of each expert by `rate` towards the mean load of its layer, the same on every rank.

    This balances experts without a loss. After an optimizer step the bias of an expert that was chosen more often than
    the mean of its layer falls, and that of one which was chosen less often rises, all by the same amount (DeepSeek-V3,
    arXiv 2412.19437, section 2.1.2; arXiv 2408.15664). A bias only counts when experts are chosen: probabilities are
    made without it, so that nothing else changes.

    loads: int64 [layers, E] of the model's layers with experts, in their order, over the whole batch.
    """
    routers = [module.router for module in model.modules() if isinstance(module, MoELayer)]
    for router, load in zip(routers, loads, strict=True):
        router.expert_bias += rate * torch.sign(load.sum() - load.numel() * load)
