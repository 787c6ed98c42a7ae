"""SGLang's modules on their CUDA branches, on a machine without a GPU.

`pretend` answers torch's questions about CUDA as an H100 would, and puts stubs in the place of the packages that only a
CUDA install has. It changes the process for good: call it in one of its own, before SGLang is imported.
"""

import contextlib
import sys
import types
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lab.bench.gpu import stand_ins

_CUDA_ONLY = {
    *("sgl_kernel", "deep_gemm", "flashinfer", "flash_attn", "tilelang", "quack", "humming"),
    *("torch_memory_saver", "deep_ep"),
}

called: list[str] = []
"""The stubs that were called, in order."""


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

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def synchronize(self) -> None: ...


def pretend() -> None:
    """Be a process with an H100, as far as importing goes."""
    import torchvision.io  # noqa: F401  (its own look at CUDA comes first)

    numbers = {"multi_processor_count": 132, "warp_size": 32, "regs_per_multiprocessor": 65536}
    sizes = {"total_memory": 85 << 30, "shared_memory_per_block_optin": 232448, "L2_cache_size": 50 << 20}
    named = {"name": "NVIDIA H100 80GB HBM3", "uuid": "GPU-0", "gcnArchName": "", "major": 9, "minor": 0}
    properties = types.SimpleNamespace(**named, **numbers, **sizes)
    answers = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_capability": (9, 0),
        "get_device_name": properties.name, "get_device_properties": properties, "mem_get_info": (84 << 30, 85 << 30),
        **dict.fromkeys(("synchronize", "empty_cache", "set_device", "_lazy_init")), "current_stream": _Stream(),
        "stream": contextlib.nullcontext(),
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, answer=answer, **kwargs: answer)
    torch.cuda.Stream = _Stream  # type: ignore[misc, assignment]
    torch.version.cuda = "13.0"
    # What SGLang compiles by itself would be compiled for the H100.
    torch._dynamo.config.disable = True
    for name in [name for name in sys.modules if name.split(".")[0] in _CUDA_ONLY]:
        del sys.modules[name]
    stand_ins.put(_CUDA_ONLY, called.append)
