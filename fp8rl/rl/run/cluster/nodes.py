"""The nodes of the cluster, by the names that a spec may give them, and what each of them sees."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray
import torch
from ray._private.state import available_resources_per_node
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fp8rl.numerics.backend.implementation import capability_of
from fp8rl.numerics.core.errors import user_error

_EVERY_NODE_HAS = ("CPU", "GPU", "memory", "object_store_memory")
_TOUCH = 0.001
"""The amount of a resource that is reserved only to be on a node that has it."""
SEES_ALL_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
"""Environment of a process that is to see all GPUs of its node, not only those that it has reserved with Ray."""
_LOOK_SECONDS = 120.0
"""Seconds in which a node has to start a process and report what it sees."""


@dataclass
class Node:
    """A node that is up."""

    id: str
    address: str
    has_gpus: bool
    room: float
    """GPUs that nobody has reserved. On a node without GPUs infinite, because any number of processes share its CPUs; 0
    if it offers none (`--num-cpus=0`)."""
    names: tuple[str, ...]
    """The node's names in a spec: its address, custom resources (`rack1`) and labels (`side=engines`)."""

    def bundle(self, gpus: int) -> dict[str, float]:
        """Return what a rank or an engine reserves on such a node. A bundle cannot be empty."""
        return {"GPU": float(gpus)} if self.has_gpus else {"CPU": _TOUCH}


def nodes_up() -> list[Node]:
    """Return the nodes that are up, the driver's first."""
    here, free = ray.get_runtime_context().get_node_id(), available_resources_per_node()
    up = []
    for node in filter(lambda node: node["Alive"], ray.nodes()):
        id, address, resources = node["NodeID"], node["NodeManagerAddress"], node["Resources"]
        has_gpus = "GPU" in resources
        room = int(free.get(id, {}).get("GPU", 0)) if has_gpus else math.inf if "CPU" in resources else 0
        own = (name for name in resources if name not in _EVERY_NODE_HAS and not name.startswith(("node:", "bundle_")))
        labels = (f"{key}={value}" for key, value in node["Labels"].items() if not key.startswith("ray.io/"))
        up.append(Node(id, address, has_gpus, room, (address, *sorted([*own, *labels]))))
    return sorted(up, key=lambda node: (node.id != here, node.address, node.id))


def named(nodes: Sequence[Node], name: str | None, key: str) -> list[Node]:
    """Return the nodes with this name; None names all. Raises UserError: there is none. key: the spec's."""
    found = [node for node in nodes if name is None or name in node.names]
    if not found:
        raise user_error(
            key,
            found=name,
            expected="the address, a custom resource or a label (key=value) of a node that is up, one with GPUs if any "
            "has some: " + "; ".join(", ".join(node.names) for node in nodes),
            remedy="Correct it, or start a node with it, such as "
            f"`ray start --address=... --resources='{{\"{name}\": 1}}'`.",
        )
    return found


def constraints(nodes: Sequence[Node], name: str | None) -> tuple[dict[str, float], dict[str, str]]:
    """Return the resources and labels by which Ray finds nodes of this name, also a node that comes later."""
    if name is None:
        return {}, {}
    if any(name == node.address for node in nodes):
        return {f"node:{name}": _TOUCH}, {}
    key, is_label, value = name.partition("=")
    return ({}, {key: value}) if is_label else ({name: _TOUCH}, {})


def listed(nodes: Sequence[Node]) -> str:
    """Return the addresses of nodes, for a message."""
    return ", ".join(dict.fromkeys(node.address for node in nodes))


@dataclass(frozen=True)
class NodeView:
    """The hardware that a node has, and the files that it does not see."""

    interface: str | None
    """The network interface that has the node's address."""
    capability: tuple[int, int] | None
    """Compute capability of the node's GPUs; None on a CPU."""
    unseen: tuple[Path, ...]
    """Files that the node does not see."""


def views(nodes: Sequence[Node], folder: Path, files: Sequence[Path]) -> dict[str, NodeView]:
    """Return the view of each node, by its id. Raises UserError: a node does not answer, or does not see `folder`,
    which must be on a shared disk, or one of `files`, which must be on a shared disk or the same everywhere."""
    mark = folder / f".seen-{secrets.token_hex(16)}"
    mark.touch()
    look = ray.remote(num_cpus=0, max_retries=0, runtime_env={"env_vars": SEES_ALL_GPUS})(_look)
    try:
        calls = [
            look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote(
                node.address, [mark, *files]
            )
            for node in nodes
        ]
        return {node.id: _checked(node, call, mark) for node, call in zip(nodes, calls, strict=True)}
    finally:
        mark.unlink(missing_ok=True)


def _look(address: str, files: Sequence[Path]) -> NodeView:
    """Return the view of the node that this runs on."""
    return NodeView(interface_of(address), own_capability(), tuple(file for file in files if not file.is_file()))


def _checked(node: Node, call: ray.ObjectRef, mark: Path) -> NodeView:
    try:
        view: NodeView = ray.get(call, timeout=_LOOK_SECONDS)
    except ray.exceptions.RayError as error:
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
    return capability_of("cuda" if torch.cuda.is_available() else "cpu")


def interface_of(address: str) -> str | None:
    """Return the network interface of this machine that has `address`, for gloo to listen on; None if none has it."""
    if address.startswith("127."):
        return "lo"
    return next(
        (name for name, held in psutil.net_if_addrs().items() if any(each.address == address for each in held)), None
    )
