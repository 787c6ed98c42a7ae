"""Placement of trainer ranks and engines on nodes, as data: nodes and a spec in, nodes out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fp8rl.numerics.core.errors import UserError, check_rules, user_error
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.experiment.preconditions.rules import ENGINE_RANKS


@dataclass(frozen=True)
class Node:
    """A node of the cluster.

    gpus: whole ones that nobody has reserved; None on a node that has none at all, and computes on its CPU. names: what
    a spec may call it by, beside its address: custom resources (`rack1`) and labels (`side=engines`).
    """

    id: str
    address: str
    gpus: int | None = None
    names: frozenset[str] = frozenset()

    def is_called(self, name: str) -> bool:
        return name == self.address or name in self.names


@dataclass(frozen=True)
class Place:
    """The place of an engine.

    shares: the trainer rank whose GPU it computes on, too; None: a GPU of its own, or a CPU.
    """

    node: Node
    shares: int | None = None


@dataclass(frozen=True)
class Placement:
    """ranks: the node of each trainer rank. engines: the place of each engine."""

    ranks: tuple[Node, ...]
    engines: tuple[Place, ...]

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Every node that is used, once."""
        return tuple({node.id: node for node in (*self.ranks, *(place.node for place in self.engines))}.values())


def place(nodes: Sequence[Node], experiment: Experiment) -> Placement:
    """Return where everything of a run goes. nodes: of the cluster, the driver's first.

    Raises:
        UserError: it does not fit on the nodes that the spec lets it use.
    """
    check_rules(ENGINE_RANKS, (experiment, any(node.gpus is not None for node in nodes)))
    ranks = place_ranks(nodes, experiment)
    taken = Counter(node.id for node in ranks)
    left = [node if node.gpus is None else replace(node, gpus=node.gpus - taken[node.id]) for node in nodes]
    engines: list[Place] = []
    for index, width in enumerate(experiment.engine_ranks):
        engines.append(place_engine(left, experiment, ranks, engines, index))
        if engines[-1].shares is None:
            left = [_with_less(node, width) if node.id == engines[-1].node.id else node for node in left]
    whole = Placement(tuple(ranks), tuple(engines))
    _check_sleepers(whole, experiment)
    if experiment.sync.transport == "tensor" and experiment.needs_engines:
        _check_one_node(replace(whole, engines=whole.engines[: experiment.rollout.engines]))  # those that are synced
    return whole


def place_ranks(nodes: Sequence[Node], experiment: Experiment) -> list[Node]:
    """The node of each rank; ranks of one node follow each other. Raises UserError."""
    count = experiment.trainer.world_size
    able = _able(nodes, experiment.cluster.trainer_nodes, "cluster.trainer_nodes")
    seated: Counter[str] = Counter()
    for _ in range(count):
        node = _choose(able, seated, 1, experiment)
        if node is None:
            raise user_error(
                "trainer",
                found=f"tp * pp * dp * cp = {count} ranks",
                expected=f"at most the {seated.total()} free GPUs of {_listed(able)}, one for each",
                remedy="Lower trainer.tp, trainer.pp, trainer.dp or trainer.cp, or wait for GPUs that others use.",
            )
        seated[node.id] += 1
        able = [_with_less(other, 1) if other.id == node.id else other for other in able]
    return [node for node in nodes for _ in range(seated[node.id])]


def place_engine(
    nodes: Sequence[Node], experiment: Experiment, ranks: Sequence[Node], others: Sequence[Place], index: int
) -> Place:
    """The place of one more engine beside these ranks and engines; Raises UserError.

    nodes: with the GPUs that are left. index: of the engine, the policy's before the teacher's.

    It takes as many GPUs of one node. Where none is left it shares a rank's, one engine of the policy and one of the
    teacher to a GPU. With the `distributed` transport it must not, as NCCL refuses two processes on one GPU.
    """
    cluster, width = experiment.cluster, experiment.engine_ranks[index]
    shares_memory = experiment.sync.transport == "tensor" and index < experiment.rollout.engines
    able = _able(nodes, cluster.engine_nodes, "cluster.engine_nodes")
    if shares_memory and cluster.placement == "pack":
        able = [node for node in able if node.id == ranks[0].id] or able
    seated = Counter([node.id for node in ranks] + [other.node.id for other in others])
    node = _choose(able, seated, width, experiment)
    if node is not None:
        return Place(node)
    ids = {node.id for node in able}
    shared, policys = [other.shares for other in others], experiment.rollout.engines
    alike = shared[:policys] if index < policys else shared[policys:]
    able_ranks = [rank for rank, node in enumerate(ranks) if node.id in ids and rank not in alike]
    if able_ranks and width == 1 and not experiment.sync.engines_own_gpus:
        rank = min(able_ranks, key=shared.count)
        return Place(ranks[rank], rank)
    own = " (sync.transport=distributed: none that the trainer uses)" if experiment.sync.engines_own_gpus else ""
    key = "rollout.engines" if experiment.teacher is None else "rollout.engines + teacher.engines"
    raise user_error(
        key,
        found=len(experiment.engine_ranks),
        expected=f"at most {len(others)}, for which {_listed(able)} have GPUs: {width} for each{own}",
        remedy=f"Lower {key}, let them use other nodes (cluster.engine_nodes), or wait for GPUs that others "
        "use. With sync.transport=tensor engines share the trainer's GPUs.",
    )


def _able(nodes: Sequence[Node], name: str | None, key: str) -> list[Node]:
    """The nodes that a side may use: those of its name, and of a cluster that has GPUs those that have some."""
    named = [node for node in nodes if name is None or node.is_called(name)]
    if not named:
        raise user_error(
            key,
            found=name,
            expected="the address, a custom resource or a label (key=value) of a node that is up: "
            + "; ".join(", ".join([node.address, *sorted(node.names)]) for node in nodes),
            remedy="Correct it, or start a node with it, such as "
            f"`ray start --address=... --resources='{{\"{name}\": 1}}'`.",
        )
    if all(node.gpus is None for node in nodes):
        return named
    able = [node for node in named if node.gpus is not None]
    if not able:
        raise user_error(
            key,
            found=f"{name}, which is {_listed(named)}",
            expected="a node with GPUs, as others of the cluster have",
            remedy="Name such a node.",
        )
    return able


def _choose(nodes: Sequence[Node], seated: Counter[str], width: int, experiment: Experiment) -> Node | None:
    """The node for one more that takes `width` GPUs; the first of equals. None where they are not left."""
    free = [node for node in nodes if node.gpus is None or node.gpus >= width]
    if experiment.cluster.placement == "spread":
        return min(free, key=lambda node: seated[node.id], default=None)
    # Near the others; for the first, where most of the rest can follow.
    return max(free, key=lambda node: (seated[node.id], node.gpus or 0), default=None)


def _with_less(node: Node, count: int) -> Node:
    return node if node.gpus is None else replace(node, gpus=node.gpus - count)


def _check_sleepers(placement: Placement, experiment: Experiment) -> None:
    """Engines that are to sleep share a GPU with the trainer, or all are on CPUs."""
    own = [place for place in placement.engines[: experiment.rollout.engines] if place.shares is None]
    if experiment.rollout.sleep and any(place.node.gpus is not None for place in own):
        raise user_error(
            "rollout.sleep",
            found=f"true with {len(own)} engine(s) on GPUs of their own",
            expected="engines on the trainer's GPUs: elsewhere sleeping frees no memory for the trainer",
            remedy="Have the trainer take all GPUs that the run may use (trainer.dp, cluster.engine_nodes), or remove "
            "rollout.sleep.",
        )


def _check_one_node(placement: Placement) -> None:
    if len(placement.nodes) > 1:
        problem: UserError = user_error(
            "sync.transport",
            found=f"tensor, with the trainer on {_listed(placement.ranks)} and engines on "
            f"{_listed([place.node for place in placement.engines])}",
            expected="all on one node, whose memory they share",
            remedy="Set sync.transport=distributed (or disk, where the nodes share one), or put all of it on one node.",
        )
        raise problem


def _listed(nodes: Sequence[Node]) -> str:
    return ", ".join(dict.fromkeys(node.address for node in nodes))
