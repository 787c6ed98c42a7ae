"""SGLang's modules on their CUDA branches, on a machine without a GPU.

`pretend` answers torch's questions about CUDA as an H100 would, and puts stubs in the place of the packages that only a
CUDA install has. It changes the process for good: call it in one of its own, before SGLang is imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch.overrides import TorchFunctionMode

_CUDA_ONLY = {
    *("sgl_kernel", "deep_gemm", "flashinfer", "flash_attn", "tilelang", "quack", "humming"),
    *("torch_memory_saver", "deep_ep"),
}

called: list[str] = []
"""The stubs that were called, in order."""


class Stub:
    """Something of such a package: it has every attribute, and may be called."""

    def __init__(self, name: str) -> None:
        self.__dict__.update(__name__=name, __qualname__=name)

    def __getattr__(self, name: str) -> Stub:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Stub:
        called.append(self.__name__)
        return Stub(f"{self.__name__}()")

    def __or__(self, other: Any) -> Stub:  # in annotations
        return self

    __ror__ = __or__


class _Package(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper() and not name.isupper():  # a class, which may be inherited from
            return type(name, (Stub,), {"__init__": lambda self, *args, **kwargs: Stub.__init__(self, name)})
        return Stub(f"{self.__name__}.{name}")


class _Packages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        wanted = name.split(".")[0] in _CUDA_ONLY
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if wanted else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Package(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class OnCpu(TorchFunctionMode):
    """Inside, tensors that are asked for on a GPU are the CPU's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = dict(kwargs or {})
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = torch.device("cpu")
        if func is torch.Tensor.to:
            args = tuple(torch.device("cpu") if _is_gpu(each) else each for each in args)
        return func(*args, **kwargs)


def _is_gpu(device: Any) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


class _Stream:
    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


def pretend() -> None:
    """Be a process with an H100, as far as importing goes."""
    import torchvision.io  # noqa: F401  (its own look at CUDA comes first)

    properties = types.SimpleNamespace(
        name="NVIDIA H100 80GB HBM3",
        major=9,
        minor=0,
        multi_processor_count=132,
        total_memory=85 << 30,
        uuid="GPU-0",
        gcnArchName="",
        warp_size=32,
        regs_per_multiprocessor=65536,
        shared_memory_per_block_optin=232448,
        L2_cache_size=50 << 20,
    )
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "get_device_name": properties.name,
        "get_device_properties": properties,
        "mem_get_info": (84 << 30, 85 << 30),
        "synchronize": None,
        "empty_cache": None,
        "set_device": None,
        "_lazy_init": None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, answer=answer, **kwargs: answer)
    torch.cuda.Stream = _Stream  # type: ignore[misc, assignment]
    torch.version.cuda = "13.0"
    # What SGLang compiles by itself would be compiled for the H100.
    torch._dynamo.config.disable = True
    for name in [name for name in sys.modules if name.split(".")[0] in _CUDA_ONLY]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Packages())
