"""CUDA's handles of memory, for tensors of the host."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch


def install_cuda_ipc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Export and open handles as CUDA does: the process that exports one cannot open it, and each is opened once."""
    exported: dict[bytes, torch.UntypedStorage] = {}

    def export(storage: torch.UntypedStorage) -> tuple[Any, ...]:
        handle = f"{os.getpid()}/{len(exported)}".encode()
        exported[handle] = storage
        return 0, handle, storage.nbytes(), 0, b"counter", 0, b"", False

    def open_handle(device: int, handle: bytes, *rest: Any) -> torch.UntypedStorage:
        if int(handle.split(b"/")[0]) == os.getpid():
            raise RuntimeError("CUDA error: invalid device context")
        return exported.pop(handle)

    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", export)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", open_handle)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"GPU-{index}"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
