"""The nodes of the cluster as they are now, and what each of them sees."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray
from ray._private.state import available_resources_per_node
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fp8rl.numerics.backend.dispatch import capability_of
from fp8rl.numerics.core.errors import user_error
from fp8rl.rl.run.cluster.placement import Node
from fp8rl.rollout.server.arguments import has_cuda

_EVERY_NODE_HAS = ("CPU", "GPU", "memory", "object_store_memory")
SEES_ALL_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
"""Environment of a process that Ray is not to hide from what it has not reserved."""
_LOOK_SECONDS = 120.0
"""Seconds in which a node starts a process and looks."""


def nodes_up() -> list[Node]:
    """The nodes that are up, the driver's first, with the GPUs that nobody has reserved."""
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
class View:
    """The view of a node. interface: that has its address. capability: of its GPUs, None on a CPU. unseen: files that
    it does not see as this process does."""

    interface: str | None
    capability: tuple[int, int] | None
    unseen: tuple[Path, ...]


def views(nodes: Sequence[Node], folder: Path, files: Sequence[Path]) -> dict[str, View]:
    """Return what each of these nodes sees, by its id.

    Raises:
        UserError: one does not answer, or does not see `folder`, which is on a disk that they have to share, or one of
            `files`, which are on such a disk or everywhere alike.
    """
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


def _look(address: str, expected: Mapping[Path, str | None]) -> View:
    """Look around on a node."""
    unseen = [path for path, text in expected.items() if not path.is_file() or text not in (None, path.read_text())]
    return View(interface_of(address), own_capability(), tuple(unseen))


def _checked(node: Node, call: ray.ObjectRef, answered: bool, mark: Path) -> View:
    try:
        if not answered:
            raise TimeoutError(f"no answer within {_LOOK_SECONDS:g} s")
        view: View = ray.get(call)
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
    """Compute capability of this machine's GPUs, None where it computes on its CPU."""
    return capability_of("cuda" if has_cuda() else "cpu")


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has an address, None if none has: gloo listens where it is told to."""
    if address.startswith("127."):
        return "lo"
    return next(
        (name for name, held in psutil.net_if_addrs().items() if any(each.address == address for each in held)), None
    )
