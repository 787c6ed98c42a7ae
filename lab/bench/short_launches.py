"""Repeats launches of our kernels without most of Triton's Python, which takes the host longer than CUDA takes it.

Triton's binder says which variant of a kernel the arguments need: by their dtypes, by which pointers and numbers are
multiples of 16 or 1, and by the constants. If this variant has been launched on this device, it is launched as Triton
does it. What else Triton looks at stays the same in a process, but for hooks, with which its own call launches.

It has not run on a GPU. Until it has, no product uses it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import logging
from collections.abc import Iterator
from typing import Any

import triton
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from fp8rl.numerics.kernels.kernels import functions

OWN_CALL = {"966265fd6647e6c1": "3.6.0", "8686893714b9aef1": "3.7.1"}
"""Digests of the code that `launch` stands for, and the version of each."""


@contextlib.contextmanager
def shortened() -> Iterator[None]:
    """Shorten repeated launches of our kernels inside the block, if this Triton launches as we know it."""
    code = hashlib.sha256(inspect.getsource(JITFunction.run).encode()).hexdigest()[:16]
    if code not in OWN_CALL:
        versions = " or ".join(OWN_CALL.values())
        message = (
            f"kernels: found Triton {triton.__version__}, expected {versions}: launches take the host twice as long"
        )
        logging.getLogger(__name__).warning(message)
    kernels = {id(kernel): kernel for kernel in functions()}.values() if code in OWN_CALL else ()
    for kernel in kernels:
        kernel.run = functools.partial(launch, kernel, {})
    try:
        yield
    finally:
        for kernel in kernels:
            del kernel.run


def launch(kernel: Any, launched: dict[Any, Any], *args: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
    """Launch a kernel as `kernel.run` does. launched: the variants that were launched before, by their key."""
    device, hooks = driver.active.get_current_device(), triton.knobs.runtime
    bound, variant, options = kernel.device_caches[device][-1](*args, **constants)
    key = device, *variant, *options.items()
    compiled = launched.get(key)
    if compiled is None or warmup or hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
        compiled = JITFunction.run(kernel, *args, grid=grid, warmup=warmup, **constants)
        if isinstance(compiled, CompiledKernel):
            launched[key] = compiled
        return compiled
    handles = driver.active.get_current_stream(device), compiled.function, compiled.packed_metadata
    compiled.run(*(*grid, 1, 1)[:3], *handles, None, None, None, *bound.values())
    return compiled
