"""Has Ray place a run: a placement group holds the trainer's ranks, and another one each engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fp8rl.models.architecture import Role
from fp8rl.numerics.core.errors import UserError, raise_first, user_error
from fp8rl.numerics.core.process import LOOPBACK
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.experiment.preconditions.rules import engine_ranks
from fp8rl.rl.run.cluster.nodes import (
    SEES_ALL_GPUS,
    Node,
    NodeView,
    constraints,
    listed,
    named,
    nodes_up,
    own_capability,
    views,
)
from fp8rl.trainer.config import ActorPlacement

_RESERVE_SECONDS = 10
"""Seconds in which Ray has to reserve what nodes have reported as free."""
_MOVE_SECONDS = 10
"""Seconds in which Ray has to say where an engine's group is."""
_ROOM_SECONDS = 60.0
"""Seconds for which a run that was lost with a node waits for room on other nodes."""
_AGAIN_SECONDS = 1.0
_GIVING_BACK_SECONDS = 2.0
_PART = 0.33
"""The part of a rank's GPU that each process on it takes: the rank, an engine of the policy, one of the teacher."""


class NoRoomError(RuntimeError):
    """No node has room for ranks or engines: a node has left, or another run has reserved its GPUs first."""


@dataclass
class _Seat:
    """A bundle of a placement group. A rank, an engine, or a rank and the engines on its GPU run in it."""

    node: Node
    group: PlacementGroup
    bundle: int
    gpus: float
    """GPUs of the bundle that each process in it takes."""


class Reservations:
    """Reserves with Ray the GPUs of each trainer rank and engine. Ray chooses nodes and GPUs.

    Each engine has a placement group of its own: if its node leaves, Ray moves it alone. If the whole run is on the
    driver's node, its processes use loopback; otherwise they use their nodes' addresses.
    """

    def __init__(self, experiment: Experiment, folder: Path, again: bool = False) -> None:
        """Place and reserve all ranks and engines. folder: a folder that all nodes have to see. again: the run was
        lost, maybe with a node, and waits for room.

        Raises:
            UserError: the run does not fit on the nodes, or a node does not see the folder or a file.
            NoRoomError: another run has reserved the GPUs first, or a run that was lost finds no room.
        """
        self._experiment, self._folder = experiment, folder
        self._ranks: list[_Seat] = []
        self._engines: list[_Seat] = []  # the policy's come before the teacher's
        self._views: dict[str, NodeView] = {}
        deadline = time.monotonic() + _ROOM_SECONDS
        while True:
            try:
                return self._place()
            except BaseException as error:
                self.close()
                if not again or not isinstance(error, UserError | NoRoomError):
                    raise
                if time.monotonic() > deadline:
                    found = f"has found no room within {_ROOM_SECONDS:g} s: {error}"
                    raise NoRoomError(f"the run was lost, and {found}") from None
            time.sleep(_AGAIN_SECONDS)

    def trainer(self) -> list[ActorPlacement]:
        """Return the placement of each rank."""
        return [self._actor_placement(seat) for seat in self._ranks]

    def engine(self, role: Role, index: int) -> tuple[ActorPlacement, tuple[int, int] | None]:
        """Return the placement of the engine `index` of a role, on the node where Ray has it now, and the compute
        capability of its GPU; None: it computes on a CPU. Raises NoRoomError: no node has room now."""
        seat = self._engines[index if role == "policy" else self._experiment.rollout.engines + index]
        name = self._experiment.cluster.engine_nodes
        if not seat.group.wait(_MOVE_SECONDS):
            raise NoRoomError(f"found no room on the nodes that are up (cluster.engine_nodes: {name or 'all'})")
        seat.node = _nodes_of(seat.group, nodes_up())[seat.bundle]
        try:
            self._look_at([seat.node])
        except UserError as error:  # during a run the input is right, and another node may come
            raise NoRoomError(str(error)) from None
        # CUDA IPC maps memory of the trainer's GPU.
        placement = self._actor_placement(seat, all_gpus=not self._experiment.sync.engines_own_gpus)
        return placement, self._views[seat.node.id].capability if self._spans else own_capability()

    def close(self) -> None:
        """Release all reservations, which ends the actors that still run on them.

        This does not wait for a head that is gone: a signal to the whole foreground group ends it before this process.
        """
        groups = {seat.group for seat in (*self._ranks, *self._engines)}
        self._ranks, self._engines = [], []
        giving = threading.Thread(target=lambda: [remove_placement_group(group) for group in groups], daemon=True)
        giving.start()
        giving.join(_GIVING_BACK_SECONDS)

    def _actor_placement(self, seat: _Seat, *, all_gpus: bool = False) -> ActorPlacement:
        environment = dict(SEES_ALL_GPUS) if all_gpus and seat.node.has_gpus else {}
        if self._spans and (interface := self._views[seat.node.id].interface) is not None:
            environment["GLOO_SOCKET_IFNAME"] = interface
        strategy = PlacementGroupSchedulingStrategy(seat.group, placement_group_bundle_index=seat.bundle)
        options = {"num_gpus": seat.gpus, "scheduling_strategy": strategy}
        return ActorPlacement(seat.node.address if self._spans else LOOPBACK, environment, options)

    def _look_at(self, nodes: Iterable[Node]) -> None:
        """Check that these nodes see the folder and files of the run, unless it is on the driver's node alone."""
        new = {node.id: node for node in nodes if self._spans and node.id not in self._views}
        if new:
            files = [self._experiment.model.directory / "config.json"]
            self._views |= views(list(new.values()), self._folder, files)

    def _place(self) -> None:
        experiment, up = self._experiment, nodes_up()
        up = [node for node in up if node.has_gpus] or up  # a head without GPUs only drives
        raise_first(engine_ranks(experiment, up[0].has_gpus))
        of_trainer = named(up, experiment.cluster.trainer_nodes, "cluster.trainer_nodes")
        of_engines = named(up, experiment.cluster.engine_nodes, "cluster.engine_nodes")
        self._ranks = self._place_ranks(up, of_trainer, of_engines)
        for index in range(len(experiment.engine_ranks)):
            self._engines.append(self._place_engine(index, up, of_engines))
        used = {seat.node.id: seat.node for seat in (*self._ranks, *self._engines)}
        self._spans = used.keys() != {ray.get_runtime_context().get_node_id()}
        self._look_at(used.values())

    def _place_ranks(self, up: Sequence[Node], able: Sequence[Node], of_engines: Sequence[Node]) -> list[_Seat]:
        """Reserve a bundle for each rank on nodes that are `able`. Ranks on one node have consecutive numbers."""
        count, pack = self._experiment.trainer.world_size, self._experiment.cluster.placement == "pack"
        room = sum(node.room for node in able)
        if room < count:
            raise user_error(
                "trainer",
                found=f"tp * pp * dp * cp = {count} ranks",
                expected=f"at most the {room} free GPU{'s' * (room != 1)} of {listed(able)}, one for each",
                remedy="Lower trainer.tp, trainer.pp, trainer.dp or trainer.cp, or wait for GPUs that others use.",
            )
        # Sides that share memory need one node. Others part: ranks leave the engines' nodes to engines if they can.
        shares_memory = self._experiment.sync.transport == "tensor"
        better = [node for node in able if (node in of_engines) is shares_memory]
        if sum(node.room for node in better) >= count:
            able = better
        # Of equal nodes Ray would take any. The driver's, which is the first, needs no network and no shared disk.
        if pack and count <= able[0].room == max(node.room for node in able):
            able = able[:1]
        among = {"ray.io/node-id": f"in({','.join(node.id for node in able)})"}
        seats = _reserve(up, count, able[0].bundle(1), among, "PACK" if pack else "SPREAD", None)
        for seat in seats:
            seat.gpus = min(seat.gpus, _PART)
        return sorted(seats, key=lambda seat: up.index(seat.node))

    def _place_engine(self, index: int, up: Sequence[Node], able: Sequence[Node]) -> _Seat:
        """Reserve GPUs for the next engine on a node that is `able`. If none are left, let it share a rank's GPU.

        One engine of the policy and one of the teacher may share a GPU with its rank. With the `distributed` transport
        no engine shares: NCCL refuses two processes on one GPU. With a shared base the first engine must share, since
        the base is in the memory of the first rank's GPU.
        """
        experiment, width = self._experiment, self._experiment.engine_ranks[index]
        policys, sync = experiment.rollout.engines, experiment.sync
        of_policy, resources, labels = index < policys, *constraints(up, experiment.cluster.engine_nodes)
        if sync.transport == "tensor" and of_policy:
            nodes = [seat.node for seat in self._ranks]
            if len({node.id for node in nodes}) > 1 or nodes[0] not in able:
                raise user_error(
                    "sync.transport",
                    found=f"tensor, with the trainer on {listed(nodes)} and engines on {listed(able)}",
                    expected="all on one node, whose memory they share",
                    remedy="Set sync.transport=distributed (or disk, if they share one), or use one node for all.",
                )
            able, resources, labels = nodes[:1], {}, {"ray.io/node-id": nodes[0].id}
        needs_base = sync.shared_base and index == 0 and able[0].has_gpus
        if not needs_base and any(node.room >= width for node in able):
            if experiment.rollout.sleep and of_policy and able[0].has_gpus:
                raise user_error(
                    "rollout.sleep",
                    found="true with an engine on a GPU of its own",
                    expected="engines on the trainer's GPUs: elsewhere sleeping frees no memory for the trainer",
                    remedy="Have the trainer take all GPUs that the run may use (trainer.dp, cluster.engine_nodes), or "
                    "remove rollout.sleep.",
                )
            # Ray packs or spreads the bundles of one group. To pack an engine beside the ranks it is told to prefer the
            # node of the last rank that has room beside it. Else it takes the emptiest node, which spreads engines.
            pack = experiment.cluster.placement == "pack"
            near = next((seat.node.id for seat in reversed(self._ranks) if pack and seat.node.room >= width), None)
            return _reserve(up, 1, able[0].bundle(width) | resources, labels, "STRICT_PACK", near)[0]
        ranks = [seat for seat in self._ranks if seat.node in able]
        sharing = sum(seat in self._ranks for seat in self._engines[0 if of_policy else policys :])
        if width == 1 and not sync.engines_own_gpus and sharing < len(ranks):
            # The policy's engines share with the first ranks, the teacher's with the last.
            return ranks[sharing if of_policy else -1 - sharing]
        own = " (sync.transport=distributed: none that the trainer uses)" if sync.engines_own_gpus else ""
        key = "rollout.engines" if experiment.teacher is None else "rollout.engines + teacher.engines"
        raise user_error(
            key,
            found=len(experiment.engine_ranks),
            expected=f"at most {index}, for which {listed(able)} have GPUs: {width} for each{own}",
            remedy=f"Lower {key}, give engines other nodes (cluster.engine_nodes), or wait until other programs free "
            "GPUs. With sync.transport=tensor engines share the trainer's GPUs.",
        )


def _reserve(
    up: Sequence[Node], count: int, bundle: dict[str, float], labels: dict[str, str], strategy: str, near: str | None
) -> list[_Seat]:
    """Reserve `count` bundles on nodes with these labels, and return a seat in each, which takes all its GPUs. Raises
    NoRoomError. near: the node that Ray prefers."""
    group = placement_group(
        [bundle] * count, strategy, bundle_label_selector=[labels] * count, _soft_target_node_id=near
    )
    gpus = bundle.get("GPU", 0.0)
    try:
        if not group.wait(_RESERVE_SECONDS):
            raise NoRoomError(f"found no room for {count} x {bundle}, expected room: has another run taken it?")
        seats = [_Seat(node, group, index, gpus) for index, node in enumerate(_nodes_of(group, up))]
    except NoRoomError:
        remove_placement_group(group)
        raise
    for seat in seats:  # Ray's own figures are late by some milliseconds
        seat.node.room -= gpus
    return seats


def _nodes_of(group: PlacementGroup, up: Sequence[Node]) -> list[Node]:
    """Return the node that Ray has chosen for each bundle. Raises NoRoomError: a node has just come or left."""
    chosen, by_id = placement_group_table(group)["bundles_to_node_id"], {node.id: node for node in up}
    if missing := set(chosen.values()) - by_id.keys():
        raise NoRoomError(f"found a node that has just come or left, {', '.join(missing)}. Start the run again")
    return [by_id[chosen[bundle]] for bundle in sorted(chosen)]
