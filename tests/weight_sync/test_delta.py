"""What a trainer rank sends after the first sync: deltas where they help, and everything where they cannot."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8rl.models.tensors import EngineRank
from fp8rl.numerics.delta import LastSent, apply
from fp8rl.rollout.engine.protocol import DELTA
from fp8rl.weight_sync.buckets import changes
from tests.support.definitions import every_tensor

TABLE = every_tensor(layers=1).tensors
Q, OUT, NORM = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.o_proj.weight", "model.norm.weight"


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(256, 256, generator=generator).bfloat16() for name in (Q, OUT, NORM)}


def sent(
    last: LastSent, tensors: dict[str, Tensor], version: int, since: int | None, ranks: int = 1
) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in changes(last, tensors.items(), version, since, TABLE, ranks)}


def test_the_first_sync_sends_everything_and_the_next_what_changed() -> None:
    last, tensors = LastSent(), weights()
    assert sent(last, tensors, 0, since=0).keys() == tensors.keys()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    tensors[Q][3, 5] += 1
    received = sent(last, tensors, 1, since=0)
    assert received.keys() == {DELTA + name for name in tensors}
    assert sum(change.nbytes for change in received.values()) < 100
    for name, tensor in tensors.items():
        apply(received[DELTA + name], before[name])
        assert torch.equal(before[name], tensor)


def test_engines_that_hold_something_else_get_everything() -> None:
    last, tensors = LastSent(), weights()
    sent(last, tensors, 4, since=None)
    assert sent(last, tensors, 5, since=3).keys() == tensors.keys()
    assert sent(last, tensors, 6, since=None).keys() == tensors.keys()
    assert all(name.startswith(DELTA) for name in sent(last, tensors, 7, since=6))


def test_what_changes_back_is_sent_again() -> None:
    """A delta is to the last sync: bytes that are again as in the first one have changed since."""
    last, tensors = LastSent(), weights()
    sent(last, tensors, 0, since=None)
    held, first = tensors[Q].clone(), tensors[Q][3, 5].clone()
    for version, value in enumerate((first + 1, first), start=1):
        tensors[Q][3, 5] = value
        apply(sent(last, tensors, version, since=version - 1)[DELTA + Q], held)
        assert torch.equal(held, tensors[Q])


def test_everything_is_sent_after_a_sync_that_broke_off_and_what_has_changed_throughout_is_sent_whole() -> None:
    last, tensors = LastSent(), weights()
    sent(last, tensors, 0, since=None)
    next(iter(changes(last, tensors.items(), 1, 0, TABLE, 1)))
    assert sent(last, tensors, 1, since=0).keys() == tensors.keys()
    tensors[NORM] += 1
    assert sent(last, tensors, 2, since=1).keys() == {DELTA + Q, DELTA + OUT, NORM}


def test_each_rank_of_an_engine_gets_the_change_of_its_part() -> None:
    """q is shared by rows, o by columns, the norm is on both."""
    last, tensors = LastSent(), weights()
    sent(last, tensors, 0, since=None, ranks=2)
    places = [EngineRank(rank, 2) for rank in range(2)]

    def parts_of(place: EngineRank) -> dict[str, Tensor]:
        parts = {DELTA + place.label(n, TABLE[n]): place.part(TABLE[n], tensor) for n, tensor in tensors.items()}
        return {label: part.clone(memory_format=torch.contiguous_format) for label, part in parts.items()}

    held = [parts_of(place) for place in places]
    for tensor in tensors.values():
        tensor[17, 200] += 1
        tensor[200, 17] += 1
    received = sent(last, tensors, 1, since=0, ranks=2)
    assert received.keys() == held[0].keys() | held[1].keys()
    for place, parts in zip(places, held):
        for label, expected in parts_of(place).items():
            apply(received[label], parts[label])
            assert torch.equal(parts[label], expected)
