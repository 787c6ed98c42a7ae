"""Reservations on real Ray nodes that say they have GPUs: who gets which, and what becomes of a node that leaves."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.run.cluster import reservations as reservations_module
from fp8rl.rl.run.cluster.nodes import interface_of, nodes_up, views
from fp8rl.rl.run.cluster.reservations import NoRoomError, Reservations
from fp8rl.trainer.config import ActorPlacement
from tests.support.experiments import experiment
from tests.support.paths import EXAMPLES
from tests.support.servers import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Nodes with so many GPUs, the driver's first. The first has the resource `near`, the second `far` and the
    label `side=right`."""
    head, *others = ({"num_cpus": 1, "num_gpus": gpus} for gpus in request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GLOO_SOCKET_IFNAME", raising=False)  # of a trainer that was in this process
        cluster = Cluster(True, head_node_args=head | {"resources": {"near": 1}, "include_dashboard": False})
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        for node in others:
            cluster.add_node(**node, resources={"far": 1}, labels={"side": "right"})
        cluster.wait_for_nodes()
        yield cluster
        ray.shutdown()
        cluster.shutdown()


# Apart from the rows: a fixture that shares its mark with a test's own arguments starts anew for each row.
on_gpus = pytest.mark.parametrize("cluster", [(2, 4)], indirect=True)
on_cpus = pytest.mark.parametrize("cluster", [(0, 0)], indirect=True)


def spec(ranks: int = 1, engines: int = 1, tp: int = 1, **sections: Any) -> Experiment:
    rollout = {"engines": engines, "tp": tp} | sections.pop("rollout", {})
    model = {"path": str(EXAMPLES / "models/tiny_qwen3_moe")}
    return experiment(trainer={"dp": ranks}, rollout=rollout, model=model, **sections)


LETTERS = {"near": "a", "far": "b", "gone": "c"}  # nodes by a resource of theirs; `a` is the driver's
NATIVE: dict[str, Any] = {"numerics": {"mode": "native"}}
DISK: dict[str, Any] = {"sync": {"transport": "disk"}}
DISTRIBUTED: dict[str, Any] = {"sync": {"transport": "distributed"}}
SPREAD = {"cluster": {"placement": "spread"}}
TAUGHT: dict[str, Any] = {"algorithm": {"name": "opd"}, "teacher": {"path": "/t", "engines": 2}}
WIDE = {"path": "/t", "tp": 2}
BASE = {"adapter": {"rank": 8}, "sync": {"shared_base": True}}


@contextmanager
def reserved(experiment: Experiment, folder: Path) -> Iterator[Reservations]:
    """Reservations, of which nothing is left behind the block or a refusal."""
    free = [node.room for node in nodes_up()]
    try:
        with closing(Reservations(experiment, folder)) as reservations:
            yield reservations
    finally:
        assert wait_until(lambda: [node.room for node in nodes_up()] == free, 10), "something stays reserved"


def seat(placement: ActorPlacement) -> tuple[str, Any, int]:
    """The node of an actor, its placement group and its bundle."""
    strategy = placement.options["scheduling_strategy"]
    group, bundle = strategy.placement_group, strategy.placement_group_bundle_index
    at = placement_group_table(group)["bundles_to_node_id"][bundle]
    return next(LETTERS[node.names[1]] for node in nodes_up() if node.id == at), group, bundle


def placed_as(reservations: Reservations, experiment: Experiment) -> str:
    """Ranks, then engines: the node of each, with the rank that an engine shares a GPU with, such as "aa b0"."""
    ranks = [seat(placement) for placement in reservations.trainer()]
    policys = experiment.rollout.engines if experiment.needs_engines else 0
    teachers = 0 if experiment.teacher is None else experiment.teacher.engines
    engines = [seat(reservations.engine("policy", index)[0]) for index in range(policys)]
    engines += [seat(reservations.engine("teacher", index)[0]) for index in range(teachers)]
    shares = [str(ranks.index(each)) if each in ranks else "" for each in engines]
    placed = [node + share for (node, *_), share in zip(engines, shares, strict=True)]
    return " ".join(["".join(node for node, *_ in ranks), *placed])


@on_gpus
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # A GPU for each, of the node with the most; where none is left, engines share the trainer's.
        ({}, "b b"),
        ({"ranks": 3, "engines": 3}, "bbb b b0 b1"),
        ({"ranks": 3, "engines": 2, **DISTRIBUTED}, "bbb b a"),
        ({"ranks": 5, **DISTRIBUTED}, "abbbb a"),
        ({"ranks": 2, "engines": 2, **DISTRIBUTED, **SPREAD}, "ab b b"),
        ({"engines": 2, "tp": 2, **DISTRIBUTED, **NATIVE}, "b b a"),
        # The second node by its kinds of names. The trainer leaves the engines' nodes to them.
        ({**DISTRIBUTED, "cluster": {"engine_nodes": "far"}}, "a b"),
        ({**DISTRIBUTED, "cluster": {"engine_nodes": "far", "trainer_nodes": "side=right"}}, "b b"),
        ({"cluster": {"engine_nodes": "side=right"}}, "b b"),
        # Sleeping engines and those with the trainer's base share its GPU.
        ({"ranks": 4, "rollout": {"sleep": True}}, "bbbb b0"),
        (BASE, "b b0"),
        # A teacher's engines are placed behind the policy's and need not be on the trainer's node.
        ({"ranks": 3, **TAUGHT}, "bbb b a a"),
        ({"ranks": 4, **TAUGHT, "teacher": {"path": "/t", "engines": 4}}, "bbbb b0 a a b3 b2"),
        ({"algorithm": {"name": "sft"}, "eval": {"problems": 0}, "ranks": 2}, "bb"),
    ],
)
def test_ray_places_ranks_and_engines(cluster: object, tmp_path: Path, settings: Any, expected: str) -> None:
    run = spec(**settings)
    with reserved(run, tmp_path) as reservations:
        assert placed_as(reservations, run) == expected


@on_gpus
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks": 7}, r"trainer: found 'tp \* pp \* dp \* cp = 7 ranks', expected at most the 6 free GPUs of"),
        ({"ranks": 2, "engines": 6}, "rollout.engines: found 6, expected at most 4, .* have GPUs: 1 for each"),
        ({"ranks": 6, **DISTRIBUTED}, r"engines: found 1, expected at most 0.*: none that the trainer uses\)"),
        ({"ranks": 2, **DISTRIBUTED, **NATIVE, "tp": 4}, "engines: found 1, expected .* have GPUs: 4 for each"),
        ({"ranks": 6, **TAUGHT, **DISK, "engines": 7}, r"engines \+ teacher.engines: found 9, expected at most 6"),
        ({"ranks": 5}, "sync.transport: found 'tensor, with the trainer on .* engines on .*, expected all on one"),
        ({"rollout": {"sleep": True}}, "rollout.sleep: found 'true with an engine on a GPU of its own'"),
        ({"cluster": {"engine_nodes": "x"}}, "engine_nodes: found 'x', expected the address, .*, far, side=right"),
        ({"tp": 2}, "rollout.tp: found '2 with numerics.mode=exact on GPUs', expected 1 there"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(cluster: object, tmp_path: Path, settings: Any, message: str) -> None:
    with pytest.raises(UserError, match=message), reserved(spec(**settings), tmp_path):
        pass


class Looker:
    """What a process finds where it is placed."""

    def sees(self) -> tuple[str, list[int], str | None, str | None]:
        """Node, reserved GPUs, those that are visible, and gloo's interface."""
        visible, interface = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("GLOO_SOCKET_IFNAME")
        return ray.get_runtime_context().get_node_id(), ray.get_gpu_ids(), visible, interface


def sees(placements: Sequence[ActorPlacement]) -> list[Any]:
    actors = [ray.remote(num_cpus=0)(Looker).options(**each.actor_options()).remote() for each in placements]
    return ray.get([actor.sees.remote() for actor in actors])


@on_gpus
def test_engines_share_a_ranks_gpu_once_the_others_are_taken(cluster: Cluster, tmp_path: Path) -> None:
    here, _ = nodes_up()
    others = spec(ranks=3, **DISTRIBUTED, cluster={"trainer_nodes": "far", "engine_nodes": "far"})
    with reserved(others, tmp_path), reserved(spec(engines=2, **TAUGHT | {"teacher": {"path": "/t"}}), tmp_path) as run:
        given = [*run.trainer(), run.engine("policy", 0)[0], run.engine("policy", 1)[0], run.engine("teacher", 0)[0]]
        (node, (rank,), *rest), (_, (own,), *of_own), *sharing = sees(given)
        assert node == here.id and rest == [str(rank), None], "a rank sees its GPU alone, and is on loopback"
        assert own != rank and of_own == [None, None], "an engine maps the trainer's GPU, so that it sees all"
        assert sharing == [(here.id, [rank], None, None)] * 2
        assert {placement.host for placement in given} == {"127.0.0.1"}
        assert [node.room for node in nodes_up()] == [0, 0]
        with pytest.raises(UserError, match="at most the 0 free GPUs"):
            Reservations(spec(), tmp_path)


@on_gpus
def test_a_folder_that_a_node_does_not_see_is_refused_before_the_start(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"model.path: found '{tmp_path}, which node .* does not see'"):
        views(nodes_up(), tmp_path, [tmp_path / "config.json"])
    assert list(tmp_path.iterdir()) == [], "nothing is left of the look"


@on_gpus
def test_sides_move_when_a_node_leaves(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reservations_module, "_ROOM_SECONDS", 0.0)
    monkeypatch.setattr(reservations_module, "_MOVE_SECONDS", 5)
    leaves = cluster.add_node(num_cpus=1, num_gpus=8, resources={"gone": 1})
    here, *others = before = nodes_up()
    (gone,) = [node for node in others if "gone" in node.names]

    def run(**cluster: str) -> Reservations:
        return Reservations(spec(**DISTRIBUTED, cluster=cluster), tmp_path)

    whole, bound = run(trainer_nodes="gone"), run(trainer_nodes="near", engine_nodes="gone")
    free = run(trainer_nodes="near", engine_nodes=here.address, placement="spread")  # all nodes have this address
    engines = [each.engine("policy", 0)[0] for each in (whole, free, bound)]
    try:
        found = sees([*whole.trainer(), *engines, *free.trainer(), *bound.trainer()])
        assert [node for node, *_ in found] == [*[gone.id] * 4, here.id, here.id]
        assert {placement.host for placement in engines} == {gone.address}
        assert {interface for *_, interface in found} == {interface_of(gone.address)} != {None}
        cluster.remove_node(leaves)
        whole.close()
        with pytest.raises(NoRoomError, match=r"the run was lost, .*cluster.trainer_nodes: found 'gone'"):
            Reservations(whole._experiment, tmp_path, again=True)
        assert seat(free.engine("policy", 0)[0])[0] == "b", "the driver's GPUs are taken"
        with pytest.raises(NoRoomError, match=r"no room .* \(cluster.engine_nodes: gone\)"):
            bound.engine("policy", 0)
        leaves = cluster.add_node(num_cpus=1, num_gpus=3, resources={"gone": 1})
        assert seat(bound.engine("policy", 0)[0])[0] == "c" and bound._engines[0].node.id != gone.id
        whole = Reservations(whole._experiment, tmp_path, again=True)
        assert sees(whole.trainer())[0][0] not in [node.id for node in before]
    finally:
        for each in (whole, free, bound):
            each.close()
        cluster.remove_node(leaves)


@on_cpus
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # Any number fits anywhere. The driver's node is the first choice, and engines are near the trainer.
        ({"ranks": 2, "engines": 3}, "aa a a a"),
        ({"rollout": {"sleep": True}, **BASE}, "a a"),
        ({**DISK, "cluster": {"trainer_nodes": "near", "placement": "spread"}}, "a b"),
        ({**DISTRIBUTED, "cluster": {"trainer_nodes": "far"}}, "b b"),
        ({**DISTRIBUTED, "cluster": {"engine_nodes": "side=right"}}, "a b"),
    ],
)
def test_ray_places_over_cpus(cluster: object, tmp_path: Path, settings: Any, expected: str) -> None:
    test_ray_places_ranks_and_engines(cluster, tmp_path, settings, expected)


@on_cpus
@pytest.mark.parametrize(("key", "asked"), [("rollout.tp", {"tp": 2}), ("teacher.tp", TAUGHT | {"teacher": WIDE})])
def test_engines_of_two_ranks_are_refused_on_cpus(cluster: object, tmp_path: Path, key: str, asked: Any) -> None:
    message = f"{key}: found '2 with numerics.mode=native on CPUs', expected 1 there"
    test_what_does_not_fit_is_refused_by_name(cluster, tmp_path, NATIVE | asked, message)
