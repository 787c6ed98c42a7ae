"""The one place that lets stock megatron-core 0.16.1 run without CUDA and without TransformerEngine.

Megatron asks `torch.cuda` for devices, streams and random states, creates tensors with ``device="cuda"``, and compares
tensor type names with ``torch.cuda.*``. Three of its functions also rely on CUDA or on TransformerEngine being there.
Each patch below says which line of Megatron needs it. With CUDA and TransformerEngine nothing is patched.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

_CPU = torch.device("cpu")
_installed = False


def install() -> None:
    """Prepare torch and Megatron for this machine. Idempotent; call it before the process groups exist."""
    global _installed
    if _installed:
        return
    _installed = True
    # Megatron reports every optional accelerator that is not installed, once per module.
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(megatron|mbridge)\..*")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(megatron|torch\.distributed)\..*")
    _patch_missing_transformer_engine()
    if torch.cuda.is_available():
        return
    _patch_devices()
    _patch_streams()
    _patch_random()
    _patch_tensors()
    _patch_dispatcher()


@contextlib.contextmanager
def cuda_type_names() -> Iterator[None]:
    """Let `Tensor.type()` call CPU tensors ``torch.cuda.*`` inside the block.

    The optimizer sorts parameters by these names (distrib_optimizer.py:361,420,582 and clip_grads.py:167).
    """
    if torch.cuda.is_available():
        yield
        return
    original = torch.Tensor.type

    def type_name(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return original(self, dtype, *args, **kwargs)
        return original(self).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = type_name
    try:
        yield
    finally:
        torch.Tensor.type = original


def _no_op() -> Callable[..., None]:
    """A new function that does nothing; torch.compile keeps rules by function and refuses one under two names."""
    return lambda *args, **kwargs: None


class _Event:
    """A CUDA event on a device that has no queue: everything has already happened."""

    record, wait, synchronize = _no_op(), _no_op(), _no_op()

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def query(self) -> bool:
        return True


class _Stream:
    """A CUDA stream on a device that runs everything in program order."""

    wait_stream, wait_event, synchronize = _no_op(), _no_op(), _no_op()

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


class _Generators:
    """`torch.cuda.default_generators[device]`: the CPU has one generator."""

    def __getitem__(self, device: Any) -> torch.Generator:
        return torch.default_generator


def _patch_devices() -> None:
    # Every parameter and buffer is created on torch.cuda.current_device().
    torch.cuda.current_device = lambda: _CPU
    for name in ("set_device", "synchronize", "empty_cache"):
        setattr(torch.cuda, name, _no_op())


def _patch_streams() -> None:
    # The all-to-all dispatcher copies split sizes to the host on a side stream (token_dispatcher.py:870).
    stream = _Stream()
    torch.cuda.Stream, torch.cuda.Event = _Stream, _Event
    torch.cuda.current_stream = lambda *args: stream
    torch.cuda.default_stream = lambda *args: stream
    torch.cuda.stream = lambda *args: contextlib.nullcontext()


def _patch_random() -> None:
    # tensor_parallel/random.py keeps one CUDA random state per parallel region; on the CPU they are CPU states.
    import torch.cuda.random as cuda_random

    for module in (torch.cuda, cuda_random):
        module.get_rng_state = lambda device=None: torch.get_rng_state()
        module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
        module.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)
        module.manual_seed_all = lambda seed: torch.default_generator.manual_seed(seed)
    torch.cuda.default_generators = _Generators()
    import megatron.core.tensor_parallel.random as megatron_random

    torch.cuda._lazy_call = megatron_random._lazy_call = lambda call, **kwargs: call()


def _patch_tensors() -> None:
    # Literal device="cuda": schedules.py:596, optimizer.py:473, clip_grads.py:103, utils.py:1207 and
    # transformer/utils.py:35.
    from megatron.core import utils
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.optimizer import clip_grads, optimizer
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer import utils as transformer_utils

    for module in (schedules, optimizer, clip_grads, param_and_grad_buffer, utils, transformer_utils):
        module.torch = _TorchOnCpu()
    # language_module.py:244 moves a tied embedding of the last pipeline stage.
    torch.Tensor.cuda = lambda self, *args, **kwargs: self


class _TorchOnCpu:
    """`torch` as a few Megatron modules see it: tensors asked for on ``"cuda"`` are created on the CPU.

    torch's own functions stay as they are; other libraries (transformers) depend on their identity.
    """

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        if name in ("zeros", "ones", "empty", "full", "tensor", "empty_like", "zeros_like"):
            value = _on_cpu(value)
        setattr(self, name, value)
        return value


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return create


def _patch_dispatcher() -> None:
    # moe_utils.py:1092 turns split sizes into numbers only if they were on a GPU; gloo needs numbers as well.
    from megatron.core.transformer.moe import token_dispatcher

    original = token_dispatcher.maybe_move_tensor_to_cpu

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        moved = original(tensor, as_numpy, record_stream)
        return moved.numpy() if as_numpy and torch.is_tensor(moved) else moved

    token_dispatcher.maybe_move_tensor_to_cpu = move


def _patch_missing_transformer_engine() -> None:
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.transformer.moe import moe_utils

    # moe_utils.py:1192 reads this name, which its import block only defines with TransformerEngine.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if distrib_optimizer.HAVE_APEX_OR_TE:
        return
    # Without TransformerEngine the optimizer is torch's AdamW, which keeps a `step` tensor per parameter.
    # distrib_optimizer.py:821 gives all parameters the same tensor on loading, so that every parameter would advance
    # everybody's step, and :940 expects `step` among the stored tensors and writes into leaves that require grad.
    optimizer_class = distrib_optimizer.DistributedOptimizer
    original = optimizer_class._set_main_param_and_optimizer_states

    def set_states(self: Any, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        step = state.pop("step", None)
        with torch.no_grad():
            original(self, model_param, {key: value for key, value in tensors.items() if key != "step"})
        if step is not None:
            state["step"] = step.clone()

    optimizer_class._set_main_param_and_optimizer_states = set_states
