"""Routing replay (R3, arXiv 2510.11370): the engine's choice of experts in the trainer, and its own beside it.

Megatron's `moe_enable_routing_replay` gives each router a `RouterReplay`, whom it asks for the experts of its tokens.
During a pass over a batch with routes, those of this model remember what the router itself would choose, and answer
with the batch's routes if it is to be replayed. Probabilities are always the trainer's, at whatever experts are taken,
so gradients reach the router; what the forward chose is in its graph, so the backward needs no replay of its own. A
forward that is recomputed in the backward still finds the routes of its micro-batch, for the next one comes later.

The same record says how often each expert was chosen, by which a router's bias is moved (`trainer.step.router_bias`).
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

from fp8rl.numerics.errors import user_error
from fp8rl.trainer import device
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.megatron.patches import become
from fp8rl.trainer.step.batch import UNKNOWN, TokenBatch
from fp8rl.trainer.step.microbatches import MicroBatch


@contextmanager
def routing_of(model: nn.Module, batch: TokenBatch, layout: Layout, counting: bool = False) -> Iterator[Routing]:
    """The model's routers for a pass over `batch`; without routes in the batch or counting they are left alone.

    counting: whether to count what each expert is chosen for.

    Raises:
        UserError: the batch has routes, and the model is split over pipeline stages.
        ValueError: the routes are not those of such a model.
    """
    routers: list[TopKRouter] = []
    if counting or batch.routes is not None:
        routers = [module.router for module in model.modules() if isinstance(module, MoELayer)]
    if batch.routes is not None:
        _check_pipeline(layout.pp_size)
        _check_routes(batch, routers)
    layers = [_layer_routing(router) for router in routers]
    action = RouterReplayAction.REPLAY_FORWARD if batch.replay else RouterReplayAction.RECORD
    for layer in layers:
        layer.set_router_replay_action(action)
    try:
        yield Routing(layers, layout, _no_loads(routers) if counting else None)
    finally:
        for layer in layers:
            layer.clear_router_replay_action()
            layer.clear_indices()


class Routing:
    """The routers of one model during a pass.

    Attributes:
        loads: int64 [layers of this stage, E], how often each expert was chosen by the tokens of this rank's rows.
            Padding does not count, nor does a rank that shares its rows with the one that does. None: not counted.
    """

    def __init__(self, layers: list[LayerRouting], layout: Layout, loads: Tensor | None = None) -> None:
        self._layers, self._layout, self.loads = layers, layout, loads

    def begin(self, micro: MicroBatch) -> None:
        """Before the forward of a micro-batch: where its tokens are to go."""
        if micro.batch.routes is None or not micro.batch.replay:
            return
        # Routers see [S, B] tokens, and under sequence parallelism this rank's part of S.
        part = (
            micro.laid(micro.batch.routes)
            .transpose(0, 1)
            .chunk(self._layout.tp_size)[self._layout.tp_rank]
            .long()
            .flatten(0, 1)
        )
        for layer, experts in zip(self._layers, part.unbind(1), strict=True):
            layer.target_topk_idx = experts

    def own_choice(self, micro: MicroBatch) -> Tensor | None:
        """After the forward: where the routers would have sent the micro-batch's tokens, int16 [B, S, L, K], experts
        ascending and -1 in the padding; they are counted, too. None for a batch without routes."""
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
        """int32 [B, S, L, K], with anything in the padding."""
        # Not int16, which gloo does not carry.
        chosen = torch.stack([layer.recorded_topk_idx for layer in self._layers], dim=1).int()
        if self._layout.tp_size > 1:
            parts = [torch.empty_like(chosen) for _ in range(self._layout.tp_size)]
            dist.all_gather(parts, chosen, group=self._layout.tp_group)
            chosen = torch.cat(parts)
        rows = micro.laid(micro.batch.tokens).shape[0]
        return micro.by_row(chosen.sort(-1).values.unflatten(0, (-1, rows)).transpose(0, 1))


class LayerRouting(RouterReplay):
    """Megatron's replay for one router, which also records while it replays, and leaves the choice to the router where
    no route is known."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """scores [T, E] -> scores [T, k] of the experts taken, and the experts int64 [T, k], best first."""
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


def _no_loads(routers: list[TopKRouter]) -> Tensor:
    experts = routers[0].config.num_moe_experts if routers else 0
    return torch.zeros(len(routers), experts, dtype=torch.int64, device=device.current())


def _layer_routing(router: TopKRouter) -> LayerRouting:
    """The RouterReplay that Megatron made for a router, as ours."""
    routing: LayerRouting = become(router.router_replay, LayerRouting)
    return routing


def _check_pipeline(stages: int) -> None:
    if stages > 1:
        raise user_error(
            "trainer.pp",
            found=stages,
            expected="1 with numerics.router_replay",
            remedy="Set trainer.pp=1, or numerics.router_replay=off.",
        )


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
    """Every token has k different experts of the model in a layer, or none."""
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
