"""Places trainer ranks and engines on the nodes of the cluster, and checks what each node sees."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import ray
from ray._private.state import available_resources_per_node
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fp8rl.numerics.backend.implementation import capability_of
from fp8rl.numerics.core.errors import UserError, raise_first, user_error
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.experiment.preconditions.rules import engine_ranks
from fp8rl.rollout.engine.server.arguments import has_cuda


@dataclass(frozen=True)
class Node:
    id: str
    address: str
    gpus: int | None = None
    """GPUs of the node that nobody has reserved; None on a node without GPUs, which computes on its CPU."""
    names: frozenset[str] = frozenset()
    """Names of the node in a spec besides its address: custom resources (`rack1`) and labels (`side=engines`)."""


@dataclass(frozen=True)
class EnginePlacement:
    """Where an engine runs."""

    node: Node
    shares: int | None = None
    """The trainer rank whose GPU the engine shares; None: the engine has GPUs of its own, or computes on a CPU."""


@dataclass(frozen=True)
class Placement:
    """The nodes of all trainer ranks and engines of a run."""

    ranks: tuple[Node, ...]
    """The node of each trainer rank."""
    engines: tuple[EnginePlacement, ...]

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Every node that is used, once."""
        return tuple({node.id: node for node in (*self.ranks, *(place.node for place in self.engines))}.values())


def place(nodes: Sequence[Node], experiment: Experiment) -> Placement:
    """Place all ranks and engines of a run. nodes: of the cluster, the driver's first. Raises UserError: they do not
    fit on the nodes that the spec allows."""
    raise_first(engine_ranks(experiment, any(node.gpus is not None for node in nodes)))
    ranks = place_ranks(nodes, experiment)
    taken = Counter(node.id for node in ranks)
    left = [node if node.gpus is None else replace(node, gpus=node.gpus - taken[node.id]) for node in nodes]
    engines: list[EnginePlacement] = []
    for index, width in enumerate(experiment.engine_ranks):
        engines.append(place_engine(left, experiment, ranks, engines, index))
        if engines[-1].shares is None:
            left = [_with_less(node, width) if node.id == engines[-1].node.id else node for node in left]
    synced = Placement(tuple(ranks), tuple(engines[: experiment.rollout.engines]))
    raise_first(_misplaced(synced, experiment))
    return replace(synced, engines=tuple(engines))


def place_ranks(nodes: Sequence[Node], experiment: Experiment) -> list[Node]:
    """Return the node of each rank; ranks on one node have consecutive numbers. Raises UserError."""
    count = experiment.trainer.world_size
    able = _able(nodes, experiment.cluster.trainer_nodes, "cluster.trainer_nodes")
    used: Counter[str] = Counter()
    for _ in range(count):
        node = _choose(able, used, 1, experiment)
        if node is None:
            raise user_error(
                "trainer",
                found=f"tp * pp * dp * cp = {count} ranks",
                expected=f"at most the {used.total()} free GPU{'s' * (used.total() != 1)} of {_listed(able)}, one for "
                "each",
                remedy="Lower trainer.tp, trainer.pp, trainer.dp or trainer.cp, or wait for GPUs that others use.",
            )
        used[node.id] += 1
        able = [_with_less(other, 1) if other.id == node.id else other for other in able]
    return [node for node in nodes for _ in range(used[node.id])]


def place_engine(
    nodes: Sequence[Node], experiment: Experiment, ranks: Sequence[Node], others: Sequence[EnginePlacement], index: int
) -> EnginePlacement:
    """Return the placement of one more engine in addition to `ranks` and `others`. Raises UserError.

    nodes: with the GPUs that are left. index: the engine's number; the policy's engines come before the teacher's.

    An engine takes a GPU for each of its ranks, on one node. If no GPU is left it shares a trainer rank's GPU; one
    engine of the policy and one of the teacher may share it. With the `distributed` transport none may: NCCL refuses
    two processes on one GPU. With a shared base the first engine is on the first rank's GPU, which has the base.
    """
    cluster, width = experiment.cluster, experiment.engine_ranks[index]
    shares_memory = experiment.sync.transport == "tensor" and index < experiment.rollout.engines
    able = _able(nodes, cluster.engine_nodes, "cluster.engine_nodes")
    if experiment.sync.shared_base and index == 0 and ranks[0].gpus is not None:
        if ranks[0].id not in {node.id for node in able}:
            raise user_error(
                "cluster.engine_nodes",
                found=f"{cluster.engine_nodes}, which leaves out {ranks[0].address}, which has the base",
                expected="that node, with sync.shared_base",
                remedy="Remove cluster.engine_nodes, or set sync.shared_base=false.",
            )
        return EnginePlacement(ranks[0], 0)
    if shares_memory and cluster.placement == "pack":
        able = [node for node in able if node.id == ranks[0].id] or able
    used = Counter([node.id for node in ranks] + [other.node.id for other in others])
    node = _choose(able, used, width, experiment)
    if node is not None:
        return EnginePlacement(node)
    ids = {node.id for node in able}
    shared, policys = [other.shares for other in others], experiment.rollout.engines
    alike = shared[:policys] if index < policys else shared[policys:]
    able_ranks = [rank for rank, node in enumerate(ranks) if node.id in ids and rank not in alike]
    if able_ranks and width == 1 and not experiment.sync.engines_own_gpus:
        rank = min(able_ranks, key=shared.count)
        return EnginePlacement(ranks[rank], rank)
    own = " (sync.transport=distributed: none that the trainer uses)" if experiment.sync.engines_own_gpus else ""
    key = "rollout.engines" if experiment.teacher is None else "rollout.engines + teacher.engines"
    raise user_error(
        key,
        found=len(experiment.engine_ranks),
        expected=f"at most {len(others)}, for which {_listed(able)} have GPUs: {width} for each{own}",
        remedy=f"Lower {key}, give engines other nodes (cluster.engine_nodes), or wait until other programs free "
        "GPUs. With sync.transport=tensor engines share the trainer's GPUs.",
    )


def _able(nodes: Sequence[Node], name: str | None, key: str) -> list[Node]:
    """Return the nodes with this `name` that trainer or engines may use; if any node has GPUs, only nodes with GPUs."""
    named = [node for node in nodes if name in (None, node.address, *node.names)]
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


def _choose(nodes: Sequence[Node], used: Counter[str], width: int, experiment: Experiment) -> Node | None:
    """Return the node for one more rank or engine with `width` GPUs, the first of equals; None if no node has room."""
    free = [node for node in nodes if node.gpus is None or node.gpus >= width]
    if experiment.cluster.placement == "spread":
        return min(free, key=lambda node: used[node.id], default=None)
    # Near the others. The first goes to the node with the most free GPUs, so that others can follow.
    return max(free, key=lambda node: (used[node.id], node.gpus or 0), default=None)


def _with_less(node: Node, count: int) -> Node:
    return node if node.gpus is None else replace(node, gpus=node.gpus - count)


def _listed(nodes: Sequence[Node]) -> str:
    return ", ".join(dict.fromkeys(node.address for node in nodes))


def _misplaced(placed: Placement, experiment: Experiment) -> Iterator[UserError]:
    """Yield an error for each way in which the placement of trainer and engines breaks the spec."""
    alone = sum(each.shares is None for each in placed.engines)
    if experiment.rollout.sleep and any(each.shares is None and each.node.gpus is not None for each in placed.engines):
        expected = "engines on the trainer's GPUs: elsewhere sleeping frees no memory for the trainer"
        remedy = (
            "Have the trainer take all GPUs that the run may use (trainer.dp, cluster.engine_nodes), or remove "
            "rollout.sleep."
        )
        yield user_error("rollout.sleep", f"true with {alone} engine(s) on GPUs of their own", expected, remedy)
    if experiment.sync.transport == "tensor" and experiment.needs_engines and len(placed.nodes) > 1:
        engines = _listed([each.node for each in placed.engines])
        found = f"tensor, with the trainer on {_listed(placed.ranks)} and engines on {engines}"
        remedy = "Set sync.transport=distributed (or disk, if the nodes share one), or use one node for the whole run."
        yield user_error("sync.transport", found, "all on one node, whose memory they share", remedy)


# The nodes as they are now, and what each of them sees.

_EVERY_NODE_HAS = ("CPU", "GPU", "memory", "object_store_memory")
SEES_ALL_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
"""Environment of a process that is to see all GPUs of its node, not only those that it has reserved with Ray."""
_LOOK_SECONDS = 120.0
"""Seconds in which a node has to start a process and report what it sees."""


def nodes_up() -> list[Node]:
    """Return the nodes that are up, the driver's first, with the GPUs that nobody has reserved."""
    here, free = ray.get_runtime_context().get_node_id(), available_resources_per_node()
    up = [
        Node(
            id=node["NodeID"],
            address=node["NodeManagerAddress"],
            gpus=int(free.get(node["NodeID"], {}).get("GPU", 0)) if node["Resources"].get("GPU") else None,
            names=_names(node["Resources"], node["Labels"]),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(up, key=lambda node: (node.id != here, node.address, node.id))


def _names(resources: Mapping[str, float], labels: Mapping[str, str]) -> frozenset[str]:
    custom = {name for name in resources if name not in _EVERY_NODE_HAS and not name.startswith(("node:", "bundle_"))}
    return frozenset(custom | {f"{key}={value}" for key, value in labels.items() if not key.startswith("ray.io/")})


@dataclass(frozen=True)
class NodeView:
    """The hardware that a node has, and the files that it does not see."""

    interface: str | None
    """The network interface that has the node's address."""
    capability: tuple[int, int] | None
    """Compute capability of the node's GPUs; None on a CPU."""
    unseen: tuple[Path, ...]
    """Files that the node does not see, or sees with other contents than this process does."""


def views(nodes: Sequence[Node], folder: Path, files: Sequence[Path]) -> dict[str, NodeView]:
    """Return the view of each node, by the node's id. Raises UserError: a node does not answer, or does not see
    `folder`, which must be on a shared disk, or does not see one of `files`, which must be on a shared disk or the same
    everywhere."""
    mark, text = folder / f".seen-{secrets.token_hex(4)}", secrets.token_hex(16)
    mark.write_text(text)
    expected = {mark: text} | dict.fromkeys(files)
    look = ray.remote(num_cpus=0, max_retries=0, runtime_env={"env_vars": SEES_ALL_GPUS})(_look)
    try:
        calls = {
            node.id: look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote(
                node.address, expected
            )
            for node in nodes
        }
        done, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=_LOOK_SECONDS)
        return {node.id: _checked(node, calls[node.id], calls[node.id] in done, mark) for node in nodes}
    finally:
        mark.unlink(missing_ok=True)


def _look(address: str, expected: Mapping[Path, str | None]) -> NodeView:
    """Return the view of the node that this runs on. expected: files, and the text that each must have (None: any)."""
    unseen = [path for path, text in expected.items() if not path.is_file() or text not in (None, path.read_text())]
    return NodeView(interface_of(address), own_capability(), tuple(unseen))


def _checked(node: Node, call: ray.ObjectRef, answered: bool, mark: Path) -> NodeView:
    try:
        if not answered:
            raise TimeoutError(f"no answer within {_LOOK_SECONDS:g} s")
        view: NodeView = ray.get(call)
    except (ray.exceptions.RayError, TimeoutError) as error:
        raise user_error(
            "cluster",
            found=f"node {node.address} that cannot look at its files: {str(error).strip().splitlines()[-1]}",
            expected="a node that runs this version of fp8rl, from an environment like this one",
            remedy="Install it there, or leave the node out with cluster.trainer_nodes and cluster.engine_nodes.",
        ) from None
    for path in view.unseen:
        of_run = path == mark
        raise user_error(
            "run.dir" if of_run else "model.path",
            found=f"{path.parent}, which node {node.address} does not see",
            expected="a folder on a disk that every node of the run shares"
            + (": engines load and log there, ranks write checkpoints" if of_run else ", or a copy on each"),
            remedy="Choose one on a shared disk, or use the nodes that see it (cluster.trainer_nodes, .engine_nodes).",
        )
    return view


def own_capability() -> tuple[int, int] | None:
    """Return the compute capability of this machine's GPUs; None if it computes on its CPU."""
    return capability_of("cuda" if has_cuda() else "cpu")


def interface_of(address: str) -> str | None:
    """Return the network interface of this machine that has `address`, for gloo to listen on; None if none has it."""
    if address.startswith("127."):
        return "lo"
    return next(
        (name for name, held in psutil.net_if_addrs().items() if any(each.address == address for each in held)), None
    )
