"""Memory that processes share; the memory of a process: placeholders and batches."""

from __future__ import annotations

import faulthandler
import inspect
import itertools
import os
import re
import signal
from multiprocessing import get_context

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing import reductions

from fp8rl.numerics.core.memory import (
    NAN,
    ZEROS,
    DeviceMemory,
    HostMemory,
    batches_by_bytes,
    mapped,
    own_memory,
    placeholders,
)
from tests.support.cuda_ipc import install_cuda_ipc


def test_what_was_written_before_the_seal_is_read_and_cannot_be_written() -> None:
    memory = HostMemory("base", 5000)
    before = mapped(memory.address(), writable=True)
    before.fill_(7)
    with pytest.raises(OSError):  # it could still be written here
        memory.seal()
    del before
    memory.seal()
    with pytest.raises(OSError):
        mapped(memory.address(), writable=True)
    here = mapped(memory.address())
    assert here.tolist() == [7] * 5000 and killed_by(lambda: here.fill_(8)) == signal.SIGSEGV
    with get_context("fork").Pool(1) as pool:
        assert pool.apply(total, (memory.address(),)) == 5000 * 7


def test_the_owner_of_a_gpus_memory_opens_no_handle_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    install_cuda_ipc(monkeypatch)
    memory = DeviceMemory(64, torch.device("cpu"))
    memory.own(writable=True).copy_(torch.arange(64, dtype=torch.uint8))
    memory.seal()
    assert torch.equal(memory.own(), torch.arange(64, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="invalid device context"):
        mapped(memory.address())
    address = memory.address()
    with get_context("fork").Pool(1) as pool:
        assert pool.apply(total, (address,)) == 64 * 63 // 2
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(OSError, match=r"GPU GPU-0: found \[\] in this process"):
        mapped(address)


def test_a_gpus_memory_is_opened_with_what_torch_opens_it_with() -> None:
    """No CPU has CUDA's handles, so this reads how torch itself sends a tensor."""
    sent = re.search(r"\(([^()]*)\) = storage\._share_cuda_\(\)", inspect.getsource(reductions.reduce_tensor))
    opened = re.search(r"_new_shared_cuda\(([^()]*)\)", inspect.getsource(reductions.rebuild_cuda_tensor))
    assert sent is not None and opened is not None
    found, expected = (re.findall(r"\w+", part[1].replace("storage_", "")) for part in (opened, sent))
    assert found == expected and found[0] == "device"


def test_memory_whose_owner_has_let_it_go_stays_with_those_that_have_mapped_it() -> None:
    files = len(os.listdir("/proc/self/fd"))
    memory = HostMemory("bucket", 5000)
    address, here = memory.address(), memory.own(writable=True)
    del memory
    assert not os.path.exists(address) and here.fill_(7).sum() == 5000 * 7
    del here
    assert len(os.listdir("/proc/self/fd")) == files


def total(address: str) -> int:
    return int(mapped(address).sum())


def killed_by(action: object) -> int:
    """The signal that ends a process which does it."""
    if (child := os.fork()) == 0:
        faulthandler.disable()
        action()  # type: ignore[operator]
        os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


LIMIT = 100


def named(sizes: list[int]) -> list[tuple[str, torch.Tensor]]:
    return [(str(index), torch.zeros(size, dtype=torch.uint8)) for index, size in enumerate(sizes)]


@given(st.lists(st.integers(0, 130)))
def test_every_tensor_once_in_order_and_no_batch_that_could_have_taken_the_next(sizes: list[int]) -> None:
    packed = list(batches_by_bytes(named(sizes), LIMIT))
    assert [name for batch in packed for name, _ in batch] == [str(index) for index in range(len(sizes))]
    totals = [[tensor.nbytes for _, tensor in batch] for batch in packed]
    assert all(sum(batch) <= LIMIT or len(batch) == 1 for batch in totals)
    assert all(sum(batch) + after[0] > LIMIT for batch, after in itertools.pairwise(totals))


def test_bytes_count_and_not_elements() -> None:
    tensors = [("a", torch.zeros(20)), ("b", torch.zeros(10, dtype=torch.bfloat16)), ("c", torch.zeros(1))]
    assert [[name for name, _ in batch] for batch in batches_by_bytes(tensors, LIMIT)] == [["a", "b"], ["c"]]


def test_tensors_are_taken_one_batch_at_a_time() -> None:
    """A model larger than memory streams: nothing is read before the batch that it belongs to is asked for."""
    taken: list[str] = []
    stream = (taken.append(each[0]) or each for each in named([60, 60, 60]))  # type: ignore[func-returns-value]
    next(batches_by_bytes(stream, LIMIT))
    assert taken == ["0", "1"]


class Layer(nn.Module):
    """Parameters of several sizes and formats, of which one is wrapped anew, as loaders do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.weight = nn.Parameter(torch.ones(4, 8, dtype=torch.bfloat16))
        self.weight.tag = "split"  # type: ignore[attr-defined]
        self.codes = nn.Parameter(torch.ones(5, 7).to(torch.float8_e4m3fn), requires_grad=False)
        self.codes = nn.Parameter(self.codes.data, requires_grad=False)


@pytest.mark.parametrize(("fill", "value"), [(ZEROS, 0.0), (NAN, float("nan"))])
def test_all_parameters_share_the_memory_of_the_largest(fill: int, value: float) -> None:
    with placeholders(fill):
        model = nn.ModuleList(Layer() for _ in range(3))
    held = list(model.parameters())
    assert {p.untyped_storage().data_ptr() for p in held} == {held[0].untyped_storage().data_ptr()}
    assert held[0].untyped_storage().nbytes() == 2 * 4 * 8
    assert [(p.shape, p.dtype) for p in held] == [(p.shape, p.dtype) for _ in range(3) for p in Layer().parameters()]
    assert all(p.is_contiguous() and p.float().allclose(torch.tensor(value), equal_nan=True) for p in held)
    assert all(layer.weight.tag == "split" for layer in model)
    own_memory(held[0])
    held[0].data.fill_(1.0)
    assert (held[1] != 1.0).all()


def test_modules_of_later_have_memory_of_their_own() -> None:
    with pytest.raises(KeyError), placeholders(ZEROS):
        raise KeyError
    assert all((p == 1.0).all() for p in (Layer().scale, Layer().weight))
