"""Nodes and a spec in, nodes out."""

from __future__ import annotations

from typing import Any

import pytest

from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.run.cluster.placement import EnginePlacement, Node, place, place_engine
from tests.support.experiments import experiment


def nodes(*gpus: int | None, **names: str) -> list[Node]:
    """Nodes a, b, ... with so many free GPUs; names: of a node, such as b="fast"."""
    return [
        Node(letter, f"10.0.0.{index}", count, frozenset(names.get(letter, "").split()))
        for index, (letter, count) in enumerate(zip("abcd", gpus, strict=False), start=1)
    ]


def placed_as(given: list[Node], ranks: int = 1, engines: int = 1, tp: int = 1, **sections: Any) -> str:
    """Ranks, then engines: the node of each, with the rank that an engine shares a GPU with, such as "aa b0"."""
    spec = experiment(trainer={"dp": ranks}, rollout={"engines": engines, "tp": tp}, **sections)
    whole = place(given, spec)
    shares = ["" if each.shares is None else str(each.shares) for each in whole.engines]
    placed = [each.node.id + share for each, share in zip(whole.engines, shares, strict=True)]
    return " ".join(["".join(node.id for node in whole.ranks), *placed])


NATIVE: dict[str, Any] = {"numerics": {"mode": "native"}}
DISK, DISTRIBUTED = ({"sync": {"transport": name}} for name in ("disk", "distributed"))
SPREAD = {"cluster": {"placement": "spread"}}
APART = {"cluster": {"trainer_nodes": "left", "engine_nodes": "side=right"}}


@pytest.mark.parametrize(
    ("cluster", "settings", "expected"),
    [
        # CPUs: any number fits anywhere, the driver's node is the first choice.
        (nodes(None), {"ranks": 2, "engines": 3}, "aa a a a"),
        (nodes(None, None), {"ranks": 2, "engines": 3, **DISK, **SPREAD}, "ab a b a"),
        (nodes(None, None, b="left", a="side=right"), {**DISTRIBUTED, **APART}, "b a"),
        (nodes(None, None), {**DISK, "cluster": {"engine_nodes": "10.0.0.2"}}, "a b"),
        # GPUs: one for each, of the node with the most; where none is left, engines share the trainer's.
        (nodes(1), {}, "a a0"),
        (nodes(6), {"ranks": 4, "engines": 4}, "aaaa a a a0 a1"),
        (nodes(2, 8), {"ranks": 4, "engines": 5}, "bbbb b b b b b0"),
        (nodes(2, 8), {"ranks": 4, "engines": 5, **DISTRIBUTED}, "bbbb b b b b a"),
        (nodes(4, 4), {"ranks": 6, "engines": 2, **DISTRIBUTED}, "aaaabb b b"),
        # An engine of two ranks takes two GPUs of one node.
        (nodes(8), {"ranks": 4, "engines": 2, "tp": 2, **NATIVE}, "aaaa a a"),
        (nodes(3, 4), {"ranks": 2, "engines": 2, "tp": 2, **DISTRIBUTED, **NATIVE}, "bb b a"),
        (nodes(None), {"engines": 2, "tp": 2}, "a a a"),
        # A head without GPUs only drives.
        (nodes(None, 2), {"engines": 1}, "b b"),
    ],
)
def test_by_hand(cluster: list[Node], settings: dict[str, Any], expected: str) -> None:
    assert placed_as(cluster, **settings) == expected


@pytest.mark.parametrize(
    ("cluster", "settings", "message"),
    [
        (nodes(2, 1), {"ranks": 4}, r"trainer: found 'tp \* pp \* dp \* cp = 4 ranks', expected at most the 3 free"),
        (nodes(2), {"engines": 3}, "rollout.engines: found 3, expected at most 2, for which 10.0.0.1 have GPUs: 1"),
        (nodes(8), {"tp": 2}, "rollout.tp: found '2 with numerics.mode=exact on GPUs', expected 1 there"),
        (nodes(None), {"tp": 2, **NATIVE}, "rollout.tp: found '2 with numerics.mode=native on CPUs', expected"),
        (nodes(None, None), {"cluster": {"trainer_nodes": "h200"}}, "trainer_nodes: found 'h200', .*1; 10.0.0.2"),
        (nodes(None, 2, a="cpu"), {"cluster": {"engine_nodes": "cpu"}}, "engine_nodes: found 'cpu, .*a node with GPU"),
        (nodes(None, None), SPREAD, "sync.transport: found 'tensor, with the trainer on 10.0.0.1 and engines on 10.0"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(cluster: list[Node], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        placed_as(cluster, **settings)


def test_a_run_that_samples_nothing_is_placed_without_engines() -> None:
    supervised = {"algorithm": {"name": "sft"}, "eval": {"problems": 0}, "trainer": {"dp": 2}}
    spec = experiment(**supervised, **SPREAD, rollout={"engines": 9})
    assert [node.id for node in place(nodes(1, 1), spec).ranks] == ["a", "b"]


def test_a_teachers_engines_are_placed_behind_the_policys_and_need_not_share_its_node() -> None:
    taught = {"algorithm": {"name": "opd"}, "teacher": {"path": "/t", "engines": 2}}
    spec = experiment(**taught)
    assert [each.node.id for each in place(nodes(4), spec).engines] == ["a", "a", "a"]
    assert [each.shares for each in place(nodes(3), spec).engines] == [None, None, 0]
    assert [each.node.id for each in place(nodes(2, 2), spec).engines] == ["a", "b", "b"], "the policy's is synced"
    with pytest.raises(UserError, match=r"rollout.engines \+ teacher.engines: found 3, expected at most 2"):
        place(nodes(2), spec)
    one = experiment(algorithm={"name": "opd"}, teacher={"path": "/t"})
    assert [each.shares for each in place(nodes(1), one).engines] == [0, 0], "both on the one GPU"
    two = experiment(algorithm={"name": "opd"}, teacher={"path": "/t"}, trainer={"dp": 2})
    assert [each.shares for each in place(nodes(2), two).engines] == [0, 1], "where nobody else is"
    apart = experiment(algorithm={"name": "opd"}, teacher={"path": "/t"}, **DISTRIBUTED)
    with pytest.raises(UserError, match="found 2, expected at most 1"):
        place(nodes(2), apart)
    wide = experiment(**taught | {"teacher": {"path": "/t", "tp": 2}, **NATIVE})
    assert [each.node.id for each in place(nodes(4), wide).engines] == ["a", "a"]
    with pytest.raises(UserError, match="teacher.tp: found '2 with numerics.mode=native on CPUs'"):
        place(nodes(None), wide)


def test_an_engine_that_lost_its_node_goes_where_room_is() -> None:
    spec = experiment(rollout={"engines": 2}, **DISTRIBUTED, **SPREAD)
    one, _, three = nodes(0, 1, 1)
    assert place_engine([one, three], spec, [one], [EnginePlacement(one)], 1) == EnginePlacement(three)
    with pytest.raises(UserError, match="rollout.engines: found 2, expected at most 1, for which 10.0.0.1"):
        place_engine([one], spec, [one], [EnginePlacement(one)], 1)


def test_engines_that_sleep_share_the_trainers_gpus() -> None:
    spec = experiment(rollout={"sleep": True})
    assert place(nodes(1), spec).engines[0].shares == 0
    assert place(nodes(None), spec).engines[0].shares is None
    with pytest.raises(UserError, match=r"^rollout.sleep: found 'true with 1 engine\(s\) on GPUs of their own'"):
        place(nodes(2), spec)


def test_a_shared_base_and_its_engine_are_on_the_gpu_of_the_one_rank() -> None:
    adapted = {"adapter": {"rank": 8}, "sync": {"shared_base": True}}
    assert place(nodes(4), experiment(**adapted)).engines[0].shares == 0, "GPUs are left, and none of them has the base"
    assert place(nodes(None), experiment(**adapted, trainer={"dp": 2})).engines[0].shares is None
    apart = experiment(**adapted, cluster={"trainer_nodes": "10.0.0.1", "engine_nodes": "10.0.0.2"})
    with pytest.raises(UserError, match=r"^cluster.engine_nodes: found '10.0.0.2, which leaves out 10.0.0.1"):
        place(nodes(1, 1), apart)
