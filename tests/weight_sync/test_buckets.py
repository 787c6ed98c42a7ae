"""Send buffers: aligned, full up to the limit, written in place, never written while they are sent; deltas in them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fp8rl.models.tensors import EngineRank
from fp8rl.numerics.core.memory import DeviceMemory
from fp8rl.numerics.delta import LastSent, apply
from fp8rl.rollout.engine.plugin.lifecycle import tensor_within
from fp8rl.rollout.engine.protocol import DELTA
from fp8rl.weight_sync import buckets
from fp8rl.weight_sync.buckets import ALIGNMENT, Bucket, Packer, changes
from tests.support.definitions import every_tensor

CPU = torch.device("cpu")


def packer(limit: int) -> Packer:
    return Packer(limit, DeviceMemory)


def contents(bucket: Bucket) -> list[tuple[str, torch.Tensor]]:
    """What an engine finds: a copy of each tensor."""
    return [(name, found.clone()) for name, found in (tensor_within(bucket.flat, *each) for each in bucket.entries)]


def tensor(size: int, value: int = 0) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def packed_sizes(sizes: list[int], limit: int = 100) -> list[list[int]]:
    stream = ((str(index), tensor(size)) for index, size in enumerate(sizes))
    return [[len(found) for _, found in contents(bucket)] for bucket in packer(limit).pack(stream)]


def test_by_hand() -> None:
    """Starts on multiples of 16, and sizes in bytes whatever the dtype."""
    assert packed_sizes([]) == []
    assert packed_sizes([48, 52, 1]) == [[48, 52], [1]]
    assert packed_sizes([49, 37, 36]) == [[49], [37, 36]]  # 49 bytes take 64, and 64 + 37 are too many
    assert packed_sizes([10, 250, 10, 20]) == [[10], [250], [10, 20]]
    tensors = {"a": torch.zeros(5, dtype=torch.bfloat16), "b": torch.ones(2, 3), "c": tensor(16), "d": tensor(1)}
    (bucket,) = packer(1000).pack(tensors.items())
    floats = [("a", "bfloat16", [5], 0), ("b", "float32", [2, 3], 16)]
    assert bucket.entries == [*floats, ("c", "uint8", [16], 48), ("d", "uint8", [1], 64)] and bucket.used == 65


def test_what_was_allocated_is_sent_from_where_it_is_and_a_transposed_view_in_its_own_order() -> None:
    held = packer(1000)
    views = [held.allocate((4, 4), torch.float8_e4m3fn, CPU), held.allocate((2, 3), torch.float32, CPU)]
    assert all(view.data_ptr() % ALIGNMENT == 0 for view in views)
    views[0].copy_(torch.arange(16.0).view(4, 4))
    views[1].copy_(torch.arange(6.0).view(2, 3))
    (bucket,) = held.pack([("a", views[0]), ("b", views[1]), ("t", views[1].t())])
    assert {view.untyped_storage().data_ptr() for view in views} == {bucket.flat.untyped_storage().data_ptr()}
    (_, codes), (_, scales), (_, transposed) = contents(bucket)
    assert torch.equal(codes.float(), torch.arange(16.0).view(4, 4))
    assert torch.equal(scales, torch.arange(6.0).view(2, 3)) and torch.equal(transposed, scales.t())


@given(
    st.lists(st.tuples(st.integers(1, 130), st.sampled_from(["allocated", "plain", "replaced", "lost"]))),
    st.integers(1, 9),
)
def test_every_tensor_once_and_unharmed_wherever_it_was_made(plan: list[tuple[int, str]], ahead: int) -> None:
    """Tensors are written while others before them are still on their way, up to `ahead` of them."""
    held = packer(100)

    def made() -> Iterator[tuple[str, torch.Tensor]]:
        for index, (size, kind) in enumerate(plan):
            where = tensor(size) if kind == "plain" else held.allocate((size,), torch.uint8, CPU)
            yield str(index), where.fill_(index % 251)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        source = made()
        while batch := list(itertools.islice(source, ahead)):
            for name, made_tensor in batch:
                kind = plan[int(name)][1]
                if kind != "lost":
                    yield name, made_tensor.clone() if kind == "replaced" else made_tensor

    found: list[tuple[str, torch.Tensor]] = []
    for bucket in held.pack(stream()):
        entries = sorted(bucket.entries, key=lambda entry: entry[3])
        assert all(start + size <= after[3] for (*_, (size,), start), after in itertools.pairwise(entries))
        assert bucket.used <= 100 or len(entries) == 1
        found += contents(bucket)
    assert sorted((int(name), len(copy), set(copy.tolist())) for name, copy in found) == [
        (index, size, {index % 251}) for index, (size, kind) in enumerate(plan) if kind != "lost"
    ]


@pytest.mark.parametrize("loading", [0, 1])
def test_buffers_take_turns_and_a_bucket_that_is_still_being_read_is_not_written(loading: int) -> None:
    made: list[int] = []

    def share(size: int, device: torch.device) -> DeviceMemory:
        made.append(size)
        return DeviceMemory(size, device)

    held = Packer(100, share, loading=loading)
    stream = ((str(i), held.allocate((60,), torch.uint8, CPU).fill_(i)) for i in range(7))
    before: Bucket | None = None
    for number, bucket in enumerate(held.pack(stream)):
        assert contents(bucket)[0][1].tolist() == [number] * 60
        assert not loading or before is None or contents(before)[0][1].tolist() == [number - 1] * 60
        before = bucket
    assert number == 6 and made == [100] * (2 + loading)


def test_buffers_grow_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "SMALLEST_BYTES", 16)
    sizes = [len(bucket.flat) for bucket in packer(100).pack((str(i), tensor(16)) for i in range(30))]
    assert sizes[:5] == [16, 32, 64, 100, 100]
    assert packed_sizes([16] * 4, limit=100) == [[16], [16, 16], [16]]


def test_tensors_are_taken_one_bucket_at_a_time() -> None:
    """A model larger than memory streams: nothing is read before the bucket that it belongs to is asked for."""
    taken: list[str] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for index in range(3):
            taken.append(str(index))
            yield str(index), tensor(60)

    packed = packer(100).pack(stream())
    next(packed)
    assert taken == ["0", "1"]


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
