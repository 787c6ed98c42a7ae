"""Reserves the GPUs of a run with Ray, by placement groups for each trainer rank and each engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fp8rl.models.architecture import Role
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.core.process import LOOPBACK
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.run.cluster.placement import (
    SEES_ALL_GPUS,
    EnginePlacement,
    Node,
    NodeView,
    Placement,
    nodes_up,
    own_capability,
    place,
    place_engine,
    views,
)
from fp8rl.trainer.config import ActorPlacement

_RESERVE_SECONDS = 10.0
"""Seconds in which Ray has to reserve resources that a node has reported as free."""
_ROOM_SECONDS = 60.0
"""Seconds for which a run that was lost with a node waits for room on other nodes."""
_AGAIN_SECONDS = 1.0
_GIVING_BACK_SECONDS = 2.0
_TOUCH = 0.001
"""The amount of a node's own resource that is reserved where there is no GPU: a placement group cannot be empty."""


class NoRoomError(RuntimeError):
    """No node that is up has room for the ranks or engines of a lost node."""


@dataclass(frozen=True)
class _Reservation:
    nodes: tuple[Node, ...]
    group: PlacementGroup


class Reservations:
    """Reserves with Ray the GPUs of each trainer rank and engine, and other GPUs for engines whose node has left.

    If the whole run is on the driver's node, its processes use loopback; otherwise they use their nodes' addresses.
    """

    def __init__(self, experiment: Experiment, folder: Path, again: bool = False) -> None:
        """Place and reserve all ranks and engines. folder: a folder that all nodes have to see. again: the run was
        lost, maybe with a node, and waits for room.

        Raises:
            UserError: the run does not fit on the nodes, or a node does not see the folder or a file.
            NoRoomError: another run has reserved the GPUs first, or a run that was lost finds no room.
        """
        self._experiment, self._folder = experiment, folder
        self._views: dict[str, NodeView] = {}
        up, placement = _placed(experiment, _ROOM_SECONDS if again else None)
        self._spans = {node.id for node in placement.nodes} != {up[0].id}
        self._look_at(placement.nodes)
        self._placements = dict(enumerate(placement.engines))
        self._engines: dict[int, _Reservation] = {}
        self._ranks = _reservation(placement.ranks)
        try:
            for index, each in self._placements.items():
                self._reserve(index, each)
        except NoRoomError:
            self.close()
            raise

    def trainer(self) -> list[ActorPlacement]:
        """Return the placement of each rank."""
        return [
            self._actor_placement(node, self._ranks.group, rank, self._share(rank))
            for rank, node in enumerate(self._ranks.nodes)
        ]

    def engine(self, role: Role, index: int) -> ActorPlacement:
        """Return the placement of the engine `index` of a role. Raises NoRoomError."""
        index = self._number(role, index)
        placement = self._placements[index]
        if not self._is_up([placement.node]):
            self._placements[index] = placement = self._move_engine(index)
        if placement.shares is not None:
            return self._actor_placement(
                placement.node, self._ranks.group, placement.shares, self._share(placement.shares), all_gpus=True
            )
        self._reserve(index, placement)
        # CUDA IPC maps memory of the trainer's GPU.
        all_gpus = not self._experiment.sync.engines_own_gpus
        width = float(self._experiment.engine_ranks[index])
        return self._actor_placement(placement.node, self._engines[index].group, 0, width, all_gpus=all_gpus)

    def capability(self, role: Role, index: int) -> tuple[int, int] | None:
        """Return the compute capability of the GPU of the engine `index` of a role; None: it computes on a CPU."""
        node = self._placements[self._number(role, index)].node
        return self._views[node.id].capability if self._spans else own_capability()

    def close(self) -> None:
        """Release all reservations, which ends the actors that still run on them.

        This does not wait for a head that is gone: a signal to the whole foreground group ends it before this process.
        """
        groups = [reserved.group for reserved in (self._ranks, *self._engines.values())]
        self._engines.clear()
        giving = threading.Thread(target=lambda: [remove_placement_group(group) for group in groups], daemon=True)
        giving.start()
        giving.join(_GIVING_BACK_SECONDS)

    def _actor_placement(
        self, node: Node, group: PlacementGroup, bundle: int, gpus: float, *, all_gpus: bool = False
    ) -> ActorPlacement:
        environment = dict(SEES_ALL_GPUS) if all_gpus and node.gpus is not None else {}
        if self._spans and (interface := self._views[node.id].interface) is not None:
            environment["GLOO_SOCKET_IFNAME"] = interface
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        options = {"num_gpus": 0.0 if node.gpus is None else gpus, "scheduling_strategy": strategy}
        return ActorPlacement(node.address if self._spans else LOOPBACK, environment, options)

    def _share(self, rank: int) -> float:
        """Return the part of a rank's GPU that each process on it reserves; Ray counts to four decimal places."""
        return 10_000 // (1 + [placement.shares for placement in self._placements.values()].count(rank)) / 10_000

    def _number(self, role: Role, index: int) -> int:
        """Return the number of an engine among the engines of all roles; the policy's engines come first."""
        return index if role == "policy" else self._experiment.rollout.engines + index

    def _is_up(self, nodes: Sequence[Node]) -> bool:
        return {node.id for node in nodes} <= {node.id for node in nodes_up()}

    def _reserve(self, index: int, placement: EnginePlacement) -> None:
        """Reserve an engine's GPUs, unless they are reserved already or the engine shares a rank's."""
        if placement.shares is None and index not in self._engines:
            self._engines[index] = _reservation((placement.node,), self._experiment.engine_ranks[index])

    def _move_engine(self, index: int) -> EnginePlacement:
        """Return a new placement for an engine whose node has left. Raises NoRoomError."""
        old = self._placements[index]
        tensor = self._experiment.sync.transport == "tensor" and index < self._experiment.rollout.engines
        if (old.shares is not None or tensor) and not self._is_up(self._ranks.nodes):
            raise NoRoomError("the trainer's node has left, and this engine must be on it")
        if index in self._engines:
            remove_placement_group(self._engines.pop(index).group)
        others = [
            placement
            for other, placement in self._placements.items()
            if other != index and self._is_up([placement.node])
        ]
        with _no_room():
            placement = place_engine(nodes_up(), self._experiment, self._ranks.nodes, others, index)
            self._look_at([placement.node])
        if placement.shares is not None:  # the rank has reserved its whole GPU
            raise NoRoomError(f"no GPU is left on {placement.node.address} but the trainer's")
        return placement

    def _look_at(self, nodes: Sequence[Node]) -> None:
        """Check that these nodes see the folder and files of the run, unless it is on the driver's node alone."""
        new = [node for node in nodes if self._spans and node.id not in self._views]
        if new:
            self._views |= views(new, self._folder, [self._experiment.model.directory / "config.json"])


def _placed(experiment: Experiment, patience_s: float | None) -> tuple[list[Node], Placement]:
    """Place a run on the nodes that are up; return nodes and placement. patience_s: longest wait for room, if any."""
    deadline = time.monotonic() + (patience_s or 0.0)
    while True:
        try:
            return (up := nodes_up()), place(up, experiment)
        except UserError as error:
            if patience_s is None:
                raise
            if time.monotonic() > deadline:
                raise NoRoomError(f"the run was lost, and has found no room within {patience_s:g} s: {error}") from None
        time.sleep(_AGAIN_SECONDS)


def _reservation(nodes: Sequence[Node], gpus: int = 1) -> _Reservation:
    """Return a placement group with a bundle on each node: `gpus` GPUs, if the node has GPUs. Raises NoRoomError."""
    group = placement_group(
        [{"GPU": float(gpus)} if node.gpus is not None else {f"node:{node.address}": _TOUCH} for node in nodes],
        bundle_label_selector=[{"ray.io/node-id": node.id} for node in nodes],
    )
    if not group.wait(_RESERVE_SECONDS):
        remove_placement_group(group)
        listed = ", ".join(node.address for node in nodes)
        raise NoRoomError(f"found no room on {listed} within {_RESERVE_SECONDS:g} s, expected Ray to reserve some")
    return _Reservation(tuple(nodes), group)


@contextmanager
def _no_room() -> Iterator[None]:
    """Raise NoRoomError in place of UserError: during a run, missing room is no wrong input."""
    try:
        yield
    except UserError as error:
        raise NoRoomError(str(error)) from None
