"""Seats on real Ray nodes that say they have GPUs: who gets which, and what becomes of a node that leaves."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from numerics.errors import UserError
from rl.experiment import Experiment
from rl.run import seats as seats_module
from rl.run.nodes import interface_of, nodes_up, views
from rl.run.seats import NoRoomError, Seats
from tests.support.experiments import experiment
from tests.support.paths import EXAMPLES
from tests.support.servers import wait_until
from trainer.seat import Seat

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """The driver's node with two GPUs."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 2, "include_dashboard": False})
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def other(cluster: Cluster) -> Iterator[Any]:
    """Another node, with one GPU, called `far`."""
    node = cluster.add_node(num_cpus=1, num_gpus=1, resources={"far": 1})
    yield node
    if node in cluster.worker_nodes:
        cluster.remove_node(node)
    assert wait_until(lambda: [up.gpus for up in nodes_up()] == [2], 60)


def spec(**sections: Any) -> Experiment:
    return experiment(model={"path": str(EXAMPLES / "models/tiny_qwen3_moe")}, **sections)


class Sitter:
    """What a process finds in its seat."""

    def sees(self) -> tuple[str, list[int], str | None, str | None]:
        """Node, reserved GPUs, those that are visible, and gloo's interface."""
        visible, interface = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("GLOO_SOCKET_IFNAME")
        return ray.get_runtime_context().get_node_id(), ray.get_gpu_ids(), visible, interface


def sit(seat: Seat) -> Any:
    return ray.remote(num_cpus=0)(Sitter).options(**seat.actor()).remote()


def sees(*seats: Seat) -> list[Any]:
    actors = [sit(seat) for seat in seats]
    return ray.get([actor.sees.remote() for actor in actors])


def test_an_engine_shares_a_ranks_gpu_once_the_others_are_taken(cluster: Cluster, tmp_path: Path) -> None:
    seats = Seats(spec(rollout={"engines": 2}), tmp_path)
    here = nodes_up()[0].id
    try:
        given = [*seats.trainer(), seats.engine(0), seats.engine(1)]
        (node, (rank,), *rest), (_, (own,), *of_own), (_, (shared,), *of_shared) = sees(*given)
        assert node == here and rest == [str(rank), None], "a rank sees its GPU alone, and is on loopback"
        assert own != rank and shared == rank
        assert of_own == of_shared == [None, None], "engines map the trainer's GPU, so that they see all"
        assert {seat.host for seat in given} == {"127.0.0.1"}
        assert nodes_up()[0].gpus == 0
        with pytest.raises(UserError, match="at most the 0 free GPUs"):
            Seats(spec(), tmp_path)
    finally:
        seats.close()
    assert wait_until(lambda: nodes_up()[0].gpus == 2, 10)


def test_sides_on_two_nodes_use_addresses_and_a_lost_one_is_seated_again(
    cluster: Cluster, other: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seats_module, "_ROOM_SECONDS", 0.0)
    where = {"trainer_nodes": "far"}
    seats = Seats(spec(sync={"transport": "distributed"}, rollout={"engines": 2}, cluster=where), tmp_path)
    try:
        here, far = nodes_up()
        address = far.address
        given = [*seats.trainer(), seats.engine(0), seats.engine(1)]
        found = sees(*given)
        assert [node for node, *_ in found] == [far.id, here.id, here.id]
        assert {seat.host for seat in given} == {address}
        assert {interface for *_, interface in found} == {interface_of(address)} != {None}
        cluster.remove_node(other)
        with pytest.raises(NoRoomError, match=r"a node of the trainer has left, .*cluster.trainer_nodes: found 'far'"):
            seats.trainer()
        cluster.add_node(num_cpus=1, num_gpus=1, resources={"far": 1})
        ((again, *_),) = sees(*seats.trainer())
        assert again not in (here.id, far.id)
    finally:
        seats.close()
        for node in list(cluster.worker_nodes):
            cluster.remove_node(node)


def test_an_engine_moves_to_another_node_or_has_no_room(cluster: Cluster, other: Any, tmp_path: Path) -> None:
    where = {"placement": "spread"}
    seats = Seats(spec(sync={"transport": "distributed"}, rollout={"engines": 1}, cluster=where), tmp_path)
    try:
        here, far = nodes_up()
        ((first, *_),) = sees(seats.engine(0))
        assert first == far.id
        cluster.remove_node(other)
        ((second, *_),) = sees(seats.engine(0))
        assert second == here.id
    finally:
        seats.close()


def test_a_folder_that_a_node_does_not_see_is_refused_before_the_start(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"model.path: found '{tmp_path}, which node .* does not see'"):
        views(nodes_up(), tmp_path, [tmp_path / "config.json"])
    assert list(tmp_path.iterdir()) == [], "nothing is left of the look"
