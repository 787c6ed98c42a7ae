"""Reservations on real Ray nodes that say they have GPUs: who gets which, and what becomes of a node that leaves."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.run.cluster import reservations as reservations_module
from fp8rl.rl.run.cluster.placement import interface_of, nodes_up, views
from fp8rl.rl.run.cluster.reservations import NoRoomError, Reservations
from fp8rl.trainer.config import ActorPlacement
from tests.support.experiments import experiment
from tests.support.paths import EXAMPLES
from tests.support.servers import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """The driver's node with two GPUs."""
    head = {"num_cpus": 1, "num_gpus": 2, "include_dashboard": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GLOO_SOCKET_IFNAME", raising=False)  # of a trainer that was in this process
        cluster = Cluster(initialize_head=True, head_node_args=head)
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


def spec(**sections: Any) -> Experiment:
    return experiment(model={"path": str(EXAMPLES / "models/tiny_qwen3_moe")}, **sections)


class Looker:
    """What a process finds where it is placed."""

    def sees(self) -> tuple[str, list[int], str | None, str | None]:
        """Node, reserved GPUs, those that are visible, and gloo's interface."""
        visible, interface = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("GLOO_SOCKET_IFNAME")
        return ray.get_runtime_context().get_node_id(), ray.get_gpu_ids(), visible, interface


def start(placement: ActorPlacement) -> Any:
    return ray.remote(num_cpus=0)(Looker).options(**placement.actor_options()).remote()


def sees(*placements: ActorPlacement) -> list[Any]:
    actors = [start(placement) for placement in placements]
    return ray.get([actor.sees.remote() for actor in actors])


def test_an_engine_shares_a_ranks_gpu_once_the_others_are_taken(cluster: Cluster, tmp_path: Path) -> None:
    reservations = Reservations(spec(rollout={"engines": 2}), tmp_path)
    here = nodes_up()[0].id
    try:
        given = [*reservations.trainer(), reservations.engine("policy", 0), reservations.engine("policy", 1)]
        (node, (rank,), *rest), (_, (own,), *of_own), (_, (shared,), *of_shared) = sees(*given)
        assert node == here and rest == [str(rank), None], "a rank sees its GPU alone, and is on loopback"
        assert own != rank and shared == rank
        assert of_own == of_shared == [None, None], "engines map the trainer's GPU, so that they see all"
        assert {placement.host for placement in given} == {"127.0.0.1"}
        assert nodes_up()[0].gpus == 0
        with pytest.raises(UserError, match="at most the 0 free GPUs"):
            Reservations(spec(), tmp_path)
    finally:
        reservations.close()
    assert wait_until(lambda: nodes_up()[0].gpus == 2, 10)


def test_sides_move_when_a_node_leaves(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reservations_module, "_ROOM_SECONDS", 0.0)
    leaves = cluster.add_node(num_cpus=1, num_gpus=3, resources={"far": 1})
    here, far = nodes_up()
    one = Reservations(spec(sync={"transport": "distributed"}, cluster={"trainer_nodes": "far"}), tmp_path)
    other = Reservations(spec(sync={"transport": "distributed"}, cluster={"placement": "spread"}), tmp_path)
    try:
        given = [*one.trainer(), one.engine("policy", 0), *other.trainer(), other.engine("policy", 0)]
        found = sees(*given)
        assert [node for node, *_ in found] == [far.id, far.id, here.id, far.id]
        assert {placement.host for placement in given} == {far.address}
        assert {interface for *_, interface in found} == {interface_of(far.address)} != {None}
        cluster.remove_node(leaves)
        one.close()
        with pytest.raises(NoRoomError, match=r"the run was lost, .*cluster.trainer_nodes: found 'far'"):
            Reservations(one._experiment, tmp_path, again=True)
        ((moved, *_),) = sees(other.engine("policy", 0))
        assert moved == here.id
        cluster.add_node(num_cpus=1, num_gpus=2, resources={"far": 1})
        one = Reservations(one._experiment, tmp_path, again=True)
        ((again, *_),) = sees(*one.trainer())
        assert again not in (here.id, far.id)
    finally:
        one.close()
        other.close()


def test_a_folder_that_a_node_does_not_see_is_refused_before_the_start(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"model.path: found '{tmp_path}, which node .* does not see'"):
        views(nodes_up(), tmp_path, [tmp_path / "config.json"])
    assert list(tmp_path.iterdir()) == [], "nothing is left of the look"
