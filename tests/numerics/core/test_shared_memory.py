"""Memory that processes share."""

from __future__ import annotations

import faulthandler
import os
import signal
from multiprocessing import get_context

import pytest
import torch

from fp8rl.numerics.core.shared_memory import DeviceMemory, HostMemory, mapped
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
    address = memory.address()
    memory.close()
    assert here.tolist() == [7] * 5000, "it stays as long as somebody maps it"
    with pytest.raises(OSError, match=address):
        mapped(address)


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


def total(address: str) -> int:
    return int(mapped(address).sum())


def killed_by(action: object) -> int:
    """The signal that ends a process which does it."""
    if (child := os.fork()) == 0:
        faulthandler.disable()
        action()  # type: ignore[operator]
        os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])
